//! The configuration of an LLM, from `config.pbtxt` and the checkpoint.

use std::ops::Range;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::Duration;

use engine::{EngineConfig, TokenId};
use generation::SamplingDefaults;
use models::WorkerShape;
use ops::{PipelineStage, StepLimits, Target, TensorParallel};
use repository::ModelConfig;
use serving::{DataType, InferError, Limits, LoadRequest};
use supervision::{DeviceChoice, DeviceDrafter, KvMemory, WorkerSettings};

use super::adapter_settings::AdapterSettings;
use super::host_share::HostShare;
use super::queue_policy::QueuePolicy;
use crate::{checkpoint, parameters};

mod disk;
mod drafts;
mod engine_config;
mod host_memory;
mod invariant;
mod parallelism;
mod tiers;
mod types;

pub use disk::KvDisk;
use drafts::Drafts;
use engine_config::engine_config;
use host_memory::host_memory;
use invariant::with_whole_prompts;
use parallelism::{Parallelism, check_shares};
use types::{kv_cache_type, logits_type, weight_precision};

/// Defaults of all LLMs of this world.
#[derive(Debug, Clone)]
pub struct LlmDefaults {
    /// Settings of each worker. A model's `weight_only_precision` replaces that of the weights, its `kv_cache_dtype` that of the cache,
    /// its `kv_cache_host_memory_bytes` the host memory.
    pub worker: WorkerSettings,
    /// Host memory of models without the parameter `kv_cache_host_memory_bytes`; `None`: such models have the size in the settings.
    pub host_share: Option<Arc<HostShare>>,
    /// Files of workers for KV blocks that leave host memory. A model's `kv_cache_disk_bytes` replaces the size.
    pub kv_disk: KvDisk,
    /// Ranks of the world, each with one worker per model.
    pub world_size: u32,
    /// Most ranks on one node.
    pub ranks_per_node: u32,
    /// Positions in a KV block.
    pub block_size: usize,
    /// Default share of free memory for KV blocks.
    pub kv_free_fraction: f64,
    /// Default maximum number of tokens in a step.
    pub max_step_tokens: usize,
    /// Default bound of the time between two tokens of a stream; `None` for the engine's.
    pub max_inter_token: Option<Duration>,
    /// Where checkpoints may be that replace the weights of a model while it is served; `None`: nowhere.
    pub weight_updates_dir: Option<PathBuf>,
    /// If set, models share the devices and take turns on them: the longest one while another model has requests. The workers' settings
    /// have `sleep_mode` then.
    pub longest_turn: Option<Duration>,
    /// For benchmarks alone: drafts are accepted so that a step gives this number of tokens of a sequence on average, whatever the
    /// model says of them. The output is wrong then.
    pub forced_tokens_per_step: Option<f64>,
}

