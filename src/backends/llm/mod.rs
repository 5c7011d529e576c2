//! The LLM engine as a backend: tensors to engine requests, token events back to tensors.
//!
//! A model has one or more replicas behind one queue. Each has a step thread on rank 0, and a worker process per rank that
//! it is spread over.

mod check;
mod check_request;
mod config;
mod dispatcher;
mod event_queue;
mod event_source;
mod factory;
mod figures;
#[cfg(feature = "fuzzing")]
pub(crate) mod fuzz;
mod generate;
mod generate_stream;
mod group;
mod inbox;
mod inputs;
mod ledger;
mod llm_stream;
mod logits;
mod masks;
mod model;
mod outputs;
mod pending;
mod plan;
mod prefixes;
mod prompt_logprobs;
mod queue_rules;
mod refusal;
mod replica_state;
mod replicas;
mod request_event;
mod router;
mod step_thread;
mod text_stop;
mod texts;
mod timing;

pub use check::{CheckFactory, Sound};
pub use config::LlmDefaults;
pub use factory::{LlmFactory, LlmStatus};
pub use figures::{ENDS, FigureValues, STEP_KINDS, STEP_PHASES, Start, WorkerFigures};
pub use ledger::LlmLedger;
pub use plan::{ModelPlan, PlanFactory};
