//! tritonserver's command line, as `trireme rank` accepts it.

use std::ffi::OsString;
use std::path::PathBuf;

use clap::builder::RangedU64ValueParser;
use clap::{Arg, ArgAction, ArgMatches, Args, Command, FromArgMatches, ValueEnum};

use front::{LogFormat, LogOptions};
use record::RecordArgs;
use serving::{Limit, Limits};
use settings::{ByteSize, DeviceKind, KvCacheType, MAX_SECONDS, WeightPrecision};

use crate::boolean::boolean;
use crate::front_args::FrontArgs;
use crate::log::RequestLines;
use crate::metrics_args::MetricsArgs;

/// Which models are loaded at start, and how that may change.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum ControlModeFlag {
    /// All models of the repository, without later changes.
    None,
    /// All models; the repository is polled for changes.
    Poll,
    /// Those of `--load-model`; clients load and unload models.
    Explicit,
}

/// Options with an effect. Every other option of tritonserver is accepted and named in the log.
#[derive(Debug, Clone, Args)]
pub struct RankArgs {
    /// Directory of models; may be given more than once
    #[arg(long, visible_alias = "model-store", visible_alias = "model-repo", required = true, value_name = "DIR")]
    pub model_repository: Vec<PathBuf>,
    /// Who decides which models are loaded
    #[arg(long, value_enum, default_value = "none")]
    pub model_control_mode: ControlModeFlag,
    /// Model to load at start (explicit mode); `*` loads all
    #[arg(long, value_name = "NAME")]
    pub load_model: Vec<String>,
    /// A further name by which clients may request a model: `NAME=MODEL`, as in `org/name=model`; may be given more than once.
    /// `/v1/models` lists the model by it instead of by its own
    #[arg(long, value_name = "NAME=MODEL", value_parser = served_name)]
    pub served_model_name: Vec<(String, String)>,
    /// Seconds between two polls of the repository (poll mode); 0: none
    #[arg(long, default_value_t = 15, value_parser = clap::value_parser!(u64).range(..=MAX_SECONDS))]
    pub repository_poll_secs: u64,
    /// End when a model cannot be loaded at start
    #[arg(long, default_value = "true", value_parser = boolean, action = ArgAction::Set)]
    pub exit_on_error: bool,
    /// Ready only when every model is
    #[arg(long, default_value = "true", value_parser = boolean, action = ArgAction::Set)]
    pub strict_readiness: bool,
    /// Do not complete config.pbtxt
    #[arg(long, num_args = 0..=1, default_missing_value = "true", default_value = "false", value_parser = boolean, action = ArgAction::Set)]
    pub disable_auto_complete_config: bool,
    /// Take chat templates from requests (`chat_template`), not only the names of the model's: a hostile template can occupy a thread or end the server
    #[arg(long, num_args = 0..=1, default_missing_value = "true", default_value = "false", value_parser = boolean, action = ArgAction::Set)]
    pub trust_request_chat_template: bool,
    /// Threads of rank 0 that serve gRPC and deliver tokens to requests; one thread needs the least CPU time for each token
    #[arg(long, default_value_t = 1, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=1024))]
    pub grpc_threads: u16,
    /// Threads of rank 0 that serve HTTP and everything else; 0: one for each core, at most 2
    #[arg(long, default_value_t = 0, value_name = "N", value_parser = clap::value_parser!(u16).range(..=1024))]
    pub front_threads: u16,
    /// Models loaded at the same time at start
    #[arg(long, default_value_t = 4, value_parser = clap::value_parser!(u32).range(1..))]
    pub model_load_thread_count: u32,
    /// Further attempts to load a model that failed at start
    #[arg(long, default_value_t = 0)]
    pub model_load_retry_count: u32,
    /// The same as `--disable-auto-complete-config`, under tritonserver's old name
    #[arg(long, default_value = "false", value_parser = boolean, action = ArgAction::Set, hide = true)]
    pub strict_model_config: bool,
    /// Serve HTTP
    #[arg(long, default_value = "true", value_parser = boolean, action = ArgAction::Set)]
    pub allow_http: bool,
    /// Address of HTTP
    #[arg(long, default_value = "0.0.0.0")]
    pub http_address: String,
    /// Port of HTTP; 0 takes a free one
    #[arg(long, default_value_t = 8000)]
    pub http_port: u16,
    /// Serve gRPC
    #[arg(long, default_value = "true", value_parser = boolean, action = ArgAction::Set)]
    pub allow_grpc: bool,
    /// Address of gRPC
    #[arg(long, default_value = "0.0.0.0")]
    pub grpc_address: String,
    /// Port of gRPC; 0 takes a free one
    #[arg(long, default_value_t = 8001)]
    pub grpc_port: u16,
    /// Serve metrics
    #[arg(long, default_value = "true", value_parser = boolean, action = ArgAction::Set)]
    pub allow_metrics: bool,
    /// Address of metrics; `--http-address` when not given
    #[arg(long)]
    pub metrics_address: Option<String>,
    /// Port of metrics; 0 takes a free one
    #[arg(long, default_value_t = 8002)]
    pub metrics_port: u16,
    #[command(flatten)]
    #[allow(missing_docs)] // Documented at the type.
    pub front: FrontArgs,
    /// What one request may contain; each limit of [`serving::Limit`] has its own flag.
    #[arg(skip)]
    pub limits: Limits,
    #[command(flatten)]
    #[allow(missing_docs)] // Documented at the type.
    pub metrics: MetricsArgs,
    /// Name of this server in metadata
    #[arg(long, default_value = "triton")]
    pub id: String,
    /// Seconds that requests in flight may take after SIGTERM
    #[arg(long, default_value_t = 30, value_parser = clap::value_parser!(u64).range(..=MAX_SECONDS))]
    pub exit_timeout_secs: u64,
    /// Seconds that a step may take beyond the longest of the recent ones, before its workers are started again
    #[arg(long, default_value_t = 10, value_parser = clap::value_parser!(u64).range(1..=MAX_SECONDS), value_name = "SECONDS")]
    pub step_timeout: u64,
    /// Longest time between two tokens of a stream while prompts are computed; a model's parameter `max_inter_token_ms`
    /// overrides it [default: 50, or 8 times a step without prompts]
    #[arg(long, value_name = "MS", value_parser = clap::value_parser!(u32).range(1..=600_000))]
    pub max_inter_token_ms: Option<u32>,
    /// For benchmarks of speed only, the output is wrong: accept drafts so that a step gives this number of tokens of a stream on
    /// average, whatever the model says of them. Models without drafts are refused
    #[arg(long, value_name = "TOKENS")]
    pub benchmark_forced_acceptance: Option<f64>,
    /// Seconds without a message of another rank after which the world ends; 0: no limit
    #[arg(long, default_value_t = 15, value_name = "SECONDS", value_parser = clap::value_parser!(u64).range(..=MAX_SECONDS))]
    pub heartbeat_timeout: u64,
    /// Socket at which another world requests this one's ports; set by the launcher
    #[arg(long, env = "TRIREME_HAND_OVER", hide = true, hide_env = true, value_name = "SOCKET")]
    pub hand_over: Option<PathBuf>,
    /// Socket from which this world takes over its ports once it has loaded; set by the launcher
    #[arg(long, env = "TRIREME_TAKE_OVER", hide = true, hide_env = true, value_name = "SOCKET")]
    pub take_over: Option<PathBuf>,
    /// Socket of the launcher's health checks of rank 0; set by the launcher
    #[arg(long, env = "TRIREME_CONTROL", hide = true, hide_env = true, value_name = "SOCKET")]
    pub control: Option<PathBuf>,
    /// Directory of the sockets to which the launcher's relay forwards the connections of clients; set by the launcher
    #[arg(long, env = "TRIREME_RELAY", hide = true, hide_env = true, value_name = "DIR")]
    pub relay: Option<PathBuf>,
    /// How often the launcher has started this world again; set by the launcher
    #[arg(long, env = "TRIREME_WORLD_RESTARTS", hide = true, hide_env = true, value_name = "N")]
    pub world_restarts: Option<u32>,
    /// Whether MPI keeps the world when a rank dies, so that replicas without it go on; set by the launcher
    #[arg(long, env = "TRIREME_KEEP_WORLD", hide = true, hide_env = true)]
    pub keep_world: bool,
    /// `NAME,KEY=VALUE`; `python,shm-region-prefix-name=P` names this rank's shared memory
    #[arg(long, value_name = "NAME,KEY=VALUE", value_parser = backend_setting)]
    pub backend_config: Vec<String>,
    /// Bytes of the response cache, for models that ask for one: `local,size=BYTES`
    #[arg(long, value_name = "local,size=BYTES", value_parser = cache_bytes, default_value = "local,size=0", hide_default_value = true)]
    pub cache_config: usize,
    /// The same under tritonserver's old name
    #[arg(long, value_name = "BYTES", default_value_t = 0, hide = true, conflicts_with = "cache_config")]
    pub response_cache_byte_size: usize,
    /// Level of verbose messages; 0: none
    #[arg(long, default_value_t = 0)]
    pub log_verbose: u32,
    /// Write information
    #[arg(long, default_value = "true", value_parser = boolean, action = ArgAction::Set)]
    pub log_info: bool,
    /// Write warnings
    #[arg(long, default_value = "true", value_parser = boolean, action = ArgAction::Set)]
    pub log_warning: bool,
    /// Write errors
    #[arg(long, default_value = "true", value_parser = boolean, action = ArgAction::Set)]
    pub log_error: bool,
    /// How lines are written: default, ISO8601 or JSON
    #[arg(long, default_value = "default")]
    pub log_format: LogFormat,
    /// Which requests get a log line with the times of their phases
    #[arg(long, value_enum, default_value = "auto")]
    pub log_requests: RequestLines,
    /// Log file; standard error when not given
    #[arg(long)]
    pub log_file: Option<PathBuf>,
    /// Size at which the log file is renamed to `FILE.1`, in place of the previous one, and a new file is started; 0: never
    #[arg(long, default_value_t = 64 << 20, value_name = "BYTES")]
    pub log_file_max_bytes: u64,
    /// The device that models compute on
    #[arg(long, value_enum, default_value = "auto")]
    pub device: DeviceKind,
    /// How linear layers are quantized at load: auto (as the checkpoint has them), fp8, int8 or int4; a model's parameter
    /// `quantization` has priority
    #[arg(long, visible_alias = "quantization", default_value = "auto", value_name = "PRECISION", value_parser = str::parse::<WeightPrecision>)]
    pub weight_only_precision: WeightPrecision,
    /// Tokens of a request never depend on what runs beside it, bit for bit, on GPUs too, where some kernels are slower for it; a
    /// model's parameter `batch_invariant` has priority
    #[arg(long)]
    pub batch_invariant: bool,
    /// Serve `POST /sleep` and `POST /wake_up`: models give up the memory of their devices for a time
    #[arg(long)]
    pub enable_sleep_mode: bool,
    /// Serve `POST /update_weights_from_disk`: the weights of a language model are replaced by those of a checkpoint in this directory,
    /// which has the same path on all nodes
    #[arg(long, value_name = "DIR")]
    pub weight_updates_dir: Option<PathBuf>,
    /// Language models take turns on the devices: one is awake at a time, and the others sleep with their weights in host memory. The
    /// number is the longest turn while another model has requests [default if given without one: 10]
    #[arg(long, value_name = "SECONDS", num_args = 0..=1, default_missing_value = "10", require_equals = true,
        conflicts_with = "enable_sleep_mode")]
    pub share_devices: Option<u32>,
    /// The type of keys and values in the KV cache: auto (what the checkpoint names, else bf16), bf16, fp8 (e4m3) or int8; a model's
    /// parameter `kv_cache_dtype` has priority
    #[arg(long, default_value = "auto", value_name = "TYPE", value_parser = str::parse::<KvCacheType>)]
    pub kv_cache_dtype: KvCacheType,
    /// Host memory of each rank for KV blocks that are evicted from the device, such as `16GiB`; 0: none. A model's parameter
    /// `kv_cache_host_memory_bytes` has priority [default: on GPUs an equal share of a quarter of the host's free
    /// memory, 16GiB at most; 0 on CPUs and with sleep]
    #[arg(long, value_name = "SIZE", value_parser = str::parse::<ByteSize>)]
    pub kv_cache_host_memory: Option<ByteSize>,
    /// File of each rank for KV blocks that leave host memory, such as `200GiB`; 0: none. Needs `--kv-cache-host-memory` and
    /// `--kv-cache-disk-dir`. A model's parameter `kv_cache_disk_bytes` has priority
    #[arg(long, default_value = "0", value_name = "SIZE", value_parser = str::parse::<ByteSize>)]
    pub kv_cache_disk: ByteSize,
    /// Directory of these files, on a local disk of each node. They have no names there and end with their ranks
    #[arg(long, value_name = "DIR")]
    pub kv_cache_disk_dir: Option<PathBuf>,
    /// Directory of NVIDIA's libraries, or root of a Python environment that holds them; searched before the usual places
    #[arg(long, env = "TRIREME_LIBRARY_DIR", value_name = "DIR")]
    pub library_dir: Vec<PathBuf>,
    /// Directory for measurements kept between starts [default: $XDG_CACHE_HOME/trireme or ~/.cache/trireme]
    #[arg(long, env = "TRIREME_CACHE_DIR", value_name = "DIR")]
    pub cache_dir: Option<PathBuf>,
    /// The network that joins the nodes of a world: an interface (`eth0`) or a subnet (`10.0.0.0/16`) [default: any]
    #[arg(long, value_name = "NETWORK")]
    pub network: Option<String>,
    /// Recording of requests and steps
    #[command(flatten)]
    pub record: RecordArgs,
    /// CPU threads of a worker; by default an equal share of the node's cores
    #[arg(long, value_parser = RangedU64ValueParser::<usize>::new().range(..=4096))]
    pub threads: Option<usize>,
    /// Pin each CPU thread of a worker to its own core, if there are enough cores for all workers of the node
    #[arg(long, default_value = "false", value_parser = boolean, action = ArgAction::Set)]
    pub pin_threads: bool,
}

