//! From a spec on standard input to a worker that serves.

use std::io::Read;
use std::sync::Arc;

use device::cpu::{CpuConfig, CpuDevice, GroupConfig};
use device::cuda::{CudaConfig, CudaDevice, Exchange};
use device::{DeviceError, StepLimits};
use ipc::set_process_title;
use nix::sys::signal::{SigSet, Signal};

use crate::error::{SpecError, WorkerError};
use crate::exchange::ShmExchange;
use crate::protocol::{DeviceChoice, FromWorker, WorkerSpec};
use crate::run::{Rings, Worker};

/// The whole life of a worker process. Its last words, if it fails, go to rank 0 and to the caller.
///
/// # Errors
/// Whatever ends it but being told to stop.
pub fn main() -> Result<(), WorkerError> {
    // Meant for rank 0 when they come to a whole terminal or Slurm step: requests in flight still need this worker.
    let for_rank_0 = SigSet::from_iter([Signal::SIGTERM, Signal::SIGINT]);
    for_rank_0.thread_block().expect("these two signals can be blocked");
    // Without them a fault only lacks its stack.
    let _ = ipc::write_stacks_on_faults();
    let spec = read_spec().map_err(WorkerError::Spec)?;
    // The title only helps `ps`; a worker serves without it.
    let _ = set_process_title(&format!("trireme: worker {} {}", spec.tp_rank, spec.model));
    let mut rings = Rings::open(&spec)?;
    let result = run(&spec, &mut rings);
    if let Err(error) = &result {
        // Rank 0 may be gone; then the exit code has to do.
        let _ = rings.send(&FromWorker::Failed { message: error.to_string() });
    }
    result
}

fn read_spec() -> Result<WorkerSpec, SpecError> {
    let mut json = Vec::new();
    std::io::stdin().read_to_end(&mut json)?;
    Ok(serde_json::from_slice(&json)?)
}

fn run(spec: &WorkerSpec, rings: &mut Rings) -> Result<(), WorkerError> {
    let config = models::Config::from_dir(&spec.checkpoint)?;
    let limits = StepLimits {
        max_tokens: spec.max_step_tokens,
        max_rows: spec.max_rows,
        max_sequence_len: spec.max_sequence_len,
        vocab_size: config.vocab_size,
    };
    match spec.device {
        DeviceChoice::Cpu { threads } => {
            let group = cpu_group(spec, threads)?;
            let device = CpuDevice::new(CpuConfig { threads, limits, kv_memory_bytes: None, group })?;
            Worker::load(spec, &config, device)?.serve(rings)
        }
        DeviceChoice::Cuda { ordinal } => {
            let device = CudaDevice::new(cuda_config(spec, ordinal, limits)?)?;
            Worker::load(spec, &config, device)?.serve(rings)
        }
    }
}

fn cpu_group(spec: &WorkerSpec, threads: usize) -> Result<Option<GroupConfig>, WorkerError> {
    if spec.tp_size == 1 {
        return Ok(None);
    }
    let num_cores = std::thread::available_parallelism().map_or(1, usize::from);
    Ok(Some(GroupConfig {
        prefix: spec.group_region.prefix.parse()?,
        name: spec.group_region.name.clone(),
        tensor_parallel: spec.tensor_parallel(),
        timeout: spec.collective_timeout,
        spin: threads * spec.tp_size as usize <= num_cores,
    }))
}

fn cuda_config(spec: &WorkerSpec, ordinal: usize, limits: StepLimits) -> Result<CudaConfig, WorkerError> {
    let place = spec.tensor_parallel();
    let exchange: Option<Arc<dyn Exchange>> = match place.size {
        1 => None,
        _ => Some(Arc::new(ShmExchange::open(&spec.group_region, place, spec.collective_timeout)?)),
    };
    let trials = std::env::var("TRIREME_CUDA_TRIALS").unwrap_or_default();
    let trials = trials.parse().map_err(|reason| DeviceError::Unsupported {
        what: "TRIREME_CUDA_TRIALS".to_owned(),
        found: format!("`{trials}`"),
        expected: reason,
    })?;
    Ok(CudaConfig {
        tensor_parallel: place,
        exchange,
        library_dirs: spec.library_dirs.clone(),
        cache_dir: spec.cache_dir.clone(),
        trials,
        ..CudaConfig::new(ordinal, limits)
    })
}
