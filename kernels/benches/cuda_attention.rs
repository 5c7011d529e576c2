//! Attention on the first GPU, also with ALiBi: decode compared with the memory bandwidth, prefill in TFLOP/s, and prefill over keys and
//! values in codes compared with bf16.
//!
//! `cargo bench -p kernels --bench cuda_attention [-- READ_TB_S]`; the default bandwidth is 4.47 TB/s, an H200's.

mod gpu;

use std::sync::Arc;

use gpu::{ROTATED_BYTES, microseconds, random};
use half::bf16;
use kernels::cuda::decode_attention::{
    DecodeAttention, DecodeRows, Positions, decode_attention, decode_attention_split,
};
use kernels::cuda::decode_division::{DecodeWorkspace, Division, Splits};
use kernels::cuda::expand_blocks::{Contexts, ExpandedBlocks};
use kernels::cuda::prefill_attention::{
    PrefillAttention, PrefillRows, PrefillWorkspace, expanded_prefill_attention, prefill_attention,
    prefill_attention_simple,
};
use kernels::cuda::rope_cache::{CacheCodes, HeadShape, LayerCache};
use kernels::cuda::scores::{ScoreChange, Scores};
use kernels::cuda::{CudaError, DeviceBuffer, Gpu, Queue};
use kernels::kv_codes::KvCodes;

/// `H`, `K`, `D`.
const HEADS: [(usize, usize, usize); 3] = [(32, 32, 128), (32, 8, 128), (16, 2, 128)];
/// The same of rows whose keys and values are codes, beside bf16.
const CODED_DECODES: [(usize, usize); 5] = [(1, 8192), (8, 8192), (32, 2048), (32, 8192), (128, 1024)];
/// Number of rows, and positions of each row.
const DECODES: [(usize, usize); 9] =
    [(1, 128), (1, 1024), (8, 1024), (32, 200), (32, 1024), (128, 160), (128, 320), (128, 1024), (256, 160)];
const PREFILLS: [(usize, usize); 3] = [(8, 2048), (1, 2048), (1, 8192)];
/// Rows, tokens of the chunk of each, and positions before it.
const CODED_PREFILLS: [[usize; 3]; 10] = [
    [8, 2048, 0],
    [1, 2048, 0],
    [1, 8192, 0],
    [1, 2048, 8000],
    [1, 2048, 32_000],
    [1, 512, 32_000],
    [1, 128, 16_000],
    [1, 64, 16_000],
    [8, 256, 2048],
    [16, 128, 2048],
];
const BLOCK_SIZE: usize = 64;

/// Rows of equal length over a cache of one layer, with blocks in order.
struct Rows {
    k: DeviceBuffer,
    v: DeviceBuffer,
    codes: Option<KvCodes>,
    scales: DeviceBuffer,
    tables: DeviceBuffer,
    lens: DeviceBuffer,
    starts: DeviceBuffer,
    max_blocks: usize,
}

impl Rows {
    fn new(gpu: &Arc<Gpu>, shape: HeadShape, codes: Option<KvCodes>, [rows, len, tokens_each]: [usize; 3]) -> Self {
        let max_blocks = len.div_ceil(BLOCK_SIZE);
        let elements = rows * max_blocks * shape.block_elements();
        // As codes, each number is two.
        let size = if codes.is_some() { elements.div_ceil(2) } else { elements };
        let num_scales = codes.map_or(0, |_| elements / shape.head_dim);
        let upload = |values: &[u32]| DeviceBuffer::from_slice(gpu, values).expect("memory");
        let tables: Vec<u32> = (0..(rows * max_blocks) as u32).collect();
        let starts: Vec<u32> = (0..=rows).map(|row| (row * tokens_each) as u32).collect();
        Self {
            k: random(gpu, size),
            v: random(gpu, size),
            codes,
            scales: DeviceBuffer::from_slice(gpu, &vec![0.01f32; num_scales]).expect("memory"),
            tables: upload(&tables),
            lens: upload(&vec![len as u32; rows]),
            starts: upload(&starts),
            max_blocks,
        }
    }

    fn cache(&self) -> LayerCache {
        let scales = self.scales.span();
        let codes = self.codes.map(|kind| CacheCodes { kind, k_scales: scales, v_scales: scales });
        LayerCache { k: self.k.span(), v: self.v.span(), codes }
    }
}

