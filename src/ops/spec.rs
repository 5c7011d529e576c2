//! Descriptions of weights, attention and limits that a model passes to a device.

use std::ops::Range;

/// Element type of a tensor in a checkpoint.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DType {
    /// bfloat16.
    Bf16,
    /// IEEE half precision.
    F16,
    /// IEEE single precision.
    F32,
}

impl DType {
    /// Bytes of one element.
    pub fn size(self) -> usize {
        match self {
            DType::Bf16 | DType::F16 => 2,
            DType::F32 => 4,
        }
    }
}

/// A rectangle of a row-major matrix `[matrix_rows, matrix_cols]` in a memory-mapped checkpoint. A vector has one row.
#[derive(Debug, Clone)]
pub struct WeightSlice<'a> {
    /// Name in the checkpoint, for messages.
    pub name: &'a str,
    /// The whole matrix, little-endian. It stays mapped until the process ends, so a device may keep the pointer.
    pub data: &'static [u8],
    /// Its element type.
    pub dtype: DType,
    /// Number of columns of the whole matrix.
    pub matrix_cols: usize,
    /// The rows of the slice.
    pub rows: Range<usize>,
    /// The columns of the slice.
    pub cols: Range<usize>,
    /// If set, the rows (of a vector: the elements) belong to heads whose elements are stored in another order.
    pub head_order: Option<HeadOrder>,
}

impl WeightSlice<'_> {
    /// The row of the stored matrix that is row `row` of the model; of a vector, the element.
    pub fn stored(&self, row: usize) -> usize {
        self.head_order.map_or(row, |order| order.stored(row))
    }
}

/// Where the elements of a query or key head are stored.
///
/// Devices rotate the pairs `(i, i + D / 2)` of a head. Some checkpoints pair other elements: neighbours, or only the
/// first elements of a head. Scores do not change if q and k are permuted in the same way, so their rows are loaded in
/// the order that devices expect. Elements that are not rotated have an angle of zero in the table.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct HeadOrder {
    /// `D`, the size of a head.
    pub head_dim: usize,
    /// The first elements of a head that are rotated; even.
    pub rotary_dim: usize,
    /// Whether pairs are neighbours `(2i, 2i + 1)`; otherwise `(i, i + rotary_dim / 2)`.
    pub is_interleaved: bool,
}

impl HeadOrder {
    /// The stored index of element `index` of heads that follow each other.
    pub fn stored(self, index: usize) -> usize {
        let (head, element) = (index / self.head_dim, index % self.head_dim);
        let (half, pairs) = (self.head_dim / 2, self.rotary_dim / 2);
        let (pair, is_second) = (element % half, element >= half);
        let within = match pair.checked_sub(pairs) {
            None if self.is_interleaved => 2 * pair + usize::from(is_second),
            None => pair + if is_second { pairs } else { 0 },
            Some(rest) => self.rotary_dim + rest + if is_second { half - pairs } else { 0 },
        };
        head * self.head_dim + within
    }
}

/// A norm as it is stored in a checkpoint. Its gain is `(weight + offset) * factor`, where an absent weight is 1.
#[derive(Debug, Clone)]
pub struct NormSlices<'a> {
    /// Kind of the norm.
    pub kind: NormKind,
    /// Number of elements that are normalized together times the number of such groups.
    pub width: usize,
    /// `[width]`.
    pub weight: Option<WeightSlice<'a>>,
    /// `[width]`; only layer norms have one.
    pub bias: Option<WeightSlice<'a>>,
    /// Added to the weight: 1 where the checkpoint stores the difference from 1.
    pub offset: f32,
    /// Multiplies gain and bias.
    pub factor: f32,
}

/// Kind of a norm.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum NormKind {
    /// RMS norm: divides by the root of the mean square.
    Rms,
    /// Layer norm: subtracts the mean, divides by the standard deviation.
    Layer,
}

/// The role of a linear layer, which determines how its output is used.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LinearRole {
    /// q, k and v stacked; split by output (heads).
    Qkv,
    /// Attention output; split by input, so its product is a partial sum.
    Out,
    /// gate and up stacked; split by output.
    GateUp,
    /// Up projection without a gate; split by output.
    Up,
    /// Down projection; split by input, so its product is a partial sum.
    Down,
    /// Vocabulary head; split by output.
    Head,
}

