//! Attention of rows with one new token, over their KV blocks. Kernels: `decode_attention.cu`, and
//! `sm90_decode_attention.cu` for many rows and heads on Hopper.

use half::bf16;

use super::decode_division::{DecodeWorkspace, Division, GROUP, MAX_CLUSTER, ROWS_BY_LENGTH, Splits, groups, visits};
use super::error::ensure;
use super::head_norm::HeadNormWeights;
use super::rope_cache::{HeadShape, LayerCache};
use super::scores::{HEAD_DIMS, ScoreChange, Scores};
use super::tensor_map::TensorMap;
use super::{Arg, CudaError, Gpu, Launch, Queue, Span};

const OP: &str = "decode_attention";

/// If rows times groups of heads reach this number, [`decode_attention_ring`] is faster, by measurement on an H200
/// (kernels/README.md).
const RING_FROM: usize = 192;
/// Number of positions in a tile of the ring.
const RING_TILE: usize = 16;

/// The decoding rows of a step, and the locations of their keys and values.
#[derive(Debug, Clone, Copy)]
pub struct DecodeRows {
    /// `[R, max_blocks]` u32.
    pub block_tables: Span,
    /// Row length of `block_tables`.
    pub max_blocks: usize,
    /// `[R]` u32; 0 marks a padding row.
    pub context_lens: Span,
    /// `R`.
    pub num_rows: usize,
}

/// cos and sin of every position, each `[max_positions, D / 2]` f32.
#[derive(Debug, Clone, Copy)]
pub struct RopeTables {
    /// Cosines.
    pub cos: Span,
    /// Sines.
    pub sin: Span,
}

/// RMS norms of the heads of q and k before their rotation, as [`super::head_norm`] applies them.
#[derive(Debug, Clone, Copy)]
pub struct RotatedNorms {
    /// `[D]` bf16, for q and for k.
    pub weights: HeadNormWeights,
    /// Added to mean squares.
    pub eps: f32,
}

/// How positions are applied.
#[derive(Debug, Clone, Copy)]
pub enum Positions {
    /// Not in this op: q and k are already rotated if necessary, and all keys and values are in the blocks.
    Known,
    /// The same, where this step writes more of the keys and values that a row reads than those of its newest position, or its length:
    /// nothing of the blocks is read before earlier kernels have ended.
    Late,
    /// For `qkv` without [`super::rope_cache`]: q and k of each row's newest position, `context_lens[r] - 1`, are
    /// rotated, behind norms if there are any, and its k and v are written to the blocks. `qkv` is not changed. The caller
    /// asserts, when the step is packed, that no context is longer than the tables.
    Rope(RopeTables, Option<RotatedNorms>),
}

/// `out[r, h, :]` = attention of `q[r, h, :]` over the positions of row `r`.
#[derive(Debug, Clone, Copy)]
pub struct DecodeAttention<'a> {
    /// `[R, H D]`.
    pub out: Span,
    /// `[R, (H + 2K) D]`, or `[R, H D]` without k and v; the q part is read.
    pub qkv: Span,
    /// The layer's blocks.
    pub cache: LayerCache,
    /// How positions are applied.
    pub positions: Positions,
    /// The rows.
    pub rows: DecodeRows,
    /// Head counts and sizes.
    pub shape: HeadShape,
    /// How scores follow from products. Changed scores and chunks need [`Positions::Known`].
    pub scores: Scores,
    /// Partial sums and counters.
    pub workspace: &'a DecodeWorkspace,
}

/// Queues the attention, with the kernel and the division that the workspace is for.
pub fn decode_attention(q: &Queue, attention: &DecodeAttention<'_>) -> Result<(), CudaError> {
    match attention.workspace.division {
        Division::ByRows => attention_by_rows(q, attention),
        Division::ByLength => attention_by_length(q, attention),
    }
}

fn attention_by_rows(q: &Queue, attention: &DecodeAttention<'_>) -> Result<(), CudaError> {
    let (num_rows, shape) = (attention.rows.num_rows, attention.shape);
    let splits = Splits::for_rows(num_rows, shape);
    let can_take_ring = attention.cache.codes.is_none() && !matches!(attention.positions, Positions::Rope(..));
    if can_take_ring && takes_ring(q.gpu(), num_rows, shape) {
        return decode_attention_ring(q, attention, splits);
    }
    decode_attention_split(q, attention, splits)
}

