//! The names of weights in a checkpoint.

use crate::layer_spec::LayerSpec;

/// Names of an architecture's weights, without the suffixes `.weight` and `.bias`.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Names {
    /// Possible prefixes of every name except the head's; the one that the embedding has is used.
    pub(crate) prefixes: &'static [&'static str],
    pub(crate) embedding: &'static str,
    /// Norm of the embeddings.
    pub(crate) embedding_norm: Option<&'static str>,
    /// Learned positions; empty if the architecture has none.
    pub(crate) positions: &'static str,
    /// The row of position 0 in their table.
    pub(crate) first_position: usize,
    /// Followed by the layer's number. The names from here to `down` follow that number.
    pub(crate) layers: &'static str,
    /// Norm of attention's input.
    pub(crate) attention_norm: Option<&'static str>,
    pub(crate) qkv: QkvNames,
    /// Norms of the q and k heads; empty if the architecture has none.
    pub(crate) head_norms: [&'static str; 2],
    pub(crate) out: &'static str,
    /// Norm of attention's output, before it is added to the hidden state.
    pub(crate) attention_branch_norm: Option<&'static str>,
    /// Norm of the feed-forward's input.
    pub(crate) mlp_norm: Option<&'static str>,
    pub(crate) up: UpNames,
    pub(crate) down: &'static str,
    /// The experts and their router, and the expert that all tokens share.
    pub(crate) experts: Option<ExpertNames>,
    /// A logit of each head that takes part in the softmax of attention and has no value.
    pub(crate) sinks: Option<&'static str>,
    /// A recurrent state in place of attention or beside it.
    pub(crate) recurrent: Option<RecurrentNames>,
    /// The names of all weights of these layers, if they have other norms than those with attention.
    pub(crate) of_recurrent: Option<&'static Names>,
    /// Attention over latent vectors; `qkv` is not used then.
    pub(crate) latent: Option<LatentNames>,
    /// Norm of the feed-forward's output, before it is added to the hidden state.
    pub(crate) mlp_branch_norm: Option<&'static str>,
    /// A tensor with one element that multiplies the hidden state behind the layer.
    pub(crate) layer_scalar: Option<&'static str>,
    /// The embedding of each layer, if the architecture has them.
    pub(crate) per_layer_input: Option<PerLayerNames>,
    pub(crate) final_norm: &'static str,
    /// Possible names of the output head; the first one that exists is used.
    pub(crate) heads: &'static [&'static str],
    /// Whether linear layers are stored as `[in, out]`.
    pub(crate) transposed: bool,
}

impl Names {
    /// The names of the weights of this layer.
    pub(crate) fn of(&self, layer: &LayerSpec) -> &Names {
        self.of_recurrent.filter(|_| layer.recurrent.is_some()).unwrap_or(self)
    }

    /// Whether experts have other inputs and outputs than the feed-forward beside them.
    pub(crate) fn has_experts_apart(&self) -> bool {
        self.experts.is_some_and(|experts| experts.apart.is_some())
    }

    /// Whether there are norms behind attention or feed-forward.
    pub(crate) fn has_branch_norms(&self) -> bool {
        self.attention_branch_norm.is_some() || self.mlp_branch_norm.is_some()
    }
}

/// The names of the weights around the embedding of each layer ([`crate::PerLayerInput`]).
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct PerLayerNames {
    /// Embeddings of all layers, side by side.
    pub(crate) embedding: &'static str,
    /// From the model's embedding to one for each layer.
    pub(crate) context: &'static str,
    pub(crate) context_norm: &'static str,
    /// In a layer: from the hidden state to the width of the embedding, and back. The norm follows.
    pub(crate) gate: &'static str,
    pub(crate) out: &'static str,
    pub(crate) branch_norm: &'static str,
}

