//! Causal attention of chunks of new tokens over their rows' KV blocks. Kernels: `sm90_prefill_attention.cu` and
//! `sm90_coded_prefill_attention.cu`, and on other GPUs `prefill_attention.cu` and `coded_prefill_attention.cu`. Codes may be expanded
//! to bf16 first (`expand_blocks.cu`).

use half::bf16;

use super::error::ensure;
use super::expand_blocks::{ExpandedBlocks, expand_blocks};
use super::rope_cache::{HeadShape, LayerCache};
use super::scores::Scores;
use super::tensor_map::TensorMap;
use super::{Arg, CudaError, DeviceBuffer, Gpu, Launch, Queue, Span};
use crate::kv_codes::KvCodes;
use std::sync::Arc;

const OP: &str = "prefill_attention";
/// Number of queries of one thread block, and number of keys that it processes at a time.
const QUERIES: usize = 128;
const KEYS: usize = 64;
/// Head dimensions of the Hopper kernels.
const HOPPER_HEAD_DIMS: [usize; 2] = [64, 128];
/// Positions of a block that they can read, at most.
const MAX_HOPPER_BLOCK: usize = 128;
/// Blocks are expanded first if the kernel for codes would expand each for at least this number of tiles of queries. With fewer, a tile's
/// part of that work is less than the reads and writes (kernels/README.md).
const MIN_EXPANSIONS: usize = 4;

/// The prefilling rows of a step, and the locations of their keys and values.
#[derive(Debug, Clone, Copy)]
pub struct PrefillRows {
    /// `[R, max_blocks]` u32.
    pub block_tables: Span,
    /// Row length of `block_tables`.
    pub max_blocks: usize,
    /// `[R]` u32.
    pub context_lens: Span,
    /// `[R + 1]` u32, starting with 0: the tokens of these rows come first in the step.
    pub row_starts: Span,
    /// `R`.
    pub num_rows: usize,
    /// Number of tokens of these rows.
    pub num_tokens: usize,
    /// Number of tokens of the longest chunk.
    pub max_chunk: usize,
}

/// The counter from which thread blocks take their work. Only one [`prefill_attention`] at a time may use it.
#[derive(Debug)]
pub struct PrefillWorkspace(DeviceBuffer);

impl PrefillWorkspace {
    /// Allocates a few bytes of device memory.
    pub fn new(gpu: &Arc<Gpu>) -> Result<Self, CudaError> {
        DeviceBuffer::from_slice(gpu, &[0u32; 64]).map(Self)
    }
}

/// `out[t, h, :]` = attention of `q[t, h, :]` over the positions of its row up to its own.
#[derive(Debug, Clone, Copy)]
pub struct PrefillAttention<'a> {
    /// `[T, H D]`.
    pub out: Span,
    /// `[T, (H + 2K) D]`, or `[T, H D]` without k and v; the q part is read, because k and v are already in the blocks.
    pub qkv: Span,
    /// The layer's blocks.
    pub cache: LayerCache,
    /// The rows.
    pub rows: PrefillRows,
    /// Head counts and sizes.
    pub shape: HeadShape,
    /// How scores follow from products.
    pub scores: Scores,
    /// The work counter.
    pub workspace: &'a PrefillWorkspace,
}

/// Queues the attention.
pub fn prefill_attention(q: &Queue, attention: &PrefillAttention<'_>) -> Result<(), CudaError> {
    if attention.has_hopper_kernel(q.gpu()) {
        prefill_attention_hopper(q, attention)
    } else {
        prefill_attention_simple(q, attention)
    }
}

/// The same for blocks of codes, which are expanded to `blocks` first. The bits of the result are those of the Hopper kernel for codes.
pub fn expanded_prefill_attention(
    q: &Queue,
    attention: &PrefillAttention<'_>,
    blocks: &ExpandedBlocks,
) -> Result<(), CudaError> {
    expand_blocks(q, attention, blocks)?;
    prefill_attention(q, &blocks.read_by(attention))
}

/// Whether blocks of codes are expanded first on a Hopper GPU, if the longest chunk has this number of tokens.
pub fn gains_by_expansion(shape: HeadShape, max_chunk: usize) -> bool {
    let HeadShape { num_heads, num_kv_heads, head_dim, block_size, .. } = shape;
    let expansions = max_chunk / QUERIES * (num_heads / num_kv_heads);
    expansions >= MIN_EXPANSIONS && HOPPER_HEAD_DIMS.contains(&head_dim) && block_size <= MAX_HOPPER_BLOCK
}

/// Whether this GPU and this build have the Hopper kernels.
pub fn has_hopper_kernels(gpu: &Gpu) -> bool {
    gpu.capability().0 == 9 && HOPPER_HEAD_DIMS.iter().all(|dim| gpu.has_kernel(&format!("sm90_{OP}_bf16_d{dim}")))
}

