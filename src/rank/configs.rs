//! The configurations of the server's parts, from the command line.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use backends::chat::{ChatRequest, ChatTemplates, FormatChoice};
use backends::llm::{HostShare, KvDisk, LlmDefaults};
use backends::python::PythonConfig;
use chat_format::ChatFormat;
use comm::World;
use front::Address;
use ipc::Prefix;
use serving::{ControlMode, ServerConfig};
use supervision::{DeviceChoice, WorkerSettings};

use crate::args::{self, RankArgs};
use crate::error::RankError;
use crate::hardware::Hardware;
use crate::{devices, open_files};

/// Most tokens of a step if the model does not configure it. A step of 512 already saturates a CPU.
const CPU_STEP_TOKENS: usize = 512;

const CUDA_STEP_TOKENS: usize = 8192;

/// The defaults of LLMs on a node with `num_workers` workers, and why the workers compute on their device.
pub(crate) fn llm_defaults(
    args: &RankArgs,
    hardware: &Hardware,
    world_size: u32,
    num_workers: usize,
) -> Result<(LlmDefaults, String), RankError> {
    let (device, why) = devices::choose(hardware, args.device, args.threads, args.pin_threads, num_workers)?;
    tracing::info!("workers compute on {why}");
    let is_cpu = matches!(device, DeviceChoice::Cpu { .. });
    let sleep_mode = args.enable_sleep_mode || args.share_devices.is_some();
    // On CPUs the KV cache itself is in host memory; weights of models that sleep go there.
    let has_host_share = args.kv_cache_host_memory.is_none() && !is_cpu && !sleep_mode;
    let host_share = || Arc::new(HostShare::new((hardware.free_cpu_memory)(), num_workers as u32, world_size));
    let defaults = LlmDefaults {
        worker: WorkerSettings {
            device,
            network: args.network.clone(),
            weight_precision: args.weight_only_precision,
            batch_invariant: args.batch_invariant,
            sleep_mode,
            kv_cache_type: args.kv_cache_dtype,
            kv_host_memory_bytes: args.kv_cache_host_memory.map_or(0, |size| size.0),
            kv_host_memory_is_share: false, // A model's is, if it has no size of its own.
            step_timeout: Duration::from_secs(args.step_timeout),
            library_dirs: args.library_dir.clone(),
            cache_dir: args.cache_dir(),
        },
        host_share: has_host_share.then(host_share),
        kv_disk: KvDisk { bytes: args.kv_cache_disk.0, directory: args.kv_cache_disk_dir.clone() },
        world_size,
        ranks_per_node: num_workers as u32,
        block_size: if is_cpu { 16 } else { 64 },
        // Other processes use the memory of a CPU, too.
        kv_free_fraction: if is_cpu { 0.25 } else { 0.9 },
        max_step_tokens: if is_cpu { CPU_STEP_TOKENS } else { CUDA_STEP_TOKENS },
        max_inter_token: args.max_inter_token_ms.map(|ms| Duration::from_millis(ms.into())),
        weight_updates_dir: args.weight_updates_dir.clone(),
        longest_turn: args.share_devices.map(|seconds| Duration::from_secs(seconds.into())),
        forced_tokens_per_step: args.benchmark_forced_acceptance,
    };
    Ok((defaults, why))
}

/// The configuration of Python models: `--backend-config=python,KEY=VALUE`, and other flags that affect them.
pub(crate) fn python_config(
    args: &RankArgs,
    hardware: &Hardware,
    prefix: &Prefix,
    world: &World,
) -> Result<PythonConfig, RankError> {
    let mut config = PythonConfig {
        log_verbose: args.log_verbose > 0,
        auto_complete: !args.disable_auto_complete_config && !args.strict_model_config,
        stop_timeout: Duration::from_secs(args.exit_timeout_secs),
        hosts: (0..world.size()).map(|rank| world.hostname(rank).to_owned()).collect(),
        num_gpus: hardware.num_gpus,
        ..PythonConfig::new(prefix.clone())
    };
    for setting in args.backend_config.iter().filter_map(|setting| setting.strip_prefix("python,")) {
        let (key, value) = setting.split_once('=').unwrap_or((setting, ""));
        config.set(key, value).map_err(RankError::Server)?;
    }
    Ok(config)
}

