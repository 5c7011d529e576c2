//! Why a worker ends.

use std::path::PathBuf;

/// Why a worker ends. Its rank starts another.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs)] // Fields are named by their messages.
pub enum WorkerError {
    #[error("cannot read the worker's spec from standard input")]
    Spec(#[source] SpecError),
    #[error(transparent)]
    Ipc(#[from] ipc::IpcError),
    #[error(transparent)]
    Send(#[from] ipc::SendError),
    #[error(transparent)]
    Receive(#[from] ipc::RecvError),
    #[error(transparent)]
    Plan(#[from] engine::PlanError),
    #[error(transparent)]
    Mismatch(#[from] PlanMismatch),
    #[error(transparent)]
    Device(#[from] ops::DeviceError),
    #[error(transparent)]
    Model(#[from] models::ModelError),
    #[error("its weights need {needed} of memory, and {free} are free: {cure}; `launch --plan` shows all of it")]
    Memory { needed: String, free: String, cure: String },
    #[error(
        "`kv_cache_host_memory_bytes` is {bytes} for each of {workers} workers, and {free} bytes of host memory are free; lower it"
    )]
    HostMemory { bytes: u64, workers: usize, free: u64 },
    #[error(transparent)]
    Adapter(#[from] models::AdapterError),
    #[error("no thread can be started")]
    Thread(#[source] std::io::Error),
    #[error("network `{network}` cannot be used: {reason}; name the one that joins the nodes with --network")]
    Network { network: String, reason: String },
    #[error("cannot read checkpoint {} on node `{node}`; every node needs it, at the same path", .dir.display())]
    ReadCheckpoint { dir: PathBuf, node: String, source: std::io::Error },
    #[error(
        "checkpoint {} differs between nodes `{here}` and `{first}`: {how}; copy the same one to every node",
        .dir.display()
    )]
    Checkpoint { dir: PathBuf, here: String, first: String, how: String },
    #[error("rank 0 sent `{found}` where `{expected}` was due")]
    Protocol { expected: &'static str, found: &'static str },
}

/// Why the spec of a worker cannot be used.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs)] // Fields are named by their messages.
pub enum SpecError {
    #[error(transparent)]
    Read(#[from] std::io::Error),
    #[error(transparent)]
    Parse(#[from] serde_json::Error),
}

/// Why a plan does not fit the rows of this worker. Rank 0 and the worker no longer agree, so the worker must end.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
#[allow(missing_docs)] // Fields are named by their messages.
pub enum PlanMismatch {
    #[error("plan {found} came where plan {expected} was due")]
    StepGap { expected: u64, found: u64 },
    #[error("plan {step} names row {row}, but this worker has {max_rows} rows")]
    RowRange { step: u64, row: u32, max_rows: usize },
    #[error("plan {step}: row {row} is taken by sequence {sequence} and cannot be joined")]
    RowTaken { step: u64, row: u32, sequence: u64 },
    #[error("plan {step}: row {row} is empty")]
    RowEmpty { step: u64, row: u32 },
    #[error("plan {step}: row {row} starts at position {found}, but {computed} are computed")]
    Start { step: u64, row: u32, found: u32, computed: u32 },
    #[error("plan {step}: row {row} has no token at position {position}; it has {known}")]
    NoToken { step: u64, row: u32, position: u32, known: u32 },
    #[error("plan {step}: row {row} goes back to position {found} of {computed}, or saves a state behind its work")]
    Restored { step: u64, row: u32, found: u32, computed: u32 },
    #[error("plan {step}: row {row} needs {needed} blocks but has {found}")]
    Blocks { step: u64, row: u32, needed: usize, found: usize },
    #[error("plan {step}: row {row} has {found} block tables, but there are {groups} KV groups")]
    Tables { step: u64, row: u32, found: usize, groups: usize },
    #[error("plan {step}: row {row} names KV group {group}, but there are {groups}")]
    GroupRange { step: u64, row: u32, group: u32, groups: usize },
    #[error("plan {step}: row {row} needs block {needed} of KV group {group}, but its first is {first}")]
    Released { step: u64, row: u32, group: usize, needed: usize, first: usize },
    #[error("plan {step}: row {row} names KV block {block}, but there are {num_blocks}")]
    BlockRange { step: u64, row: u32, block: u32, num_blocks: usize },
    #[error("plan {step} names the slot {found:?} for a recurrent state, but there are {num_states}")]
    State { step: u64, found: Option<u32>, num_states: usize },
    #[error(
        "plan {step} copies {kind} {place:?} to or from slot {slot:?} of the host, but there are {num_places} and {num_slots} slots"
    )]
    Host { step: u64, kind: &'static str, place: Option<u32>, num_places: usize, slot: Option<u32>, num_slots: usize },
    #[error("plan {step} names the slot {found} for an adapter, but there are {num_slots}")]
    Adapter { step: u64, found: u32, num_slots: usize },
    #[error("plan {step}: row {row} keeps {kept} tokens of row {parent}, which has {known}")]
    Kept { step: u64, row: u32, parent: u32, kept: u32, known: u32 },
    #[error("plan {step}: row {row} stops sharing block {found}, but its last is {last:?}")]
    Copied { step: u64, row: u32, found: u32, last: Option<u32> },
    #[error("plan {step}: row {row} computes no position, or samples before its last known token")]
    Work { step: u64, row: u32 },
}
