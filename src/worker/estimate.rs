//! Estimates the memory of a worker.

use std::path::Path;

use device::Estimator;
use models::{Config, ModelError, WorkerShape};
use ops::MemoryEstimate;

/// The memory of a worker for the model in `checkpoint`. Reads the names and shapes of the weights, not their data.
///
/// # Errors
/// When loading the model would fail: the checkpoint is incomplete, or the device lacks an op of the model.
pub fn estimate_memory(checkpoint: &Path, config: &Config, worker: &WorkerShape) -> Result<MemoryEstimate, ModelError> {
    let estimator = Estimator::new(worker.target, worker.tp, worker.limits).in_stage(worker.stage);
    let mut estimator = estimator.in_precision(worker.precision);
    let loaded = models::load(checkpoint, config, &mut estimator)?;
    Ok(estimator.estimate(&loaded.attention_spec(worker.block_size, worker.limits.max_sequence_len)))
}
