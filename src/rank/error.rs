//! Why a rank cannot serve.

use std::path::PathBuf;

/// Why a rank cannot serve.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs)] // Fields are named by their messages.
pub enum RankError {
    #[error("cannot open log file {}", .path.display())]
    Log { path: PathBuf, source: std::io::Error },
    #[error(transparent)]
    Comm(#[from] comm::CommError),
    #[error(transparent)]
    Ipc(#[from] ipc::IpcError),
    #[error(transparent)]
    Record(#[from] record::RecordError),
    #[error("cannot find this program's own file, to start workers with")]
    Program(#[source] std::io::Error),
    #[error("cannot start the async runtime")]
    Runtime(#[source] std::io::Error),
    #[error("creating server: {0}")]
    Server(String),
    #[error("device `{device}` is not usable: {reason}")]
    Device { device: String, reason: String },
}
