//! Where a live sequence is stored, and which sequence a sample belongs to.

use crate::{RowId, SequenceId};

/// The index of a live sequence; reused after it ends.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Slot(pub(crate) u32);

/// A token that a plan samples.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Sample {
    pub(crate) slot: Slot,
    /// The sequence that the token belongs to. When the token is settled, another sequence may be in the slot.
    pub(crate) sequence: SequenceId,
    pub(crate) row: RowId,
    /// Whether the token is chosen among those of a mask.
    pub(crate) is_constrained: bool,
    /// Whether the token is discarded, because a mask of the sequence was late.
    pub(crate) is_void: bool,
}

impl Sample {
    /// Whether a mask must be computed for it.
    pub(crate) fn needs_mask(&self) -> bool {
        self.is_constrained && !self.is_void
    }
}