/// tritonserver's options without effect: name, and whether a value follows.
const WITHOUT_EFFECT: &[(&str, bool)] = &[
    ("model-config-name", true),
    ("model-namespacing", true),
    ("http-thread-count", true),
    ("grpc-infer-allocation-pool-size", true),
    ("grpc-infer-thread-count", true),
    ("grpc-max-response-pool-size", true),
    ("grpc-keepalive-permit-without-calls", true),
    ("grpc-http2-max-pings-without-data", true),
    ("grpc-http2-min-recv-ping-interval-without-data", true),
    ("grpc-http2-max-ping-strikes", true),
    ("backend-directory", true),
    ("cache-directory", true),
    ("repoagent-directory", true),
    ("rate-limit", true),
    ("rate-limit-resource", true),
    ("pinned-memory-pool-byte-size", true),
    ("cuda-memory-pool-byte-size", true),
    ("cuda-virtual-address-size", true),
    ("min-supported-compute-capability", true),
    ("enable-peer-access", true),
    ("buffer-manager-thread-count", true),
    ("host-policy", true),
    ("model-load-gpu-limit", true),
    ("allow-sagemaker", true),
    ("sagemaker-port", true),
    ("sagemaker-safe-port-range", true),
    ("sagemaker-thread-count", true),
    ("allow-vertex-ai", true),
    ("vertex-ai-port", true),
    ("vertex-ai-thread-count", true),
    ("vertex-ai-default-model", true),
];

