//! The configuration of a model: what `config.json` says, as a specification of every layer.

use std::path::PathBuf;

use ops::{Activation, DType, Feature, GroupScore, HeadNormSpan, KvElements, NormKind, Routing, Scoring, Target};
use settings::{KvCacheType, WeightPrecision};

use crate::layer_spec::{AttentionLayer, HeadNormSpec, KvSource, LayerSpec, MlpLayer, NormSpec, RecurrentLayer};
use crate::names::Names;
use crate::{ModelError, Rope};

/// The configuration of a model after all checks.
#[derive(Debug, Clone, PartialEq)]
pub struct Config {
    /// The name in `architectures`, for example `LlamaForCausalLM`.
    pub architecture: String,
    /// The names of its weights.
    pub(crate) names: &'static Names,
    /// `E`, the width of the hidden state.
    pub hidden_size: usize,
    /// `V`, the number of tokens in the vocabulary.
    pub vocab_size: usize,
    /// Maximum sequence length. A caller may lower it before [`crate::load`]; position tables have this size.
    pub max_position_embeddings: usize,
    /// Multiplies the embeddings.
    pub embedding_scale: f32,
    /// Multiplies the outputs of norms behind attention and feed-forward.
    pub branch_scale: f32,
    /// Rows of the table of learned positions, which is added to the embeddings.
    pub learned_positions: Option<usize>,
    /// An embedding of each token for each layer.
    pub per_layer_input: Option<PerLayerInput>,
    /// The norms of the hidden state.
    pub norm: NormSpec,
    /// Rotary embeddings; layers refer to them by index.
    pub ropes: Vec<Rope>,
    /// The decoder layers, in order.
    pub layers: Vec<LayerSpec>,
    /// The output head.
    pub head: HeadSpec,
    /// The head that predicts the token behind the next one, if the architecture has it. A checkpoint may lack its weights.
    pub mtp: Option<MtpHead>,
    /// Whether that head is loaded; its layer is then the last of `layers`. It comes from the deployment.
    pub(crate) has_mtp_layer: bool,
    /// What guesses drafts for this model from a checkpoint of its own. It comes from the deployment, too.
    pub(crate) draft: Option<Box<DraftConfig>>,
    /// First token of every prompt, if the checkpoint names one.
    pub bos_id: Option<u32>,
    /// Tokens that end a sequence, from `generation_config.json` or else from `config.json`.
    pub eos_ids: Vec<u32>,
    /// The dtype named by the configuration. The dtype of each tensor in the checkpoint takes precedence.
    pub dtype: DType,
    /// Parts of a tensor-parallel group that have different experts. At 1, all workers have columns of every expert. It
    /// comes from the deployment, not from the checkpoint.
    pub expert_groups: usize,
    /// How the linear layers are stored.
    pub(crate) weight_format: WeightFormat,
    /// What the checkpoint says of its quantization.
    pub(crate) stored_quantization: Option<StoredQuantization>,
    /// How linear layers are quantized while they are loaded. It comes from the deployment, not from the checkpoint.
    pub(crate) rounding: Option<Rounding>,
    /// How keys and values are held, the same.
    pub kv_elements: KvElements,
    /// What the reader of a log should know: parts of the checkpoint that are not served, choices that were made.
    pub notes: Vec<String>,
}

/// What a checkpoint says of its quantization.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct StoredQuantization {
    /// `quant_method`.
    pub method: String,
    /// The precision of its weights, if it has a name here.
    pub precision: Option<WeightPrecision>,
    /// The type that it names for keys and values, if there are codes for it.
    pub kv_elements: Option<KvElements>,
}

/// The form that linear layers get while they are loaded.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Rounding {
    /// e4m3 with a scale for each row.
    Fp8Rows,
    /// Integers of 8 bits with a scale for each row.
    Int8Rows,
    /// Integers of 4 bits in groups with scale and zero point.
    Int4,
}

