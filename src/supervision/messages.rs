//! Messages between rank 0 and the agents of all ranks.

use serde::{Deserialize, Serialize};

use crate::protocol::{ShmName, WorkerSpec};

/// One worker of one start of a model: a restart is a new `instance`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct WorkerId {
    /// Counts every start of every model on rank 0.
    pub instance: u64,
    /// Place among the workers of the model: in its tensor-parallel group, and groups in the order of stages.
    pub tp_rank: u32,
}

/// Both rings of a worker on this node.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct RelayedWorker {
    /// Which.
    pub worker: WorkerId,
    /// Where plans go.
    pub plan_ring: ShmName,
    /// Where its messages come from.
    pub output_ring: ShmName,
}

/// Rank 0 to the agent of a rank.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub enum ToAgent {
    /// Start a worker; the agent fills in the names of its rings.
    Start(WorkerId, Box<WorkerSpec>),
    /// End a worker: SIGUSR1, then SIGKILL.
    Stop(WorkerId),
    /// End a worker at once; it hangs or its group is lost.
    Kill(WorkerId),
    /// Carry messages to and from these workers of one start, all on this rank's node; rank 0's has no need of it.
    Relay(Vec<RelayedWorker>),
    /// A message to every worker of this start on this rank's node, as its rings carry it.
    ToWorkers {
        /// Which start.
        instance: u64,
        /// An encoded [`crate::ToWorker`].
        bytes: Vec<u8>,
    },
    /// Tell where the threads of a worker are: it hangs.
    Stacks(WorkerId),
    /// End the rank.
    Shutdown,
}

/// The agent of a rank to rank 0.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum FromAgent {
    /// The worker runs and its rings exist.
    Started {
        /// Which.
        worker: WorkerId,
        /// Its process.
        pid: u32,
        /// Its rank's process.
        rank_pid: u32,
        /// Where both run.
        node: String,
        /// Where plans go.
        plan_ring: ShmName,
        /// Where its messages come from.
        output_ring: ShmName,
    },
    /// A relayed worker's message.
    Said {
        /// Which.
        worker: WorkerId,
        /// An encoded [`crate::FromWorker`].
        bytes: Vec<u8>,
    },
    /// The worker ended, or could not be started.
    Ended {
        /// Which.
        worker: WorkerId,
        /// Exit code, signal, or what failed.
        reason: String,
        /// It ended of a signal: what it was told to do may go well the next time.
        by_signal: bool,
        /// The last that it wrote to standard error, with its stack if it met a fault.
        last_lines: Vec<String>,
    },
    /// Where the threads of a worker are.
    Stacks {
        /// Which.
        worker: WorkerId,
        /// As the kernel tells it, and as they tell themselves.
        text: String,
    },
    /// A rank has ended or hangs, and the world ends.
    RankLost {
        /// Which, and how that is known.
        reason: String,
    },
}
