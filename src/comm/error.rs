use std::time::Duration;

/// Why the world of ranks cannot be joined, used or left.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs)] // Fields are named by their messages.
pub enum CommError {
    #[error(
        "started by the launcher of {kind}, but this build was made without it; build where its `mpicc` and libclang are \
         installed, or start one rank without a launcher"
    )]
    NotBuilt { kind: &'static str },
    #[error("cannot use {kind} on this machine; install the MPI whose launcher started this rank")]
    Load { kind: &'static str, source: Box<dyn std::error::Error + Send + Sync> },
    #[error("cannot start the thread that speaks MPI")]
    Thread(#[source] std::io::Error),
    #[error("MPI did not start within {waited:?}: another rank did not come up, or cannot be reached")]
    StartTimeout { waited: Duration },
    #[error(
        "rank {rank} on node `{node}` runs another build of this program than rank 0 on node `{first}`; \
         copy the same one to every node"
    )]
    Builds { rank: usize, node: String, first: String },
    #[error("there is no rank {to} in a world of {size}")]
    NoSuchRank { to: u32, size: u32 },
    #[error("{queued} messages to other ranks wait already: they do not take them as fast as they come")]
    Overloaded { queued: usize },
    #[error("a message of {len} bytes is longer than the {max} that MPI takes")]
    TooLarge { len: usize, max: usize },
    #[error("this rank has left the world")]
    Left,
    #[error("not every rank was ready to end after {waited:?}; end this process, and the launcher ends the others")]
    FinalizeTimeout { waited: Duration },
}
