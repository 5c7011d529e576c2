//! RMSNorm of each head of q and k. Kernel: `head_norm.cu`.

use half::bf16;

use super::error::ensure;
use super::rope_cache::HeadShape;
use super::{CudaError, Launch, Queue, Span};

/// Number of heads that one thread block normalizes.
const HEADS: usize = 8;

/// Weights of [`head_norm`], each `[D]` bf16.
#[derive(Debug, Clone, Copy)]
pub struct HeadNormWeights {
    /// For the heads of q.
    pub q: Span,
    /// For the heads of k.
    pub k: Span,
}

/// Normalizes the heads of the q and k parts of `qkv` `[T, (H + 2K) D]` in place.
pub fn head_norm(
    q: &Queue,
    qkv: Span,
    weights: HeadNormWeights,
    shape: HeadShape,
    num_tokens: usize,
    eps: f32,
) -> Result<(), CudaError> {
    let op = "head_norm";
    let HeadShape { num_heads, num_kv_heads, head_dim, .. } = shape;
    ensure!(
        op,
        head_dim.is_multiple_of(8) && (8..=256).contains(&head_dim),
        "head_dim {head_dim}; a multiple of 8 up to 256"
    );
    ensure!(op, num_tokens > 0, "no tokens");
    ensure!(op, qkv.count::<bf16>() >= num_tokens * shape.qkv_cols(), "qkv is too short for {num_tokens} tokens");
    for (name, span) in [("q's weight", weights.q), ("k's weight", weights.k)] {
        ensure!(op, span.count::<bf16>() >= head_dim, "{name} is shorter than {head_dim}");
    }
    let aligned = [qkv, weights.q, weights.k].iter().all(|span| span.is_aligned(16));
    ensure!(op, aligned, "a buffer is not 16-byte aligned");
    let blocks = (num_heads + num_kv_heads).div_ceil(HEADS);
    let args = [
        qkv.into(),
        weights.q.into(),
        weights.k.into(),
        (num_heads as u32).into(),
        (num_kv_heads as u32).into(),
        (head_dim as u32).into(),
        eps.into(),
    ];
    q.launch("head_norm_bf16", Launch::new(0, 256).grid(num_tokens as u32, blocks as u32, 1), &args)
}