/// The same kernel for any number of rows, since kernels differ in bits.
fn attention_by_length(q: &Queue, attention: &DecodeAttention<'_>) -> Result<(), CudaError> {
    let (rows, shape) = (attention.rows, attention.shape);
    let takes_ring = attention.cache.codes.is_none() && has_ring(q.gpu(), shape);
    for first in (0..rows.num_rows).step_by(ROWS_BY_LENGTH) {
        let count = ROWS_BY_LENGTH.min(rows.num_rows - first);
        let part = |span: Span, width: usize| span.elements::<bf16>(first * width, count * width);
        let own = DecodeAttention {
            out: part(attention.out, shape.num_heads * shape.head_dim),
            qkv: part(attention.qkv, shape.qkv_cols()),
            rows: DecodeRows {
                block_tables: rows.block_tables.elements::<u32>(first * rows.max_blocks, count * rows.max_blocks),
                context_lens: rows.context_lens.elements::<u32>(first, count),
                num_rows: count,
                ..rows
            },
            ..*attention
        };
        let splits = Splits::by_length(count, shape);
        if takes_ring {
            decode_attention_ring(q, &own, splits)?;
            continue;
        }
        let has_shared = q.gpu().has_kernel(&format!("shared_{}", own.kernel()));
        let blocks = if has_shared { splits.blocks } else { splits.splits };
        decode_attention_split(q, &own, Splits { blocks, ..splits })?;
    }
    Ok(())
}

/// Whether [`decode_attention`] of this number of rows, rotated and cached before, uses the ring.
pub fn takes_ring(gpu: &Gpu, num_rows: usize, shape: HeadShape) -> bool {
    visits(num_rows, shape) >= RING_FROM && has_ring(gpu, shape)
}

/// Whether [`decode_attention_ring`] supports this GPU and shape; it reads bf16.
pub fn has_ring(gpu: &Gpu, shape: HeadShape) -> bool {
    gpu.has_kernel(&format!("sm90_decode_attention_bf16_d{}", shape.head_dim))
}

/// [`decode_attention`] with persistent thread blocks that prefetch, on Hopper; without [`Positions::Rope`].
pub fn decode_attention_ring(q: &Queue, attention: &DecodeAttention<'_>, splits: Splits) -> Result<(), CudaError> {
    attention.check()?;
    let DecodeAttention { shape, rows, positions, cache, .. } = *attention;
    let head_dim = shape.head_dim;
    let argument = attention.argument(splits)?;
    ensure!(OP, cache.codes.is_none(), "the ring reads bf16");
    let cache_rows = cache.rows(head_dim);
    let whole = |span: Span| TensorMap::panels(span, cache_rows, head_dim, RING_TILE);
    let half = |span: Span| TensorMap::matrix(span, cache_rows, head_dim, RING_TILE / 2, 64);
    let maps = [whole(cache.k)?, whole(cache.v)?, half(cache.k)?, half(cache.v)?];
    let mut args = vec![Arg::Bytes(&argument)];
    args.extend(maps.iter().map(|map| Arg::Bytes(map.bytes())));
    args.push(attention.workspace.counters.span().elements::<u32>(attention.workspace.max_visits, 1).into());
    let is_late = matches!(positions, Positions::Late);
    let division = [splits.splits as u32, splits.whole_len as u32];
    args.extend([
        Arg::U32(rows.num_rows as u32),
        Arg::Bytes(bytemuck::bytes_of(&division)),
        Arg::U32(u32::from(is_late)),
    ]);
    ensure!(OP, is_late || matches!(positions, Positions::Known), "the ring takes keys that are in their blocks");
    args.extend(attention.scores.argument());
    let name = format!("sm90_{}decode_attention_bf16_d{head_dim}", attention.scores.prefix());
    let blocks = (2 * q.gpu().num_multiprocessors() as usize).min(visits(rows.num_rows, shape) * splits.splits) as u32;
    q.launch(&name, Launch::new(blocks, 160).shared((ring_bytes(head_dim) + merged_bytes(shape)) as u32), &args)
}