/// How the weights of linear layers are stored. A tensor whose type is that of a plain one is one.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum WeightFormat {
    /// bf16, f16 or f32.
    Plain,
    /// fp8, integers or 4-bit floats in one of the forms that the types of the tensors tell apart: those of the method `fp8`, of
    /// compressed-tensors and of ModelOpt.
    ByTensors {
        /// Rows and columns of a block of fp8 that has a scale; none if each row has one, or the matrix.
        block: Option<[usize; 2]>,
        /// Whether the inputs of layers in fp8 may be rounded to fp8, too.
        has_fp8_inputs: bool,
    },
    /// AWQ: integers of 4 bits in groups.
    Awq,
    /// GPTQ: integers of 2, 3, 4 or 8 bits in groups.
    Gptq {
        /// What is added to each stored zero point.
        zero_offset: i32,
    },
    /// Experts in MXFP4 as gpt-oss has them.
    Mxfp4Experts,
}

/// An embedding of each token for each layer. A layer adds to the hidden state `h` the norm of
/// `out(activation(gate(h)) * input)`, where `input` is this embedding plus the norm of a projection of the token's
/// embedding at the start of the model, the sum divided by the root of 2.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct PerLayerInput {
    /// Width of the embedding of one layer.
    pub width: usize,
    /// Rows of the table; at least the vocabulary.
    pub vocab_size: usize,
    /// Multiplies the embedding.
    pub scale: f32,
    /// Activation function of the gate.
    pub activation: Activation,
}

/// The output head.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct HeadSpec {
    /// Whether it is the embedding table.
    pub is_tied: bool,
    /// Whether its rows are scaled to Euclidean norm 1 when they are loaded.
    pub has_unit_rows: bool,
    /// Whether it has a bias.
    pub has_bias: bool,
    /// Multiplies the logits.
    pub scale: f32,
    /// If set, a logit `x` becomes `cap * tanh(x / cap)`.
    pub cap: Option<f32>,
}

/// A head that predicts the token behind the next one (multi-token prediction).
#[derive(Debug, Clone, PartialEq)]
pub struct MtpHead {
    /// Its decoder layer.
    pub layer: LayerSpec,
    /// Its shape and the names of its weights.
    pub form: MtpForm,
}

/// The shapes of such heads.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum MtpForm {
    /// Qwen3-Next and Qwen3.5: weights under `mtp.`. A further guess continues from the hidden state behind the head's norm.
    Qwen,
    /// DeepSeek V3: weights of the layer behind the last one. A further guess continues from the hidden state before the norm.
    DeepSeek,
}

/// What guesses drafts from a checkpoint of its own.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct DraftConfig {
    /// The checkpoint.
    pub(crate) dir: PathBuf,
    /// A smaller model, or a head in the shape of a model of one layer.
    pub(crate) config: Config,
    /// Set if it is such a head.
    pub(crate) eagle3: Option<Eagle3Form>,
}

/// What an EAGLE-3 head has beside a layer.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Eagle3Form {
    /// Layers of the model whose inputs it takes, in the order in which it joins them.
    pub(crate) taps: Vec<usize>,
    /// What norms them before they are joined.
    pub(crate) joined_norm: JoinedNorm,
    /// Tokens that it can guess.
    pub(crate) draft_vocab_size: usize,
    /// Whether the layer's output is added to its normed input instead of the input.
    pub(crate) norm_before_residual: bool,
    /// Whether a further guess continues from the head's output behind its last norm.
    pub(crate) norm_output: bool,
}

/// The norm of the hidden states that an EAGLE-3 head takes of the model.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) enum JoinedNorm {
    None,
    /// `fc_norm`: one for each of them.
    Each,
    /// `norm_before_fc`: one for all of them side by side.
    All,
}

impl Config {
    /// Number of decoder layers, without that of an MTP head.
    pub fn num_layers(&self) -> usize {
        self.layers.len() - usize::from(self.has_mtp_layer)
    }

    /// Whether some layers have a recurrent state in place of attention, or beside it.
    pub fn has_recurrent_layers(&self) -> bool {
        self.layers.iter().any(|layer| layer.state().is_some())
    }

    /// Whether some outputs of attention, states or feed-forwards are multiplied by a factor.
    fn has_branch_scales(&self) -> bool {
        let scaled = |layer: &LayerSpec| {
            let is_scaled = layer.attention.out_scale != 1.0 || layer.mlp.is_some_and(|mlp| mlp.scale != 1.0);
            layer.beside.is_some() || is_scaled
        };
        self.layers.iter().any(scaled)
    }

    /// Whether some layers keep latent vectors in place of keys and values.
    pub fn has_latents(&self) -> bool {
        self.layers.iter().any(|layer| layer.attention.latent.is_some())
    }