pub(crate) fn server_config(args: &RankArgs) -> ServerConfig {
    ServerConfig {
        name: args.id.clone(),
        repositories: args.model_repository.clone(),
        control_mode: match args.model_control_mode {
            args::ControlModeFlag::None => ControlMode::None,
            args::ControlModeFlag::Explicit => ControlMode::Explicit { load: args.load_model.clone() },
            args::ControlModeFlag::Poll => {
                ControlMode::Poll { interval: Duration::from_secs(args.repository_poll_secs) }
            }
        },
        strict_readiness: args.strict_readiness,
        limits: args.limits,
        served_names: args.served_model_name.iter().cloned().collect(),
        load_parallelism: args.model_load_thread_count as usize,
        load_retries: args.model_load_retry_count,
        response_cache_bytes: args.cache_config.max(args.response_cache_byte_size),
        // An error of the options is reported with the front's configuration.
        keeps_recent_durations: args.metrics.options().is_ok_and(|options| options.summary_quantiles.is_some()),
        ..ServerConfig::default()
    }
}

pub(crate) fn front_config(
    args: &RankArgs,
    hardware: &Hardware,
    prefixes: Vec<String>,
) -> Result<front::Config, String> {
    let address = |allowed: bool, host: &str, port: u16| allowed.then(|| Address::new(host, port));
    let metrics_host = args.metrics_address.as_ref().unwrap_or(&args.http_address);
    let mut config = front::Config {
        grpc: address(args.allow_grpc, &args.grpc_address, args.grpc_port),
        http: address(args.allow_http, &args.http_address, args.http_port),
        metrics: address(args.allow_metrics, metrics_host, args.metrics_port),
        ..front::Config::default()
    };
    args.front.apply(&mut config)?;
    config.client_objects.reserved_prefixes = prefixes;
    config.client_objects.reserved_magic = ipc::REGION_MAGIC.into();
    bound_files(&mut config);
    let chat_formats =
        args.front.chat_format.parse::<FormatChoice>().map_err(|error| format!("`--chat-format`: {error}"))?;
    let templates = ChatTemplates::new(args.model_repository.clone(), chat_formats);
    config.chat = front::Chat(Some(Arc::new(Templates {
        templates: templates.trust_clients(args.trust_request_chat_template),
        served_names: args.served_model_name.iter().cloned().collect(),
    })));
    config.metrics_options = args.metrics.options()?;
    config.client_devices = Some(Arc::clone(&hardware.client_devices));
    Ok(config)
}

/// The prefixes of all ranks, derived from rank 0's: they differ only in the number of the rank.
pub(crate) fn prefixes(own: &str, world_size: u32) -> Vec<String> {
    match own.strip_suffix("0_") {
        Some(base) => (0..world_size).map(|rank| format!("{base}{rank}_")).collect(),
        None => vec![own.to_owned()],
    }
}

/// Limits connections and regions of clients, so that open files are left for everything else.
fn bound_files(config: &mut front::Config) {
    let (requested, max_files) = (config.max_connections, open_files::raise_limit());
    config.max_connections = open_files::max_connections(requested, max_files);
    config.max_shm_regions = open_files::max_regions(config.max_shm_regions, max_files);
    if config.max_connections < requested {
        tracing::warn!(
            "a port takes {} connections at once, not {requested}: the limit of open files leaves no room for more; \
             raise it (`ulimit -Hn`, `LimitNOFILE=` of systemd)",
            config.max_connections
        );
    }
}

/// Chat templates of the model repository, for the front.
struct Templates {
    templates: ChatTemplates,
    /// Further names of models, each with the model's own.
    served_names: BTreeMap<String, String>,
}

impl Templates {
    fn model_of<'a>(&'a self, name: &'a str) -> &'a str {
        self.served_names.get(name).map_or(name, String::as_str)
    }
}

impl front::ChatPrompts for Templates {
    fn prompt(&self, model: &str, conversation: &front::Conversation) -> Result<String, serving::InferError> {
        let request = ChatRequest {
            messages: &conversation.messages,
            tools: &conversation.tools,
            documents: conversation.documents.as_deref(),
            variables: Some(&conversation.variables),
            template: conversation.template.as_deref(),
            add_generation_prompt: conversation.add_generation_prompt,
            continue_final_message: conversation.continue_final_message,
        };
        self.templates.prompt(self.model_of(model), &request)
    }

    fn format(&self, model: &str, has_tools: bool) -> Result<Option<Arc<ChatFormat>>, serving::InferError> {
        self.templates.format(self.model_of(model), has_tools)
    }
}

#[cfg(test)]
mod tests;