/// Shared memory of a block of the ring besides its sums: eight tiles of K and V, four slots of queries, 1 024 lengths,
/// barriers and visits.
fn ring_bytes(head_dim: usize) -> usize {
    8 * 2 * RING_TILE * head_dim * 2 + 4 * GROUP * head_dim * 2 + 1024 * 4 + (8 + 4) * 16 + 4 * 16
}

/// Bytes of the sums of a block's warps.
fn merged_bytes(shape: HeadShape) -> usize {
    256 + 4 * (shape.num_heads / shape.num_kv_heads).min(GROUP) * shape.head_dim * 4
}

/// [`decode_attention`] with a given division, for which the workspace must be large enough.
pub fn decode_attention_split(q: &Queue, attention: &DecodeAttention<'_>, splits: Splits) -> Result<(), CudaError> {
    attention.check()?;
    let argument = attention.argument(splits)?;
    let head_dim = attention.shape.head_dim;
    let shared = if splits.blocks < splits.splits { "shared_" } else { "" };
    let launch = launch(q.gpu(), attention.rows, attention.shape, splits);
    match attention.positions {
        Positions::Known | Positions::Late => {
            let mut args = vec![Arg::Bytes(&argument)];
            args.extend(attention.scores.argument());
            q.launch(&format!("{shared}{}", attention.kernel()), launch, &args)
        }
        Positions::Rope(RopeTables { cos, sin }, norms) => {
            ensure!(
                OP,
                splits.blocks == splits.splits,
                "a block rotates for one split, {} have {splits:?}",
                attention.rows.num_rows
            );
            let is_plain = attention.scores.change == ScoreChange::None && attention.scores.chunk == 0;
            ensure!(OP, is_plain && attention.shape.has_kv, "changed scores, chunks, or q alone are not rotated here");
            ensure!(OP, attention.cache.codes.is_none(), "keys and values that become codes are not rotated here");
            ensure!(OP, rotates(attention.shape), "head_dim {head_dim}; a multiple of 64 is rotated here");
            let fits = cos.bytes() == sin.bytes() && cos.count::<f32>() >= head_dim / 2;
            ensure!(
                OP,
                fits && cos.is_aligned(16) && sin.is_aligned(16),
                "the rotation's tables are empty or unaligned"
            );
            let [q_gain, k_gain] = norms.map_or([Span::NULL; 2], |norms| [norms.weights.q, norms.weights.k]);
            let is_enough = |span: Span| span.count::<bf16>() >= head_dim && span.is_aligned(16);
            let fits = norms.is_none() || (is_enough(q_gain) && is_enough(k_gain));
            ensure!(OP, fits, "a weight of a norm is shorter than {head_dim}, or not aligned");
            let [k, v] = [attention.cache.k, attention.cache.v];
            let [cos, sin, k, v, q_gain, k_gain] = [cos, sin, k, v, q_gain, k_gain].map(Span::address);
            let eps = norms.map_or(0, |norms| u64::from(norms.eps.to_bits()));
            let rope = [cos, sin, k, v, q_gain, k_gain, eps];
            let name = format!("rope_decode_attention_bf16_d{head_dim}");
            q.launch(&name, launch, &[Arg::Bytes(&argument), Arg::Bytes(bytemuck::bytes_of(&rope))])
        }
    }
}

/// Whether a kernel that rotates ([`Positions::Rope`]) exists for the shape.
pub fn rotates(shape: HeadShape) -> bool {
    HEAD_DIMS.contains(&shape.head_dim) && shape.head_dim.is_multiple_of(64)
}

