//! Rank 0: loads the models, serves clients, drains at the end.

use std::collections::HashMap;
use std::path::Path;
use std::process::ExitCode;
use std::sync::Arc;
use std::sync::mpsc::Receiver;
use std::time::Duration;

use backends::chat::{ChatRequest, ChatTemplates, FormatChoice};
use backends::layouts::Layouts;
use backends::llm::{LlmDefaults, LlmFactory};
use backends::python::{PythonConfig, PythonFactory};
use chat_format::ChatFormat;
use comm::World;
use front::{Address, Listeners, Running};
use ipc::Prefix;
use serving::{BackendFactory, ControlMode, Server, ServerConfig};
use supervision::{Agents, FromAgent, Nodes, ToAgent, WorkerSupervisor};
use tokio::runtime::{Handle, Runtime};

use crate::args::{self, RankArgs};
use crate::control::Control;
use crate::error::RankError;
use crate::hand_over::{self, Taken};
use crate::hardware::Hardware;
use crate::heartbeat::{self, Heartbeat};
use crate::host_metrics::HostMetrics;
use crate::metrics::{LlmMetrics, PythonMetrics, StartupMetrics};
use crate::signals::Signals;
use crate::startup::Startup;
use crate::{devices, open_files, relay, tables};

/// Time for requests in flight after a second SIGTERM.
const SHORT_DRAIN: Duration = Duration::from_millis(200);

/// Most tokens of a step if the model does not configure it. A step of 512 already saturates a CPU.
const CPU_STEP_TOKENS: usize = 512;
const CUDA_STEP_TOKENS: usize = 8192;

/// Serves until SIGTERM or SIGINT. Before it returns, it sends [`ToAgent::Shutdown`] to every other rank.
pub(crate) fn run(
    args: RankArgs,
    world: &Arc<World>,
    supervisor: &Arc<WorkerSupervisor>,
    events: Receiver<FromAgent>,
    prefix: Prefix,
    startup: Startup,
    hardware: Hardware,
) -> Result<ExitCode, RankError> {
    let heartbeat = Heartbeat::new(world);
    let agents = connect(world, supervisor, events, Arc::clone(&heartbeat)).map_err(RankError::Runtime)?;
    heartbeat.start(world, &agents, Duration::from_secs(args.heartbeat_timeout));
    let runtime = runtime_of("front", num_front_threads(args.front_threads.into()))?;
    let grpc = runtime_of("grpc", args.grpc_threads.into())?;
    let control = Control::new(&[runtime.handle(), grpc.handle()]);
    if let Some(path) = &args.control {
        control.answer(path);
    }
    let result = llm_defaults(&args, &hardware, world.size(), agents.nodes().max_ranks()).and_then(|defaults| {
        let python =
            Arc::new(PythonFactory::new(python_config(&args, &hardware, &prefix, world)?).map_err(RankError::Runtime)?);
        let llm = Arc::new(LlmFactory::new(defaults, Arc::clone(&agents), prefix.clone(), grpc.handle().clone()));
        let prefixes = prefixes(prefix.as_str(), world.size());
        let front = front_config(&args, &hardware, prefixes).map_err(RankError::Server)?;
        runtime.block_on(serve(&args, front, grpc.handle(), llm, python, Arc::new(startup), &control))
    });
    // Requests that are left end with the runtime, before the other ranks end.
    runtime.shutdown_timeout(SHORT_DRAIN);
    grpc.shutdown_timeout(SHORT_DRAIN);
    for rank in 1..world.size() {
        agents.send(rank, ToAgent::Shutdown);
    }
    result
}

/// Default number of threads for HTTP: few threads share the work of a step without wake-ups between them.
const MAX_FRONT_THREADS: usize = 2;

/// A multi-thread runtime even for one thread, so that another thread can take over during `block_in_place`.
fn runtime_of(name: &str, threads: usize) -> Result<Runtime, RankError> {
    let mut builder = tokio::runtime::Builder::new_multi_thread();
    builder.worker_threads(threads).thread_name(name).enable_all().build().map_err(RankError::Runtime)
}

/// The requested number of threads; for 0, one for each core, at most [`MAX_FRONT_THREADS`].
fn num_front_threads(requested: usize) -> usize {
    match requested {
        0 => std::thread::available_parallelism().map_or(1, usize::from).min(MAX_FRONT_THREADS),
        requested => requested,
    }
}

/// Connects the agents of all ranks, this one's included.
fn connect(
    world: &Arc<World>,
    supervisor: &Arc<WorkerSupervisor>,
    events: Receiver<FromAgent>,
    heartbeat: Arc<Heartbeat>,
) -> std::io::Result<Arc<Agents>> {
    let (sender, own) = (Arc::clone(world), Arc::clone(supervisor));
    let agents = Arc::new(Agents::new(world.size(), nodes(world), move |ranks, message| match ranks {
        [0] => own.handle(message),
        ranks => relay::send(&sender, ranks, &message),
    }));
    let (local, remote) = (Arc::clone(&agents), Arc::clone(&agents));
    let replying = Arc::clone(world);
    ipc::essential_thread("own-events", move || events.into_iter().for_each(|event| local.deliver(event)))?;
    let incoming = world.incoming().expect("only this function takes the receiver");
    ipc::essential_thread("events", move || {
        for (from, bytes) in incoming {
            heartbeat.received(from);
            if bytes == heartbeat::BEAT {
                continue;
            }
            if bytes == relay::LIVENESS_CHECK {
                relay::send_bytes(&replying, &[from], bytes);
                continue;
            }
            match postcard::from_bytes(&bytes) {
                Ok(event) => remote.deliver(event),
                Err(error) => {
                    tracing::error!(from, %error, "a message between ranks does not decode; are all ranks one build?")
                }
            }
        }
    })?;
    Ok(agents)
}

