//! The part of each weight that a worker of a tensor-parallel group holds.
//!
//! qkv and gate/up are split by output (heads, columns of the inner layer), out and down by input, embedding and head
//! by vocabulary. KV heads are replicated if the group has more workers than there are KV heads.

use std::ops::Range;

use ops::TensorParallel;

use crate::config::LayerSpec;
use crate::{Config, ModelError};

/// Shares of the inner layer and the vocabulary are multiples of this, except the last worker's.
const ALIGN: usize = 8;

/// One worker's share, as ranges of the whole model's dimensions.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Shard {
    /// Its share of every layer.
    pub layers: Vec<LayerShard>,
    /// Rows of the embedding and the head.
    pub vocab: Range<usize>,
}

/// One worker's share of a layer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LayerShard {
    /// Query heads.
    pub heads: Range<usize>,
    /// KV heads of these query heads.
    pub kv_heads: Range<usize>,
    /// Columns of the feed-forward's inner layer; none if it consists of experts alone.
    pub intermediate: Range<usize>,
    /// Columns of the inner layer of each expert; none without experts.
    pub expert_intermediate: Range<usize>,
}

impl Shard {
    /// The shard of worker `tp.rank`.
    ///
    /// # Errors
    /// Returns an error if the heads cannot be divided by the group's size, or if a worker would have an empty shard.
    pub fn new(config: &Config, tp: TensorParallel) -> Result<Self, ModelError> {
        let (rank, size) = (tp.rank as usize, tp.size as usize);
        if let Some(layer) = config.layers.iter().find(|layer| !fits(config, layer, size)) {
            let fits_all = |size: &usize| config.layers.iter().all(|layer| fits(config, layer, *size));
            let usable: Vec<String> =
                (1..=layer.attention.num_heads).filter(fits_all).map(|size| size.to_string()).collect();
            return Err(ModelError::WorldSize {
                num_heads: layer.attention.num_heads,
                num_kv_heads: layer.attention.num_kv_heads,
                found: tp.size,
                usable: usable.join(", "),
            });
        }
        Ok(Self {
            layers: config.layers.iter().map(|layer| LayerShard::new(layer, rank, size)).collect(),
            vocab: aligned_share(config.vocab_size, rank, size),
        })
    }
}

impl LayerShard {
    fn new(layer: &LayerSpec, rank: usize, size: usize) -> Self {
        let (heads, kv_heads) = (layer.attention.num_heads / size, layer.attention.num_kv_heads.div_ceil(size));
        let first_kv_head = rank * layer.attention.num_kv_heads / size;
        Self {
            heads: rank * heads..(rank + 1) * heads,
            kv_heads: first_kv_head..first_kv_head + kv_heads,
            intermediate: aligned_share(dense_width(layer), rank, size),
            expert_intermediate: aligned_share(expert_width(layer), rank, size),
        }
    }
}

/// Whether every worker of a group of `size` gets whole heads and a part of every weight of the layer.
fn fits(config: &Config, layer: &LayerSpec, size: usize) -> bool {
    let kv_heads = layer.attention.num_kv_heads;
    size > 0
        && layer.attention.num_heads.is_multiple_of(size)
        && (kv_heads.is_multiple_of(size) || size.is_multiple_of(kv_heads))
        && [dense_width(layer), expert_width(layer)]
            .into_iter()
            .all(|width| width == 0 || !aligned_share(width, size - 1, size).is_empty())
        && !aligned_share(config.vocab_size, size - 1, size).is_empty()
}

fn dense_width(layer: &LayerSpec) -> usize {
    layer.mlp.map_or(0, |mlp| mlp.intermediate_size)
}

fn expert_width(layer: &LayerSpec) -> usize {
    layer.experts.map_or(0, |experts| experts.intermediate_size)
}

/// Part `rank` when `0..n` is divided into `size` parts of equal, aligned length; the last part may be shorter.
fn aligned_share(n: usize, rank: usize, size: usize) -> Range<usize> {
    let share = n.div_ceil(size).next_multiple_of(ALIGN);
    (rank * share).min(n)..((rank + 1) * share).min(n)
}

#[cfg(test)]
pub(crate) mod tests {
    use ops::{Activation, DType, NormKind};

    use super::*;
    use crate::config::{AttentionLayer, HeadSpec, MlpLayer, NormSpec};
    use crate::families;

    pub(crate) fn config(num_heads: usize, num_kv_heads: usize, vocab_size: usize) -> Config {
        let attention = AttentionLayer {
            num_heads,
            num_kv_heads,
            head_dim: 8,
            scale: 8f32.powf(-0.5),
            rope: None,
            has_alibi: false,
            window: None,
            score_cap: None,
            head_norm: None,
            qkv_bias: false,
            out_bias: false,
        };
        let mlp = MlpLayer {
            intermediate_size: 176,
            is_gated: true,
            activation: Activation::Silu,
            has_bias: false,
            has_output_gate: false,
        };
        Config {
            architecture: "LlamaForCausalLM".into(),
            names: families::find("LlamaForCausalLM").unwrap().names,
            hidden_size: num_heads * 8,
            vocab_size,
            max_position_embeddings: 128,
            embedding_scale: 1.0,
            learned_positions: None,
            norm: NormSpec { kind: NormKind::Rms, eps: 1e-5, has_weight: true, has_bias: false, offset: 0.0 },
            ropes: vec![],
            layers: vec![LayerSpec { attention, mlp: Some(mlp), experts: None, is_parallel: false }; 2],
            head: HeadSpec { is_tied: false, has_unit_rows: false, has_bias: false, scale: 1.0, cap: None },
            bos_id: None,
            eos_ids: vec![],
            dtype: DType::Bf16,
            notes: vec![],
        }
    }

    fn shards(config: &Config, size: u32) -> Vec<Shard> {
        (0..size).map(|rank| Shard::new(config, TensorParallel { rank, size }).unwrap()).collect()
    }

    fn covers(mut parts: impl Iterator<Item = Range<usize>>, n: usize) -> bool {
        parts.try_fold(0, |end, part| (end == part.start).then_some(part.end)) == Some(n)
    }

    #[test]
    fn shares_cover_every_dimension_once() {
        let config = config(8, 4, 501);
        for size in [1, 2, 4] {
            let shards = shards(&config, size);
            assert!(covers(shards.iter().map(|s| s.vocab.clone()), 501));
            for layer in 0..2 {
                assert!(covers(shards.iter().map(|s| s.layers[layer].heads.clone()), 8));
                assert!(covers(shards.iter().map(|s| s.layers[layer].kv_heads.clone()), 4));
                assert!(covers(shards.iter().map(|s| s.layers[layer].intermediate.clone()), 176));
            }
        }
    }

    #[test]
    fn kv_heads_are_replicated_where_the_group_is_larger() {
        let shards = shards(&config(8, 2, 512), 8);
        let kv_heads: Vec<_> = shards.iter().map(|s| s.layers[0].kv_heads.clone()).collect();
        assert_eq!(kv_heads[3], 0..1);
        assert_eq!(kv_heads[4], 1..2);
    }

    #[test]
    fn a_size_that_does_not_divide_the_heads_is_refused_with_those_that_would() {
        let error = Shard::new(&config(8, 4, 512), TensorParallel { rank: 0, size: 3 }).unwrap_err().to_string();
        assert_eq!(
            error,
            "8 heads and 4 KV heads cannot be shared by 3 workers; world sizes that would do: 1, 2, 4, 8"
        );
    }
}
