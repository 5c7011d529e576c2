//! The specification of one decoder layer.

use ops::{Activation, HeadNormSpan, LatentShape, NormKind, QueryScale, RecurrentRule, RecurrentShape, Routing};

/// The norms of the hidden state.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct NormSpec {
    /// Kind of the norms.
    pub kind: NormKind,
    /// Added to the mean square or the variance.
    pub eps: f32,
    /// Whether the checkpoint has weights of norms; otherwise all are 1.
    pub has_weight: bool,
    /// Whether the norms have biases.
    pub has_bias: bool,
    /// Added to each weight: 1 where the checkpoint stores the difference from 1.
    pub offset: f32,
}

/// One decoder layer. Which norms it has follows from the names of its weights.
#[derive(Debug, Clone, PartialEq)]
pub struct LayerSpec {
    /// Attention.
    pub attention: AttentionLayer,
    /// If set, the layer has a recurrent state in place of attention, and nothing of `attention` is used.
    pub recurrent: Option<RecurrentLayer>,
    /// If set, the layer has a recurrent state beside attention: both have the same input, and their outputs are added.
    pub beside: Option<BesideLayer>,
    /// The part of the feed-forward that every token passes: all of it, or an expert that all share.
    pub mlp: Option<MlpLayer>,
    /// The part of which each token passes some experts. Its output is added to that of `mlp`.
    pub experts: Option<ExpertLayer>,
    /// Whether attention and feed-forward have the same input, so that both are added to it.
    pub is_parallel: bool,
    /// Multiply the norms before attention and before the feed-forward.
    pub norm_scales: [f32; 2],
    /// If set, the checkpoint counts attention and feed-forward as layers of their own, and these are their numbers.
    pub numbers: Option<[usize; 2]>,
}

impl LayerSpec {
    /// The numbers of attention and feed-forward in the names of the checkpoint, where the layer is number `index` of the model.
    pub(crate) fn numbers(&self, index: usize) -> [usize; 2] {
        self.numbers.unwrap_or([index; 2])
    }

    /// The recurrent state in place of attention or beside it.
    pub(crate) fn state(&self) -> Option<RecurrentLayer> {
        self.recurrent.or(self.beside.map(|beside| beside.recurrent))
    }

    /// Whether it has a feed-forward.
    pub(crate) fn has_feed_forward(&self) -> bool {
        self.mlp.is_some() || self.experts.is_some()
    }
}

/// A layer with a recurrent state.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct RecurrentLayer {
    /// Its sizes.
    pub shape: RecurrentShape,
    /// Added to the mean square of the output.
    pub eps: f32,
    /// Whether the convolution has biases.
    pub has_conv_bias: bool,
    /// Whether the projections have biases.
    pub has_bias: bool,
}

/// A recurrent state beside attention.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct BesideLayer {
    /// The state.
    pub recurrent: RecurrentLayer,
    /// Multiply q, k and v before the convolution.
    pub conv_scales: [f32; 3],
    /// Multiplies the steps before their bias is added.
    pub step_scale: f32,
    /// Multiply the outputs of attention and of the state.
    pub out_scales: [f32; 2],
}

impl RecurrentLayer {
    pub(crate) fn has_no_norm(self) -> bool {
        self.shape.rule == RecurrentRule::Mamba2 { norm_heads: None }
    }

    pub(crate) fn is_mamba2(self) -> bool {
        matches!(self.shape.rule, RecurrentRule::Mamba2 { .. })
    }

    pub(crate) fn is_short_conv(self) -> bool {
        self.shape.rule == RecurrentRule::ShortConv
    }

    pub(crate) fn is_kimi_delta(self) -> bool {
        self.shape.rule == RecurrentRule::KimiDelta
    }

    pub(crate) fn has_doubled_rates(self) -> bool {
        self.shape.rule == RecurrentRule::GatedDelta { has_doubled_rates: true }
    }
}

