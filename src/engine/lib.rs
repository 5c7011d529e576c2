//! Decides which sequences run in each step: requests in, step plans out, token events back.
//!
//! No device, MPI, async runtime, clock, thread, text or protocol lives here: integers in, integers out.
#![forbid(unsafe_code)]

mod ids;
pub mod plan;
mod request;
mod sampling;

pub use ids::{BlockId, RowId, SequenceId, TokenId};
pub use plan::{JoinedRow, PlanError, RowWork, SampledToken, StepOutput, StepPlan};
pub use request::{FinishReason, Request, TokenEvent};
pub use sampling::SamplingParams;
