//! Names of contents of KV blocks.

use std::hash::{DefaultHasher, Hash, Hasher};

use crate::AdapterId;

/// Identifies the content of a filled block: its tokens and, through its parent, all tokens before them. Never reused.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub(crate) struct ContentId(pub(crate) u64);

impl ContentId {
    /// The parent of a sequence's first block.
    pub(crate) const ROOT: Self = Self(0);

    /// The parent of the first block of sequences with this salt: they share blocks with each other only.
    pub(crate) fn salted(salt: Option<u64>) -> Self {
        // Contents are counted from 1, so they never have the highest bit.
        salt.map_or(Self::ROOT, |salt| Self(salt | 1 << 63))
    }

    /// The same for sequences with an adapter: they share blocks only with those of the same adapter and salt.
    pub(crate) fn root_of(salt: Option<u64>, adapter: Option<AdapterId>) -> Self {
        let Some(adapter) = adapter else { return Self::salted(salt) };
        let mut hasher = DefaultHasher::new();
        (adapter.0, salt).hash(&mut hasher);
        Self::salted(Some(hasher.finish()))
    }
}
