//! From a spec on standard input to a worker that serves.

use std::io::Read;
use std::sync::Arc;

use device::cpu::{CpuConfig, CpuDevice, GroupConfig, Peers};
use device::cuda::{CudaConfig, CudaDevice, Exchange};
use device::{PipelineStage, StepLimits, TensorParallel};
use ipc::set_process_title;
use nix::sys::signal::{SigSet, Signal};
use supervision::{DeviceChoice, FromWorker, WorkerSpec};

use crate::error::{SpecError, WorkerError};
use crate::exchange::RankExchange;
use crate::network;
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
    let _ = set_process_title(&format!("trireme: worker {} {}", spec.rank, spec.model));
    let rings = Rings::open(&spec)?;
    let result = run(&spec, &rings);
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

fn run(spec: &WorkerSpec, rings: &Rings) -> Result<(), WorkerError> {
    if let Some(print) = &spec.checkpoint_fingerprint {
        check_checkpoint(spec, print)?;
    }
    let config = models::Config::from_dir(&spec.checkpoint)?;
    let limits = StepLimits {
        max_tokens: spec.max_step_tokens,
        max_rows: spec.max_rows,
        max_sequence_len: spec.max_sequence_len,
        vocab_size: config.vocab_size,
    };
    match spec.device {
        DeviceChoice::Cpu { threads, first_core } => {
            let group = cpu_group(spec, threads)?;
            let device_config = CpuConfig { threads, limits, kv_memory_bytes: None, group };
            let mut device = match spec.spans_nodes() || spec.num_stages > 1 {
                true => CpuDevice::among(device_config, &peers(spec, rings)?, config.hidden_size)?,
                false => CpuDevice::new(device_config)?,
            };
            if let Some(first) = first_core
                && let Err(error) = device.pin_threads(first)
            {
                eprintln!("{error}"); // Rank 0 logs it; the worker serves as well.
            }
            device.set_weight_precision(spec.weight_precision);
            Worker::load(spec, &config, device)?.serve(rings)
        }
        DeviceChoice::Cuda { ordinal } => {
            let device = CudaDevice::new(cuda_config(spec, ordinal, limits, rings)?)?;
            Worker::load(spec, &config, device)?.serve(rings)
        }
    }
}

/// This worker's place in its group.
fn tensor_parallel(spec: &WorkerSpec) -> TensorParallel {
    TensorParallel { rank: spec.tp_rank, size: spec.tp_size }
}

fn cpu_group(spec: &WorkerSpec, threads: usize) -> Result<Option<GroupConfig>, WorkerError> {
    if spec.tp_size == 1 {
        return Ok(None);
    }
    let num_cores = std::thread::available_parallelism().map_or(1, usize::from);
    Ok(Some(GroupConfig {
        prefix: spec.group_region.prefix.parse()?,
        name: spec.group_region.name.clone(),
        tensor_parallel: tensor_parallel(spec),
        timeout: spec.collective_timeout,
        spin: threads * spec.num_local_workers <= num_cores,
    }))
}

/// The workers of this model on other nodes and in other stages.
fn peers(spec: &WorkerSpec, rings: &Rings) -> Result<Peers, WorkerError> {
    let addresses = match spec.spans_nodes() {
        true => network::addresses(spec.network.as_deref())?,
        false => Vec::new(),
    };
    Ok(Peers {
        me: spec.index() as u32,
        num_stages: spec.num_stages,
        nodes: spec.nodes.clone(),
        addresses,
        exchange: Arc::new(RankExchange::new(rings, 0..spec.nodes.len())),
        prefix: spec.group_region.prefix.parse()?,
        name: spec.group_region.name.clone(),
        timeout: spec.collective_timeout,
    })
}

/// Errs on the nodes whose checkpoint is not that of rank 0's.
fn check_checkpoint(spec: &WorkerSpec, of_rank_0: &[u8]) -> Result<(), WorkerError> {
    let name = |node: u32| spec.node_names.get(node as usize).cloned().unwrap_or_default();
    let (dir, here) = (spec.checkpoint.clone(), name(spec.nodes[spec.index()]));
    let mine = supervision::fingerprint(&spec.checkpoint).map_err(|source| WorkerError::ReadCheckpoint {
        dir: dir.clone(),
        node: here.clone(),
        source,
    })?;
    match supervision::difference(&mine, of_rank_0) {
        Some(how) => Err(WorkerError::Checkpoint { dir, here, first: name(0), how }),
        None => Ok(()),
    }
}

fn cuda_config(
    spec: &WorkerSpec,
    ordinal: usize,
    limits: StepLimits,
    rings: &Rings,
) -> Result<CudaConfig, WorkerError> {
    let place = tensor_parallel(spec);
    let group = spec.index() - place.rank as usize..spec.index() - place.rank as usize + place.size as usize;
    let stages = (place.rank as usize..spec.nodes.len()).step_by(place.size as usize);
    let exchange = |workers: Vec<usize>| match workers.len() {
        1 => None,
        _ => Some(Arc::new(RankExchange::new(rings, workers)) as Arc<dyn Exchange>),
    };
    Ok(CudaConfig {
        tensor_parallel: place,
        exchange: exchange(group.collect()),
        stage: PipelineStage { index: spec.stage, count: spec.num_stages },
        stage_exchange: exchange(stages.collect()),
        library_dirs: spec.library_dirs.clone(),
        cache_dir: spec.cache_dir.clone(),
        // The share is taken of what the worker reports.
        kv_memory_fraction: 1.0,
        max_drafts: spec.max_drafts,
        ..CudaConfig::new(ordinal, limits)
    })
}
