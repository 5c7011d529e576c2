//! Products with the weights of keys before attention over latent vectors, and with those of values behind it. Kernels:
//! `latent_product.cu`.

use half::bf16;

use super::error::ensure;
use super::latent_cache::{RANKS, ROTARY, Rotation, width};
use super::{Arg, CudaError, Launch, Queue, Span};

/// Columns of a thread block, and elements of the sum in a stage of its shared memory.
const COLUMNS: usize = 64;
/// Bytes between rows in shared memory.
const PITCH: usize = 2 * 64 + 16;
const STAGES: usize = 3;

/// The weights of a layer's keys and values.
#[derive(Debug, Clone, Copy)]
pub struct LatentUp {
    /// `[H (key_dim + value_dim), rank]` bf16: for each head the products that give k, then those that give v.
    pub weight: Span,
    /// Elements of a latent vector, one of [`RANKS`].
    pub rank: usize,
    /// `H`.
    pub num_heads: usize,
    /// Elements of a head of q and k that are not rotated; a multiple of 8.
    pub key_dim: usize,
    /// Elements of a head of v; a multiple of 8.
    pub value_dim: usize,
}

impl LatentUp {
    fn check(&self, op: &'static str, num_tokens: usize) -> Result<(), CudaError> {
        let Self { weight, rank, num_heads, key_dim, value_dim } = *self;
        ensure!(op, RANKS.contains(&rank), "latent vectors of {rank}; expected {RANKS:?}");
        let dims = [key_dim, value_dim];
        let has_dims = dims.iter().all(|dim| *dim > 0 && dim.is_multiple_of(8));
        ensure!(op, has_dims, "heads of {key_dim} and {value_dim}; expected multiples of 8");
        ensure!(op, (1..=65_535).contains(&num_heads) && num_tokens > 0, "{num_heads} heads, {num_tokens} tokens");
        let rows = num_heads * (key_dim + value_dim);
        ensure!(op, weight.count::<bf16>() >= rows * rank, "the weight is shorter than {rows} x {rank}");
        Ok(())
    }

    fn launch(
        &self,
        q: &Queue,
        name: &str,
        spans: [Span; 3],
        angles: [u64; 5],
        (tokens, tiles): (usize, usize),
    ) -> Result<(), CudaError> {
        let pair = |low: usize, high: usize| low as u64 | (high as u64) << 32;
        let [x, weight, out] = spans.map(|span| span.address());
        let sizes = [pair(tokens, self.num_heads), pair(self.key_dim, self.value_dim)];
        let parameters: Vec<u64> = [x, weight, out].into_iter().chain(sizes).chain(angles).collect();
        let rows = if tokens <= 16 { 16 } else { 64 };
        let launch = Launch::new(0, 128)
            .grid(tiles as u32, self.num_heads as u32, tokens.div_ceil(rows) as u32)
            .shared((STAGES * (rows + COLUMNS) * PITCH) as u32);
        q.launch(
            &format!("{name}_bf16_l{}_m{rows}", self.rank),
            launch,
            &[Arg::Bytes(bytemuck::cast_slice(&parameters))],
        )
    }
}

/// `rows [T, H, width]` = for each head of `queries [T, H, key_dim + ROTARY]` its product with the weights of the head's keys,
/// and its rotated part, both times the factor of the position.
pub fn latent_queries(
    q: &Queue,
    rows: Span,
    queries: Span,
    up: &LatentUp,
    rotation: &Rotation,
    num_tokens: usize,
) -> Result<(), CudaError> {
    let op = "latent_queries";
    up.check(op, num_tokens)?;
    rotation.check(op, num_tokens)?;
    let heads = num_tokens * up.num_heads;
    ensure!(op, queries.count::<bf16>() >= heads * (up.key_dim + ROTARY), "q is too short for {num_tokens} tokens");
    ensure!(op, rows.count::<bf16>() >= heads * width(up.rank), "rows are too short for {num_tokens} tokens");
    let spans = [queries, up.weight, rows];
    ensure!(op, spans.iter().all(|span| span.is_aligned(16)), "a buffer is not 16-byte aligned");
    // One more tile is the rotated part.
    let tiles = up.rank / COLUMNS + 1;
    up.launch(q, op, spans, rotation.parameters(), (num_tokens, tiles))
}

/// `out [T, H, value_dim]` = for each head the product of the first `rank` elements of `rows [T, H, width]` with the weights of
/// the head's values.
pub fn latent_values(q: &Queue, out: Span, rows: Span, up: &LatentUp, num_tokens: usize) -> Result<(), CudaError> {
    let op = "latent_values";
    up.check(op, num_tokens)?;
    let heads = num_tokens * up.num_heads;
    ensure!(op, rows.count::<bf16>() >= heads * width(up.rank), "rows are too short for {num_tokens} tokens");
    ensure!(op, out.count::<bf16>() >= heads * up.value_dim, "out is too short for {num_tokens} tokens");
    let spans = [rows, up.weight, out];
    ensure!(op, spans.iter().all(|span| span.is_aligned(16)), "a buffer is not 16-byte aligned");
    up.launch(q, op, spans, [0; 5], (num_tokens, up.value_dim.div_ceil(COLUMNS)))
}
