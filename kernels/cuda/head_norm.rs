//! Norms of each head of q, k and v. Kernel: `head_norm.cu`.

use half::bf16;

use super::error::ensure;
use super::rope_cache::HeadShape;
use super::{Arg, CudaError, Launch, Queue, Span};

/// Number of heads that one thread block normalizes.
const HEADS: usize = 8;

/// Weights of norms of heads, bf16.
#[derive(Debug, Clone, Copy)]
pub struct HeadNormWeights {
    /// For the heads of q.
    pub q: Span,
    /// For the heads of k. Not used if there is no k.
    pub k: Span,
}

/// Norms of heads.
#[derive(Debug, Clone, Copy)]
pub struct HeadNorm {
    /// Weights `[D]`, or `[H D]` and `[K D]` if each head has its own.
    pub weights: HeadNormWeights,
    /// `[D]`, for the heads of v, or [`Span::NULL`]: they are not changed.
    pub v: Span,
    /// Whether each head of q and k has weights of its own.
    pub has_each: bool,
    /// Whether they are layer norms, without a bias; otherwise RMS norms.
    pub is_layer: bool,
    /// Added to the mean square or the variance.
    pub eps: f32,
}

/// Normalizes the heads of `qkv` `[T, (H + 2K) D]`, or of q alone where [`HeadShape::has_kv`] is not set, in place.
pub fn head_norm(q: &Queue, qkv: Span, norm: &HeadNorm, shape: HeadShape, num_tokens: usize) -> Result<(), CudaError> {
    let op = "head_norm";
    let HeadNorm { weights, v, has_each, is_layer, eps } = *norm;
    let HeadShape { num_heads, head_dim, .. } = shape;
    let kv_heads = shape.own_kv_heads();
    ensure!(
        op,
        head_dim.is_multiple_of(8) && (8..=512).contains(&head_dim),
        "head_dim {head_dim}; a multiple of 8 up to 512"
    );
    ensure!(op, num_tokens > 0, "no tokens");
    ensure!(op, qkv.count::<bf16>() >= num_tokens * shape.qkv_cols(), "qkv is too short for {num_tokens} tokens");
    for (name, span, heads) in [("q's weight", weights.q, num_heads), ("k's weight", weights.k, kv_heads)] {
        let count = if has_each { heads * head_dim } else { head_dim };
        ensure!(op, heads == 0 || span.count::<bf16>() >= count, "{name} is shorter than {count}");
    }
    ensure!(op, v.is_null() || v.count::<bf16>() >= head_dim, "v's weight is shorter than {head_dim}");
    let aligned = [qkv, weights.q, weights.k, v].iter().all(|span| span.is_aligned(16));
    ensure!(op, aligned, "a buffer is not 16-byte aligned");
    let pair = |low: u32, high: u32| u64::from(low) | u64::from(high) << 32;
    let parameters = [
        qkv.address(),
        weights.q.address(),
        weights.k.address(),
        v.address(),
        pair(num_heads as u32, kv_heads as u32),
        pair(head_dim as u32, u32::from(has_each)),
        pair(u32::from(is_layer), eps.to_bits()),
    ];
    let heads = num_heads + kv_heads * if v.is_null() { 1 } else { 2 };
    let launch = Launch::new(0, 256).grid(num_tokens as u32, heads.div_ceil(HEADS) as u32, 1);
    q.launch("head_norm_bf16", launch, &[Arg::Bytes(bytemuck::bytes_of(&parameters))])
}
