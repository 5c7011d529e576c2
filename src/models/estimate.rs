//! The memory of a worker, before it loads a model.

use std::path::Path;

use ops::{MemoryEstimate, PipelineStage, StepLimits, Target, TensorParallel};
use settings::WeightPrecision;

use crate::{Config, ModelError};

/// The worker to estimate.
#[derive(Debug, Clone, Copy)]
pub struct WorkerShape {
    /// The kind of device that it computes on.
    pub target: Target,
    /// Its rank in its tensor-parallel group.
    pub tp: TensorParallel,
    /// Its stage in the pipeline.
    pub stage: PipelineStage,
    /// Limits of every step.
    pub limits: StepLimits,
    /// Positions in a KV block.
    pub block_size: usize,
    /// Slots for the weights of adapters; 0 if the model takes none.
    pub max_adapters: usize,
    /// Largest rank of an adapter.
    pub max_adapter_rank: usize,
    /// Bytes of host memory for what is evicted from the KV cache.
    pub host_memory_bytes: u64,
    /// Precision of the weights of linear layers. The configuration of the model has it, too ([`Config::in_precision`]).
    pub precision: WeightPrecision,
    /// Whether a row's results must not depend on other rows.
    pub batch_invariant: bool,
}

/// Estimates the memory of a worker from the names and shapes of the weights in a checkpoint. It does not read their
/// data, and fails where loading would fail.
///
/// `worker::estimate_memory` is the implementation. A function of this type is passed to crates that link no device.
pub type EstimateMemory = fn(&Path, &Config, &WorkerShape) -> Result<MemoryEstimate, ModelError>;
