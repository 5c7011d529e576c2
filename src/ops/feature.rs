//! Features that a device may lack.

use std::fmt;

/// Ops that only some architectures need. A device may lack them; a model that needs a missing one is refused when it
/// is loaded.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Feature {
    /// Norms of [`crate::NormKind::Layer`].
    LayerNorm,
    /// Learned positions: [`crate::Device::load_positions`], [`crate::Device::add_positions`].
    LearnedPositions,
    /// An MLP without a gate: [`crate::Device::activated_linear`].
    PlainMlp,
    /// Activations other than SiLU and GELU's tanh approximation.
    OtherActivations,
    /// [`crate::Activation::Xielu`].
    Xielu,
    /// Norms of q and k, the same for all heads: [`crate::Device::head_norm`].
    HeadNorm,
    /// Norms of q and k with weights of each head, or layer norms: [`crate::Device::head_norm`].
    EachHeadNorm,
    /// Norms of q and k over all heads of the group: [`crate::Device::head_norm`].
    AllHeadsNorm,
    /// [`crate::LayerAttention::alibi_slopes`].
    Alibi,
    /// [`crate::LayerAttention::score_cap`].
    ScoreCap,
    /// [`crate::LayerAttention::sinks`].
    Sinks,
    /// [`crate::LayerAttention::chunk`].
    ChunkedAttention,
    /// [`crate::LayerAttention::query_gains`].
    QueryGains,
    /// [`crate::LayerAttention::query_scale`].
    QueryScale,
    /// [`crate::LogitSpec::cap`].
    LogitCap,
    /// Norms behind a branch: [`crate::Device::reduce_norm_add_norm`].
    BranchNorm,
    /// Two branches of the same input: [`crate::Device::add`].
    ParallelBranches,
    /// [`crate::HeadNorms::v`].
    ValueNorm,
    /// [`crate::LayerAttention::has_shared_kv`].
    SharedKv,
    /// Norms of several groups in a row by [`crate::Device::norm`], and [`crate::Device::multiply_columns`].
    PerLayerInputs,
    /// [`crate::Device::scale`].
    LayerScale,
    /// Experts: [`crate::Device::load_experts`], [`crate::Device::experts`], [`crate::Device::gate_rows`].
    Experts,
    /// [`crate::Scoring::Sigmoid`].
    SigmoidRouting,
    /// [`crate::ExpertSlice::gate_up`] without gates.
    PlainExperts,
    /// Experts whose inputs and outputs have another width than the router's input.
    ExpertLatents,
    /// [`crate::Scoring::SparseMixer`].
    SparseMixer,
    /// [`crate::Routing::scales_input`].
    ScaledExpertInputs,
    /// [`crate::ExpertSlices::selection_bias`].
    SelectionBias,
    /// [`crate::Routing::groups`].
    ExpertGroups,
    /// [`crate::GroupScore::Best`].
    BestExpertGroups,
    /// [`crate::ExpertSlices::scales`] and [`crate::Routing::scale`].
    ExpertScales,
    /// [`crate::Device::experts_of`] and [`crate::Device::reduce_norm`].
    ExpertsApart,
    /// [`crate::AttentionSpec::states`]: [`crate::Device::recurrent`].
    Recurrent,
    /// [`crate::RecurrentRule::KimiDelta`]: [`crate::Device::kimi_delta`].
    KimiDelta,
    /// [`crate::RecurrentRule::Mamba2`].
    Mamba2,
    /// [`crate::RecurrentRule::Mamba2`] without a norm.
    UnnormedMamba2,
    /// A recurrent state and attention in one layer.
    RecurrentBeside,
    /// [`crate::RecurrentRule::ShortConv`].
    ShortConv,
    /// [`crate::RecurrentRule::GatedDelta`] with doubled rates.
    DoubledRates,
    /// [`crate::LayerAttention::latent`]: [`crate::Device::load_latent`], [`crate::Device::latent_attention`].
    LatentAttention,
    /// [`crate::LayerAttention::query_scale`] of layers with [`crate::LayerAttention::latent`].
    LatentQueryScale,
    /// [`crate::Device::gate`].
    OutputGate,
    /// Low-rank products beside linear layers: [`crate::Device::allocate_adapters`], [`crate::Device::set_adapter`].
    Adapters,
    /// Guesses by a head of the model: [`crate::Device::run_guess`], [`crate::Device::follow`], [`crate::Device::guess`],
    /// [`crate::Device::next_guess`].
    Guesses,
    /// Guesses from a checkpoint of their own: [`crate::Device::extend`], [`crate::Device::put_columns`], [`crate::Device::load_draft_head`].
    OwnDrafters,
}

