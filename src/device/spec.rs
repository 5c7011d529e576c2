//! What a model tells a device about weights, attention and limits.

/// Element type of a tensor in a checkpoint.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DType {
    /// bfloat16.
    Bf16,
    /// IEEE half.
    F16,
    /// IEEE single.
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

/// A rectangle of a row-major matrix `[matrix_rows, matrix_cols]` in a memory-mapped checkpoint;
/// a vector has `matrix_rows` 1.
#[derive(Debug, Clone)]
pub struct WeightSlice<'a> {
    /// Name in the checkpoint, for messages.
    pub name: &'a str,
    /// The whole matrix, little-endian. The mapping lives as long as the process: a device may keep the pointer.
    pub data: &'static [u8],
    /// Its element type.
    pub dtype: DType,
    /// Columns of the whole matrix.
    pub matrix_cols: usize,
    /// Rows taken.
    pub rows: std::ops::Range<usize>,
    /// Columns taken.
    pub cols: std::ops::Range<usize>,
}

/// What a linear layer is for: tells a device how its output is used.
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

/// A feed-forward layer's non-linearity.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Activation {
    /// `x * sigmoid(x)`.
    Silu,
    /// Gaussian error linear unit, tanh form.
    GeluTanh,
}

/// A worker's place in its tensor-parallel group.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TensorParallel {
    /// In `0..size`.
    pub rank: u32,
    /// Workers in the group.
    pub size: u32,
}

/// A worker's place in a pipeline: which share of the layers it holds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PipelineStage {
    /// In `0..count`, in the order of the layers.
    pub index: u32,
    /// Stages.
    pub count: u32,
}

impl PipelineStage {
    /// All layers.
    pub const WHOLE: Self = Self { index: 0, count: 1 };

    /// Whether tokens enter here.
    pub fn is_first(self) -> bool {
        self.index == 0
    }

    /// Whether tokens are chosen here.
    pub fn is_last(self) -> bool {
        self.index + 1 == self.count
    }

    /// The layers of this stage; earlier stages hold one more where they cannot be equal.
    pub fn layers(self, num_layers: usize) -> std::ops::Range<usize> {
        let (index, count) = (self.index as usize, self.count as usize);
        let (share, rest) = (num_layers / count, num_layers % count);
        let start = index * share + index.min(rest);
        start..start + share + usize::from(index < rest)
    }
}

/// cos and sin of every position, so that scaling rules stay on the host.
#[derive(Debug, Clone, PartialEq)]
pub struct RopeTable {
    /// `[max_positions, D / 2]` cosines, scaled where the model's rule says so.
    pub cos: Vec<f32>,
    /// `[max_positions, D / 2]` sines.
    pub sin: Vec<f32>,
}

impl RopeTable {
    /// Rotates by nothing, for models that know positions otherwise.
    pub fn identity(head_dim: usize, max_positions: usize) -> Self {
        let entries = max_positions * head_dim / 2;
        Self { cos: vec![1.0; entries], sin: vec![0.0; entries] }
    }
}

/// Attention of every layer, this worker's share.
#[derive(Debug, Clone, PartialEq)]
pub struct AttentionSpec {
    /// Layers with KV blocks.
    pub num_layers: usize,
    /// `H`, query heads on this worker.
    pub num_heads: usize,
    /// `K`, KV heads on this worker; divides `H`.
    pub num_kv_heads: usize,
    /// `D`.
    pub head_dim: usize,
    /// Multiplies q·k, usually `D^-0.5`.
    pub scale: f32,
    /// Positions in one KV block.
    pub block_size: usize,
    /// Rotation; halves are paired as `(i, i + D / 2)`, as Hugging Face llama does.
    pub rope: RopeTable,
    /// Attention sees only the last so many positions; `None` sees all.
    pub sliding_window: Option<usize>,
    /// `[H]` slopes of ALiBi, this worker's heads: `slope * (key's position - query's)` is added to each score.
    /// Empty adds nothing. Only where the device has [`Feature::Alibi`].
    pub alibi_slopes: Vec<f32>,
}

/// Ops that some architectures need and a device may lack; a model that needs one it lacks is refused at load.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Feature {
    /// Norms with mean and bias: [`crate::Device::load_layer_norm`], [`crate::Device::layer_norm`], and both kinds
    /// in [`crate::Device::reduce_add_norm`].
    LayerNorm,
    /// A table of positions: [`crate::Device::load_positions`], [`crate::Device::add_positions`].
    LearnedPositions,
    /// A feed-forward layer without a gate: [`crate::Device::activated_linear`].
    PlainMlp,
    /// Norms of each head's q and k: [`crate::Device::head_norm`].
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

/// Bounds of every step, known when a device is made: buffers are sized by them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct StepLimits {
    /// Most tokens in a step.
    pub max_tokens: usize,
    /// Most rows, in a step and in the row table.
    pub max_rows: usize,
    /// Longest sequence, prompt and output together.
    pub max_sequence_len: usize,
    /// Vocabulary of the whole model.
    pub vocab_size: usize,
}

/// What a worker's memory allows.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MemoryPlan {
    /// Bytes held by weights.
    pub weights_bytes: u64,
    /// Bytes held by activations and scratch.
    pub workspace_bytes: u64,
    /// Bytes of one KV block in all layers.
    pub block_bytes: u64,
    /// KV blocks that fit.
    pub max_blocks: usize,
}