/// How tokens choose among the experts of a feed-forward.
///
/// The probabilities of all experts are the softmax, in f32, of the products of the router. A token goes to the `top_k`
/// likeliest experts, the lower one where two are equal.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Routing {
    /// Experts of a token.
    pub top_k: usize,
    /// Whether the probabilities of the chosen experts are divided by their sum.
    pub is_normalized: bool,
    /// Activation function of the gates.
    pub activation: Activation,
}

/// The experts of a feed-forward, of which each is a gated MLP. This worker has some columns of the inner layer of each.
#[derive(Debug, Clone)]
pub struct ExpertSlices<'a> {
    /// `[experts, E]`, the same on every worker.
    pub router: WeightSlice<'a>,
    /// All experts, in order.
    pub experts: Vec<ExpertSlice<'a>>,
    /// How tokens choose.
    pub routing: Routing,
}

/// The weights of one expert.
#[derive(Debug, Clone)]
pub struct ExpertSlice<'a> {
    /// gate and up, each `[I, E]`.
    pub gate_up: [WeightSlice<'a>; 2],
    /// `[E, I]`.
    pub down: WeightSlice<'a>,
}

/// The activation function of an MLP.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Activation {
    /// `x * sigmoid(x)`.
    Silu,
    /// Gaussian error linear unit, tanh approximation.
    GeluTanh,
    /// Gaussian error linear unit, `x * normal_cdf(x)`.
    Gelu,
    /// `max(x, 0)`.
    Relu,
    /// `max(x, 0)^2`.
    ReluSquared,
}

/// A worker's rank in its tensor-parallel group.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TensorParallel {
    /// In `0..size`.
    pub rank: u32,
    /// Number of workers in the group.
    pub size: u32,
}

/// A worker's stage in a pipeline, which determines its layers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PipelineStage {
    /// In `0..count`, in the order of the layers.
    pub index: u32,
    /// Number of stages.
    pub count: u32,
}

impl PipelineStage {
    /// A single stage with all layers.
    pub const WHOLE: Self = Self { index: 0, count: 1 };

    /// Whether this stage embeds the tokens.
    pub fn is_first(self) -> bool {
        self.index == 0
    }

    /// Whether this stage chooses the tokens.
    pub fn is_last(self) -> bool {
        self.index + 1 == self.count
    }

    /// The layers of this stage. If the layers cannot be divided equally, earlier stages have one more.
    pub fn layers(self, num_layers: usize) -> std::ops::Range<usize> {
        let (index, count) = (self.index as usize, self.count as usize);
        let (share, rest) = (num_layers / count, num_layers % count);
        let start = index * share + index.min(rest);
        start..start + share + usize::from(index < rest)
    }
}

/// cos and sin of every position. The scaling rules are applied on the host.
#[derive(Debug, Clone, PartialEq)]
pub struct RopeTable {
    /// `[max_positions, D / 2]` cosines, scaled if the model's rule says so.
    pub cos: Vec<f32>,
    /// `[max_positions, D / 2]` sines.
    pub sin: Vec<f32>,
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
    /// The layers with KV blocks.
    pub layers: Vec<LayerAttention>,
}

