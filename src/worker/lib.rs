//! A worker process: takes step plans from a ring, keeps rows, runs the model on its device, sends tokens back.
//!
//! - [`main`]: the whole life of the process.
//! - [`RowTable`]: the rows of the plans, packed into device inputs.
//!
//! It makes no choice of its own: what to run comes in plans, which it checks against its rows. The protocol and the
//! processes that start it are in the room `supervision`.
#![forbid(unsafe_code)]

mod error;
mod exchange;
mod nccl_check;
mod network;
mod rows;
mod run;
mod start;

pub use error::{SpecError, WorkerError};
pub use nccl_check::NcclCheck;
pub use rows::{PlanMismatch, RowTable};
pub use start::main;