/// The node of each rank. Ranks of one node can share memory.
fn nodes(world: &World) -> Nodes {
    let is_first = |&rank: &u32| world.node_ranks(rank)[0] == rank;
    Nodes::new((0..world.size()).filter(is_first).map(|rank| (world.hostname(rank).to_owned(), world.node_ranks(rank))))
}

/// The defaults of LLMs on a node with `num_workers` workers.
pub(crate) fn llm_defaults(
    args: &RankArgs,
    hardware: &Hardware,
    world_size: u32,
    num_workers: usize,
) -> Result<LlmDefaults, RankError> {
    let (device, why) = devices::choose(hardware, args.device, args.threads, args.pin_threads, num_workers)?;
    tracing::info!("workers compute on {why}");
    let is_cpu = matches!(device, supervision::DeviceChoice::Cpu { .. });
    Ok(LlmDefaults {
        device,
        world_size,
        ranks_per_node: num_workers as u32,
        network: args.network.clone(),
        block_size: if is_cpu { 16 } else { 64 },
        // Other processes use the memory of a CPU, too.
        kv_free_fraction: if is_cpu { 0.25 } else { 0.9 },
        max_step_tokens: if is_cpu { CPU_STEP_TOKENS } else { CUDA_STEP_TOKENS },
        weight_precision: args.weight_only_precision,
        step_timeout: Duration::from_secs(args.step_timeout),
        library_dirs: args.library_dir.clone(),
        cache_dir: args.cache_dir(),
    })
}