    /// The same model in a tensor-parallel group whose workers form `count` parts with different experts.
    pub fn in_expert_groups(self, count: u32) -> Self {
        Self { expert_groups: count as usize, ..self }
    }

    /// What the checkpoint says of its quantization; `None` if it has none.
    pub fn stored_quantization(&self) -> Option<&StoredQuantization> {
        self.stored_quantization.as_ref()
    }

    /// The same model with linear layers in this precision, on a device of this kind. The CPU device itself makes its 8-bit and 4-bit
    /// integers, also of quantized weights; all else is rounded while it is read.
    ///
    /// # Errors
    /// Returns an error if the weights are quantized in another form, or if the device has no such form.
    pub fn in_precision(mut self, precision: WeightPrecision, target: Target) -> Result<Self, ModelError> {
        use WeightPrecision::{Checkpoint, Fp8, Int4, Int8};
        let note = match (target, precision, &self.stored_quantization) {
            (_, Checkpoint, _) => return Ok(self),
            (Target::Cpu, Int8 | Int4, Some(stored)) => {
                format!(
                    "weights of `quant_method` `{}` are expanded, and quantized again to {precision}",
                    stored.method
                )
            }
            (_, _, Some(stored)) if stored.precision == Some(precision) => return Ok(self),
            (_, _, Some(stored)) => {
                let (found, asked) = (stored.method.clone(), precision.name());
                return Err(ModelError::AlreadyQuantized { found, asked });
            }
            (Target::Cpu, Int8 | Int4, None) => {
                format!("linear layers are quantized to {precision}, with a scale for each 64 weights")
            }
            (target, Fp8, None) => {
                self.rounding = Some(Rounding::Fp8Rows);
                let kept = if target == Target::Cpu { "; CPUs keep the rounded values in bf16" } else { "" };
                format!("linear layers are quantized to fp8, with a scale for each output{kept}")
            }
            (Target::Cuda, Int8, None) => {
                self.rounding = Some(Rounding::Int8Rows);
                "linear layers are quantized to int8, with a scale for each output".to_owned()
            }
            (Target::Cuda, Int4, None) => {
                self.rounding = Some(Rounding::Int4);
                "linear layers are quantized to int4, in groups of 128 inputs with zero points".to_owned()
            }
        };
        self.notes.push(note);
        Ok(self)
    }

    /// The same model with keys and values of this type.
    pub fn in_kv_cache(mut self, asked: KvCacheType) -> Self {
        let stored = self.stored_quantization.as_ref().and_then(|stored| stored.kv_elements);
        let (elements, why) = match asked {
            // Latent vectors have no other form.
            KvCacheType::Auto if self.has_latents() => (KvElements::Plain, ""),
            KvCacheType::Auto => (stored.unwrap_or_default(), ", as the checkpoint names it"),
            KvCacheType::Bf16 => (KvElements::Plain, ""),
            KvCacheType::Fp8 => (KvElements::Fp8, ""),
            KvCacheType::Int8 => (KvElements::Int8, ""),
        };
        self.kv_elements = elements;
        let name = match elements {
            KvElements::Plain => return self,
            KvElements::Fp8 => "fp8",
            KvElements::Int8 => "int8",
        };
        self.notes.push(format!("keys and values are kept in {name}{why}, with a scale for each token and head"));
        self
    }

