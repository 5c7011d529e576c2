//! The part of each weight that a worker of a tensor-parallel group holds.
//!
//! qkv and gate/up are split by output (heads, columns of the inner layer), out and down by input, embedding and head
//! by vocabulary. KV heads are replicated if the group has more workers than there are KV heads. Experts are divided
//! among the parts of a group, if there are several, and each expert is split like a feed-forward within its part.

use std::ops::Range;

use ops::{RecurrentRule, TensorParallel};

use crate::layer_spec::{LayerSpec, RecurrentLayer};
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
    /// Query heads; value heads of a layer with a recurrent state.
    pub heads: Range<usize>,
    /// KV heads of these query heads; key heads of these value heads.
    pub kv_heads: Range<usize>,
    /// Value heads and key heads of a state beside attention; none without one.
    pub beside: [Range<usize>; 2],
    /// Columns of the feed-forward's inner layer; none if it consists of experts alone.
    pub intermediate: Range<usize>,
    /// Experts; none if the layer has none.
    pub experts: Range<usize>,
    /// Columns of the inner layer of each of these experts; none without experts.
    pub expert_intermediate: Range<usize>,
}

/// Checks that `size` workers can share a model, and what guesses its drafts.
///
/// # Errors
/// As [`Shard::new`].
pub fn check(config: &Config, size: u32) -> Result<(), ModelError> {
    let tp = TensorParallel { rank: 0, size };
    Shard::new(config, tp)?;
    let Some(draft) = &config.draft else { return Ok(()) };
    Shard::new(&draft.config, tp).map(drop).map_err(|source| match draft.eagle3 {
        Some(_) => ModelError::OfEagle3 { source: Box::new(source) },
        None => ModelError::OfDraftModel { source: Box::new(source) },
    })
}

impl Shard {
    /// The shard of worker `tp.rank`.
    ///
    /// # Errors
    /// Returns an error if the heads cannot be divided by the group's size, the experts by its parts, or if a worker
    /// would have an empty shard.
    pub fn new(config: &Config, tp: TensorParallel) -> Result<Self, ModelError> {
        let (rank, size) = (tp.rank as usize, tp.size as usize);
        check_expert_groups(config, tp)?;
        if let Some(layer) = config.layers.iter().find(|layer| !fits(config, layer, size)) {
            let fits_all = |size: &usize| config.layers.iter().all(|layer| fits(config, layer, *size));
            let usable: Vec<String> = (1..=heads(layer)[0]).filter(fits_all).map(|size| size.to_string()).collect();
            let what = undivided(config, layer, size);
            return Err(ModelError::WorldSize { what, found: tp.size, usable: usable.join(", ") });
        }
        Ok(Self {
            layers: config
                .layers
                .iter()
                .map(|layer| LayerShard::new(layer, rank, size, config.expert_groups))
                .collect(),
            vocab: aligned_share(config.vocab_size, rank, size),
        })
    }
}

impl LayerShard {
    fn new(layer: &LayerSpec, rank: usize, size: usize, expert_groups: usize) -> Self {
        let [heads, kv_heads] = own_heads(heads(layer), rank, size);
        // The workers of a part have neighbouring ranks.
        let part_size = size / expert_groups;
        let num_experts = layer.experts.map_or(0, |experts| experts.num_experts) / expert_groups;
        let part = rank / part_size;
        Self {
            heads,
            kv_heads,
            beside: own_heads(layer.beside.map_or([0, 0], |beside| state_heads(&beside.recurrent)), rank, size),
            intermediate: aligned_share(dense_width(layer), rank, size),
            experts: part * num_experts..(part + 1) * num_experts,
            expert_intermediate: aligned_share(expert_width(layer), rank % part_size, part_size),
        }
    }

    /// The same whose heads are those of the state beside attention.
    pub(crate) fn of_beside(&self) -> Self {
        let [heads, kv_heads] = self.beside.clone();
        Self { heads, kv_heads, ..self.clone() }
    }
}

