//! The configuration of a model.

use ops::{Activation, DType, Feature};

use crate::Rope;

/// The configuration of a model after all checks.
#[derive(Debug, Clone, PartialEq)]
pub struct Config {
    /// The name in `architectures`, for example `LlamaForCausalLM`.
    pub architecture: String,
    /// `E`, the width of the hidden state.
    pub hidden_size: usize,
    /// Inner width of the MLP.
    pub intermediate_size: usize,
    /// Number of decoder layers.
    pub num_layers: usize,
    /// `H`, the number of query heads.
    pub num_heads: usize,
    /// `K`, the number of KV heads; divides `H`.
    pub num_kv_heads: usize,
    /// `D`, the size of a head; a multiple of 8.
    pub head_dim: usize,
    /// `V`, the number of tokens in the vocabulary.
    pub vocab_size: usize,
    /// Maximum sequence length. A caller may lower it before [`crate::load`]; position tables have this size.
    pub max_position_embeddings: usize,
    /// Kind of all norms except the head norms, which are always RMS norms.
    pub norm: NormKind,
    /// Added to the mean square or the variance in norms.
    pub norm_eps: f32,
    /// Whether q and k of each head are normalized before the rotation.
    pub head_norms: bool,
    /// Activation function of the MLP.
    pub activation: Activation,
    /// Kind of the MLP.
    pub mlp: Mlp,
    /// How positions enter the model.
    pub positions: Positions,
    /// Whether the output head uses the embedding table.
    pub tie_word_embeddings: bool,
    /// Whether the rows of the output head are scaled to Euclidean norm 1 when they are loaded.
    pub unit_head: bool,
    /// Whether q, k, v have biases.
    pub qkv_bias: bool,
    /// Whether the output projection of attention has a bias.
    pub out_bias: bool,
    /// Whether the MLP has biases.
    pub mlp_bias: bool,
    /// If set, attention reads only this number of last positions.
    pub sliding_window: Option<usize>,
    /// First token of every prompt, if the checkpoint names one.
    pub bos_id: Option<u32>,
    /// Tokens that end a sequence, from `generation_config.json` or else from `config.json`.
    pub eos_ids: Vec<u32>,
    /// The dtype named by the configuration. The dtype of each tensor in the checkpoint takes precedence.
    pub dtype: DType,
}

/// How positions enter a model.
#[derive(Debug, Clone, PartialEq)]
pub enum Positions {
    /// Rotary embedding of q and k.
    Rotary(Rope),
    /// ALiBi: attention scores decrease with distance.
    Alibi,
    /// Learned table, added to the embeddings.
    Learned {
        /// Number of rows of the table.
        num_positions: usize,
    },
}

/// Kind of a norm.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum NormKind {
    /// RMS norm: divides by the root of the mean square.
    Rms,
    /// Layer norm: subtracts the mean, divides by the standard deviation, adds a bias.
    Layer,
}

/// Kind of an MLP.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Mlp {
    /// `down(activation(gate(x)) * up(x))`.
    Gated,
    /// `down(activation(up(x)))`.
    Plain,
}

impl Config {
    /// Ops that the model needs and that some devices lack.
    pub fn features(&self) -> Vec<Feature> {
        let needs = [
            (self.norm == NormKind::Layer, Feature::LayerNorm),
            (matches!(self.positions, Positions::Learned { .. }), Feature::LearnedPositions),
            (self.mlp == Mlp::Plain, Feature::PlainMlp),
            (self.head_norms, Feature::HeadNorm),
            (self.positions == Positions::Alibi, Feature::Alibi),
        ];
        needs.into_iter().filter_map(|(needed, feature)| needed.then_some(feature)).collect()
    }
}
