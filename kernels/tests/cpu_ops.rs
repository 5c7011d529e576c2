//! Compares the CPU's small ops and attention with the reference. Each tolerance is a number of f32 roundings,
//! explained beside it.

mod cpu;

use cpu::random;
use kernels::cpu::{
    Attention, AttentionRow, Gate, Isa, KvCache, KvType, Norm, Pool, activate, add_norm, gate, head_norm, norm, rotate,
};
use kernels::reference;

fn assert_near(found: &[f32], expected: &[f32], allowed: f32, what: &str) {
    assert_eq!(found.len(), expected.len());
    for (index, (found, expected)) in found.iter().zip(expected).enumerate() {
        let error = (found - expected).abs();
        assert!(error <= allowed * expected.abs().max(1.0), "{what}, element {index}: {found} not {expected}");
    }
}

#[test]
fn rms_norm_agrees_with_the_reference() {
    for (rows, width) in [(1, 1), (3, 17), (5, 64), (40, 2050)] {
        let (x, weight) = (random(1, rows * width), random(2, width));
        let mut out = vec![f32::NAN; x.len()];
        norm(&mut Pool::new(2), &mut out, &x, Norm::Rms { weight: &weight }, 1e-5);
        // A sum in 16 lanes of width / 16 additions, a square root and two products.
        let allowed = (width as f32 / 16.0 + 20.0) * 2f32.powi(-24);
        assert_near(&out, &reference::rms_norm(&x, &weight, 1e-5), allowed, "rms_norm");
    }
}

#[test]
fn layer_norm_agrees_with_the_reference() {
    for (rows, width) in [(1, 1), (3, 17), (5, 64), (40, 2050)] {
        let x: Vec<f32> = random(1, rows * width).iter().map(|x| x + 3.0).collect();
        let (weight, bias) = (random(2, width), random(3, width));
        let mut out = vec![f32::NAN; x.len()];
        norm(&mut Pool::new(2), &mut out, &x, Norm::Layer { weight: &weight, bias: &bias }, 1e-5);
        // The same for two sums. Differences from a mean of 3 have its rounding error, which is divided by a deviation
        // of at least 0.3.
        let allowed = (width as f32 / 16.0 + 100.0) * 2f32.powi(-24);
        assert_near(&out, &reference::layer_norm(&x, &weight, &bias, 1e-5), allowed, "layer_norm");
    }
}

#[test]
fn heads_are_normed_in_place_and_what_follows_them_is_not() {
    let (dim, stride) = (24, 24 * 5 + 7);
    for rows in [1, 200] {
        let (q, k) = (random(2, dim), random(3, dim));
        let mut x = random(1, rows * stride);
        let expected: Vec<f32> = x
            .chunks_exact(stride)
            .flat_map(|row| {
                let q = reference::rms_norm(&row[..3 * dim], &q, 1e-6);
                let k = reference::rms_norm(&row[3 * dim..4 * dim], &k, 1e-6);
                [q, k, row[4 * dim..].to_vec()].concat()
            })
            .collect();
        head_norm(&mut Pool::new(2), &mut x, stride, [3, 1], [&q, &k], 1e-6);
        assert_near(&x, &expected, 30.0 * 2f32.powi(-24), "head_norm");
    }
}

#[test]
fn activations_agree_with_the_reference() {
    for (kind, function) in [(Gate::Silu, reference::silu as fn(f32) -> f32), (Gate::GeluTanh, reference::gelu_tanh)] {
        let mut x: Vec<f32> = random(1, 40_000).iter().map(|x| x * 12.0).collect();
        let expected: Vec<f32> = x.iter().map(|x| function(*x)).collect();
        activate(&mut Pool::new(2), &mut x, kind);
        assert_near(&x, &expected, 40.0 * 2f32.powi(-24), "activate"); // The same as for gates.
    }
}

#[test]
fn partial_sums_are_added_to_the_residual_before_the_norm() {
    let (rows, width) = (33, 96);
    let (weight, first, second) = (random(1, width), random(2, rows * width), random(3, rows * width));
    let mut residual = random(4, rows * width);
    let sum: Vec<f32> = residual.iter().zip(&first).zip(&second).map(|((r, a), b)| r + (a + b)).collect();
    let mut out = vec![f32::NAN; sum.len()];
    add_norm(&mut Pool::new(2), &mut out, &mut residual, &[&first, &second], Norm::Rms { weight: &weight }, 1e-5);
    assert_eq!(residual, sum);
    assert_near(&out, &reference::rms_norm(&sum, &weight, 1e-5), 30.0 * 2f32.powi(-24), "add_norm");
}

#[test]
fn gates_agree_with_the_reference() {
    for (rows, width) in [(1, 5), (3, 2049), (9, 4100)] {
        let x: Vec<f32> = random(1, rows * 2 * width).iter().map(|x| x * 12.0).collect();
        for (kind, function) in
            [(Gate::Silu, reference::silu as fn(f32) -> f32), (Gate::GeluTanh, reference::gelu_tanh)]
        {
            let row = |x: &[f32]| -> Vec<f32> { (0..width).map(|i| function(x[i]) * x[width + i]).collect() };
            let expected: Vec<f32> = x.chunks_exact(2 * width).flat_map(row).collect();
            let mut out = vec![f32::NAN; rows * width];
            gate(&mut Pool::new(2), &mut out, &x, width, kind);
            // An exponential of a rounded argument of up to 30: about 30 units in the last place.
            assert_near(&out, &expected, 40.0 * 2f32.powi(-24), "gate");
        }
    }
}

