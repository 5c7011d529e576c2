//! Supervision of worker processes, on the side of the ranks.
//!
//! - [`WorkerSupervisor`]: spawns, watches and kills the worker processes of one rank. It is the rank's *agent*.
//! - [`Agents`]: on rank 0, sends messages to the agents of all ranks and delivers theirs.
//! - [`ToWorker`], [`FromWorker`], [`WorkerSpec`]: the protocol between rank 0 and a worker process.
//!
//! The worker process itself is the room `worker`. This room links no device and no model.
#![forbid(unsafe_code)]

mod activity;
mod agents;
mod checkpoint;
mod disk;
mod messages;
mod node_relay;
mod protocol;
mod stderr_log;
mod supervisor;

pub use agents::{Agents, HostMemoryLease, Nodes};
pub use checkpoint::{difference, fingerprint};
pub use disk::{DiskEvent, DiskLayout};
pub use messages::{Activity, FromAgent, RelayedWorker, ToAgent, WorkerId};
pub use protocol::{
    AdapterPiece, DeviceChoice, DeviceDrafter, FromWorker, KvCacheType, KvMemory, LogitsPiece, LogitsPlace,
    MAX_ADAPTER_PIECE, MAX_LOGITS_PIECE, MAX_MASK_WORDS, PassedMemory, ShmName, ToWorker, WeightPrecision,
    WorkerSettings, WorkerSpec,
};
pub use supervisor::WorkerSupervisor;
