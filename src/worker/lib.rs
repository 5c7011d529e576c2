//! A worker process: receives step plans through a ring, keeps rows, runs the model on its device, sends tokens back.
//!
//! - [`main`]: runs the process from its start to its end.
//! - [`estimate_memory`]: the memory that a worker will need.
//! - [`RowTable`]: the rows of the plans, packed into device inputs.
//!
//! A worker decides nothing: it executes plans, after it has checked them against its rows. The protocol and the supervisor that
//! starts workers are in the room `supervision`.
#![forbid(unsafe_code)]

mod adapters;
mod error;
mod estimate;
mod exchange;
mod memory;
mod nccl_check;
mod network;
mod rows;
mod run;
mod sleep;
mod start;

pub use error::{PlanMismatch, SpecError, WorkerError};
pub use estimate::estimate_memory;
pub use nccl_check::NcclCheck;
pub use rows::RowTable;
pub use start::main;
