//! The LLM engine as a backend.
//!
//! A model has one or more replicas, which share one queue. Each replica has a step thread on rank 0, and a worker process on each of
//! its ranks. Requests arrive as tensors (`inputs`, `outputs`) or as `GenerateRequest`s.

mod active_request;
mod adapter_settings;
mod adapters;
mod check;
mod check_request;
mod config;
mod dispatcher;
mod event_queue;
mod event_source;
mod factory;
#[cfg(feature = "fuzzing")]
pub(crate) mod fuzz;
mod generate_stream;
mod host_share;
mod inbox;
pub(crate) mod inputs;
mod inter_token;
mod ledger;
mod llm_stream;
mod logits;
mod masks;
mod metrics;
mod model;
mod outputs;
mod plan;
mod prompt_logprobs;
mod queue_policy;
mod refusal;
mod replica_state;
mod replicas;
mod request_event;
mod responsiveness;
mod router;
mod sent_prefixes;
mod sleeper;
mod step_log;
mod step_thread;
mod submission;
mod text_stop;
mod timing;
mod turns;
mod weights;
mod worker_group;

pub use adapters::AdapterStatus;
pub use check::{CheckFactory, CheckedModel};
pub use config::{KvDisk, LlmDefaults};
pub use factory::{LlmFactory, LlmStatus};
pub use host_share::HostShare;
pub use ledger::LlmLedger;
pub use metrics::{
    FINISH_REASONS, MetricValues, PRIORITY_LEVELS, STEP_COSTS, STEP_KINDS, STEP_PHASES, Start, WorkerStatus,
};
pub use plan::{ModelPlan, PlanFactory};