/// [`prefill_attention`] on Hopper.
fn prefill_attention_hopper(q: &Queue, attention: &PrefillAttention<'_>) -> Result<(), CudaError> {
    attention.check()?;
    let PrefillAttention { qkv, cache, rows, shape, workspace, .. } = *attention;
    let HeadShape { num_heads, head_dim, block_size, .. } = shape;
    let mut maps = vec![TensorMap::matrix(qkv, rows.num_tokens, shape.qkv_cols(), QUERIES, 64)?];
    if cache.codes.is_none() {
        for blocks in [cache.k, cache.v] {
            maps.push(TensorMap::matrix(blocks, cache.rows(head_dim), head_dim, block_size, 64)?);
        }
    }
    let tiles = rows.max_chunk.div_ceil(QUERIES);
    let works = (tiles * num_heads * rows.num_rows) as u32;
    let argument = attention.argument();
    let mut args: Vec<Arg<'_>> = maps.iter().map(|map| Arg::Bytes(map.bytes())).collect();
    args.extend([Arg::Bytes(&argument), workspace.0.span().into(), (tiles as u32).into(), works.into()]);
    args.extend(attention.scores.argument());
    // The queries, and two stages of 128 keys and values; 1024 bytes for their alignment.
    let shared_bytes = 5 * 128 * head_dim * 2 + 1024;
    let launch = Launch::new(works.min(q.gpu().num_multiprocessors()), 384).shared(shared_bytes as u32);
    q.launch(&format!("sm90_{}", attention.kernel()), launch, &args)
}

/// [`prefill_attention`] with the version that runs on any GPU.
pub fn prefill_attention_simple(q: &Queue, attention: &PrefillAttention<'_>) -> Result<(), CudaError> {
    attention.check()?;
    let argument = attention.argument();
    let mut args = vec![Arg::Bytes(&argument)];
    args.extend(attention.scores.argument());
    q.launch(&attention.kernel(), attention.simple_launch(), &args)
}

impl PrefillAttention<'_> {
    /// Whether this GPU and this build have the fast kernel.
    fn has_hopper_kernel(&self, gpu: &Gpu) -> bool {
        let is_small = self.shape.block_size <= MAX_HOPPER_BLOCK;
        gpu.capability().0 == 9 && is_small && gpu.has_kernel(&format!("sm90_{}", self.kernel()))
    }

    /// The name of the simple kernel.
    fn kernel(&self) -> String {
        let (prefix, element) = (self.scores.prefix(), self.cache.type_name());
        format!("{prefix}prefill_attention_{element}_d{}", self.shape.head_dim)
    }

    /// The kernels' `PrefillAttention`: eight pointers, eight words, two pointers.
    pub(super) fn argument(&self) -> [u8; 112] {
        let Self { out, qkv, cache, rows, shape, scores, .. } = *self;
        let mut argument = [0u8; 112];
        let pointers = [qkv, cache.k, cache.v, rows.block_tables, rows.context_lens, rows.row_starts, out];
        for (bytes, span) in argument.chunks_exact_mut(8).zip(pointers) {
            bytes.copy_from_slice(&span.address().to_ne_bytes());
        }
        let words = [
            shape.qkv_cols() as u32,
            rows.max_blocks as u32,
            shape.num_heads as u32,
            shape.num_kv_heads as u32,
            shape.block_size.trailing_zeros(),
            scores.window,
            scores.scale.to_bits(),
            scores.chunk,
        ];
        argument[56..64].copy_from_slice(&scores.sinks_address().to_ne_bytes());
        for (bytes, word) in argument[64..].chunks_exact_mut(4).zip(words) {
            bytes.copy_from_slice(&word.to_ne_bytes());
        }
        for (bytes, span) in argument[96..].chunks_exact_mut(8).zip(cache.scales()) {
            bytes.copy_from_slice(&span.address().to_ne_bytes());
        }
        argument
    }

    /// Checks sizes, shapes and alignment.
    pub(super) fn check(&self) -> Result<(), CudaError> {
        let Self { out, qkv, cache, rows, shape, .. } = *self;
        let HeadShape { num_heads, head_dim, .. } = shape;
        self.scores.check_fast(OP, shape)?;
        let PrefillRows { num_rows, num_tokens, max_chunk, .. } = rows;
        ensure!(OP, (1..=65535).contains(&num_rows), "{num_rows} rows");
        ensure!(OP, (1..=num_tokens).contains(&max_chunk), "a longest chunk of {max_chunk} of {num_tokens} tokens");
        ensure!(
            OP,
            out.count::<bf16>() >= num_tokens * num_heads * head_dim,
            "out is too short for {num_tokens} tokens"
        );
        ensure!(OP, qkv.count::<bf16>() >= num_tokens * shape.qkv_cols(), "qkv is too short for {num_tokens} tokens");
        ensure!(OP, rows.context_lens.count::<u32>() >= num_rows, "context_lens is too short for {num_rows} rows");
        ensure!(OP, rows.row_starts.count::<u32>() > num_rows, "row_starts is too short for {num_rows} rows");
        let tables = rows.block_tables.count::<u32>();
        ensure!(OP, tables >= num_rows * rows.max_blocks, "block_tables is too short for {num_rows} rows");
        ensure!(OP, out.is_aligned(16) && qkv.is_aligned(16), "a buffer is not 16-byte aligned");
        cache.check(OP, head_dim)
    }

    /// The launch of the simple kernel. Its shared memory has the queries and two tiles of K and V in bf16; of codes, one tile in
    /// bf16, two of codes, and their scales.
    fn simple_launch(&self) -> Launch {
        let (rows, shape) = (self.rows, self.shape);
        let row_bytes = 2 * shape.head_dim + 16;
        let shared_bytes = match self.cache.codes {
            None => (QUERIES + 4 * KEYS) * row_bytes,
            Some(_) => (QUERIES + 2 * KEYS) * row_bytes + 4 * KEYS * (shape.head_dim + KvCodes::SCALE_BYTES),
        };
        Launch::new(0, 256)
            .grid(rows.max_chunk.div_ceil(QUERIES) as u32, shape.num_heads as u32, rows.num_rows as u32)
            .shared(shared_bytes as u32)
    }
}
