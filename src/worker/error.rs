//! Why a worker ends.

use std::path::PathBuf;

use crate::rows::PlanMismatch;

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
