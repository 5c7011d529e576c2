//! Messages between rank 0 and the agents of all ranks.

use engine::DiskCopy;
use serde::{Deserialize, Serialize};

use crate::disk::{DiskEvent, DiskLayout};
use crate::protocol::{ShmName, WorkerSpec};

/// Identifies one worker of one start of a model. A restart has a new `instance`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct WorkerId {
    /// Rank 0 counts every start of every model.
    pub instance: u64,
    /// Index among the workers of the model: tensor-parallel groups in the order of their stages.
    pub tp_rank: u32,
}

/// A worker whose messages are relayed, and its rings.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct RelayedWorker {
    /// The worker.
    pub worker: WorkerId,
    /// Ring of the plans.
    pub plan_ring: ShmName,
    /// Ring of the worker's messages.
    pub output_ring: ShmName,
}

/// Rank 0 to the agent of a rank.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub enum ToAgent {
    /// Start a worker. The agent sets the names of its rings in the spec.
    Start(WorkerId, Box<WorkerSpec>),
    /// End a worker: SIGUSR1, and SIGKILL after a grace period.
    Stop(WorkerId),
    /// End a worker at once: it hangs, or its group is lost. Its rings are removed.
    Kill(WorkerId),
    /// Carry messages to and from these workers of one start, all on this rank's node. Not used on the node of rank 0.
    Relay(Vec<RelayedWorker>),
    /// A message to every worker of this start on this rank's node, encoded as in the rings.
    ToWorkers {
        /// The start.
        instance: u64,
        /// An encoded [`crate::ToWorker`].
        bytes: Vec<u8>,
    },
    /// Report the stacks of a worker, which hangs.
    Stacks(WorkerId),
    /// Create the file below host memory that is passed to a worker. [`DiskEvent::Opened`] or [`DiskEvent::Failed`] answers.
    OpenDisk {
        /// [`PassedMemory::id`](crate::PassedMemory::id) of the memory.
        id: u64,
        /// The slots of both.
        layout: DiskLayout,
    },
    /// Copy slots between host memory and its file, in this order. [`DiskEvent::Copied`] answers each.
    CopyDisk {
        /// [`PassedMemory::id`](crate::PassedMemory::id) of the memory.
        id: u64,
        /// The copies.
        copies: Vec<DiskCopy>,
    },
    /// Free host memory that was passed to workers, and its file. A worker that runs keeps the memory until its end.
    FreeHostMemory {
        /// [`PassedMemory::id`](crate::PassedMemory::id).
        id: u64,
    },
    /// A rank is lost, and the world goes on without it.
    RankLost(u32),
    /// End the rank.
    Shutdown,
}

/// The agent of a rank to rank 0.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum FromAgent {
    /// The worker process runs and its rings exist.
    Started {
        /// The worker.
        worker: WorkerId,
        /// Process id of the worker.
        pid: u32,
        /// Process id of its rank.
        rank_pid: u32,
        /// Host name of their node.
        node: String,
        /// Ring of the plans.
        plan_ring: ShmName,
        /// Ring of the worker's messages.
        output_ring: ShmName,
    },
    /// A message of a worker on another node.
    Relayed {
        /// The worker.
        worker: WorkerId,
        /// An encoded [`crate::FromWorker`].
        bytes: Vec<u8>,
    },
    /// The worker ended, or could not be started.
    Ended {
        /// The worker.
        worker: WorkerId,
        /// Exit code or signal, or why it could not be started.
        reason: String,
        /// Whether a signal ended it. If so, the same work may succeed next time.
        by_signal: bool,
        /// The last lines of its standard error, with its stack after a fault.
        last_lines: Vec<String>,
    },
    /// The stacks of a worker's threads.
    Stacks {
        /// The worker.
        worker: WorkerId,
        /// States as the kernel reports them, and stacks as the threads wrote them.
        text: String,
    },
    /// Something about the file below host memory.
    Disk {
        /// [`PassedMemory::id`](crate::PassedMemory::id) of the memory.
        id: u64,
        /// What.
        event: DiskEvent,
    },
    /// A rank has ended or hangs. The world goes on with the replicas that have workers on other ranks only.
    ReplicaLost {
        /// The rank.
        rank: u32,
        /// The rank, and how the loss was detected.
        reason: String,
    },
    /// A rank has ended or hangs. The world ends.
    RankLost {
        /// The rank, and how the loss was detected.
        reason: String,
    },
    /// What a worker does has changed. It begins with [`Activity::Runs`].
    Activity {
        /// The worker.
        worker: WorkerId,
        /// What it does now.
        activity: Activity,
    },
}

/// What the process of a worker does.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum Activity {
    /// It uses a processor, or did so a moment ago.
    Runs,
    /// It has used no processor for some seconds: it has no work, or waits for others.
    Waits,
    /// It is stopped, by SIGSTOP or a debugger.
    Stopped,
}
