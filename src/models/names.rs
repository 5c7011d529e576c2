//! The names of weights in a checkpoint.

/// Names of an architecture's weights, without the suffixes `.weight` and `.bias`.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Names {
    /// Possible prefixes of every name except the head's; the one that the embedding has is used.
    pub(crate) prefixes: &'static [&'static str],
    pub(crate) embedding: &'static str,
    /// Learned positions; empty if the architecture has none.
    pub(crate) positions: &'static str,
    /// Followed by the layer's number. The names from here to `down` follow that number.
    pub(crate) layers: &'static str,
    pub(crate) attention_norm: &'static str,
    pub(crate) qkv: QkvNames,
    /// Norms of the q and k heads; empty if the architecture has none.
    pub(crate) head_norms: [&'static str; 2],
    pub(crate) out: &'static str,
    pub(crate) mlp_norm: &'static str,
    /// Empty if there is no gate.
    pub(crate) gate: &'static str,
    pub(crate) up: &'static str,
    pub(crate) down: &'static str,
    pub(crate) final_norm: &'static str,
    pub(crate) head: &'static str,
    /// Whether linear layers are stored as `[in, out]`.
    pub(crate) transposed: bool,
}

/// How q, k and v are stored in a checkpoint.
#[derive(Debug, Clone, Copy)]
pub(crate) enum QkvNames {
    /// Three separate matrices.
    Separate([&'static str; 3]),
    /// One matrix: all of q, all of k, all of v.
    Stacked(&'static str),
    /// One matrix: for each KV head the q of its query heads, then its k, then its v.
    Grouped(&'static str),
}
