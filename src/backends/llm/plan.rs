//! Estimates the memory of LLMs without loading them.

use std::sync::{Arc, Mutex};

use engine::{EngineConfig, divide_host_memory, divide_memory};
use futures::FutureExt;
use futures::future::BoxFuture;
use models::{EstimateMemory, ModelError};
use ops::{MemoryEstimate, PipelineStage, TensorParallel};
use serving::{Backend, BackendFactory, InferError, LoadRequest};
use supervision::{DeviceChoice, KvMemory};

use super::config::LlmConfig;
use super::config::LlmDefaults;
use super::host_share::most_of_share;

/// Maximum tensor parallel size that is tried for a model that does not fit.
const MAX_WORKERS: u32 = 1024;

/// The memory of one LLM.
#[derive(Debug, Clone)]
pub struct ModelPlan {
    /// Model name.
    pub name: String,
    /// The device of its workers.
    pub device: DeviceChoice,
    /// The estimate for each worker of a replica, in order of their ranks.
    pub workers: Vec<MemoryEstimate>,
    /// Number of replicas.
    pub num_replicas: usize,
    /// Number of workers of a stage, which share the memory of a CPU.
    pub tp_size: u32,
    /// Limits of its engine. The number of KV blocks follows from the memory.
    pub engine: EngineConfig,
    /// Most bytes of host memory of each worker for what is evicted from its device.
    most_host_bytes: u64,
    /// Whether they are the default.
    pub has_host_share: bool,
    /// Largest size of the file of each worker for what leaves host memory.
    pub disk_bytes: u64,
    kv_memory: KvMemory,
    larger: Vec<(u32, MemoryEstimate)>,
}

impl ModelPlan {
    fn new(config: &LlmConfig, estimate_memory: EstimateMemory) -> Result<Self, ModelError> {
        let target = config.target();
        let model = config.model(target)?;
        let count = config.pp_size;
        let estimate = |index, rank, size| -> Result<MemoryEstimate, ModelError> {
            let (tp, stage) = (TensorParallel { rank, size }, PipelineStage { index, count });
            estimate_memory(&config.checkpoint, &model, &config.worker_shape(target, tp, stage))
        };
        let size = config.tp_size;
        let places = (0..count).flat_map(|stage| (0..size).map(move |rank| (stage, rank)));
        let workers = places.map(|(stage, rank)| estimate(stage, rank, size)).collect::<Result<Vec<_>, _>>()?;
        let sizes =
            std::iter::successors(Some(size * 2), |size| Some(size * 2)).take_while(|&size| size <= MAX_WORKERS);
        // A size that does not divide the model is not advised.
        let first = |size| estimate(0, 0, size).ok().map(|estimate| (size * count, estimate));
        let larger = sizes.map_while(first).collect();
        Ok(Self {
            name: config.name.clone(),
            device: config.worker.device,
            workers,
            num_replicas: config.num_replicas as usize,
            tp_size: config.tp_size,
            engine: config.engine.clone(),
            most_host_bytes: config.worker.kv_host_memory_bytes,
            has_host_share: config.host_share.is_some(),
            disk_bytes: config.kv_disk.bytes,
            kv_memory: config.kv_memory,
            larger,
        })
    }

    /// Number of KV blocks when each worker has `free_bytes` before it loads; 0 if the weights do not fit.
    pub fn num_blocks(&self, free_bytes: u64) -> u64 {
        self.workers.iter().map(|worker| self.divided(worker, free_bytes).0).min().unwrap_or(0)
    }

    /// Number of slots for recurrent states when each worker has `free_bytes` before it loads; 0 if the model has none.
    pub fn num_states(&self, free_bytes: u64) -> u64 {
        let states = |worker: &MemoryEstimate| self.divided(worker, free_bytes).1 as u64;
        self.workers.iter().map(states).min().unwrap_or(0)
    }

    /// Bytes of host memory of each worker for what is evicted, where its device has `free_bytes` before it loads. Those of a share are
    /// what a model has that loads first.
    pub fn host_memory_bytes(&self, free_bytes: u64) -> u64 {
        if !self.has_host_share {
            return self.most_host_bytes;
        }
        if !self.workers.iter().all(|worker| worker.affords_host_buffers(free_bytes)) {
            return 0;
        }
        let (blocks, states) = (self.num_blocks(free_bytes), self.num_states(free_bytes));
        let cache = |worker: &MemoryEstimate| blocks * worker.block_bytes + states * worker.state_bytes;
        most_of_share(self.most_host_bytes, self.workers.iter().map(cache).max().unwrap_or(0))
    }

    /// Numbers of slots in host memory for KV blocks and for recurrent states.
    pub fn host_slots(&self, free_bytes: u64) -> [usize; 2] {
        self.slots(self.host_memory_bytes(free_bytes))
    }

    /// Numbers of slots on disk for KV blocks and for recurrent states.
    pub fn disk_slots(&self) -> [usize; 2] {
        self.slots(self.disk_bytes)
    }

    /// Numbers of slots for both in so many bytes of each worker.
    fn slots(&self, bytes: u64) -> [usize; 2] {
        let of = |worker: &MemoryEstimate| divide_host_memory(bytes, [worker.block_bytes, worker.state_bytes]);
        self.workers.iter().map(of).reduce(|[a, b], [c, d]| [a.min(c), b.min(d)]).unwrap_or_default()
    }