impl DecodeAttention<'_> {
    /// The name of the kernel for [`Positions::Known`] with a block for each split.
    fn kernel(&self) -> String {
        let (prefix, element) = (self.scores.prefix(), self.cache.type_name());
        format!("{prefix}decode_attention_{element}_d{}", self.shape.head_dim)
    }

    /// The kernel's `DecodeAttention`: ten pointers, ten words, two pointers.
    fn argument(&self, splits: Splits) -> Result<[u8; 136], CudaError> {
        let Self { out, qkv, cache, rows, shape, scores, workspace, .. } = *self;
        let HeadShape { num_heads, num_kv_heads, head_dim, block_size, .. } = shape;
        let Splits { splits, blocks, min_chunk, cluster, .. } = splits;
        ensure!(
            OP,
            (1..=64).contains(&splits) && min_chunk > 0 && min_chunk.is_multiple_of(16),
            "{splits} splits of at least {min_chunk}"
        );
        let fits = (1..=MAX_CLUSTER).contains(&cluster) && splits.is_multiple_of(cluster);
        let fits = fits && (cluster == 1 || blocks == splits) && (1..=splits).contains(&blocks);
        ensure!(OP, fits, "clusters of {cluster}, {blocks} blocks for {splits} splits");
        let parts = rows.num_rows * splits * num_heads;
        let counters = visits(rows.num_rows, shape);
        let (partial_span, counter_span) = (workspace.partial.span(), workspace.counters.span());
        let fits = partial_span.count::<f32>() >= parts * (head_dim + 2) && workspace.max_visits >= counters;
        ensure!(OP, fits, "the workspace is too small");
        let sums = partial_span.elements::<f32>(0, parts * head_dim);
        let stats = partial_span.elements::<f32>(parts * head_dim, parts * 2);
        let pointers = [qkv, cache.k, cache.v, rows.block_tables, rows.context_lens, out, sums, stats, counter_span];
        let mut argument = [0u8; 136];
        for (bytes, span) in argument.chunks_exact_mut(8).zip(pointers) {
            bytes.copy_from_slice(&span.address().to_ne_bytes());
        }
        let words = [
            shape.qkv_cols() as u32,
            rows.max_blocks as u32,
            num_heads as u32,
            num_kv_heads as u32,
            block_size.trailing_zeros(),
            scores.window,
            min_chunk as u32,
            scores.scale.to_bits(),
            scores.chunk,
            splits as u32,
        ];
        argument[72..80].copy_from_slice(&scores.sinks_address().to_ne_bytes());
        for (bytes, word) in argument[80..].chunks_exact_mut(4).zip(words) {
            bytes.copy_from_slice(&word.to_ne_bytes());
        }
        for (bytes, span) in argument[120..].chunks_exact_mut(8).zip(cache.scales()) {
            bytes.copy_from_slice(&span.address().to_ne_bytes());
        }
        Ok(argument)
    }

    fn check(&self) -> Result<(), CudaError> {
        let Self { out, qkv, cache, rows, shape, .. } = *self;
        let HeadShape { num_heads, head_dim, .. } = shape;
        self.scores.check_fast(OP, shape)?;
        ensure!(OP, (1..=65535).contains(&rows.num_rows), "{} rows", rows.num_rows);
        let num_rows = rows.num_rows;
        ensure!(OP, out.count::<bf16>() >= num_rows * num_heads * head_dim, "out is too short for {num_rows} rows");
        ensure!(OP, qkv.count::<bf16>() >= num_rows * shape.qkv_cols(), "qkv is too short for {num_rows} rows");
        ensure!(OP, rows.context_lens.count::<u32>() >= num_rows, "context_lens is too short for {num_rows} rows");
        let tables = rows.block_tables.count::<u32>();
        ensure!(OP, tables >= num_rows * rows.max_blocks, "block_tables is too short for {num_rows} rows");
        ensure!(OP, out.is_aligned(16) && qkv.is_aligned(16), "a buffer is not 16-byte aligned");
        cache.check(OP, head_dim)
    }
}

fn launch(gpu: &Gpu, rows: DecodeRows, shape: HeadShape, splits: Splits) -> Launch {
    let cluster = if gpu.capability().0 >= 9 { splits.cluster } else { 1 };
    Launch::new(0, 128)
        .grid(splits.blocks as u32, (shape.num_kv_heads * groups(shape)) as u32, rows.num_rows as u32)
        .shared(merged_bytes(shape) as u32)
        .cluster(cluster as u32)
}
