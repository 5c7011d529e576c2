//! Identifiers that are shared between crates. Those that reach a device are `u32`.

use bytemuck::{Pod, Zeroable};
use serde::{Deserialize, Serialize};

/// A token of a model's vocabulary.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default, Pod, Zeroable, Serialize, Deserialize)]
#[repr(transparent)]
pub struct TokenId(pub u32);

/// One KV block: `block_size` consecutive positions of one sequence, in every layer of a KV group. Any group may use
/// any block.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default, Pod, Zeroable, Serialize, Deserialize)]
#[repr(transparent)]
pub struct BlockId(pub u32);

/// The index of a running sequence in every worker's row table, in `0..max_rows`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default, Pod, Zeroable, Serialize, Deserialize)]
#[repr(transparent)]
pub struct RowId(pub u32);

/// A slot for the recurrent state of a sequence, in every layer that has one.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default, Pod, Zeroable, Serialize, Deserialize)]
#[repr(transparent)]
pub struct StateId(pub u32);

/// A slot in host memory, of every worker, for a copy of a KV block; or, of another kind, for a copy of a recurrent state.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default, Pod, Zeroable, Serialize, Deserialize)]
#[repr(transparent)]
pub struct HostSlot(pub u32);

/// A slot in the file of every rank for a copy of a KV block that left host memory; or, of another kind, of a recurrent state.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default, Serialize, Deserialize)]
pub struct DiskSlot(pub u32);

/// A sequence of one engine; never reused.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default, Serialize, Deserialize)]
pub struct SequenceId(pub u64);