/// The sub-command `rank` with every option.
pub fn command() -> Command {
    let base = RankArgs::augment_args(Command::new("rank").infer_long_args(true).args_override_self(true))
        .about("One rank of a world: rank 0 serves clients, every rank supervises its workers");
    let with_effect = Limit::all().fold(base, |command, limit| command.arg(limit_arg(limit)));
    WITHOUT_EFFECT.iter().fold(with_effect, |command, &(name, takes_value)| {
        let action = if takes_value { ArgAction::Append } else { ArgAction::SetTrue };
        command.arg(Arg::new(name).long(name).action(action).hide(true))
    })
}

/// Each flag of a rank as `--NAME`, or as `--NAME VALUE` where the next word is its value if there is none behind `=`.
pub fn flag_names() -> impl Iterator<Item = String> {
    let words = |arg: &Arg| {
        let takes_word = arg.get_action().takes_values()
            && !arg.is_require_equals_set()
            && arg.get_num_args().is_none_or(|range| range.min_values() > 0);
        let end = if takes_word { " VALUE" } else { "" };
        let names = arg.get_long_and_visible_aliases().unwrap_or_default();
        names.into_iter().map(move |name| format!("--{name}{end}")).collect::<Vec<_>>()
    };
    let mut command = command();
    command.build();
    command.get_arguments().flat_map(words).collect::<Vec<_>>().into_iter()
}

