//! The names of weights in a checkpoint.

/// Names of an architecture's weights, without the suffixes `.weight` and `.bias`.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Names {
    /// Possible prefixes of every name except the head's; the one that the embedding has is used.
    pub(crate) prefixes: &'static [&'static str],
    pub(crate) embedding: &'static str,
    /// Learned positions; empty if the architecture has none.
    pub(crate) positions: &'static str,
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
    /// Norm of the feed-forward's output, before it is added to the hidden state.
    pub(crate) mlp_branch_norm: Option<&'static str>,
    pub(crate) final_norm: &'static str,
    /// Possible names of the output head; the first one that exists is used.
    pub(crate) heads: &'static [&'static str],
    /// Whether linear layers are stored as `[in, out]`.
    pub(crate) transposed: bool,
}

impl Names {
    /// Whether there are norms behind attention or feed-forward.
    pub(crate) fn has_branch_norms(&self) -> bool {
        self.attention_branch_norm.is_some() || self.mlp_branch_norm.is_some()
    }
}

/// How q, k and v are stored in a checkpoint.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) enum QkvNames {
    /// Three separate matrices.
    Separate([&'static str; 3]),
    /// One matrix: all of q, all of k, all of v.
    Stacked(&'static str),
    /// One matrix: for each KV head the q of its query heads, then its k, then its v.
    Grouped(&'static str),
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
    /// up, down and output gate of the expert that all tokens share, if there is one.
    pub(crate) shared: Option<(UpNames, &'static str, &'static str)>,
}

/// How experts are stored in a checkpoint.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) enum ExpertLayout {
    /// Each on its own: `PREFIX.number.NAME` for gate, up and down.
    Each { prefix: &'static str, names: [&'static str; 3] },
    /// Together: gate and up as one tensor `[experts, 2 I, E]`, down as one `[experts, E, I]`.
    Stacked([&'static str; 2]),
}
