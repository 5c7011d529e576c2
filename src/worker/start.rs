//! The start of a worker process: from the spec on standard input to the step loop.

use std::io::Read;
use std::path::Path;
use std::sync::Arc;

use device::Exchange;
use device::cpu::{CpuConfig, CpuDevice, GroupConfig, Peers};
use device::cuda::{CudaConfig, CudaDevice};
use ipc::set_process_title;
use models::WorkerShape;
use nix::sys::signal::{SigSet, Signal};
use ops::{PipelineStage, StepLimits, Target, TensorParallel};
use supervision::{DeviceChoice, DeviceDrafter, FromWorker, WorkerSpec};

use crate::error::{SpecError, WorkerError};
use crate::exchange::RankExchange;
use crate::memory;
use crate::network;
use crate::run::{Rings, Worker};

/// Runs a worker process to its end. An error goes to rank 0 and to the caller.
///
/// # Errors
/// When the worker ends for any reason but [`ToWorker::Stop`](supervision::ToWorker::Stop).
pub fn main() -> Result<(), WorkerError> {
    // A terminal or a Slurm step signals all processes, but requests in flight still need this worker: rank 0 ends it.
    let blocked = SigSet::from_iter([Signal::SIGTERM, Signal::SIGINT]);
    blocked.thread_block().expect("these two signals can be blocked");
    // On an error, a fault is reported without a stack.
    let _ = ipc::write_stacks_on_faults();
    let spec = read_spec().map_err(WorkerError::Spec)?;
    // The title only serves `ps`, so an error is ignored.
    let _ = set_process_title(&format!("trireme: worker {} {}", spec.rank, spec.model));
    let rings = Rings::open(&spec)?;
    let result = run(&spec, &rings);
    if let Err(error) = &result {
        // Rank 0 may have ended; then only the exit code reports the error.
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
        check_checkpoint(spec, &spec.checkpoint, print)?;
    }
    let draft_dir = match &spec.drafter {
        Some(DeviceDrafter::Model(dir) | DeviceDrafter::Eagle3(dir)) => Some(dir),
        Some(DeviceDrafter::Mtp) | None => None,
    };
    if let (Some(dir), Some(print)) = (draft_dir, &spec.draft_fingerprint) {
        check_checkpoint(spec, dir, print)?;
    }
    let (precision, target) = (spec.settings.weight_precision, target(spec.settings.device));
    let config = models::Config::from_dir(&spec.checkpoint)?.in_expert_groups(spec.expert_groups);
    let config = config.in_precision(precision, target)?.in_kv_cache(spec.settings.kv_cache_type);
    let config = match &spec.drafter {
        Some(drafter) => config.with_drafter(drafter, precision, target)?,
        None => config,
    };
    let limits = StepLimits {
        max_tokens: spec.max_step_tokens,
        max_rows: spec.max_rows,
        max_sequence_len: spec.max_sequence_len,
        vocab_size: config.vocab_size,
    };
    let stage = PipelineStage { index: spec.stage, count: spec.num_stages };
    let (tp, block_size) = (tensor_parallel(spec), spec.block_size);
    let shape = WorkerShape {
        target,
        tp,
        stage,
        limits,
        block_size,
        max_adapters: spec.max_adapters,
        max_adapter_rank: spec.max_adapter_rank,
        host_memory_bytes: spec.settings.kv_host_memory_bytes,
        precision,
        batch_invariant: spec.settings.batch_invariant,
    };
    match spec.settings.device {
        DeviceChoice::Cpu { threads, first_core } => {
            // 0 is unknown.
            if let free @ 1.. = device::cpu::available_memory() {
                memory::check(spec, &config, &shape, free)?;
            }
            let group = cpu_group(spec, threads)?;
            let device_config = CpuConfig { threads, limits, kv_memory_bytes: None, group };
            let mut device = match spec.spans_nodes() || spec.num_stages > 1 {
                true => CpuDevice::new_distributed(device_config, &peers(spec, rings)?, config.hidden_size)?,
                false => CpuDevice::new(device_config)?,
            };
            if let Some(first) = first_core
                && let Err(error) = device.pin_threads(first)
            {
                eprintln!("{error}"); // Rank 0 logs it; the worker also runs unpinned.
            }
            device.set_weight_precision(precision);
            Worker::load(spec, &config, &shape, device)?.serve(rings)
        }
        DeviceChoice::Cuda { ordinal } => {
            let mut device = CudaDevice::new(cuda_config(spec, ordinal, limits, rings)?)?;
            let free = device.free_bytes()?;
            let estimate = memory::check(spec, &config, &shape, free)?;
            let host_memory_bytes = memory::worthwhile_host_bytes(spec, estimate.as_ref(), free);
            let shape = WorkerShape { host_memory_bytes, ..shape };
            device.set_host_memory_bytes(host_memory_bytes);
            Worker::load(spec, &config, &shape, device)?.serve(rings)
        }
    }
}

fn target(device: DeviceChoice) -> Target {
    match device {
        DeviceChoice::Cpu { .. } => Target::Cpu,
        DeviceChoice::Cuda { .. } => Target::Cuda,
    }
}

/// The rank of this worker in its tensor-parallel group.
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
        timeout: spec.settings.step_timeout,
        spin: threads * spec.num_local_workers <= num_cores,
    }))
}

/// How this worker reaches those on other nodes and in other stages.
fn peers(spec: &WorkerSpec, rings: &Rings) -> Result<Peers, WorkerError> {
    let addresses = match spec.spans_nodes() {
        true => network::addresses(spec.settings.network.as_deref())?,
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
        timeout: spec.settings.step_timeout,
    })
}

/// Compares a checkpoint of this node with the fingerprint of rank 0's.
///
/// # Errors
/// When they differ, or a file cannot be read.
fn check_checkpoint(spec: &WorkerSpec, dir: &Path, expected: &[u8]) -> Result<(), WorkerError> {
    let name = |node: u32| spec.node_names.get(node as usize).cloned().unwrap_or_default();
    let (dir, here) = (dir.to_owned(), name(spec.nodes[spec.index()]));
    let mine = supervision::fingerprint(&dir).map_err(|source| WorkerError::ReadCheckpoint {
        dir: dir.clone(),
        node: here.clone(),
        source,
    })?;
    match supervision::difference(&mine, expected) {
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
        library_dirs: spec.settings.library_dirs.clone(),
        cache_dir: spec.settings.cache_dir.clone(),
        // `report_memory` applies the fraction of the spec.
        kv_memory_fraction: 1.0,
        max_drafts: spec.max_drafts,
        host_memory_bytes: spec.settings.kv_host_memory_bytes,
        batch_invariant: spec.settings.batch_invariant,
        sleep_mode: spec.settings.sleep_mode,
        ..CudaConfig::new(ordinal, limits)
    })
}