fn main() {
    let Some((gpu, queue)) = gpu::open() else { return };
    let read = std::env::args().find_map(|arg| arg.parse::<f64>().ok()).unwrap_or(4.47);
    println!(
        "{:>12} {:>5} {:>6} {:>9} {:>7} {:>7} {:>9} {:>9} {:>9}",
        "decode H/K/D", "rows", "len", "us", "TB/s", "% read", "ALiBi us", "no ring", "by length"
    );
    for (num_heads, num_kv_heads, head_dim) in HEADS {
        let shape = HeadShape { num_heads, num_kv_heads, head_dim, block_size: BLOCK_SIZE, has_kv: true };
        for (rows, len) in DECODES {
            decode(&gpu, &queue, shape, None, [rows, len], read);
        }
    }
    let (num_heads, num_kv_heads, head_dim) = HEADS[1];
    let shape = HeadShape { num_heads, num_kv_heads, head_dim, block_size: BLOCK_SIZE, has_kv: true };
    for codes in [None, Some(KvCodes::Fp8), Some(KvCodes::Int8)] {
        println!("{}:", codes.map_or("bf16", KvCodes::name));
        CODED_DECODES.iter().for_each(|&(rows, len)| decode(&gpu, &queue, shape, codes, [rows, len], read));
    }
    println!(
        "{:>12} {:>5} {:>6} {:>9} {:>8} {:>10} {:>9}",
        "prefill", "rows", "len", "us", "TFLOP/s", "simple us", "ALiBi us"
    );
    for (num_heads, num_kv_heads, head_dim) in HEADS {
        let shape = HeadShape { num_heads, num_kv_heads, head_dim, block_size: BLOCK_SIZE, has_kv: true };
        for (rows, len) in PREFILLS {
            prefill(&gpu, &queue, shape, [rows, len]);
        }
    }
    print!("{:>12} {:>5} {:>6} {:>6} {:>9}", "prefill", "rows", "chunk", "before", "bf16 us");
    KvCodes::ALL.iter().for_each(|codes| print!(" {:>15} {:>15}", codes.name(), "expanded first"));
    println!();
    for (num_heads, num_kv_heads, head_dim) in HEADS {
        let shape = HeadShape { num_heads, num_kv_heads, head_dim, block_size: BLOCK_SIZE, has_kv: true };
        CODED_PREFILLS.iter().for_each(|&sizes| coded_prefill(&gpu, &queue, shape, sizes));
    }
}

type Kernel = fn(&Queue, &DecodeAttention<'_>) -> Result<(), CudaError>;

fn title(shape: HeadShape) -> String {
    format!("{}/{}/{}", shape.num_heads, shape.num_kv_heads, shape.head_dim)
}

fn slopes(gpu: &Arc<Gpu>, shape: HeadShape) -> DeviceBuffer {
    let slopes: Vec<f32> = (0..shape.num_heads).map(|head| 0.8f32.powi(head as i32 + 1)).collect();
    DeviceBuffer::from_slice(gpu, &slopes).expect("memory")
}

fn decode(gpu: &Arc<Gpu>, queue: &Queue, shape: HeadShape, codes: Option<KvCodes>, [rows, len]: [usize; 2], read: f64) {
    let position_bytes = if codes.is_some() { 2 * (shape.head_dim + KvCodes::SCALE_BYTES) } else { 4 * shape.head_dim };
    let bytes = rows * len * shape.num_kv_heads * position_bytes;
    let copies = (ROTATED_BYTES / bytes).clamp(1, 12);
    let sets: Vec<Rows> = (0..copies).map(|_| Rows::new(gpu, shape, codes, [rows, len, 1])).collect();
    let qkv = random(gpu, rows * shape.qkv_cols());
    let out = DeviceBuffer::with_count::<bf16>(gpu, rows * shape.num_heads * shape.head_dim).expect("memory");
    let workspace = |division| DecodeWorkspace::new(gpu, rows, &[shape], division).expect("memory");
    let slopes = slopes(gpu, shape);
    let us_of = |division: Division, change: ScoreChange, kernel: Kernel| {
        let workspace = workspace(division);
        microseconds(queue, 2 * copies, |i| {
            let set = &sets[i % copies];
            let attention = DecodeAttention {
                out: out.span(),
                qkv: qkv.span(),
                cache: set.cache(),
                positions: Positions::Known,
                rows: DecodeRows {
                    block_tables: set.tables.span(),
                    max_blocks: set.max_blocks,
                    context_lens: set.lens.span(),
                    num_rows: rows,
                },
                shape,
                scores: Scores { change, ..Scores::scaled((shape.head_dim as f32).powf(-0.5)) },
                workspace: &workspace,
            };
            kernel(queue, &attention)
        })
    };
    let us = us_of(Division::ByRows, ScoreChange::None, decode_attention);
    let alibi = us_of(Division::ByRows, ScoreChange::Alibi(slopes.span()), decode_attention);
    let split = us_of(Division::ByRows, ScoreChange::None, apart);
    let by_length = us_of(Division::ByLength, ScoreChange::None, decode_attention);
    let rate = bytes as f64 / us / 1e6;
    let share = 100.0 * rate / read;
    println!(
        "{:>12} {rows:>5} {len:>6} {us:>9.1} {rate:>7.2} {share:>7.0} {alibi:>9.1} {split:>9.1} {by_length:>9.1}",
        title(shape)
    );
}

/// The kernel without a ring, for any number of rows.
fn apart(q: &Queue, attention: &DecodeAttention<'_>) -> Result<(), CudaError> {
    decode_attention_split(q, attention, Splits::for_rows(attention.rows.num_rows, attention.shape))
}

/// The buffers of prefill attention other than keys and values.
struct Chunks {
    qkv: DeviceBuffer,
    out: DeviceBuffer,
    workspace: PrefillWorkspace,
}

impl Chunks {
    fn new(gpu: &Arc<Gpu>, shape: HeadShape, num_tokens: usize) -> Self {
        Self {
            qkv: random(gpu, num_tokens * shape.qkv_cols()),
            out: DeviceBuffer::with_count::<bf16>(gpu, num_tokens * shape.num_heads * shape.head_dim).expect("memory"),
            workspace: PrefillWorkspace::new(gpu).expect("memory"),
        }
    }

    /// Attention of `num_rows` chunks of `chunk` tokens.
    fn attention<'a>(&'a self, set: &Rows, shape: HeadShape, [num_rows, chunk]: [usize; 2]) -> PrefillAttention<'a> {
        PrefillAttention {
            out: self.out.span(),
            qkv: self.qkv.span(),
            cache: set.cache(),
            rows: PrefillRows {
                block_tables: set.tables.span(),
                max_blocks: set.max_blocks,
                context_lens: set.lens.span(),
                row_starts: set.starts.span(),
                num_rows,
                num_tokens: num_rows * chunk,
                max_chunk: chunk,
            },
            shape,
            scores: Scores::scaled((shape.head_dim as f32).powf(-0.5)),
            workspace: &self.workspace,
        }
    }
}

