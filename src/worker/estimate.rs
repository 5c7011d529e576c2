//! Estimates the memory of a worker.

use std::path::Path;

use device::Estimator;
use models::{Config, ModelError, WorkerShape};
use ops::{MemoryEstimate, Target, TensorParallel};

use crate::adapters;

/// The memory of a worker for the model in `checkpoint`. Reads the names and shapes of the weights, not their data.
///
/// # Errors
/// When loading the model would fail: the checkpoint is incomplete, or the device lacks an op of the model.
pub fn estimate_memory(checkpoint: &Path, config: &Config, worker: &WorkerShape) -> Result<MemoryEstimate, ModelError> {
    let estimator = Estimator::new(worker.target, worker.tp, worker.limits).in_stage(worker.stage);
    let mut estimator = estimator.in_precision(worker.precision).with_invariant_rows(worker.batch_invariant);
    let loaded = models::load(checkpoint, config, &mut estimator)?;
    if worker.max_adapters > 0 {
        let checked = adapters::check(&estimator, worker.max_adapters);
        let (num_slots, max_rank) = (worker.max_adapters, worker.max_adapter_rank);
        let checked = checked.and_then(|()| loaded.allocate_adapters(&mut estimator, num_slots, max_rank));
        checked.map_err(|source| ModelError::Device { dir: checkpoint.into(), source })?;
    }
    let estimate = estimator.estimate(&loaded.attention_spec(worker.block_size, worker.limits.max_sequence_len));
    let adapter_bytes = adapters::slot_bytes(&*loaded, &estimator, worker.max_adapters, worker.max_adapter_rank);
    let host_buffer_bytes = match worker.target {
        Target::Cpu => 0,
        Target::Cuda => device::cuda::host_buffer_bytes(
            [estimate.block_bytes, estimate.state_bytes].map(|bytes| bytes as usize),
            worker.host_memory_bytes,
        ) as u64,
    };
    let workspace_bytes = estimate.workspace_bytes + adapter_bytes + host_buffer_bytes;
    Ok(MemoryEstimate { workspace_bytes, host_buffer_bytes, ..estimate })
}

/// The names of tensors of the checkpoint that no worker of the model takes. Reads names and shapes alone.
///
/// # Errors
/// When loading the whole model would fail.
pub(crate) fn unused_tensors(
    checkpoint: &Path,
    config: &Config,
    worker: &WorkerShape,
) -> Result<Vec<String>, ModelError> {
    let whole = TensorParallel { rank: 0, size: 1 };
    let mut estimator = Estimator::new(worker.target, whole, worker.limits);
    let model = models::load(checkpoint, &config.clone().in_expert_groups(1), &mut estimator)?;
    Ok(model.unused_tensors().to_vec())
}
