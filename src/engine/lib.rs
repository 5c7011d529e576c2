//! The scheduler: decides which sequences run in each step. It takes requests and returns step plans and token events.
//!
//! This crate contains no device, MPI, async runtime, clock, thread, text or protocol. Its inputs and outputs are
//! integers, and the durations of finished steps, from which it learns how long steps take.
//!
//! - [`Engine`] owns the queue, the sequences, the KV blocks and the prefix cache of one model. It is a state machine:
//!   the caller sends its plans to the workers and passes their outputs back.
//! - [`StepPlan`] is what rank 0 sends to every worker, [`StepOutput`] is what the workers return.
//! - [`Request`] is the input, [`TokenEvent`]s are the output. The last event of a sequence has a [`FinishReason`].
//!
//! ```
//! use engine::{Engine, EngineConfig, FinishReason, Request, SampledToken, StepOutput, TokenId};
//!
//! let mut engine = Engine::new(EngineConfig::default())?;
//! let request = Request {
//!     prompt: vec![TokenId(1), TokenId(2), TokenId(3)],
//!     max_tokens: 2,
//!     ..Request::default()
//! };
//! let sequence = engine.submit(request)?;
//!
//! let mut events = Vec::new();
//! while !engine.is_idle() {
//!     let mut in_flight = Vec::new();
//!     while let Some(plan) = engine.plan() {
//!         in_flight.push(plan); // Sent to every worker; two at a time.
//!     }
//!     for plan in in_flight {
//!         // A device that always chooses token 7.
//!         let sampled = |row| SampledToken { row, token: TokenId(7), logprob: None, top: vec![] };
//!         let tokens = plan.work.iter().filter(|work| work.samples).map(|work| sampled(work.row)).collect();
//!         engine.settle(StepOutput { step: plan.step, tokens, guesses: vec![] }, &mut events)?;
//!     }
//! }
//! assert_eq!(events.iter().flat_map(|event| &event.tokens).count(), 2);
//! assert_eq!(events.last().unwrap().sequence, sequence);
//! assert_eq!(events.last().unwrap().finished, Some(FinishReason::Length));
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
#![forbid(unsafe_code)]

mod adapter;
mod beams;
mod blocks;
mod config;
mod constraint;
mod content;
mod costs;
mod disk;
mod draft;
mod engine;
mod guided;
mod host;
mod ids;
mod masks;
mod moving;
pub mod plan;
mod plan_builder;
mod plan_bytes;
mod prefix;
mod queue;
mod request;
mod rows;
mod sampling;
mod schedule;
mod schedule_beams;
mod schedule_drafts;
mod sequence;
mod sequences;
mod settle;
mod slot;
mod snapshots;
mod states;
mod stats;
mod step_size;
mod stop;
mod tables;
mod tiers;
mod usefulness;
mod weigh_drafts;
mod windows;

pub use adapter::{Adapter, AdapterId, AdapterSlot, FilledSlot};
pub use config::{ConfigError, DEFAULT_DECODE_FACTOR, DEFAULT_INTER_TOKEN, EngineConfig, Policy};
pub use constraint::{Constraint, RequestConstraint, SampleMask};
pub use costs::{StepCosts, StepLoad};
pub use disk::{DiskCopy, DiskDirection, SlotKind};
pub use draft::{Drafter, ForcedAcceptance, PromptLookup};
pub use engine::Engine;
pub use ids::{BlockId, DiskSlot, HostSlot, RowId, SequenceId, StateId, TokenId};
pub use masks::MaskJob;
pub use moving::MovedSequence;
pub use plan::{
    CopiedBlock, CopiedState, GrownTable, HostCopies, JoinedRow, JoinedTable, PlanError, RestoredRow, RevisedRow,
    RowWork, STORES_COMPLETE_AFTER, SampledToken, SavedState, StepOutput, StepPlan,
};
pub use request::{BeamOutput, BeamParams, BlockUsage, DraftUsage, FinishReason, Refused, Request, TokenEvent};
pub use sampling::{MAX_BEAM_CANDIDATES, MAX_LOGPROBS, SamplingParams};
pub use settle::SettleError;
pub use states::{divide_host_memory, divide_memory, state_interval};
pub use stats::{EngineStats, Holding, Ledger};