/// The flag of one limit.
fn limit_arg(limit: Limit) -> Arg {
    let help = format!("{} [default: {}]", limit.help(), limit.default_value());
    Arg::new(limit.name()).long(limit.name()).value_name("N").value_parser(clap::value_parser!(u64)).help(help)
}

/// The typed options, and the names of those given that have no effect.
///
/// # Errors
/// When options contradict each other, and for matches that are not of [`command`].
pub fn parse(matches: &ArgMatches) -> Result<(RankArgs, Vec<&'static str>), clap::Error> {
    let given = |name: &str| matches.value_source(name) == Some(clap::parser::ValueSource::CommandLine);
    let ignored = WITHOUT_EFFECT.iter().map(|&(name, _)| name).filter(|name| given(name)).collect();
    let mut args = RankArgs::from_arg_matches(matches)?;
    for limit in Limit::all() {
        if let Some(value) = matches.get_one::<u64>(limit.name()) {
            args.limits.set(limit, *value);
        }
    }
    if !args.load_model.is_empty() && args.model_control_mode != ControlModeFlag::Explicit {
        let words = "use of '--load-model' requires setting '--model-control-mode=explicit' as well";
        return Err(command().error(clap::error::ErrorKind::ArgumentConflict, words));
    }
    Ok((args, ignored))
}