impl fmt::Display for Feature {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Feature::LayerNorm => "layer norm",
            Feature::LearnedPositions => "learned positions",
            Feature::PlainMlp => "feed-forward without a gate",
            Feature::OtherActivations => "activations other than SiLU and GELU (tanh)",
            Feature::Xielu => "the activation xIELU",
            Feature::HeadNorm => "norms of q and k",
            Feature::EachHeadNorm => "layer norms of each head of q and k",
            Feature::AllHeadsNorm => "norms of q and k over all heads",
            Feature::Alibi => "ALiBi",
            Feature::ScoreCap => "capped attention scores",
            Feature::Sinks => "attention sinks",
            Feature::ChunkedAttention => "attention in chunks",
            Feature::QueryGains => "norms of q and k behind the rotation",
            Feature::QueryScale => "a scale of queries that depends on the position",
            Feature::LogitCap => "capped logits",
            Feature::BranchNorm => "norms behind attention and feed-forward",
            Feature::ParallelBranches => "attention and feed-forward in parallel",
            Feature::ValueNorm => "norms of v",
            Feature::SharedKv => "layers that share keys and values",
            Feature::PerLayerInputs => "an embedding for each layer",
            Feature::LayerScale => "a factor of each layer or feed-forward",
            Feature::SigmoidRouting => "experts that are weighted by sigmoids",
            Feature::PlainExperts => "experts without gates",
            Feature::ExpertLatents => "experts of another width than the model",
            Feature::SparseMixer => "experts that are chosen as in SparseMixer",
            Feature::ScaledExpertInputs => "experts whose inputs are weighted",
            Feature::SelectionBias => "experts that are chosen by their weights and a bias",
            Feature::ExpertGroups => "experts that are chosen within groups",
            Feature::BestExpertGroups => "experts that are chosen within the groups of the best ones",
            Feature::ExpertScales => "a factor of each expert",
            Feature::ExpertsApart => "experts with an input of their own",
            Feature::Recurrent => "layers with a recurrent state (Gated DeltaNet)",
            Feature::KimiDelta => "Kimi Delta Attention",
            Feature::Mamba2 => "layers with a recurrent state of Mamba-2",
            Feature::UnnormedMamba2 => "layers with a recurrent state of Mamba-2 without a norm",
            Feature::RecurrentBeside => "layers with a recurrent state beside attention",
            Feature::ShortConv => "layers with a short convolution",
            Feature::DoubledRates => "layers with a recurrent state whose learning rates are up to 2",
            Feature::LatentAttention => "attention over latent vectors (MLA)",
            Feature::LatentQueryScale => {
                "attention over latent vectors with a scale of queries that depends on the position"
            }
            Feature::OutputGate => "attention with an output gate",
            Feature::Guesses => "drafts of an MTP head (`mtp_num_tokens`)",
            Feature::OwnDrafters => {
                "drafts of an EAGLE-3 head or a draft model (`eagle3_num_tokens`, `draft_model_num_tokens`)"
            }
            Feature::Adapters => "adapters (LoRA)",
            Feature::Experts => "mixture of experts",
        })
    }
}