    /// Bytes of host memory of all workers, which are on one node.
    pub fn all_host_memory_bytes(&self, free_bytes: u64) -> u64 {
        self.host_memory_bytes(free_bytes).saturating_mul((self.num_replicas * self.workers.len()) as u64)
    }

    /// Bytes that the worker with the least room lacks for the longest sequence; 0 if it fits.
    pub fn missing_bytes(&self, free_bytes: u64) -> u64 {
        let missing = |worker: &MemoryEstimate| self.needed(worker, free_bytes).saturating_sub(free_bytes);
        self.workers.iter().map(missing).max().unwrap_or(0)
    }

    /// Whether the weights and all else but the KV cache fit where each worker has `free_bytes`.
    pub fn holds_weights(&self, free_bytes: u64) -> bool {
        self.workers.iter().all(|worker| self.fixed_bytes(worker, free_bytes) <= free_bytes)
    }

    /// Whether the workers compute on CPUs, where those of one machine share its memory.
    pub fn is_on_cpus(&self) -> bool {
        matches!(self.device, DeviceChoice::Cpu { .. })
    }

    /// The next larger number of workers with which the longest sequence fits, if any.
    pub fn fitting_world(&self, free_bytes: u64) -> Option<u32> {
        self.larger.iter().find(|(_, worker)| self.needed(worker, free_bytes) <= free_bytes).map(|(size, _)| *size)
    }

    /// Bytes that a worker needs for the longest sequence.
    fn needed(&self, worker: &MemoryEstimate, free_bytes: u64) -> u64 {
        let blocks = self.engine.num_blocks_for(self.engine.max_sequence_len) as u64;
        // States may take half of the memory that they share with KV blocks.
        let (room, sizes) = (2 * blocks * worker.block_bytes, [worker.block_bytes, worker.state_bytes]);
        let states = divide_memory(room, sizes, self.engine.max_rows, Some(blocks)).1;
        let kv = (blocks * worker.block_bytes + states as u64 * worker.state_bytes) as f64 / self.share();
        self.fixed_bytes(worker, free_bytes) + kv.ceil() as u64
    }

    /// Share of the free memory after loading that KV blocks may use.
    fn share(&self) -> f64 {
        let of_device = match self.device {
            DeviceChoice::Cpu { .. } => 0.5 / f64::from(self.tp_size),
            DeviceChoice::Cuda { .. } => 1.0,
        };
        match self.kv_memory {
            KvMemory::FreeFraction(fraction) => fraction * of_device,
            KvMemory::Tokens(_) => of_device,
        }
    }

    /// Bytes in use before the first KV block is allocated. Memory-mapped files count as available.
    fn fixed_bytes(&self, worker: &MemoryEstimate, free_bytes: u64) -> u64 {
        let worker = match self.has_host_share && !worker.affords_host_buffers(free_bytes) {
            true => worker.without_host_buffers(),
            false => *worker,
        };
        worker.fixed_bytes() - worker.mapped_bytes
    }

    /// The numbers of KV blocks and of slots for recurrent states.
    fn divided(&self, worker: &MemoryEstimate, free_bytes: u64) -> (u64, usize) {
        let room = (free_bytes.saturating_sub(self.fixed_bytes(worker, free_bytes)) as f64 * self.share()) as u64;
        let num_groups = self.engine.windows.len() as u64;
        let max_blocks = match self.kv_memory {
            KvMemory::FreeFraction(_) => None,
            KvMemory::Tokens(tokens) => Some(tokens.div_ceil(self.engine.block_size as u64) * num_groups),
        };
        divide_memory(room, [worker.block_bytes, worker.state_bytes], self.engine.max_rows, max_blocks)
    }
}

/// Estimates each LLM that [`super::LlmFactory`] would load.
pub struct PlanFactory {
    defaults: LlmDefaults,
    estimate: EstimateMemory,
    plans: Mutex<Vec<ModelPlan>>,
    failures: Mutex<Vec<String>>,
}

impl PlanFactory {
    /// A factory that estimates models with `defaults`.
    pub fn new(defaults: LlmDefaults, estimate: EstimateMemory) -> Self {
        Self { defaults, estimate, plans: Mutex::default(), failures: Mutex::default() }
    }

    /// The estimates so far.
    pub fn plans(&self) -> Vec<ModelPlan> {
        ipc::lock(&self.plans).clone()
    }

    /// The errors so far, one line each.
    pub fn failures(&self) -> Vec<String> {
        ipc::lock(&self.failures).clone()
    }
}

impl BackendFactory for PlanFactory {
    /// Adds the estimate to [`PlanFactory::plans`]. Always returns an error, because the model is not loaded.
    fn load(&self, load: LoadRequest) -> BoxFuture<'static, Result<Arc<dyn Backend>, InferError>> {
        let planned = LlmConfig::new(&load, &self.defaults).and_then(|config| {
            let name = config.name.clone();
            ModelPlan::new(&config, self.estimate)
                .map_err(|error| InferError::invalid(format!("model `{name}`: {error}")))
        });
        let error = match planned {
            Ok(plan) => {
                let mut plans = ipc::lock(&self.plans);
                plans.retain(|known| known.name != plan.name); // A server may retry a failed load.
                plans.push(plan);
                InferError::unavailable("planned, not loaded")
            }
            Err(error) => {
                let (mut failures, message) = (ipc::lock(&self.failures), error.to_string());
                if !failures.contains(&message) {
                    failures.push(message);
                }
                error
            }
        };
        async move { Err(error) }.boxed()
    }
}