    /// Ops that the model needs and that some devices lack.
    pub fn features(&self) -> Vec<Feature> {
        let attention = |is: fn(&AttentionLayer) -> bool| self.layers.iter().any(|layer| is(&layer.attention));
        let mlp = |is: fn(&MlpLayer) -> bool| self.layers.iter().any(|layer| layer.mlp.as_ref().is_some_and(is));
        let routing = |is: fn(&Routing) -> bool| {
            self.layers.iter().any(|layer| layer.experts.as_ref().is_some_and(|experts| is(&experts.routing)))
        };
        let recurrent = |is: fn(RecurrentLayer) -> bool| self.layers.iter().filter_map(LayerSpec::state).any(is);
        let needs = [
            (self.norm.kind == NormKind::Layer, Feature::LayerNorm),
            (self.learned_positions.is_some(), Feature::LearnedPositions),
            (mlp(|mlp| !mlp.is_gated) || self.per_layer_input.is_some(), Feature::PlainMlp),
            (mlp(|mlp| !matches!(mlp.activation, Activation::Silu | Activation::GeluTanh)), Feature::OtherActivations),
            (mlp(|mlp| matches!(mlp.activation, Activation::Xielu { .. })), Feature::Xielu),
            (attention(|a| a.head_norm.is_some_and(HeadNormSpec::is_simple)), Feature::HeadNorm),
            (attention(|a| a.head_norm.is_some_and(|norm| norm.needs_each_head())), Feature::EachHeadNorm),
            (attention(|a| a.head_norm.is_some_and(|norm| norm.span == HeadNormSpan::AllHeads)), Feature::AllHeadsNorm),
            (attention(|a| a.has_alibi), Feature::Alibi),
            (attention(|a| a.score_cap.is_some()), Feature::ScoreCap),
            (attention(|a| a.has_sinks), Feature::Sinks),
            (attention(|a| a.has_output_gate), Feature::OutputGate),
            (self.has_recurrent_layers(), Feature::Recurrent),
            (recurrent(RecurrentLayer::is_mamba2), Feature::Mamba2),
            (recurrent(RecurrentLayer::has_no_norm), Feature::UnnormedMamba2),
            (self.layers.iter().any(|layer| layer.beside.is_some()), Feature::RecurrentBeside),
            (recurrent(RecurrentLayer::is_short_conv), Feature::ShortConv),
            (recurrent(RecurrentLayer::has_doubled_rates), Feature::DoubledRates),
            (recurrent(RecurrentLayer::is_kimi_delta), Feature::KimiDelta),
            (self.has_latents(), Feature::LatentAttention),
            (attention(|a| a.chunk.is_some()), Feature::ChunkedAttention),
            (attention(|a| a.head_norm.is_some_and(|norm| norm.is_behind_rotation)), Feature::QueryGains),
            (attention(|a| a.query_scale.is_some() && a.latent.is_none()), Feature::QueryScale),
            (attention(|a| a.query_scale.is_some() && a.latent.is_some()), Feature::LatentQueryScale),
            (self.head.cap.is_some(), Feature::LogitCap),
            (attention(|a| a.head_norm.is_some_and(|norm| norm.has_value)), Feature::ValueNorm),
            (attention(|a| matches!(a.kv, KvSource::Layer(_))), Feature::SharedKv),
            (self.per_layer_input.is_some(), Feature::PerLayerInputs),
            (self.names.layer_scalar.is_some() || self.has_branch_scales(), Feature::LayerScale),
            (self.names.has_branch_norms(), Feature::BranchNorm),
            (
                self.layers.iter().any(|layer| layer.is_parallel)
                    || self.per_layer_input.is_some()
                    || self.has_mtp_layer,
                Feature::ParallelBranches,
            ),
            (routing(|_| true), Feature::Experts),
            (routing(|routing| routing.scoring == Scoring::Sigmoid), Feature::SigmoidRouting),
            (
                routing(|_| true) && self.names.experts.is_some_and(|names| !names.layout.is_gated()),
                Feature::PlainExperts,
            ),
            (
                self.layers.iter().filter_map(|layer| layer.experts).any(|experts| experts.latent_size.is_some()),
                Feature::ExpertLatents,
            ),
            (routing(|routing| matches!(routing.scoring, Scoring::SparseMixer { .. })), Feature::SparseMixer),
            (routing(|routing| routing.scales_input), Feature::ScaledExpertInputs),
            (
                routing(|_| true) && self.names.experts.is_some_and(|names| names.selection_bias.is_some()),
                Feature::SelectionBias,
            ),
            (routing(|routing| routing.groups.is_some()), Feature::ExpertGroups),
            (
                routing(|routing| routing.groups.is_some_and(|groups| groups.score == GroupScore::Best)),
                Feature::BestExpertGroups,
            ),
            (
                routing(|routing| routing.scale != 1.0) || routing(|_| true) && self.names.has_experts_apart(),
                Feature::ExpertScales,
            ),
            (routing(|_| true) && self.names.has_experts_apart(), Feature::ExpertsApart),
            (self.has_mtp_layer || self.draft.is_some(), Feature::Guesses),
            (self.draft.is_some(), Feature::OwnDrafters),
        ];
        let own = needs.into_iter().filter_map(|(needed, feature)| needed.then_some(feature));
        own.chain(self.draft.iter().flat_map(|draft| draft.config.features())).collect()
    }
}