/// The configuration of one LLM.
#[derive(Debug, Clone)]
pub(crate) struct LlmConfig {
    pub(crate) name: String,
    pub(crate) checkpoint: PathBuf,
    /// Fingerprint of the checkpoint, which workers on other nodes compare with theirs. `None` on a single node.
    pub(crate) checkpoint_fingerprint: Option<Vec<u8>>,
    /// What guesses drafts on the devices; rank 0 guesses the others.
    pub(crate) drafter: Option<DeviceDrafter>,
    /// The same fingerprint of the draft model's checkpoint, if there is one.
    pub(crate) draft_fingerprint: Option<Vec<u8>>,
    /// Settings of each worker.
    pub(crate) worker: WorkerSettings,
    /// The files of its workers for KV blocks that leave host memory.
    /// The shares from which workers take host memory, if its size is the default.
    pub(crate) host_share: Option<Arc<HostShare>>,
    pub(crate) kv_disk: KvDisk,
    /// Where checkpoints may be that replace the weights; `None`: nowhere.
    pub(crate) weight_updates_dir: Option<PathBuf>,
    /// Whether the model takes turns with others on the devices. It sleeps by itself then, and not by request.
    pub(crate) takes_turns: bool,
    /// Workers of a stage.
    pub(crate) tp_size: u32,
    /// Pipeline stages.
    pub(crate) pp_size: u32,
    /// Parts of a tensor-parallel group that have different experts.
    pub(crate) ep_size: u32,
    /// Copies of the model, each on `tp_size` x `pp_size` ranks of its own, from rank 0 on.
    pub(crate) num_replicas: u32,
    pub(crate) kv_memory: KvMemory,
    /// `num_blocks` is set when the workers have reported how many fit.
    pub(crate) engine: EngineConfig,
    /// Adapters (LoRA).
    pub(crate) adapters: AdapterSettings,
    /// Priorities, timeouts and bounds of queued requests.
    pub(crate) queue: QueuePolicy,
    /// Limits of one request.
    pub(crate) limits: Limits,
    /// Whether a request may have more than one response.
    pub(crate) decoupled: bool,
    /// Default of `exclude_input_in_output`.
    pub(crate) exclude_input: bool,
    /// Outputs declared in `config.pbtxt`.
    pub(crate) outputs: Vec<String>,
    /// Whether outputs of log-probabilities and logits that were not requested are sent as zeros.
    pub(crate) has_placeholders: bool,
    /// The type in which logits are returned: FP32, FP16 or BF16.
    pub(crate) logits_type: DataType,
    pub(crate) vocab_size: usize,
    /// Whether prompts with ids outside of the vocabulary are refused.
    pub(crate) check_input_ids: bool,
    /// Whether the warning about ids outside of the vocabulary was logged.
    pub(crate) has_wrapped_ids: Arc<AtomicBool>,
    /// Whether the warning about a temperature without effect was logged.
    pub(crate) has_warned_of_greedy: Arc<AtomicBool>,
    /// Default of `end_id`.
    pub(crate) end_ids: Vec<TokenId>,
    /// The checkpoint's `generation_config.json`. Requests as tensors do not use it.
    pub(crate) sampling_defaults: SamplingDefaults,
}

