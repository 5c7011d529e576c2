//! Rows in KV blocks for tests of attention.

use std::sync::Arc;

use half::bf16;
use kernels::cuda::rope_cache::{CacheCodes, HeadShape, LayerCache};
use kernels::cuda::scores::{ScoreChange, Scores};
use kernels::cuda::{DeviceBuffer, Gpu};
use kernels::kv_codes::KvCodes;
use kernels::reference;

use crate::gpu::{Random, floats};

/// Rows of given lengths in shuffled KV blocks. Unused positions are NaN.
pub struct CachedRows {
    pub shape: HeadShape,
    pub max_blocks: usize,
    k: Vec<f32>,
    v: Vec<f32>,
    codes: Option<Codes>,
    tables: Vec<u32>,
    pub k_buffer: DeviceBuffer,
    pub v_buffer: DeviceBuffer,
    pub table_buffer: DeviceBuffer,
    #[allow(dead_code)] // Some kernels read the lengths from elsewhere.
    pub len_buffer: DeviceBuffer,
}

/// Kind and scales of codes.
struct Codes {
    kind: KvCodes,
    k_scales: DeviceBuffer,
    v_scales: DeviceBuffer,
}

/// What happens with scores, and whether there are sinks.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Kind {
    Plain,
    Alibi,
    Capped,
    Sinks,
}

/// A cap that changes scores of random vectors.
const CAP: f32 = 1.5;

/// Scores for a kernel and for the formula.
pub struct KindOfScores {
    pub on_gpu: Scores,
    slopes: Vec<f32>,
    sinks: Vec<f32>,
    cap: Option<f32>,
    _buffers: [DeviceBuffer; 2],
}

impl CachedRows {
    pub fn new(gpu: &Arc<Gpu>, random: &mut Random, shape: HeadShape, lens: &[usize]) -> Self {
        let blocks_of = |len: &usize| len.div_ceil(shape.block_size);
        let num_blocks = lens.iter().map(blocks_of).sum::<usize>() + 3;
        let max_blocks = lens.iter().map(blocks_of).max().unwrap_or(0).max(1) + 1;
        let order = random.shuffled(num_blocks);
        let mut tables = vec![0u32; lens.len() * max_blocks];
        let mut k = vec![bf16::NAN; num_blocks * shape.block_elements()];
        let mut v = k.clone();
        let mut next = order.into_iter();
        for (row, len) in lens.iter().enumerate() {
            for index in 0..blocks_of(len) {
                let block = next.next().expect("enough blocks");
                tables[row * max_blocks + index] = block;
                let filled = (len - index * shape.block_size).min(shape.block_size);
                for head in 0..shape.num_kv_heads {
                    let start = (block as usize * shape.num_kv_heads + head) * shape.block_size * shape.head_dim;
                    let count = filled * shape.head_dim;
                    k[start..start + count].copy_from_slice(&random.bf16s(count, 1.0));
                    v[start..start + count].copy_from_slice(&random.bf16s(count, 1.0));
                }
            }
        }
        let lens_u32: Vec<u32> = lens.iter().map(|&len| len as u32).collect();
        Self {
            shape,
            max_blocks,
            k_buffer: DeviceBuffer::from_slice(gpu, &k).expect("memory"),
            v_buffer: DeviceBuffer::from_slice(gpu, &v).expect("memory"),
            table_buffer: DeviceBuffer::from_slice(gpu, &tables).expect("memory"),
            len_buffer: DeviceBuffer::from_slice(gpu, &lens_u32).expect("memory"),
            k: floats(&k),
            v: floats(&v),
            codes: None,
            tables,
        }
    }

    /// The same rows with keys and values in codes. Unused positions have codes, and scales that are no numbers.
    #[allow(dead_code)] // Tests of rotation fill the blocks themselves.
    pub fn coded(mut self, gpu: &Arc<Gpu>, kind: KvCodes) -> Self {
        let encode = |values: &mut Vec<f32>| {
            let (mut codes, mut scales) = (vec![0x7fu8; values.len()], Vec::new());
            let dim = self.shape.head_dim;
            for (row, codes) in values.chunks_mut(dim).zip(codes.chunks_mut(dim)) {
                let is_used = !row[0].is_nan();
                let scale = if is_used { kind.encode_all(row, codes) } else { f32::NAN };
                row.iter_mut().zip(&*codes).for_each(|(value, code)| *value = kind.decode(*code) * scale);
                scales.push(scale);
            }
            let upload = |scales: &[f32]| DeviceBuffer::from_slice(gpu, scales).expect("memory");
            (DeviceBuffer::from_slice(gpu, &codes).expect("memory"), upload(&scales))
        };
        let ((k_buffer, k_scales), (v_buffer, v_scales)) = (encode(&mut self.k), encode(&mut self.v));
        Self { k_buffer, v_buffer, codes: Some(Codes { kind, k_scales, v_scales }), ..self }
    }

