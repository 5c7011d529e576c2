//! Attention of a model, as a device needs it to lay out the KV cache and to run its layers.

#[cfg(doc)]
use crate::Feature;
use crate::{LatentShape, RecurrentShape};

/// cos and sin of every position. The scaling rules are applied on the host.
#[derive(Debug, Clone, PartialEq)]
pub struct RopeTable {
    /// `[max_positions, D / 2]` cosines, scaled if the model's rule says so.
    pub cos: Vec<f32>,
    /// `[max_positions, D / 2]` sines.
    pub sin: Vec<f32>,
}

/// How KV blocks hold keys and values.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum KvElements {
    /// As the device computes with them.
    #[default]
    Plain,
    /// Codes in e4m3 with a scale for each position and KV head.
    Fp8,
    /// Codes in integers of 8 bits, the same.
    Int8,
}

/// Attention of a model, for this worker's shard.
#[derive(Debug, Clone, PartialEq)]
pub struct AttentionSpec {
    /// Positions in one KV block.
    pub block_size: usize,
    /// Maximum length of a sequence; the rotation tables have this number of positions.
    pub max_positions: usize,
    /// Rotary embeddings; elements `(i, i + D / 2)` of a head form a pair.
    pub ropes: Vec<RopeTable>,
    /// The layers.
    pub layers: Vec<LayerAttention>,
    /// For each KV group of the whole model, the window of its layers, or `None` if they need all blocks of a row. Each row
    /// of a step has a block table for each group.
    pub kv_windows: Vec<Option<usize>>,
    /// How KV blocks hold keys and values.
    pub kv_elements: KvElements,
    /// The layers with a recurrent state in place of attention, which are not in `layers`. Requires [`Feature::Recurrent`].
    pub states: Vec<RecurrentShape>,
}

impl AttentionSpec {
    /// A layer for each buffer of KV blocks, in order; layers that share a buffer have the same shape.
    pub fn kv_buffers(&self) -> Vec<&LayerAttention> {
        let count = self.layers.iter().map(|layer| layer.kv_buffer + 1).max().unwrap_or(0);
        (0..count).filter_map(|buffer| self.layers.iter().find(|layer| layer.kv_buffer == buffer)).collect()
    }

    /// Bytes of a sequence's recurrent states in all layers; 0 if there are none.
    pub fn state_bytes(&self) -> usize {
        self.states.iter().map(|state| state.state_len() * size_of::<f32>()).sum()
    }

    /// KV heads of one position in a KV block.
    pub fn kv_heads(&self) -> usize {
        self.kv_buffers().iter().map(|layer| layer.num_kv_heads).sum()
    }

    /// Elements of one position in a KV block: of K and V, or of latent vectors.
    pub fn position_elements(&self) -> usize {
        self.kv_buffers().iter().map(|layer| layer.position_elements()).sum()
    }
}

/// Attention of one layer, for this worker's shard.
#[derive(Debug, Clone, PartialEq)]
pub struct LayerAttention {
    /// `H`, query heads on this worker.
    pub num_heads: usize,
    /// `K`, KV heads on this worker; divides `H`.
    pub num_kv_heads: usize,
    /// `D`, the head dimension.
    pub head_dim: usize,
    /// Whether the layer has no k and v of its own and reads those of an earlier layer, whose `kv_group` and `kv_buffer`
    /// it has. Its activations are `q [T, H D]`. Requires [`Feature::SharedKv`].
    pub has_shared_kv: bool,
    /// Multiplies q·k, usually `D^-0.5`.
    pub scale: f32,
    /// Index in [`AttentionSpec::ropes`]; `None` if q and k are not rotated.
    pub rope: Option<usize>,
    /// The KV group, whose block tables the layer uses.
    pub kv_group: usize,
    /// The buffer with the layer's part of each KV block. It is shared with layers of other groups, which use other
    /// blocks.
    pub kv_buffer: usize,
    /// If set, KV blocks hold latent vectors in place of k and v: there is one KV head, `head_dim` is
    /// [`LatentShape::width`], and the layer is run by [`crate::Device::latent_attention`]. Requires
    /// [`Feature::LatentAttention`].
    pub latent: Option<LatentShape>,
    /// If set, attention reads only this number of last positions.
    pub window: Option<usize>,
    /// If set, attention reads only the chunk of this number of positions in which the token lies: those from
    /// `position / chunk * chunk` on. Requires [`Feature::ChunkedAttention`].
    pub chunk: Option<usize>,
    /// If set, a score `s` becomes `cap * tanh(s / cap)`. Requires [`Feature::ScoreCap`].
    pub score_cap: Option<f32>,
    /// `[H]` a logit of each head that takes part in the softmax and has no value. Empty if there are none. Requires
    /// [`Feature::Sinks`].
    pub sinks: Vec<f32>,
    /// `[D]` factors of the elements of each query head after the rotation. Empty if there are none. Requires
    /// [`Feature::QueryGains`].
    pub query_gains: Vec<f32>,
    /// If set, q is multiplied by a factor of its position after the rotation. Requires [`Feature::QueryScale`], or
    /// [`Feature::LatentQueryScale`] if KV blocks hold latent vectors.
    pub query_scale: Option<QueryScale>,
    /// `[H]` ALiBi slopes of this worker's heads: `slope * (key position - query position)` is added to each score.
    /// Empty if the model does not use ALiBi. Requires [`Feature::Alibi`].
    pub alibi_slopes: Vec<f32>,
}

impl LayerAttention {
    /// Elements of one position in a KV block.
    pub fn position_elements(&self) -> usize {
        let vectors = if self.latent.is_some() { 1 } else { 2 };
        vectors * self.num_kv_heads * self.head_dim
    }
}

/// A factor of q that grows with the logarithm of the position: `1 + beta * ln(1 + floor((position + offset) / period))`.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct QueryScale {
    /// How fast it grows; 0 for a factor of 1.
    pub beta: f32,
    /// Positions without growth, at least 1.
    pub period: u32,
    /// Added to the position: 1 where the reference counts positions from one, else 0.
    pub offset: u32,
}

impl QueryScale {
    /// The factor at `position`.
    pub fn at(self, position: u32) -> f32 {
        let periods = (u64::from(position) + u64::from(self.offset)) / u64::from(self.period.max(1));
        1.0 + self.beta * (periods as f32).ln_1p()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_factor_of_q_grows_at_multiples_of_the_period() {
        let scale = QueryScale { beta: 0.5, period: 4, offset: 0 };
        assert_eq!([0, 3].map(|position| scale.at(position)), [1.0, 1.0]);
        assert_eq!([4, 7, 8].map(|p| scale.at(p)), [2f32, 2.0, 3.0].map(|n| 1.0 + 0.5 * n.ln()));
        assert_eq!(QueryScale { offset: 1, ..scale }.at(3), scale.at(4));
    }
}