/// How q, k and v are stored in a checkpoint.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) enum QkvNames {
    /// Three separate matrices. If the output has gates, those of a head are stored behind its q.
    Separate([&'static str; 3]),
    /// Three separate matrices, and one without a bias that gives the gates of the output.
    Gated([&'static str; 4]),
    /// One matrix: all of q, all of k, all of v.
    Stacked(&'static str),
    /// One matrix: for each KV head the q of its query heads, then its k, then its v.
    Grouped(&'static str),
}

/// The names of a layer with latent vectors.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct LatentNames {
    /// Gives q, if it does not follow from a latent vector.
    pub(crate) query: &'static str,
    /// Gives the latent vector of q; its norm; gives q from it.
    pub(crate) query_down: &'static str,
    pub(crate) query_norm: &'static str,
    pub(crate) query_up: &'static str,
    /// Gives the latent vector of k and v, and the rotated part of k; the norm of the vector; gives the rest of k and v from it.
    pub(crate) down: &'static str,
    pub(crate) norm: &'static str,
    pub(crate) up: &'static str,
}

/// The names of a layer with a recurrent state.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct RecurrentNames {
    pub(crate) projections: RecurrentProjections,
    /// Full names from here to `norm`; empty where the rule has none.
    pub(crate) conv: &'static str,
    pub(crate) conv_bias: &'static str,
    pub(crate) a_log: &'static str,
    pub(crate) dt_bias: &'static str,
    pub(crate) skip: &'static str,
    pub(crate) norm: &'static str,
    pub(crate) out: &'static str,
}

/// How the projections of such a layer are stored in a checkpoint.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) enum RecurrentProjections {
    /// All of q, k and v; gates of the output; learning rates; steps.
    Separate { qkv: &'static str, z: &'static str, b: &'static str, a: &'static str },
    /// For each key head its q, its k, and v and gates of its value heads; learning rates and steps of its value heads.
    Grouped { qkvz: &'static str, ba: &'static str },
    /// One matrix: all gates of the output, all of v, k and q, all steps. The convolution has v, k and q in this order.
    Together(&'static str),
    /// One matrix: all gates of the input, all gates of the output, all of v. The convolution has v alone.
    ShortConv(&'static str),
    /// A matrix for each of q, k, v and learning rates, and a convolution for each of q, k and v; steps and gates of the output by two
    /// products each, of which the first one has few outputs.
    LowRank { qkvb: [&'static str; 4], convs: [&'static str; 3], steps: [&'static str; 2], gates: [&'static str; 2] },
    /// A matrix for each of q, k, v and the gates of the output, learning rates and steps, and a convolution for each of q, k and v.
    Each { qkvz: [&'static str; 4], ba: [&'static str; 2], convs: [&'static str; 3] },
}

/// How the first layer of a feed-forward is stored in a checkpoint.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) enum UpNames {
    /// Gate and up as separate matrices.
    Separate([&'static str; 2]),
    /// One matrix: all of gate, all of up.
    Stacked(&'static str),
    /// There is no gate.
    Plain(&'static str),
}

impl UpNames {
    pub(crate) fn is_gated(self) -> bool {
        !matches!(self, UpNames::Plain(_))
    }
}

/// The names of a layer's experts.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct ExpertNames {
    pub(crate) router: &'static str,
    pub(crate) layout: ExpertLayout,
    /// What is added to the weights of experts while they are chosen. The full name.
    pub(crate) selection_bias: Option<(&'static str, BiasForm)>,
    /// Norms of the experts, if they have other inputs and outputs than the feed-forward beside them.
    pub(crate) apart: Option<ApartNames>,
    /// Whether the router and the experts have biases.
    pub(crate) has_biases: bool,
    /// The projections from the width of the model to that of the experts, and back, if they have another width.
    pub(crate) latents: Option<[&'static str; 2]>,
    /// up, down and output gate of the expert that all tokens share, if there is one.
    pub(crate) shared: Option<(UpNames, &'static str, &'static str)>,
}

/// The names of what experts beside a feed-forward have of their own: their input is the norm of the hidden state, not
/// that of the feed-forward, and the outputs of both are normed before they are added.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct ApartNames {
    /// Norm of the experts' input.
    pub(crate) input_norm: &'static str,
    /// Gain of the norm of the router's input; divided by the root of the width. The full name.
    pub(crate) router_gain: &'static str,
    /// Factor of each expert. The full name.
    pub(crate) scales: &'static str,
    /// Norms of the output of the feed-forward and of the experts.
    pub(crate) branch_norms: [&'static str; 2],
}

/// The shape in which the biases of experts are stored.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) enum BiasForm {
    /// `[experts]`.
    Vector,
    /// `[1, experts]`.
    Row,
}

/// How experts are stored in a checkpoint.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) enum ExpertLayout {
    /// Each on its own: `PREFIX.number.NAME` for gate, up and down.
    Each { prefix: &'static str, names: [&'static str; 3] },
    /// Each on its own and without a gate: `PREFIX.number.NAME` for up and down.
    EachPlain { prefix: &'static str, names: [&'static str; 2] },
    /// Together and as `[in, out]`, in tensors whose names have no suffix: gate and up `[experts, E, 2 I]`, down
    /// `[experts, I, E]`.
    StackedTransposed([&'static str; 2]),
    /// The same, with rows of gate and up in turn. In MXFP4 they are `[experts, rows, cols]`: `NAME_blocks` and `NAME_scales`.
    Alternating([&'static str; 2]),
    /// Together: gate and up as one tensor `[experts, 2 I, E]`, down as one `[experts, E, I]`. The full names.
    Stacked([&'static str; 2]),
    /// `Stacked` if the checkpoint has the first of `stacked`, else `Each`. If `may_be_transposed`, a stack of another shape is
    /// `StackedTransposed`.
    Either { stacked: [&'static str; 2], may_be_transposed: bool, prefix: &'static str, names: [&'static str; 3] },
}

impl ExpertLayout {
    /// Whether the experts have gates.
    pub(crate) fn is_gated(self) -> bool {
        !matches!(self, ExpertLayout::EachPlain { .. })
    }
}