    /// Expects results of a kernel that rounds keys and values to bf16.
    #[allow(dead_code)] // Only one kernel expands codes so.
    pub fn round_to_bf16(&mut self) {
        self.k.iter_mut().chain(&mut self.v).for_each(|value| *value = bf16::from_f32(*value).to_f32());
    }

    pub fn cache(&self) -> LayerCache {
        let codes = self.codes.as_ref().map(|codes| CacheCodes {
            kind: codes.kind,
            k_scales: codes.k_scales.span(),
            v_scales: codes.v_scales.span(),
        });
        LayerCache { k: self.k_buffer.span(), v: self.v_buffer.span(), codes }
    }

    /// Slot of the newest position of row `row`; the padding value for an empty row.
    #[allow(dead_code)] // Only tests of decode have one newest position.
    pub fn newest_slot(&self, row: usize, len: usize) -> u32 {
        let block_size = self.shape.block_size;
        len.checked_sub(1).map_or(u32::MAX, |position| {
            self.tables[row * self.max_blocks + position / block_size] * block_size as u32
                + (position % block_size) as u32
        })
    }

    /// Scores of one kind within a window and a chunk, with slopes from steep to nearly flat, or sinks about as large as
    /// scores.
    pub fn scores(&self, gpu: &Arc<Gpu>, kind: Kind, [window, chunk]: [u32; 2]) -> KindOfScores {
        let vector = |value: fn(usize) -> f32| (0..self.shape.num_heads).map(value).collect::<Vec<f32>>();
        let slopes = if kind == Kind::Alibi { vector(|head| 0.7f32.powi(head as i32 + 1)) } else { Vec::new() };
        let sinks = if kind == Kind::Sinks { vector(|head| head as f32 % 5.0 - 1.0) } else { Vec::new() };
        let upload = |values: &[f32]| DeviceBuffer::from_slice(gpu, values).expect("memory");
        let buffers = [upload(&slopes), upload(&sinks)];
        let change = match kind {
            Kind::Plain | Kind::Sinks => ScoreChange::None,
            Kind::Alibi => ScoreChange::Alibi(buffers[0].span()),
            Kind::Capped => ScoreChange::Capped(CAP),
        };
        let on_gpu = Scores {
            window,
            chunk,
            change,
            sinks: (kind == Kind::Sinks).then(|| buffers[1].span()),
            ..Scores::scaled((self.shape.head_dim as f32).powf(-0.5))
        };
        KindOfScores { on_gpu, slopes, sinks, cap: (kind == Kind::Capped).then_some(CAP), _buffers: buffers }
    }

    /// Positions `range` of a row's keys or values of one KV head.
    fn gather(&self, from: &[f32], row: usize, kv_head: usize, range: std::ops::Range<usize>) -> Vec<f32> {
        let HeadShape { num_kv_heads, head_dim, block_size, .. } = self.shape;
        let one = |position: usize| {
            let block = self.tables[row * self.max_blocks + position / block_size] as usize;
            let start = ((block * num_kv_heads + kv_head) * block_size + position % block_size) * head_dim;
            from[start..start + head_dim].to_vec()
        };
        range.flat_map(one).collect()
    }

    /// Asserts that `found [H D]` is the attention of the q part of `qkv` at `position` of `row`. Each element must be
    /// within the rounding of the probabilities (2^-8 of the weighted magnitudes, at most the largest value) and of the
    /// store.
    ///
    pub fn check(&self, what: &str, found: &[f32], qkv: &[bf16], row: usize, position: usize, scores: &KindOfScores) {
        let HeadShape { num_heads, num_kv_heads, head_dim, .. } = self.shape;
        let (window, chunk) = (scores.on_gpu.window as usize, scores.on_gpu.chunk as usize);
        let in_window = if window > 0 { (position + 1).saturating_sub(window) } else { 0 };
        let first = position.checked_div(chunk).map_or(in_window, |chunks| in_window.max(chunks * chunk));
        for kv_head in 0..num_kv_heads {
            let keys = self.gather(&self.k, row, kv_head, first..position + 1);
            let values = self.gather(&self.v, row, kv_head, first..position + 1);
            let sizes: Vec<f32> = values.iter().map(|v| v.abs()).collect();
            let group = num_heads / num_kv_heads;
            for head in kv_head * group..(kv_head + 1) * group {
                let own = reference::Scores {
                    scale: scores.on_gpu.scale,
                    slope: scores.slopes.get(head).copied().unwrap_or_default(),
                    cap: scores.cap,
                    sink: scores.sinks.get(head).copied(),
                };
                let query = floats(&qkv[head * head_dim..(head + 1) * head_dim]);
                let expected = reference::attention_with(&query, &keys, &values, own);
                let weighted = reference::attention_with(&query, &keys, &sizes, own);
                for d in 0..head_dim {
                    let (found, expected) = (found[head * head_dim + d], expected[d]);
                    let tolerance = (expected.abs() + weighted[d]) * 2.0f32.powi(-8) + 1e-5;
                    assert!(
                        (found - expected).abs() <= tolerance,
                        "{what}, row {row}, position {position}, head {head}, element {d}: {found}, {expected} was expected"
                    );
                }
            }
        }
    }
}