/// `--grpc_port` is `--grpc-port`: `_` becomes `-` in the names of long options, never in values.
pub fn with_dashes(args: impl IntoIterator<Item = OsString>) -> Vec<OsString> {
    let convert = |arg: OsString| match arg.to_str() {
        Some(text) if text.starts_with("--") => {
            let (name, value) = text.split_once('=').map_or((text, None), |(name, value)| (name, Some(value)));
            let name = name.replace('_', "-");
            value.map_or(name.clone(), |value| format!("{name}={value}")).into()
        }
        _ => arg,
    };
    args.into_iter().map(convert).collect()
}

/// A setting of a backend.
fn backend_setting(text: &str) -> Result<String, String> {
    match text.split_once(',') {
        Some(_) => Ok(text.to_owned()),
        None => Err("expected `NAME,KEY=VALUE`".to_owned()),
    }
}

/// A name for clients, and the model's own, which has no `=`.
fn served_name(text: &str) -> Result<(String, String), String> {
    match text.rsplit_once('=') {
        Some((name, model)) if !name.is_empty() && !model.is_empty() => Ok((name.to_owned(), model.to_owned())),
        _ => Err("expected `NAME=MODEL`, with a MODEL of the repository".to_owned()),
    }
}

/// The size of the `local` cache, the only one.
fn cache_bytes(text: &str) -> Result<usize, String> {
    let size = text.strip_prefix("local,size=").and_then(|size| size.parse().ok());
    size.ok_or_else(|| "expected `local,size=BYTES`; `local` is the cache there is".to_owned())
}

impl RankArgs {
    /// The directory for measurements; `None` without a home directory.
    pub fn cache_dir(&self) -> Option<PathBuf> {
        let from_env = |name: &str| std::env::var_os(name).map(PathBuf::from).filter(|dir| dir.is_absolute());
        let default = || from_env("XDG_CACHE_HOME").or_else(|| from_env("HOME").map(|home| home.join(".cache")));
        self.cache_dir.clone().or_else(|| default().map(|dir| dir.join("trireme")))
    }

    /// The log options at the start.
    pub fn log_options(&self) -> LogOptions {
        LogOptions {
            file: self.log_file.as_ref().map(|file| file.display().to_string()).unwrap_or_default(),
            info: self.log_info,
            warning: self.log_warning,
            error: self.log_error,
            verbose_level: self.log_verbose,
            format: self.log_format,
        }
    }

    /// The prefix of this rank's shared memory: the last `shm-region-prefix-name` given to the Python backend.
    pub fn shm_prefix(&self) -> Option<&str> {
        let settings = self.backend_config.iter().rev().filter_map(|config| config.split_once(','));
        settings.filter_map(|(_, setting)| setting.strip_prefix("shm-region-prefix-name=")).next()
    }
}

#[cfg(test)]
mod tests;
