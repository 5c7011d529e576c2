//! Rotary embedding, and writing to KV blocks. Kernel: `rope_cache.cu`.

use half::bf16;

use super::error::ensure;
use super::{Arg, CudaError, Launch, Queue, Span};
use crate::kv_codes::KvCodes;

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

/// Keys and values of one layer, each `[blocks, K, B, D]` bf16, or codes of a byte.
#[derive(Debug, Clone, Copy)]
pub struct LayerCache {
    /// Keys, after the rotation.
    pub k: Span,
    /// Values.
    pub v: Span,
    /// For codes, their kind and scales.
    pub codes: Option<CacheCodes>,
}

/// What codes of keys and values mean.
#[derive(Debug, Clone, Copy)]
pub struct CacheCodes {
    /// How codes are numbers.
    pub kind: KvCodes,
    /// Scales of keys, `[blocks, K, B]` f32.
    pub k_scales: Span,
    /// Scales of values.
    pub v_scales: Span,
}

impl LayerCache {
    /// The type of elements in the names of kernels.
    pub(super) fn type_name(&self) -> &'static str {
        self.codes.map_or("bf16", |codes| codes.kind.name())
    }

    /// Bytes of an element.
    pub(super) fn element_bytes(&self) -> usize {
        if self.codes.is_some() { 1 } else { 2 }
    }

    /// Scales of keys and of values; null without codes.
    pub(super) fn scales(&self) -> [Span; 2] {
        self.codes.map_or([Span::NULL; 2], |codes| [codes.k_scales, codes.v_scales])
    }

    /// Rows of D elements in K, or in V.
    pub(super) fn rows(&self, head_dim: usize) -> usize {
        self.k.bytes() / (head_dim * self.element_bytes())
    }

    /// Checks that all buffers are aligned, and that every row has a scale.
    pub(super) fn check(&self, op: &'static str, head_dim: usize) -> Result<(), CudaError> {
        let [k_scales, v_scales] = self.scales();
        let aligned = [self.k, self.v, k_scales, v_scales].iter().all(|span| span.is_aligned(16));
        ensure!(op, aligned, "keys, values or their scales are not 16-byte aligned");
        let rows = self.rows(head_dim);
        let has_all = self.codes.is_none() || [k_scales, v_scales].iter().all(|span| span.count::<f32>() >= rows);
        ensure!(op, has_all, "fewer scales than {rows} rows of keys and values");
        Ok(())
    }
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
    /// `[D]` f32 that multiply the elements of each head of q after the rotation; or [`Span::NULL`].
    pub query_gains: Span,
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
    /// beta, period, offset. `None` changes nothing.
    pub(super) fn parameters(scale: Option<Self>) -> [u32; 3] {
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
    cache.check("rope_cache", head_dim)?;
    let gains = inputs.query_gains;
    ensure!("rope_cache", gains.is_null() || gains.count::<f32>() >= head_dim, "gains are shorter than {head_dim}");
    let spans = [cos, sin, qkv, gains];
    ensure!("rope_cache", spans.iter().all(|s| s.is_aligned(16)), "a buffer is not 16-byte aligned");
    for (name, span) in [("positions", inputs.positions), ("slots", inputs.slots)] {
        ensure!("rope_cache", span.count::<u32>() >= num_tokens, "{name} is shorter than {num_tokens}");
    }
    let has_period = inputs.query_scale.is_none_or(|scale| scale.period > 0);
    ensure!("rope_cache", has_period, "the scale of queries has a period of 0");
    let [beta, period, offset] = QueryScale::parameters(inputs.query_scale).map(u64::from);
    // `Queries` of the kernel: gains, beta, period, offset, padding.
    let queries = [gains.address(), beta | period << 32, offset];
    let heads = num_heads + 2 * kv_heads;
    // A warp has whole heads where they are coded.
    let lanes = (head_dim / 16).next_power_of_two();
    ensure!("rope_cache", cache.codes.is_none() || lanes <= 32, "head_dim {head_dim} of codes; at most 512");
    let units = if cache.codes.is_some() { heads * lanes } else { heads * head_dim / 16 };
    let pointers = [cache.k, cache.v, cache.scales()[0], cache.scales()[1]].map(|span| span.address());
    let blocks = match cache.codes {
        Some(_) => vec![Arg::Bytes(bytemuck::bytes_of(&pointers))],
        None => vec![cache.k.into(), cache.v.into()],
    };
    let mut args = vec![qkv.into()];
    args.extend(blocks);
    args.extend([cos, sin, inputs.positions, inputs.slots].map(Arg::from));
    let words = [num_heads, kv_heads, head_dim].map(|size| Arg::U32(size as u32));
    args.extend(words);
    args.extend([block_size.trailing_zeros().into(), Arg::Bytes(bytemuck::bytes_of(&queries))]);
    args.extend(cache.codes.map(|_| Arg::U32(lanes.trailing_zeros())));
    let launch = Launch::new(0, 128).grid(num_tokens as u32, units.div_ceil(128) as u32, 1);
    q.launch(&format!("rope_cache_{}", cache.type_name()), launch, &args)
}
