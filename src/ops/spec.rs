//! Descriptions of weights, attention and limits that a model passes to a device.

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
    pub rows: std::ops::Range<usize>,
    /// The columns of the slice.
    pub cols: std::ops::Range<usize>,
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

/// The activation function of an MLP.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Activation {
    /// `x * sigmoid(x)`.
    Silu,
    /// Gaussian error linear unit, tanh approximation.
    GeluTanh,
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

impl RopeTable {
    /// A table that rotates by zero, for models without rotary embedding.
    pub fn identity(head_dim: usize, max_positions: usize) -> Self {
        let entries = max_positions * head_dim / 2;
        Self { cos: vec![1.0; entries], sin: vec![0.0; entries] }
    }
}

/// Attention of every layer, for this worker's shard.
#[derive(Debug, Clone, PartialEq)]
pub struct AttentionSpec {
    /// Number of layers with KV blocks.
    pub num_layers: usize,
    /// `H`, query heads on this worker.
    pub num_heads: usize,
    /// `K`, KV heads on this worker; divides `H`.
    pub num_kv_heads: usize,
    /// `D`, the head dimension.
    pub head_dim: usize,
    /// Multiplies q·k, usually `D^-0.5`.
    pub scale: f32,
    /// Positions in one KV block.
    pub block_size: usize,
    /// Rotary embedding; elements `(i, i + D / 2)` form a pair, as in Hugging Face's Llama.
    pub rope: RopeTable,
    /// If set, attention reads only this number of last positions.
    pub sliding_window: Option<usize>,
    /// `[H]` ALiBi slopes of this worker's heads: `slope * (key position - query position)` is added to each score.
    /// Empty if the model does not use ALiBi. Requires [`Feature::Alibi`].
    pub alibi_slopes: Vec<f32>,
}

/// Ops that only some architectures need. A device may lack them; a model that needs a missing one is refused when it
/// is loaded.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Feature {
    /// Layer norms: [`crate::Device::load_layer_norm`], [`crate::Device::layer_norm`], and both kinds of norm in
    /// [`crate::Device::reduce_add_norm`].
    LayerNorm,
    /// Learned positions: [`crate::Device::load_positions`], [`crate::Device::add_positions`].
    LearnedPositions,
    /// An MLP without a gate: [`crate::Device::activated_linear`].
    PlainMlp,
    /// Head norms of q and k: [`crate::Device::head_norm`].
    HeadNorm,
    /// [`AttentionSpec::alibi_slopes`].
    Alibi,
}

impl std::fmt::Display for Feature {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Feature::LayerNorm => "layer norm",
            Feature::LearnedPositions => "learned positions",
            Feature::PlainMlp => "feed-forward without a gate",
            Feature::HeadNorm => "norms of q and k",
            Feature::Alibi => "ALiBi",
        })
    }
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