impl LlmConfig {
    pub(crate) fn new(load: &LoadRequest, defaults: &LlmDefaults) -> Result<Self, InferError> {
        let (config, replaced) = (&load.config, load.replaced.as_deref());
        let checkpoint = checkpoint::find(config, &load.model_dir, &load.version_dir);
        let checkpoint = checkpoint.map_err(|message| invalid(config, message))?;
        let weight_precision = weight_precision(config, defaults)?;
        let kv_cache_type = kv_cache_type(config, defaults)?;
        let wrong = |error: models::ModelError| invalid(config, error.to_string());
        let model = models::Config::from_dir(&checkpoint).map_err(wrong)?;
        let model = model.in_precision(weight_precision, target(defaults.worker.device)).map_err(wrong)?;
        let model = model.in_kv_cache(kv_cache_type);
        let drafts = Drafts::new(config, &model)?;
        let drafter = drafts.drafter(load, &checkpoint, model.vocab_size)?;
        let forced_acceptance = drafts.forced_acceptance(config, defaults)?;
        let model = match &drafter {
            Some(drafter) => {
                model.with_drafter(drafter, weight_precision, target(defaults.worker.device)).map_err(wrong)?
            }
            None => model,
        };
        for note in &model.notes {
            tracing::info!(model = %config.name, "{note}");
        }
        let sampling_defaults = SamplingDefaults::from_dir(&checkpoint);
        log_sampling_defaults(&config.name, &sampling_defaults);
        let queue = QueuePolicy::new(config);
        let parallelism = Parallelism::new(config, &model, defaults)?;
        let batch_invariant = parameters::flag(config, "batch_invariant")?.unwrap_or(defaults.worker.batch_invariant);
        let Parallelism { tp_size, pp_size, ep_size, num_replicas } = parallelism;
        let model = model.in_expert_groups(ep_size);
        check_shares(config, &model, tp_size)?;
        let adapters = AdapterSettings::new(config, &load.model_dir)?;
        let engine = engine_config(config, &model, defaults, &queue, drafts)?;
        let host_memory = host_memory(config, replaced, engine.prefix_cache, defaults)?;
        let kv_disk = KvDisk::new(config, replaced, engine.prefix_cache, host_memory.bytes, defaults)?;
        let engine = EngineConfig {
            max_adapters: adapters.num_slots,
            // How many follows from the size of a block.
            num_host_blocks: usize::from(host_memory.bytes > 0),
            forced_acceptance,
            ..engine
        };
        let groups_per_node = defaults.ranks_per_node.div_ceil(tp_size * pp_size).min(num_replicas);
        let stages = pp_size as usize;
        // One step is planned while each stage runs another.
        let max_in_flight = engine.max_in_flight.max(stages + 1);
        // Decode kernels give generated tokens other bits than a prompt with the same tokens has.
        let shares_output = !(batch_invariant && target(defaults.worker.device) == Target::Cuda);
        let engine = EngineConfig { num_stages: stages, max_in_flight, shares_output, ..engine };
        let engine = if shares_output { engine } else { with_whole_prompts(config, &model, engine)? };
        Ok(Self {
            name: config.name.clone(),
            sampling_defaults,
            checkpoint,
            checkpoint_fingerprint: None,
            drafter,
            draft_fingerprint: None,
            worker: WorkerSettings {
                weight_precision,
                batch_invariant,
                kv_cache_type,
                kv_host_memory_bytes: host_memory.bytes,
                kv_host_memory_is_share: host_memory.share.is_some(),
                ..defaults.worker.clone()
            },
            host_share: host_memory.share,
            kv_disk,
            weight_updates_dir: defaults.weight_updates_dir.clone(),
            takes_turns: defaults.longest_turn.is_some(),
            tp_size,
            pp_size,
            ep_size,
            num_replicas,
            kv_memory: kv_memory(config, defaults, groups_per_node)?,
            engine,
            adapters,
            queue,
            limits: load.limits,
            decoupled: config.model_transaction_policy.as_ref().is_some_and(|policy| policy.decoupled),
            exclude_input: parameters::flag(config, "exclude_input_in_output")?.unwrap_or(false),
            outputs: config.output.iter().map(|output| output.name.clone()).collect(),
            has_placeholders: has_placeholders(config),
            logits_type: logits_type(config)?,
            vocab_size: model.vocab_size,
            check_input_ids: parameters::flag(config, "check_input_ids")?.unwrap_or(false),
            has_wrapped_ids: Arc::default(),
            has_warned_of_greedy: Arc::default(),
            end_ids: model.eos_ids.iter().copied().map(TokenId).collect(),
        })
    }

    /// The shape of a worker, to estimate its memory.
    pub(crate) fn worker_shape(&self, target: Target, tp: TensorParallel, stage: PipelineStage) -> WorkerShape {
        let limits = StepLimits {
            max_tokens: self.max_device_tokens(),
            max_rows: self.engine.max_rows,
            max_sequence_len: self.engine.max_sequence_len,
            vocab_size: self.vocab_size,
        };
        let (block_size, precision) = (self.engine.block_size, self.worker.weight_precision);
        let (max_adapters, max_adapter_rank) = (self.adapters.num_slots, self.adapters.max_rank);
        let host_memory_bytes = self.worker.kv_host_memory_bytes;
        WorkerShape {
            target,
            tp,
            stage,
            limits,
            block_size,
            max_adapters,
            max_adapter_rank,
            host_memory_bytes,
            precision,
            batch_invariant: self.worker.batch_invariant,
        }
    }

    /// The kind of device of the workers.
    pub(crate) fn target(&self) -> Target {
        target(self.worker.device)
    }

