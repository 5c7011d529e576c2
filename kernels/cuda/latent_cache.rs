//! The KV blocks of attention over latent vectors: a row of [`width`] numbers for each position. Kernel: `latent_cache.cu`.

use half::bf16;

use super::error::ensure;
use super::rope_cache::QueryScale;
use super::{Arg, CudaError, Launch, Queue, Span};

/// Elements of the latent vectors that kernels exist for.
pub const RANKS: [usize; 2] = [256, 512];
/// Rotated elements behind them.
pub const ROTARY: usize = 64;

/// Elements of a row with a latent vector of `rank`.
pub const fn width(rank: usize) -> usize {
    rank + ROTARY
}

/// Angles of a step's tokens.
#[derive(Debug, Clone, Copy)]
pub struct Rotation {
    /// `[max_positions, ROTARY / 2]` f32.
    pub cos: Span,
    /// `[max_positions, ROTARY / 2]` f32.
    pub sin: Span,
    /// `[T]` u32, below max_positions (asserted when the step is packed).
    pub positions: Span,
    /// Whether pairs are neighbours `(2i, 2i + 1)`; otherwise `(i, i + ROTARY / 2)`.
    pub is_interleaved: bool,
    /// If set, multiplies whole queries.
    pub query_scale: Option<QueryScale>,
}

impl Rotation {
    pub(super) fn check(&self, op: &'static str, num_tokens: usize) -> Result<(), CudaError> {
        let Self { cos, sin, positions, query_scale, .. } = *self;
        ensure!(op, query_scale.is_none_or(|scale| scale.period > 0), "the scale of queries has a period of 0");
        let has_tables = cos.bytes() == sin.bytes() && cos.count::<f32>() >= ROTARY / 2;
        ensure!(op, has_tables, "the rotation's tables are empty or differ in length");
        ensure!(op, cos.is_aligned(16) && sin.is_aligned(16), "the rotation's tables are not 16-byte aligned");
        ensure!(op, positions.count::<u32>() >= num_tokens, "positions are shorter than {num_tokens}");
        Ok(())
    }

    /// `Rotation` of the kernels: cos, sin, positions, interleaved, beta, period, offset.
    pub(super) fn parameters(&self) -> [u64; 5] {
        let [beta, period, offset] = QueryScale::parameters(self.query_scale).map(u64::from);
        let words = [u64::from(self.is_interleaved) | beta << 32, period | offset << 32];
        [self.cos.address(), self.sin.address(), self.positions.address(), words[0], words[1]]
    }
}

/// The norm of latent vectors.
#[derive(Debug, Clone, Copy)]
pub struct LatentNorm {
    /// Elements of a vector, one of [`RANKS`].
    pub rank: usize,
    /// `[rank]` bf16.
    pub gain: Span,
    /// Added to the mean square.
    pub eps: f32,
}

/// Norms and rotates the rows `latents [T, width]` bf16, and writes them to their slots in `cache [blocks, B, width]` bf16. `slots`
/// is `[T]` u32, inside the cache or `u32::MAX` (asserted when the step is packed).
pub fn latent_cache(
    q: &Queue,
    cache: Span,
    latents: Span,
    norm: LatentNorm,
    slots: Span,
    rotation: &Rotation,
    num_tokens: usize,
) -> Result<(), CudaError> {
    let (op, rank) = ("latent_cache", norm.rank);
    ensure!(op, RANKS.contains(&rank), "latent vectors of {rank}; expected {RANKS:?}");
    ensure!(op, num_tokens > 0, "no tokens");
    ensure!(op, latents.count::<bf16>() >= num_tokens * width(rank), "latents are too short for {num_tokens} tokens");
    ensure!(op, norm.gain.count::<bf16>() >= rank, "the gain is shorter than {rank}");
    ensure!(op, slots.count::<u32>() >= num_tokens, "slots are shorter than {num_tokens}");
    let aligned = [cache, latents, norm.gain].iter().all(|span| span.is_aligned(16));
    ensure!(op, aligned, "a buffer is not 16-byte aligned");
    rotation.check(op, num_tokens)?;
    let angles = rotation.parameters();
    let args = [
        cache.into(),
        latents.into(),
        norm.gain.into(),
        slots.into(),
        Arg::Bytes(bytemuck::bytes_of(&angles)),
        norm.eps.into(),
    ];
    q.launch(&format!("latent_cache_bf16_l{rank}"), Launch::new(num_tokens as u32, rank as u32 / 8), &args)
}