#[test]
fn rotation_agrees_with_the_reference() {
    let angles: Vec<f64> = (0..20).map(|i| f64::from(i) * 0.37).collect();
    let (cos, sin): (Vec<f32>, Vec<f32>) = angles.iter().map(|a| (a.cos() as f32, a.sin() as f32)).unzip();
    let mut x = random(1, 3 * 40);
    let expected: Vec<f32> = x.chunks_exact(40).flat_map(|head| reference::rotate(head, &angles)).collect();
    rotate(&mut x, &cos, &sin);
    assert_near(&x, &expected, 4.0 * 2f32.powi(-24), "rotate");
}

/// K and V of one row, in blocks taken in descending order, with NaN around them.
struct Case {
    heads: usize,
    kv_heads: usize,
    dim: usize,
    block: usize,
    len: usize,
    window: Option<usize>,
    slopes: Vec<f32>,
}

const NUM_BLOCKS: usize = 12;

impl Case {
    fn k(&self) -> Vec<f32> {
        random(11, self.len * self.kv_heads * self.dim)
    }

    fn v(&self) -> Vec<f32> {
        random(12, self.len * self.kv_heads * self.dim)
    }

    fn table(&self) -> Vec<u32> {
        (0..NUM_BLOCKS as u32).rev().collect()
    }

    fn cache(&self, kv_type: KvType) -> KvCache {
        let mut cache = KvCache::new(kv_type, 2, NUM_BLOCKS, self.kv_heads, self.block, self.dim);
        let width = self.kv_heads * self.dim;
        for slot in 0..NUM_BLOCKS * self.block {
            cache.write(1, slot, &vec![f32::NAN; width], &vec![1e9; width]);
        }
        // Blocks in use contain numbers everywhere, like the cache of a served model.
        for position in 0..self.len.next_multiple_of(16) {
            let slot = self.table()[position / self.block] as usize * self.block + position % self.block;
            let own = position * width..(position + 1) * width;
            match position < self.len {
                true => cache.write(1, slot, &self.k()[own.clone()], &self.v()[own]),
                false => cache.write(1, slot, &vec![3.0; width], &vec![1e9; width]),
            }
        }
        cache
    }

    /// Attention of tokens `first..first + count` of the row in one step.
    fn run(&self, isa: Isa, cache: &KvCache, first: usize, count: usize, threads: usize) -> Vec<f32> {
        let q = random(13, self.len * self.heads * self.dim);
        let width = self.heads * self.dim;
        let mut out = vec![f32::NAN; count * width];
        let attention = Attention {
            num_heads: self.heads,
            scale: 0.3,
            window: self.window,
            q_stride: width,
            alibi_slopes: &self.slopes,
            isa,
        };
        let table = self.table();
        let row = AttentionRow { first_token: 0, num_tokens: count, first_position: first, block_table: &table };
        attention.run(&mut Pool::new(threads), &mut out, &q[first * width..], &[row], cache, 1);
        out
    }

    fn expected(&self, token: usize) -> Vec<f32> {
        let (k, v, q) = (self.k(), self.v(), random(13, self.len * self.heads * self.dim));
        let start = (token + 1).saturating_sub(self.window.unwrap_or(usize::MAX));
        let head = |head: usize| {
            let kv_head = head / (self.heads / self.kv_heads);
            let of = |x: &[f32]| -> Vec<f32> {
                (start..=token)
                    .flat_map(|s| x[(s * self.kv_heads + kv_head) * self.dim..][..self.dim].to_vec())
                    .collect()
            };
            let q = &q[(token * self.heads + head) * self.dim..][..self.dim];
            reference::alibi_attention(q, &of(&k), &of(&v), 0.3, self.slopes.get(head).copied().unwrap_or(0.0))
        };
        (0..self.heads).flat_map(head).collect()
    }
}

fn cases() -> Vec<Case> {
    let mut cases = Vec::new();
    for (heads, kv_heads, dim) in [(4, 4, 64), (8, 2, 80), (3, 1, 8), (20, 1, 96), (4, 2, 128), (2, 2, 256)] {
        for (block, len, window) in [(16, 1, None), (16, 16, Some(5)), (32, 67, None), (16, 70, Some(20))] {
            for with_slopes in [false, true] {
                let slope = |head| if with_slopes { Some(0.5f32.powi(head + 1)) } else { None };
                let slopes = (0..heads as i32).filter_map(slope).collect();
                cases.push(Case { heads, kv_heads, dim, block, len, window, slopes });
            }
        }
    }
    cases
}

#[test]
fn attention_agrees_with_the_reference_and_sees_nothing_beyond_its_row() {
    for case in cases() {
        for kv_type in [KvType::Bf16, KvType::F32] {
            let expected: Vec<f32> = (0..case.len).flat_map(|token| case.expected(token)).collect();
            let cache = case.cache(kv_type);
            for isa in Isa::available() {
                let found = case.run(isa, &cache, 0, case.len, 2);
                // A score is a sum of up to D terms below 1. Its error enters an exponential, and sums over as many
                // values as positions.
                let allowed = (case.dim as f32 + case.len as f32) * 2f32.powi(-24) * 2.0;
                assert_near(&found, &expected, allowed, "attention");
            }
        }
    }
}

#[test]
fn a_token_attends_with_the_same_bits_in_any_chunk() {
    for case in cases() {
        let cache = case.cache(KvType::Bf16);
        let isa = Isa::detect();
        let whole = case.run(isa, &cache, 0, case.len, 3);
        let width = case.heads * case.dim;
        for chunk in [1, 3, 17] {
            for first in (0..case.len).step_by(chunk) {
                let count = chunk.min(case.len - first);
                assert!(case.run(isa, &cache, first, count, 1) == whole[first * width..(first + count) * width]);
            }
        }
    }
}
