//! What distinguishes one architecture from another.

use ops::HeadNormSpan;

use crate::fields::Fields;
use crate::names::Names;
use crate::{Config, ModelError};

/// A supported architecture.
pub(crate) struct Family {
    /// The name in `architectures` of `config.json`.
    pub(crate) name: &'static str,
    /// The name in `model_type`.
    pub(crate) model_type: &'static str,
    /// Another name in `model_type`, of a publisher whose models have the same form.
    pub(crate) other_model_type: Option<&'static str>,
    pub(crate) names: &'static Names,
    /// Fields that have other names than Llama's: the usual name, then its own.
    pub(crate) aliases: &'static [(&'static str, &'static str)],
    /// A JSON object: values of fields that `config.json` lacks, where transformers has others than Llama's.
    pub(crate) defaults: &'static str,
    /// Whether the fields are in `text_config`, beside those of a vision part, which is not served.
    pub(crate) is_nested: bool,
    /// Whether the first checkpoints of a nested architecture have these fields at the top of the file.
    pub(crate) may_be_flat: bool,
    pub(crate) norm: NormRule,
    pub(crate) attention_bias: AttentionBias,
    pub(crate) mlp_bias: BiasRule,
    /// The inner width of the feed-forward, as a multiple of the hidden size, if no field sets it.
    pub(crate) inner_factor: Option<usize>,
    pub(crate) window: WindowRule,
    /// Norms of q and k.
    pub(crate) head_norm: Option<HeadNormSpan>,
    /// The share of a head that is rotated if no field sets it; `None` if whole heads always are.
    pub(crate) partial_rotary: Option<f64>,
    /// Whether rotated pairs are neighbours.
    pub(crate) is_interleaved: bool,
    /// Whether attention and feed-forward have the same input.
    pub(crate) is_parallel: bool,
    /// Values of `quantization_config.quant_method` that are read besides those of all families.
    pub(crate) quantizations: &'static [&'static str],
    /// Reads the remaining fields.
    pub(crate) adjust: fn(&Fields, &mut Config) -> Result<(), ModelError>,
}

/// The norms of the hidden state.
#[derive(Debug, Clone, Copy)]
pub(crate) enum NormRule {
    /// RMS norm.
    Rms,
    /// RMS norm whose weight is stored as the difference from 1.
    RmsFromOne,
    /// RMS norm without weight.
    RmsWithoutWeight,
    /// Layer norm with weight and bias.
    Layer,
    /// Layer norm with weight and bias, whose weight is stored as the difference from 1.
    LayerFromOne,
    /// Layer norm with a weight.
    LayerWithoutBias,
    /// Layer norm without weight and bias.
    LayerWithoutWeight,
}

/// Which linear layers have a bias.
#[derive(Debug, Clone, Copy)]
pub(crate) enum BiasRule {
    Always,
    Never,
    /// Set by a flag of `config.json`, else `default`.
    Field {
        name: &'static str,
        default: bool,
    },
}

/// The biases of q, k, v, and of the output projection.
#[derive(Debug, Clone, Copy)]
pub(crate) struct AttentionBias {
    pub(crate) qkv: BiasRule,
    pub(crate) out: BiasRule,
}

/// Which layers have a sliding window.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum WindowRule {
    /// None.
    Never,
    /// All, if `sliding_window` is set.
    AllLayers,
    /// If `use_sliding_window` is set: those that `layer_types` names, or those from `max_window_layers` on.
    IfEnabled,
    /// Those that `layer_types` names, or all but every n-th, where n is `sliding_window_pattern` or else this.
    Pattern(usize),
    /// Those that `layer_types` names, or all but every n-th, beginning with the first.
    PatternFromFirst(usize),
    /// Those that `layer_types` names, or all.
    Listed,
}