/// A worker's heads, and those that they share.
fn own_heads([all, all_shared]: [usize; 2], rank: usize, size: usize) -> [Range<usize>; 2] {
    let (heads, first) = (all / size, rank * all_shared / size);
    [rank * heads..(rank + 1) * heads, first..first + all_shared.div_ceil(size)]
}

/// Whether every worker of a group of `size` gets whole heads and a part of every weight of the layer.
fn fits(config: &Config, layer: &LayerSpec, size: usize) -> bool {
    size > 0 && fits_heads(layer, size) && widths(config, layer, size).into_iter().all(|(_, fits)| fits)
}

/// Query heads and KV heads, or value heads and key heads.
fn heads(layer: &LayerSpec) -> [usize; 2] {
    let attention = &layer.attention;
    layer.recurrent.as_ref().map_or([attention.num_heads, attention.num_kv_heads], state_heads)
}

fn state_heads(layer: &RecurrentLayer) -> [usize; 2] {
    [layer.shape.num_value_heads, layer.shape.num_key_heads]
}

fn fits_heads(layer: &LayerSpec, size: usize) -> bool {
    is_divided(heads(layer), size)
        && layer.state().is_none_or(|state| {
            let heads = state_heads(&state);
            is_divided(heads, size) && norm_heads(layer).is_none_or(|count| (heads[0] / size).is_multiple_of(count))
        })
}

fn is_divided([heads, shared]: [usize; 2], size: usize) -> bool {
    heads.is_multiple_of(size) && (shared.is_multiple_of(size) || size.is_multiple_of(shared))
}

/// Value heads of a recurrent layer whose output is normed together.
fn norm_heads(layer: &LayerSpec) -> Option<usize> {
    match layer.state()?.shape.rule {
        RecurrentRule::GatedDelta { .. } | RecurrentRule::KimiDelta | RecurrentRule::ShortConv => None,
        RecurrentRule::Mamba2 { norm_heads } => norm_heads,
    }
}

/// What is divided by columns, and whether each worker would have some.
fn widths(config: &Config, layer: &LayerSpec, size: usize) -> [(usize, bool); 3] {
    let inner = [(dense_width(layer), size), (expert_width(layer), size / config.expert_groups)];
    // A group with fewer workers than parts has none for some experts.
    let has_some = |width, size: usize| size > 0 && !aligned_share(width, size - 1, size).is_empty();
    let [dense, experts] = inner.map(|(width, size)| (width, width == 0 || has_some(width, size)));
    [dense, experts, (config.vocab_size, has_some(config.vocab_size, size))]
}

/// What of a layer does not fit, for an error message.
fn undivided(config: &Config, layer: &LayerSpec, size: usize) -> String {
    let narrow = (size > 0 && fits_heads(layer, size)).then(|| widths(config, layer, size));
    let names = ["an inner layer of", "experts of", "a vocabulary of"];
    let narrow = narrow.and_then(|widths| names.into_iter().zip(widths).find(|(_, (_, fits))| !fits));
    let state = layer.state().filter(|_| layer.recurrent.is_some() || is_divided(heads(layer), size));
    let [heads, kv_heads] = state.as_ref().map_or(heads(layer), state_heads);
    match narrow {
        Some((name, (width, _))) => format!("{name} {width} columns"),
        None if state.is_some() => {
            let normed = norm_heads(layer).map(|count| format!(", of which {count} are normed together,"));
            format!("recurrent layers of {heads} value heads and {kv_heads} key heads{}", normed.unwrap_or_default())
        }
        None => format!("{heads} heads and {kv_heads} KV heads"),
    }
}