/// The configuration of Python models: `--backend-config=python,KEY=VALUE`, and other flags that affect them.
fn python_config(
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

async fn serve(
    args: &RankArgs,
    mut front_config: front::Config,
    grpc: &Handle,
    llm: Arc<LlmFactory>,
    python: Arc<PythonFactory>,
    startup: Arc<Startup>,
    control: &Control,
) -> Result<ExitCode, RankError> {
    let mut signals = Signals::new().map_err(RankError::Runtime)?;
    let mut factories: HashMap<String, Arc<dyn BackendFactory>> = backends::builtin();
    let layouts = Layouts::new(Arc::clone(&llm) as _, Arc::clone(&python) as _);
    factories.extend(layouts.factories());
    let config = server_config(args);
    let server = Server::new(config.clone(), factories).map_err(|error| RankError::Server(error.to_string()))?;
    python.attach(&server);
    layouts.attach(&server);
    let host =
        HostMetrics::new(args.metrics.interval(), args.metrics.allow_cpu_metrics, args.metrics.allow_gpu_metrics);
    let metrics: Vec<Arc<dyn front::MetricsSource>> = vec![
        Arc::new(host),
        Arc::new(LlmMetrics(Arc::clone(&llm))),
        Arc::new(PythonMetrics(python)),
        Arc::new(StartupMetrics(Arc::clone(&startup))),
    ];
    front_config.ledger = args.front.debug_endpoints.then(|| crate::ledger::source(Arc::clone(&llm)));
    // A world that takes over ports opens them after it has loaded; others open their ports first.
    let (listeners, taken) = match &args.take_over {
        None => (Listeners::default(), None),
        Some(socket) => match load(args, &config, &server, &mut signals).await? {
            Loaded::All => take_over(socket),
            Loaded::Stopped => return Ok(ExitCode::SUCCESS),
        },
    };
    let front = front::start_on(listeners, grpc, front_config, Arc::clone(&server), metrics);
    let front = front.await.map_err(|error| RankError::Server(error.to_string()))?;
    if args.take_over.is_none() && load(args, &config, &server, &mut signals).await? == Loaded::Stopped {
        return Ok(ExitCode::SUCCESS);
    }
    startup.reached("models");
    report_started(&front);
    startup.reached("total");
    if let Some(taken) = taken {
        taken.confirm();
        tracing::info!("took the ports over from the world that served before");
    }
    tokio::spawn({
        let server = Arc::clone(&server);
        async move { server.keep_polling().await }
    });
    // Before the launcher sees that this world serves, because it then requests the ports too.
    let handed_over = offer_ports(args, &front);
    control.serves(&server);
    tokio::select! {
        () = signals.next() => Ok(drain(args, &server, front, signals).await),
        () = handed_over => {
            tracing::info!("another world has the ports: this one ends with the requests that it has");
            front.leave(Duration::from_secs(args.exit_timeout_secs)).await;
            Ok(drain(args, &server, front, signals).await)
        }
    }
}

#[derive(PartialEq)]
enum Loaded {
    All,
    Stopped,
}

async fn load(
    args: &RankArgs,
    config: &ServerConfig,
    server: &Arc<Server>,
    signals: &mut Signals,
) -> Result<Loaded, RankError> {
    tokio::select! {
        loaded = server.load_all() => {
            let failures = loaded.err().unwrap_or_default();
            tables::write(args, config, server);
            report_loading(args, &failures).map(|()| Loaded::All)
        }
        () = signals.next() => Ok(Loaded::Stopped),
    }
}

/// The sockets of the world that serves; none if that world has ended meanwhile.
fn take_over(socket: &Path) -> (Listeners, Option<Taken>) {
    match hand_over::take(socket) {
        Ok((listeners, taken)) => (listeners, Some(taken)),
        Err(error) => {
            tracing::warn!("the world that served before hands nothing over ({error}); binds the ports itself");
            (Listeners::default(), None)
        }
    }
}

/// Offers the ports to other worlds; resolves when another world serves on them.
fn offer_ports(args: &RankArgs, front: &Running) -> impl Future<Output = ()> + use<> {
    let offered = args.hand_over.as_ref().and_then(|path| {
        let offered = front.listeners().and_then(|listeners| hand_over::offer(path.clone(), listeners));
        offered.inspect_err(|error| tracing::warn!("ports cannot be offered at {}: {error}", path.display())).ok()
    });
    async move {
        let is_taken = match offered {
            Some(taken) => taken.await.is_ok(),
            None => false,
        };
        if !is_taken {
            std::future::pending().await
        }
    }
}

fn report_loading(args: &RankArgs, failures: &[serving::LoadFailure]) -> Result<(), RankError> {
    for failure in failures {
        tracing::error!("failed to load '{}': {}", failure.model, failure.reason);
    }
    match failures.is_empty() || !args.exit_on_error {
        true => Ok(()),
        false => Err(RankError::Server("Internal - failed to load all models".to_owned())),
    }
}

/// The three lines that scripts wait for.
fn report_started(front: &Running) {
    let addresses = front.addresses();
    if let Some(address) = addresses.grpc {
        tracing::info!("Started GRPCInferenceService at {address}");
    }
    if let Some(address) = addresses.http {
        tracing::info!("Started HTTPService at {address}");
    }
    if let Some(address) = addresses.metrics {
        tracing::info!("Started Metrics Service at {address}");
    }
}

/// Waits for requests in flight. A second signal cuts them short.
async fn drain(args: &RankArgs, server: &Server, front: Running, mut signals: Signals) -> ExitCode {
    let timeout = Duration::from_secs(args.exit_timeout_secs);
    front.begin_drain();
    server.begin_drain();
    let left = tokio::select! {
        left = server.drain(timeout) => left,
        () = signals.next() => {
            tracing::info!("second signal: requests in flight are cut short");
            server.drain(SHORT_DRAIN).await
        }
    };
    front.shutdown(SHORT_DRAIN).await;
    if left == 0 {
        return ExitCode::SUCCESS;
    }
    tracing::error!(
        "failed to stop server: Internal - Exit timeout expired. Exiting immediately. ({left} requests cut off)"
    );
    ExitCode::FAILURE
}

pub(crate) fn server_config(args: &RankArgs) -> ServerConfig {
    ServerConfig {
        name: args.id.clone(),
        repositories: args.model_repository.clone(),
        control_mode: match args.model_control_mode {
            args::ControlMode::None => ControlMode::None,
            args::ControlMode::Explicit => ControlMode::Explicit { load: args.load_model.clone() },
            args::ControlMode::Poll => ControlMode::Poll { interval: Duration::from_secs(args.repository_poll_secs) },
        },
        strict_readiness: args.strict_readiness,
        limits: args.limits,
        load_parallelism: args.model_load_thread_count as usize,
        load_retries: args.model_load_retry_count,
        response_cache_bytes: args.cache_config.max(args.response_cache_byte_size),
        // An error of the options is reported with the front's configuration.
        keeps_recent_durations: args.metrics.options().is_ok_and(|options| options.summary_quantiles.is_some()),
        ..ServerConfig::default()
    }
}

fn front_config(args: &RankArgs, hardware: &Hardware, prefixes: Vec<String>) -> Result<front::Config, String> {
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
    config.chat = front::Chat(Some(Arc::new(Templates(templates.trust_clients(args.trust_request_chat_template)))));
    config.metrics_options = args.metrics.options()?;
    config.client_devices = Some(Arc::clone(&hardware.client_devices));
    Ok(config)
}

/// The prefixes of all ranks, derived from rank 0's: they differ only in the number of the rank.
fn prefixes(own: &str, world_size: u32) -> Vec<String> {
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
struct Templates(ChatTemplates);

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
        self.0.prompt(model, &request)
    }

    fn format(&self, model: &str, has_tools: bool) -> Result<Option<Arc<ChatFormat>>, serving::InferError> {
        self.0.format(model, has_tools)
    }
}

#[cfg(test)]
mod tests;
