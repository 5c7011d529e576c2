//! RMSNorm of all heads of q together, and of all heads of k. Kernels: `wide_head_norm.cu`.

use half::bf16;

use super::error::ensure;
use super::head_norm::HeadNormWeights;
use super::rope_cache::HeadShape;
use super::{CudaError, Launch, Queue, Span};

fn check(op: &'static str, qkv: Span, shape: HeadShape, num_tokens: usize) -> Result<(), CudaError> {
    ensure!(
        op,
        shape.head_dim > 0 && shape.head_dim.is_multiple_of(8),
        "head_dim {} is no multiple of 8",
        shape.head_dim
    );
    ensure!(op, num_tokens > 0, "no tokens");
    ensure!(op, qkv.count::<bf16>() >= num_tokens * shape.qkv_cols(), "qkv is too short for {num_tokens} tokens");
    ensure!(op, qkv.is_aligned(16), "qkv is not 16-byte aligned");
    Ok(())
}

/// This worker's sums of squares of q and of k: `sums` `[T, 2]` f32.
pub fn head_squares(q: &Queue, sums: Span, qkv: Span, shape: HeadShape, num_tokens: usize) -> Result<(), CudaError> {
    let op = "head_squares";
    check(op, qkv, shape, num_tokens)?;
    ensure!(op, sums.count::<f32>() >= 2 * num_tokens, "sums are too short for {num_tokens} tokens");
    let args = [
        sums.into(),
        qkv.into(),
        (shape.num_heads as u32).into(),
        (shape.num_kv_heads as u32).into(),
        (shape.head_dim as u32).into(),
    ];
    q.launch("head_squares_bf16", Launch::new(0, 256).grid(num_tokens as u32, 2, 1), &args)
}

/// The sums of squares of all workers.
#[derive(Debug, Clone, Copy)]
pub struct Squares {
    /// `[workers, T, 2]` f32.
    pub sums: Span,
    /// Number of workers. Those that share a KV head have all counted it.
    pub workers: usize,
}

/// Normalizes q and k of `qkv` `[T, (H + 2K) D]` in place. `weights` are `[H D]` and `[K D]`.
pub fn scale_heads(
    q: &Queue,
    qkv: Span,
    squares: Squares,
    weights: HeadNormWeights,
    shape: HeadShape,
    num_tokens: usize,
    eps: f32,
) -> Result<(), CudaError> {
    let Squares { sums, workers } = squares;
    let op = "scale_heads";
    check(op, qkv, shape, num_tokens)?;
    let HeadShape { num_heads, num_kv_heads, head_dim, .. } = shape;
    ensure!(op, sums.count::<f32>() >= 2 * num_tokens * workers, "sums are too short for {num_tokens} tokens");
    for (weight, heads) in [(weights.q, num_heads), (weights.k, num_kv_heads)] {
        let fits = weight.count::<bf16>() >= heads * head_dim && weight.is_aligned(16);
        ensure!(op, fits, "a weight is short or not 16-byte aligned");
    }
    let counted = |heads: usize| (heads * head_dim * workers) as f32;
    let args = [
        qkv.into(),
        sums.into(),
        weights.q.into(),
        weights.k.into(),
        (num_heads as u32).into(),
        (num_kv_heads as u32).into(),
        (head_dim as u32).into(),
        (workers as u32).into(),
        counted(num_heads).into(),
        counted(num_kv_heads).into(),
        eps.into(),
    ];
    q.launch("scale_heads_bf16", Launch::new(0, 256).grid(num_tokens as u32, 2, 1), &args)
}
