//! A worker process: takes step plans from a ring, keeps rows, runs the model on its device, sends tokens back.
//!
//! - [`main`]: the whole life of the process.
//! - [`Agent`]: a rank's care for its workers. [`Agents`]: rank 0's reach to the agents of all ranks.
//! - [`protocol`](ToWorker): what travels between them.
//!
//! It makes no choice of its own: what to run comes in plans, which it checks against its rows.
#![forbid(unsafe_code)]

mod agent;
mod agents;
mod checkpoint;
mod error;
mod exchange;
mod nccl_check;
mod network;
mod node_relay;
mod protocol;
mod rows;
mod run;
mod said;
mod start;

pub use agent::{Agent, FromAgent, ToAgent, WorkerId};
pub use agents::{Agents, Nodes};
pub use checkpoint::fingerprint;
pub use error::{SpecError, WorkerError};
pub use nccl_check::NcclCheck;
pub use node_relay::RelayedWorker;
pub use protocol::{
    DeviceChoice, FromWorker, KvMemory, LogitsPiece, LogitsPlace, MAX_LOGITS_PIECE, ShmName, ToWorker, WeightPrecision,
    WorkerSpec,
};
pub use rows::{PlanMismatch, RowTable};
pub use start::main;