    /// The model as workers on a device of this kind load it.
    pub(crate) fn model(&self, target: Target) -> Result<models::Config, models::ModelError> {
        let model = models::Config::from_dir(&self.checkpoint)?.in_expert_groups(self.ep_size);
        let model = model.in_precision(self.worker.weight_precision, target)?.in_kv_cache(self.worker.kv_cache_type);
        match &self.drafter {
            Some(drafter) => model.with_drafter(drafter, self.worker.weight_precision, target),
            None => Ok(model),
        }
    }

    /// Tokens that a pass of a step may have on a device. A draft model computes the new token of each row, too.
    pub(crate) fn max_device_tokens(&self) -> usize {
        let num_new = if matches!(self.drafter, Some(DeviceDrafter::Model(_))) { self.engine.max_rows } else { 0 };
        self.engine.max_step_tokens + num_new
    }

    /// The configuration of a replica, whose workers may use what others have left of the shares of their ranks.
    pub(crate) fn of_replica(&self, replica: u32) -> Self {
        let mut own = self.clone();
        if let Some(share) = &self.host_share {
            own.worker.kv_host_memory_bytes = share.left(self.ranks(replica));
        }
        own
    }

    /// The ranks of a replica, each with one of its workers.
    pub(crate) fn ranks(&self, replica: u32) -> Range<u32> {
        self.first_rank(replica)..self.first_rank(replica + 1)
    }

    /// Number of workers of one replica.
    pub(crate) fn group_size(&self) -> u32 {
        self.tp_size * self.pp_size
    }

    /// The rank of the first worker of `replica`; the others follow.
    pub(crate) fn first_rank(&self, replica: u32) -> u32 {
        replica * self.group_size()
    }
}

fn target(device: DeviceChoice) -> Target {
    match device {
        DeviceChoice::Cpu { .. } => Target::Cpu,
        DeviceChoice::Cuda { .. } => Target::Cuda,
    }
}

/// Says which settings requests to OpenAI's and Anthropic's endpoints have by default.
fn log_sampling_defaults(model: &str, defaults: &SamplingDefaults) {
    match defaults.listed() {
        none if none.is_empty() => {
            tracing::info!(model, "generation_config.json has no sampling defaults: OpenAI's apply")
        }
        listed => tracing::info!(
            model,
            "sampling defaults of generation_config.json for /v1, unless --generation-config=none: {listed}"
        ),
    }
}

/// TensorRT-LLM's backend sends such outputs up to release 0.13, the last one without `num_return_sequences`, and clients of
/// those releases expect them.
fn has_placeholders(config: &ModelConfig) -> bool {
    config.backend == "tensorrtllm" && config.input.iter().all(|input| input.name != "num_return_sequences")
}

/// Memory for KV blocks. On a CPU, the replicas of a node share it.
fn kv_memory(config: &ModelConfig, defaults: &LlmDefaults, groups_per_node: u32) -> Result<KvMemory, InferError> {
    if let Some(tokens) = parameters::number(config, "max_tokens_in_paged_kv_cache")? {
        return Ok(KvMemory::Tokens(tokens));
    }
    // TensorRT-LLM's and TurboMind's names for the same share.
    let mut fraction = defaults.kv_free_fraction;
    for key in ["kv_cache_free_gpu_mem_fraction", "cache_max_entry_count"] {
        if let Some(value) = parameters::number::<f64>(config, key)? {
            if !(value > 0.0 && value <= 1.0) {
                return Err(invalid(config, format!("`{key}` is {value}, expected a share in (0, 1]")));
            }
            fraction = value;
        }
    }
    let sharing = if matches!(defaults.worker.device, DeviceChoice::Cpu { .. }) { groups_per_node } else { 1 };
    Ok(KvMemory::FreeFraction(fraction / f64::from(sharing)))
}

fn invalid(config: &ModelConfig, message: String) -> InferError {
    InferError::invalid(format!("model `{}`: {message}", config.name))
}

#[cfg(test)]
pub(crate) mod tests;
