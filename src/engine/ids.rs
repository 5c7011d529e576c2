//! Identifiers that travel between rooms. `u32` is what reaches a device.

use bytemuck::{Pod, Zeroable};
use serde::{Deserialize, Serialize};

/// One entry of a model's vocabulary.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default, Pod, Zeroable, Serialize, Deserialize)]
#[repr(transparent)]
pub struct TokenId(pub u32);

/// One KV block: `block_size` consecutive positions of one sequence, in every layer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default, Pod, Zeroable, Serialize, Deserialize)]
#[repr(transparent)]
pub struct BlockId(pub u32);

/// The place of a running sequence in every worker's row table, in `0..max_rows`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default, Pod, Zeroable, Serialize, Deserialize)]
#[repr(transparent)]
pub struct RowId(pub u32);

/// One sequence for the life of the engine; never reused.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default, Serialize, Deserialize)]
pub struct SequenceId(pub u64);