fn check_expert_groups(config: &Config, tp: TensorParallel) -> Result<(), ModelError> {
    let groups = config.expert_groups;
    let counts = config.layers.iter().filter_map(|layer| layer.experts.map(|experts| experts.num_experts));
    let is_divided = |count: usize| groups > 0 && count.is_multiple_of(groups);
    let undivided = counts.clone().find(|&count| !is_divided(count));
    if is_divided(tp.size as usize) && undivided.is_none() && (groups == 1 || counts.clone().next().is_some()) {
        return Ok(());
    }
    let num_experts = undivided.or(counts.max()).unwrap_or(0);
    Err(ModelError::ExpertGroups { num_experts, group: tp.size, found: groups })
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
    use ops::{Activation, DType, NormKind, RecurrentShape};

    use super::*;
    use crate::config::{DraftConfig, HeadSpec};
    use crate::families;
    use crate::layer_spec::{AttentionLayer, KvSource, MlpLayer, NormSpec};

    pub(crate) fn config(num_heads: usize, num_kv_heads: usize, vocab_size: usize) -> Config {
        let attention = AttentionLayer {
            num_heads,
            num_kv_heads,
            head_dim: 8,
            value_dim: None,
            scale: 8f32.powf(-0.5),
            rope: None,
            has_alibi: false,
            window: None,
            chunk: None,
            latent: None,
            kv: KvSource::Projections,
            score_cap: None,
            has_sinks: false,
            has_output_gate: false,
            query_scale: None,
            head_norm: None,
            qkv_bias: false,
            out_bias: false,
            out_scale: 1.0,
        };
        let mlp = MlpLayer {
            intermediate_size: 176,
            is_gated: true,
            activation: Activation::Silu,
            has_bias: false,
            has_output_gate: false,
            scale: 1.0,
        };
        Config {
            architecture: "LlamaForCausalLM".into(),
            names: families::find("LlamaForCausalLM").unwrap().names,
            hidden_size: num_heads * 8,
            vocab_size,
            max_position_embeddings: 128,
            embedding_scale: 1.0,
            branch_scale: 1.0,
            learned_positions: None,
            per_layer_input: None,
            norm: NormSpec { kind: NormKind::Rms, eps: 1e-5, has_weight: true, has_bias: false, offset: 0.0 },
            ropes: vec![],
            layers: vec![
                LayerSpec {
                    attention,
                    recurrent: None,
                    beside: None,
                    norm_scales: [1.0; 2],
                    mlp: Some(mlp),
                    experts: None,
                    is_parallel: false,
                    numbers: None
                };
                2
            ],
            head: HeadSpec { is_tied: false, has_unit_rows: false, has_bias: false, scale: 1.0, cap: None },
            mtp: None,
            has_mtp_layer: false,
            draft: None,
            bos_id: None,
            eos_ids: vec![],
            dtype: DType::Bf16,
            expert_groups: 1,
            weight_format: crate::config::WeightFormat::Plain,
            stored_quantization: None,
            rounding: None,
            kv_elements: ops::KvElements::default(),
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

    #[test]
    fn a_size_that_divides_the_heads_of_the_model_but_not_of_its_draft_model_is_refused() {
        let draft = DraftConfig { dir: "draft".into(), config: config(3, 1, 512), eagle3: None };
        let with_draft = config(6, 6, 512).with_draft(draft);
        assert!([1, 3].iter().all(|&size| check(&with_draft, size).is_ok()));
        let error = check(&with_draft, 2).unwrap_err().to_string();
        assert_eq!(
            error,
            "draft model: 3 heads and 1 KV heads cannot be shared by 2 workers; world sizes that would do: 1, 3"
        );
    }

    #[test]
    fn value_heads_are_shared_like_query_heads_and_key_heads_like_kv_heads() {
        let mut config = config(8, 4, 512);
        let shape = |rule| {
            let (num_key_heads, num_value_heads) = (2, 4);
            let shape = RecurrentShape { rule, num_key_heads, num_value_heads, key_dim: 8, value_dim: 8, num_taps: 4 };
            Some(RecurrentLayer { shape, eps: 1e-6, has_conv_bias: false, has_bias: false })
        };
        config.layers[1].recurrent = shape(RecurrentRule::GatedDelta { has_doubled_rates: false });
        let own = |size| -> Vec<_> {
            let shards = shards(&config, size);
            shards.into_iter().map(|shard| (shard.layers[1].heads.clone(), shard.layers[1].kv_heads.clone())).collect()
        };
        assert_eq!(own(2), [(0..2, 0..1), (2..4, 1..2)]);
        assert_eq!(own(4), [(0..1, 0..1), (1..2, 0..1), (2..3, 1..2), (3..4, 1..2)]);
        let error = Shard::new(&config, TensorParallel { rank: 0, size: 8 }).unwrap_err().to_string();
        assert_eq!(
            error,
            "recurrent layers of 4 value heads and 2 key heads cannot be shared by 8 workers; world sizes that would do: 1, \
             2, 4"
        );
        config.layers[1].recurrent = shape(RecurrentRule::Mamba2 { norm_heads: Some(2) });
        assert!(Shard::new(&config, TensorParallel { rank: 0, size: 2 }).is_ok());
        let error = Shard::new(&config, TensorParallel { rank: 0, size: 4 }).unwrap_err().to_string();
        assert_eq!(
            error,
            "recurrent layers of 4 value heads and 2 key heads, of which 2 are normed together, cannot be shared by 4 \
             workers; world sizes that would do: 1, 2"
        );
    }

    #[test]
    fn a_size_that_leaves_a_worker_without_columns_is_refused_with_what_is_too_narrow() {
        let mut config = config(8, 4, 512);
        config.layers[1].mlp.as_mut().unwrap().intermediate_size = 40;
        let error =
            |config: &Config, size| Shard::new(config, TensorParallel { rank: 0, size }).unwrap_err().to_string();
        let found = error(&config, 4);
        assert_eq!(
            found,
            "an inner layer of 40 columns cannot be shared by 4 workers; world sizes that would do: 1, 2"
        );
        let narrow = Config { vocab_size: 8, ..config };
        assert!(error(&narrow, 2).starts_with("a vocabulary of 8 columns cannot be"), "{}", error(&narrow, 2));
    }

    #[test]
    fn parts_of_a_group_have_different_experts_and_share_the_columns_of_each() {
        let mut config = config(8, 4, 512);
        let (scoring, activation) = (ops::Scoring::Softmax, Activation::Silu);
        let routing = ops::Routing {
            top_k: 2,
            scoring,
            scales_input: false,
            groups: None,
            is_normalized: true,
            scale: 1.0,
            activation,
        };
        let experts = crate::ExpertLayer { num_experts: 6, intermediate_size: 48, latent_size: None, routing };
        config.layers[1].experts = Some(experts);
        let own = |groups: u32, size: u32| -> Vec<_> {
            let shards = shards(&config.clone().in_expert_groups(groups), size);
            shards
                .into_iter()
                .map(|shard| (shard.layers[1].experts.clone(), shard.layers[1].expert_intermediate.clone()))
                .collect()
        };
        assert_eq!(own(1, 2), [(0..6, 0..24), (0..6, 24..48)]);
        assert_eq!(own(2, 2), [(0..3, 0..48), (3..6, 0..48)]);
        assert_eq!(own(2, 4), [(0..3, 0..24), (0..3, 24..48), (3..6, 0..24), (3..6, 24..48)]);
        let refused = |groups, size| {
            Shard::new(&config.clone().in_expert_groups(groups), TensorParallel { rank: 0, size })
                .unwrap_err()
                .to_string()
        };
        assert_eq!(
            refused(4, 4),
            "6 experts cannot be divided among `ep` 4 parts of a group of 4 workers; `ep` must divide both"
        );
        assert!(refused(2, 1).starts_with("6 experts cannot"), "{}", refused(2, 1));
        assert!(refused(0, 1).starts_with("6 experts cannot"), "{}", refused(0, 1));
        config.layers[1].experts = None;
        let error =
            Shard::new(&config.in_expert_groups(2), TensorParallel { rank: 0, size: 2 }).unwrap_err().to_string();
        assert!(error.ends_with("(this model has no experts: remove `ep`)"), "{error}");
    }
}
