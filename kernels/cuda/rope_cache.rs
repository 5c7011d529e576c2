//! Rotary embedding, and writing to KV blocks. Kernel: `rope_cache.cu`.

use half::bf16;

use super::error::ensure;
use super::{Arg, CudaError, Launch, Queue, Span};

/// Head counts and sizes of a worker, and the size of its KV blocks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct HeadShape {
    /// `H`, query heads.
    pub num_heads: usize,
    /// `K`, KV heads; divides `H`.
    pub num_kv_heads: usize,
    /// `D`, head dimension.
    pub head_dim: usize,
    /// `B`, positions in a block; a power of two.
    pub block_size: usize,
    /// Whether rows of qkv have k and v. Otherwise they are q alone, `[T, H D]`, and attention reads the keys and values of
    /// another layer.
    pub has_kv: bool,
}

impl HeadShape {
    /// Number of columns of qkv: `(H + 2K) D`, or `H D` without k and v.
    pub fn qkv_cols(&self) -> usize {
        (self.num_heads + 2 * self.own_kv_heads()) * self.head_dim
    }

    /// Number of heads of k, and of v, in a row of qkv.
    pub(super) fn own_kv_heads(&self) -> usize {
        if self.has_kv { self.num_kv_heads } else { 0 }
    }

    /// Number of elements of one KV block's K (or V) in one layer: `K B D`.
    pub fn block_elements(&self) -> usize {
        self.num_kv_heads * self.block_size * self.head_dim
    }
}

/// Keys and values of one layer, each `[blocks, K, B, D]` bf16.
#[derive(Debug, Clone, Copy)]
pub struct LayerCache {
    /// Keys, after the rotation.
    pub k: Span,
    /// Values.
    pub v: Span,
}

/// Positions of a step's tokens, and the rotation tables.
#[derive(Debug, Clone, Copy)]
pub struct RopeInputs {
    /// cos and sin, each `[max_positions, D / 2]` f32. Without them nothing is rotated.
    pub tables: Option<[Span; 2]>,
    /// `[T]` u32, below max_positions (asserted when the step is packed).
    pub positions: Span,
    /// `[T]` u32, inside the cache or `u32::MAX` (asserted when the step is packed).
    pub slots: Span,
    /// If set, multiplies q after the rotation.
    pub query_scale: Option<QueryScale>,
}

/// A factor of q that depends on the position: `1 + beta * ln(1 + floor((position + offset) / period))`.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct QueryScale {
    /// How fast it grows.
    pub beta: f32,
    /// Positions without growth, at least 1.
    pub period: u32,
    /// Added to the position.
    pub offset: u32,
}

impl QueryScale {
    /// `QueryScale` of the kernel: beta, period, offset. `None` changes nothing.
    fn parameters(scale: Option<Self>) -> [u32; 3] {
        scale.map_or([0, 1, 0], |scale| [scale.beta.to_bits(), scale.period, scale.offset])
    }
}

/// Rotates q in place, and writes the rotated k, and v, to the cache. `qkv` `[T, (H + 2K) D]`, or `[T, H D]` without k and
/// v, where nothing is written.
pub fn rope_cache(
    q: &Queue,
    qkv: Span,
    cache: LayerCache,
    inputs: RopeInputs,
    shape: HeadShape,
    num_tokens: usize,
) -> Result<(), CudaError> {
    let HeadShape { num_heads, head_dim, block_size, .. } = shape;
    let kv_heads = shape.own_kv_heads();
    ensure!("rope_cache", head_dim.is_multiple_of(16) && head_dim > 0, "head_dim {head_dim} is not a multiple of 16");
    ensure!("rope_cache", block_size.is_power_of_two(), "block_size {block_size} is not a power of two");
    ensure!("rope_cache", num_tokens > 0, "no tokens");
    let found = qkv.count::<bf16>();
    ensure!("rope_cache", found >= num_tokens * shape.qkv_cols(), "qkv has {found} elements for {num_tokens} tokens");
    let [cos, sin] = inputs.tables.unwrap_or([Span::NULL, Span::NULL]);
    let spans = [cos, sin, qkv, cache.k, cache.v];
    ensure!("rope_cache", spans.iter().all(|s| s.is_aligned(16)), "a buffer is not 16-byte aligned");
    for (name, span) in [("positions", inputs.positions), ("slots", inputs.slots)] {
        ensure!("rope_cache", span.count::<u32>() >= num_tokens, "{name} is shorter than {num_tokens}");
    }
    let has_period = inputs.query_scale.is_none_or(|scale| scale.period > 0);
    ensure!("rope_cache", has_period, "the scale of queries has a period of 0");
    let scale = QueryScale::parameters(inputs.query_scale);
    let units = (num_heads + 2 * kv_heads) * head_dim / 16;
    let args = [
        qkv.into(),
        cache.k.into(),
        cache.v.into(),
        cos.into(),
        sin.into(),
        inputs.positions.into(),
        inputs.slots.into(),
        (num_heads as u32).into(),
        (kv_heads as u32).into(),
        (head_dim as u32).into(),
        block_size.trailing_zeros().into(),
        Arg::Bytes(bytemuck::bytes_of(&scale)),
    ];
    let launch = Launch::new(0, 128).grid(num_tokens as u32, units.div_ceil(128) as u32, 1);
    q.launch("rope_cache_bf16", launch, &args)
}