fn prefill(gpu: &Arc<Gpu>, queue: &Queue, shape: HeadShape, [rows, len]: [usize; 2]) {
    let set = Rows::new(gpu, shape, None, [rows, len, len]);
    let chunks = Chunks::new(gpu, shape, rows * len);
    let plain = chunks.attention(&set, shape, [rows, len]);
    let us = microseconds(queue, 4, |_| prefill_attention(queue, &plain));
    let simple = microseconds(queue, 2, |_| prefill_attention_simple(queue, &plain));
    let slopes = slopes(gpu, shape);
    let scores = Scores { change: ScoreChange::Alibi(slopes.span()), ..plain.scores };
    let with_slopes = PrefillAttention { scores, ..plain };
    let alibi = microseconds(queue, 4, |_| prefill_attention(queue, &with_slopes));
    let flops = 2.0 * (rows * shape.num_heads * shape.head_dim) as f64 * len as f64 * (len + 1) as f64;
    println!("{:>12} {rows:>5} {len:>6} {us:>9.1} {:>8.0} {simple:>10.1} {alibi:>9.1}", title(shape), flops / us / 1e6);
}

/// Prints the time over bf16, over codes, and over codes that are expanded first, the last two with their ratio to bf16.
fn coded_prefill(gpu: &Arc<Gpu>, queue: &Queue, shape: HeadShape, [rows, chunk, before]: [usize; 3]) {
    let len = before + chunk;
    let chunks = Chunks::new(gpu, shape, rows * chunk);
    let contexts = Contexts { sum: rows * len, longest: len };
    let scratch = DeviceBuffer::new(gpu, ExpandedBlocks::bytes(shape, rows, contexts)).expect("memory");
    let blocks = ExpandedBlocks::in_buffer(scratch.span(), shape, rows, contexts).expect("enough memory");
    let set_of = |codes| Rows::new(gpu, shape, codes, [rows, len, chunk]);
    let plain = set_of(None);
    let attention = chunks.attention(&plain, shape, [rows, chunk]);
    let bf16 = microseconds(queue, 4, |_| prefill_attention(queue, &attention));
    print!("{:>12} {rows:>5} {chunk:>6} {before:>6} {bf16:>9.1}", title(shape));
    for codes in KvCodes::ALL {
        let set = set_of(Some(codes));
        let attention = chunks.attention(&set, shape, [rows, chunk]);
        let coded = microseconds(queue, 4, |_| prefill_attention(queue, &attention));
        let expanded = microseconds(queue, 4, |_| expanded_prefill_attention(queue, &attention, &blocks));
        [coded, expanded].iter().for_each(|us| print!(" {us:>8.1} ({:>4.2})", us / bf16));
    }
    println!();
}
