//! Common parts of GPU tests: opening the GPU, random values, poisoned buffers, element-wise comparison.
#![allow(dead_code)] // Each test file uses only a part.

use std::sync::Arc;

use half::bf16;
use kernels::cuda::{DeviceBuffer, Gpu, Queue};

/// The first GPU and a queue on it. Prints a message and returns `None` if there is none.
pub fn open() -> Option<(Arc<Gpu>, Queue)> {
    match Gpu::count() {
        Ok(0) => {
            println!("skipped: no CUDA device");
            return None;
        }
        Err(reason) => {
            println!("skipped: {reason}");
            return None;
        }
        Ok(_) => {}
    }
    let gpu = Gpu::open(0).expect("a GPU that the driver shows can be opened");
    let queue = Queue::new(&gpu).expect("a queue");
    Some((gpu, queue))
}

/// Repeatable pseudo-random numbers (SplitMix64; Steele, Lea & Flood 2014).
pub struct Random(u64);

impl Random {
    pub fn new(seed: u64) -> Self {
        Self(seed)
    }

    pub fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut x = self.0;
        x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        x ^ (x >> 31)
    }

    pub fn below(&mut self, n: usize) -> usize {
        (self.next() % n as u64) as usize
    }

    /// Uniform in [-1, 1).
    pub fn unit(&mut self) -> f32 {
        (self.next() >> 40) as f32 / (1 << 23) as f32 - 1.0
    }

    /// Approximately normal: a sum of uniform numbers.
    pub fn normal(&mut self) -> f32 {
        (0..4).map(|_| self.unit()).sum::<f32>() * 0.866
    }

    pub fn bf16s(&mut self, count: usize, scale: f32) -> Vec<bf16> {
        (0..count).map(|_| bf16::from_f32(self.normal() * scale)).collect()
    }

    pub fn shuffled(&mut self, n: usize) -> Vec<u32> {
        let mut values: Vec<u32> = (0..n as u32).collect();
        (1..n).rev().for_each(|i| values.swap(i, self.below(i + 1)));
        values
    }
}

/// A buffer of `count` values with all bits set: NaN as bf16 and f32, the maximum as u32.
pub fn poisoned<T>(gpu: &Arc<Gpu>, q: &Queue, count: usize) -> DeviceBuffer {
    let buffer = DeviceBuffer::with_count::<T>(gpu, count).expect("memory");
    q.fill(buffer.span(), 0xff).expect("a fill");
    // Later writes of a test do not use this queue.
    q.wait().expect("a fill");
    buffer
}

/// Asserts that each element is within `relative` of its value plus `absolute`; NaN never is.
pub fn assert_close(what: &str, found: &[f32], expected: &[f32], relative: f32, absolute: f32) {
    assert_eq!(found.len(), expected.len(), "{what}: lengths");
    let mut worst = (0usize, 0.0f32);
    for (index, (&found, &expected)) in found.iter().zip(expected).enumerate() {
        let excess = (found - expected).abs() / (relative * expected.abs() + absolute).max(f32::MIN_POSITIVE);
        if !excess.is_finite() || excess > worst.1 {
            worst = (index, if excess.is_finite() { excess } else { f32::INFINITY });
        }
    }
    let (index, excess) = worst;
    assert!(
        excess <= 1.0,
        "{what}: element {index} is {} but {} was expected: {excess} of the tolerance {relative} relative, {absolute} absolute",
        found[index],
        expected[index]
    );
}

/// The values as f32.
pub fn floats(values: &[bf16]) -> Vec<f32> {
    values.iter().map(|v| v.to_f32()).collect()
}

/// Rows of experts that tokens chose: bit `t` of `chosen[e]` is set if token `t` chose expert `e`.
pub struct Listed {
    /// The list of experts.
    pub list: DeviceBuffer,
    /// The number of rows of each expert.
    pub counts: Vec<usize>,
    /// The token of each row.
    pub tokens: Vec<usize>,
}

impl Listed {
    pub fn new(gpu: &Arc<Gpu>, chosen: &[u32]) -> Self {
        let counts: Vec<usize> = chosen.iter().map(|bits| bits.count_ones() as usize).collect();
        let tokens: Vec<usize> =
            chosen.iter().flat_map(|bits| (0..32).filter(move |token| bits >> token & 1 == 1)).collect();
        let mut list = vec![[0; 4]];
        for (expert, &bits) in chosen.iter().enumerate().filter(|(_, bits)| **bits != 0) {
            let first = counts[..expert].iter().sum::<usize>() as u32;
            list.push([expert as u32, first, bits, 0]);
        }
        list[0][0] = list.len() as u32 - 1;
        list.resize(1 + tokens.len(), [u32::MAX; 4]);
        Self { list: DeviceBuffer::from_slice(gpu, &list).expect("memory"), counts, tokens }
    }

    /// Number of tokens; the last one chose an expert.
    pub fn num_tokens(&self) -> usize {
        self.tokens.iter().max().map_or(0, |last| last + 1)
    }

    /// The rows of all experts, for rows of tokens `[tokens, k]`.
    pub fn sorted(&self, x: &[bf16], k: usize) -> Vec<bf16> {
        self.tokens.iter().flat_map(|token| x[token * k..][..k].iter().copied()).collect()
    }
}

/// Choices for tests, as [`Listed::new`] takes them: one token with one expert, one token with three, three tokens, and eight tokens.
pub const CHOSEN: [&[u32]; 4] =
    [&[1], &[0, 1, 1, 0, 1], &[0b101, 0, 0b11, 0b111, 0b10], &[0xff, 0, 0x81, 0x10, 0x7e, 0x55]];

/// Rows of `k` columns as rows of tokens in the reverse order, and the token of each row.
pub fn rows_of_tokens(x: &[bf16], k: usize) -> (Vec<bf16>, Vec<u32>) {
    let tokens = 0..(x.len() / k) as u32;
    (x.rchunks(k).flatten().copied().collect(), tokens.rev().collect())
}