/// Attention of a layer.
#[derive(Debug, Clone, PartialEq)]
pub struct AttentionLayer {
    /// `H`, the number of query heads.
    pub num_heads: usize,
    /// `K`, the number of KV heads; divides `H`.
    pub num_kv_heads: usize,
    /// `D`, the size of a head; a multiple of 8.
    pub head_dim: usize,
    /// If set, heads of v have this number of elements in the checkpoint, less than `head_dim`. They are loaded with zeros behind
    /// them, and so are the inputs of the output projection.
    pub value_dim: Option<usize>,
    /// If set, k and v of all heads follow from a latent vector: `num_kv_heads` is 1, `head_dim` is [`LatentShape::width`], and
    /// `kv` is not used.
    pub latent: Option<LatentLayer>,
    /// Where k and v come from.
    pub kv: KvSource,
    /// Multiplies q·k.
    pub scale: f32,
    /// Index in [`Config::ropes`](crate::Config::ropes); `None` if q and k are not rotated.
    pub rope: Option<usize>,
    /// Whether scores decrease with distance (ALiBi).
    pub has_alibi: bool,
    /// If set, attention reads only this number of last positions.
    pub window: Option<usize>,
    /// If set, attention reads only the chunk of this number of positions of the token.
    pub chunk: Option<usize>,
    /// If set, a score `s` becomes `cap * tanh(s / cap)`.
    pub score_cap: Option<f32>,
    /// Whether each head has a logit that takes part in the softmax and has no value.
    pub has_sinks: bool,
    /// Whether the output of each head is multiplied by the sigmoid of a projection of the layer's input.
    pub has_output_gate: bool,
    /// If set, q is multiplied by a factor of its position.
    pub query_scale: Option<QueryScale>,
    /// Norms of q and k.
    pub head_norm: Option<HeadNormSpec>,
    /// Whether q, k, v have biases.
    pub qkv_bias: bool,
    /// Whether the output projection has a bias.
    pub out_bias: bool,
    /// Multiplies the output. Other values than 1 require [`ops::Feature::LayerScale`].
    pub out_scale: f32,
}

/// Attention over latent vectors.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LatentLayer {
    /// Sizes.
    pub shape: LatentShape,
    /// Elements of the latent vector from which q follows; `None` if q follows from the layer's input.
    pub query_rank: Option<usize>,
}

/// Where k and v of a layer come from.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum KvSource {
    /// From two projections of the layer's input.
    Projections,
    /// From one projection: v is k before its norm and rotation.
    KeyProjection,
    /// From this earlier layer, whose KV blocks are read. It has the same KV heads.
    Layer(usize),
}

/// Norms of q and k, and of v.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct HeadNormSpec {
    /// What they are computed over.
    pub span: HeadNormSpan,
    /// Kind of the norms.
    pub kind: NormKind,
    /// Added to the mean square or the variance.
    pub eps: f32,
    /// Whether the checkpoint has weights of them; otherwise all are 1.
    pub has_weight: bool,
    /// Whether the heads of v are normed too, each on its own and without weights.
    pub has_value: bool,
    /// Whether they follow the rotation. It keeps the lengths of heads, so that only the weights are applied behind it. Requires
    /// [`HeadNormSpan::Head`].
    pub is_behind_rotation: bool,
}

/// Feed-forward of a layer.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct MlpLayer {
    /// Inner width.
    pub intermediate_size: usize,
    /// Whether it is `down(activation(gate(x)) * up(x))`; otherwise `down(activation(up(x)))`.
    pub is_gated: bool,
    /// Activation function.
    pub activation: Activation,
    /// Whether its linear layers have biases.
    pub has_bias: bool,
    /// Whether its output is multiplied by the sigmoid of a product with the input.
    pub has_output_gate: bool,
    /// Multiplies its output. Other values than 1 require [`ops::Feature::LayerScale`].
    pub scale: f32,
}

/// The experts of a layer.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct ExpertLayer {
    /// Number of experts.
    pub num_experts: usize,
    /// Inner width of each.
    pub intermediate_size: usize,
    /// If set, the width of their inputs and outputs, which are projections from and to the width of the model.
    pub latent_size: Option<usize>,
    /// How tokens choose among them.
    pub routing: Routing,
}

impl HeadNormSpec {
    pub(crate) fn is_simple(self) -> bool {
        self.span == HeadNormSpan::Head && self.kind == NormKind::Rms
    }

    pub(crate) fn needs_each_head(self) -> bool {
        self.span != HeadNormSpan::AllHeads && !self.is_simple()
    }
}