impl AttentionSpec {
    /// Elements of K, or of V, of one position in all layers.
    pub fn kv_width(&self) -> usize {
        self.layers.iter().map(|layer| layer.num_kv_heads * layer.head_dim).sum()
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
    /// Multiplies q·k, usually `D^-0.5`.
    pub scale: f32,
    /// Index in [`AttentionSpec::ropes`]; `None` if q and k are not rotated.
    pub rope: Option<usize>,
    /// If set, attention reads only this number of last positions.
    pub window: Option<usize>,
    /// If set, a score `s` becomes `cap * tanh(s / cap)`. Requires [`Feature::ScoreCap`].
    pub score_cap: Option<f32>,
    /// `[H]` a logit of each head that takes part in the softmax and has no value. Empty if there are none. Requires
    /// [`Feature::Sinks`].
    pub sinks: Vec<f32>,
    /// `[H]` ALiBi slopes of this worker's heads: `slope * (key position - query position)` is added to each score.
    /// Empty if the model does not use ALiBi. Requires [`Feature::Alibi`].
    pub alibi_slopes: Vec<f32>,
}

/// Ops that only some architectures need. A device may lack them; a model that needs a missing one is refused when it
/// is loaded.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Feature {
    /// Norms of [`NormKind::Layer`].
    LayerNorm,
    /// Learned positions: [`crate::Device::load_positions`], [`crate::Device::add_positions`].
    LearnedPositions,
    /// An MLP without a gate: [`crate::Device::activated_linear`].
    PlainMlp,
    /// Activations other than SiLU and GELU's tanh approximation.
    OtherActivations,
    /// Norms of q and k, the same for all heads: [`crate::Device::head_norm`].
    HeadNorm,
    /// Norms of q and k with weights of each head, or layer norms: [`crate::Device::head_norm`].
    EachHeadNorm,
    /// Norms of q and k over all heads of the group: [`crate::Device::head_norm`].
    AllHeadsNorm,
    /// [`LayerAttention::alibi_slopes`].
    Alibi,
    /// [`LayerAttention::score_cap`].
    ScoreCap,
    /// [`LayerAttention::sinks`].
    Sinks,
    /// [`LogitSpec::cap`].
    LogitCap,
    /// Norms behind a branch: [`crate::Device::reduce_norm_add_norm`].
    BranchNorm,
    /// Two branches of the same input: [`crate::Device::add`].
    ParallelBranches,
    /// Experts: [`crate::Device::load_experts`], [`crate::Device::experts`], [`crate::Device::gate_rows`].
    Experts,
}

impl std::fmt::Display for Feature {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Feature::LayerNorm => "layer norm",
            Feature::LearnedPositions => "learned positions",
            Feature::PlainMlp => "feed-forward without a gate",
            Feature::OtherActivations => "activations other than SiLU and GELU (tanh)",
            Feature::HeadNorm => "norms of q and k",
            Feature::EachHeadNorm => "layer norms of each head of q and k",
            Feature::AllHeadsNorm => "norms of q and k over all heads",
            Feature::Alibi => "ALiBi",
            Feature::ScoreCap => "capped attention scores",
            Feature::Sinks => "attention sinks",
            Feature::LogitCap => "capped logits",
            Feature::BranchNorm => "norms behind attention and feed-forward",
            Feature::ParallelBranches => "attention and feed-forward in parallel",
            Feature::Experts => "mixture of experts",
        })
    }
}

/// How logits follow from the products of the output head.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct LogitSpec {
    /// If set, a logit `x` becomes `cap * tanh(x / cap)`. Requires [`Feature::LogitCap`].
    pub cap: Option<f32>,
}

/// What the norms of q and k are computed over.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum HeadNormSpan {
    /// Each head with the same weight `[D]`.
    Head,
    /// Each head with its own weight, `[H, D]` and `[K, D]`.
    EachHead,
    /// All heads of the whole model together, with weights `[H D]` and `[K D]`.
    AllHeads,
}

/// Limits of every step. They are set when a device is created, and its buffers have the corresponding sizes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct StepLimits {
    /// Maximum number of tokens in a step.
    pub max_tokens: usize,
    /// Maximum number of rows, in a step and in the row table.
    pub max_rows: usize,
    /// Maximum length of a sequence, prompt and output together.
    pub max_sequence_len: usize,
    /// Number of tokens in the vocabulary of the whole model.
    pub vocab_size: usize,
}

/// A worker's memory use, and the number of KV blocks that fit.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MemoryPlan {
    /// Bytes used by weights.
    pub weights_bytes: u64,
    /// Bytes used by activations and scratch buffers.
    pub workspace_bytes: u64,
    /// Bytes of one KV block in all layers.
    pub block_bytes: u64,
    /// Number of KV blocks that fit.
    pub max_blocks: usize,
}
