//! Attention over KV blocks for any mix of rows: the simple version. Kernel: `paged_attention.cu`.

use half::bf16;

use super::error::ensure;
use super::rope_cache::{HeadShape, LayerCache};
use super::scores::Scores;
use super::{Arg, CudaError, Launch, Queue, Span};

/// Maximum size of a head.
pub const MAX_HEAD_DIM: usize = 512;

/// Locations of the keys and values for a step's tokens.
#[derive(Debug, Clone, Copy)]
pub struct TokenTables {
    /// `[R, max_blocks]` u32.
    pub block_tables: Span,
    /// Row length of `block_tables`.
    pub max_blocks: usize,
    /// `[T]` u32, below `R`.
    pub token_tables: Span,
    /// `[T]` u32.
    pub positions: Span,
    /// `[T]` u32; `u32::MAX` marks padding.
    pub slots: Span,
}

/// Causal attention of each token's query heads over its row's KV blocks.
#[derive(Debug, Clone, Copy)]
pub struct PagedAttention {
    /// `[T, H D]`.
    pub out: Span,
    /// `[T, (H + 2K) D]`, or `[T, H D]` without k and v; the q part is read.
    pub qkv: Span,
    /// The layer's blocks.
    pub cache: LayerCache,
    /// Where each token's keys and values are.
    pub tables: TokenTables,
    /// Head counts and sizes.
    pub shape: HeadShape,
    /// How scores follow from products.
    pub scores: Scores,
}

/// Queues the attention of `num_tokens` tokens.
pub fn paged_attention(q: &Queue, attention: &PagedAttention, num_tokens: usize) -> Result<(), CudaError> {
    let PagedAttention { out, qkv, cache, tables, shape, scores } = *attention;
    let op = "paged_attention";
    scores.check(op, shape)?;
    let HeadShape { num_heads, num_kv_heads, head_dim, block_size, .. } = shape;
    ensure!(op, (1..=MAX_HEAD_DIM).contains(&head_dim), "head_dim {head_dim}; at most {MAX_HEAD_DIM}");
    ensure!(
        op,
        num_kv_heads > 0 && num_heads.is_multiple_of(num_kv_heads),
        "{num_heads} heads for {num_kv_heads} KV heads"
    );
    ensure!(op, block_size.is_power_of_two(), "block_size {block_size} is not a power of two");
    ensure!(op, num_tokens > 0, "no tokens");
    cache.check(op, head_dim)?;
    ensure!(op, out.count::<bf16>() >= num_tokens * num_heads * head_dim, "out is too short for {num_tokens} tokens");
    ensure!(op, qkv.count::<bf16>() >= num_tokens * shape.qkv_cols(), "qkv is too short for {num_tokens} tokens");
    let scales = cache.scales().map(|span| span.address());
    let mut args = vec![
        out.into(),
        qkv.into(),
        cache.k.into(),
        cache.v.into(),
        tables.block_tables.into(),
        tables.token_tables.into(),
        tables.positions.into(),
        tables.slots.into(),
        (shape.qkv_cols() as u32).into(),
        (tables.max_blocks as u32).into(),
        (num_heads as u32).into(),
        (num_kv_heads as u32).into(),
        (head_dim as u32).into(),
        block_size.trailing_zeros().into(),
        scores.scale.into(),
        scores.window.into(),
        scores.chunk.into(),
        scores.sinks.unwrap_or(Span::NULL).into(),
        Arg::Bytes(bytemuck::bytes_of(&scales)),
    ];
    args.extend(scores.argument());
    let name = format!("{}paged_attention_{}", scores.prefix(), cache.type_name());
    q.launch(&name, Launch::new(0, 32).grid(num_tokens as u32, num_heads as u32, 1), &args)
}
