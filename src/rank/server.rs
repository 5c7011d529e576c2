//! Rank 0: loads the models, serves clients, drains at the end.

use std::collections::HashMap;
use std::path::Path;
use std::process::ExitCode;
use std::sync::Arc;
use std::sync::mpsc::Receiver;
use std::time::Duration;

use backends::layouts::Layouts;
use backends::llm::LlmFactory;
use backends::python::PythonFactory;
use comm::World;
use front::{Listeners, Running, WorldFacts};
use ipc::Prefix;
use record::Recorder;
use serving::{BackendFactory, ModelIndexEntry, Server, ServerConfig};
use supervision::{FromAgent, ToAgent, WorkerSupervisor};
use tokio::runtime::Handle;

use crate::args::{ControlModeFlag, RankArgs};
use crate::client_relay;
use crate::configs::{front_config, llm_defaults, prefixes, python_config, server_config};
use crate::connect::connect;
use crate::control::Control;
use crate::error::RankError;
use crate::hand_over::{self, Taken};
use crate::hardware::Hardware;
use crate::heartbeat::Heartbeat;
use crate::host_metrics::HostMetrics;
use crate::losses::Losses;
use crate::metrics::{LlmMetrics, PythonMetrics, StartupMetrics};
use crate::runtime::{num_front_threads, runtime_of};
use crate::signals::Signals;
use crate::startup::Startup;
use crate::tables;

/// Time for requests in flight after a second SIGTERM.
const SHORT_DRAIN: Duration = Duration::from_millis(200);

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
    let losses = Losses::watch(world, &agents, args.keep_world, args.relay.is_some());
    Arc::clone(&heartbeat).start(world, &agents, Duration::from_secs(args.heartbeat_timeout));
    let runtime = runtime_of("front", num_front_threads(args.front_threads.into()))?;
    let grpc = runtime_of("grpc", args.grpc_threads.into())?;
    let control = Control::new(&[runtime.handle(), grpc.handle()], heartbeat, Arc::clone(&losses));
    if let Some(path) = &args.control {
        control.answer(path);
    }
    let mut recorder = None;
    let result = llm_defaults(&args, &hardware, world.size(), agents.nodes().max_ranks()).and_then(|(defaults, _)| {
        recorder = args.record.options().map(|options| Recorder::start(&options)).transpose()?;
        let python =
            Arc::new(PythonFactory::new(python_config(&args, &hardware, &prefix, world)?).map_err(RankError::Runtime)?);
        let llm = LlmFactory::new(defaults, Arc::clone(&agents), prefix.clone(), grpc.handle().clone());
        let llm = Arc::new(llm.with_recorder(recorder.clone()));
        losses.set_models(&llm);
        let prefixes = prefixes(prefix.as_str(), world.size());
        let mut front = front_config(&args, &hardware, prefixes).map_err(RankError::Server)?;
        front.world = world_facts(&args, world);
        front.recorder = recorder.clone();
        if args.relay.is_some() {
            front.is_behind_relay = true;
            (front.grpc_tls, front.http_tls, front.metrics_tls) = (None, None, None); // The relay has them.
        }
        runtime.block_on(serve(&args, front, grpc.handle(), llm, python, Arc::new(startup), &control))
    });
    // Requests that are left end with the runtime, before the other ranks end.
    runtime.shutdown_timeout(SHORT_DRAIN);
    grpc.shutdown_timeout(SHORT_DRAIN);
    recorder.iter().for_each(|recorder| recorder.finish());
    losses.end();
    for rank in 1..world.size() {
        agents.send(rank, ToAgent::Shutdown);
    }
    result
}

fn world_facts(args: &RankArgs, world: &World) -> WorldFacts {
    let hosts = (0..world.size()).map(|rank| world.hostname(rank).to_owned()).collect();
    WorldFacts { hosts, num_restarts: args.world_restarts }
}

/// Loads the models, and serves until a signal or another world ends this one.
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
    let config = server_config(args);
    let server = new_server(&config, &llm, &python)?;
    let vitals = Arc::clone(control.vitals());
    server.set_responds(move || vitals.respond());
    let metrics = metrics_sources(args, &llm, python, &startup, control);
    front_config.ledger = args.front.debug_endpoints.then(|| crate::ledger::source(Arc::clone(&llm)));
    // A world that takes over ports opens them after it has loaded; others open their ports first.
    let (listeners, taken) = match (&args.relay, &args.take_over) {
        (Some(directory), _) => (client_relay::listeners(directory)?, None),
        (None, None) => (Listeners::default(), None),
        (None, Some(socket)) => match load(args, &config, &server, &mut signals).await? {
            Loaded::All => take_over(socket),
            Loaded::Stopped => return Ok(ExitCode::SUCCESS),
        },
    };
    let front = front::start_on(listeners, grpc, front_config, Arc::clone(&server), metrics);
    let front = front.await.map_err(|error| RankError::Server(error.to_string()))?;
    let is_loaded = args.take_over.is_some() && args.relay.is_none();
    if !is_loaded && load(args, &config, &server, &mut signals).await? == Loaded::Stopped {
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
    // Before the launcher detects that this world serves, because it then requests the ports too.
    let handed_over = offer_ports(args, &front);
    control.serves(&server);
    tokio::select! {
        () = signals.next() => {}
        () = handed_over => {
            tracing::info!("another world has the ports: this one ends when its requests have ended");
            front.leave(Duration::from_secs(args.exit_timeout_secs)).await;
        }
    }
    Ok(drain(args, &server, front, signals).await)
}

/// A server with all backends, which has loaded no model.
fn new_server(
    config: &ServerConfig,
    llm: &Arc<LlmFactory>,
    python: &Arc<PythonFactory>,
) -> Result<Arc<Server>, RankError> {
    let mut factories: HashMap<String, Arc<dyn BackendFactory>> = backends::builtin();
    let layouts = Layouts::new(Arc::clone(llm) as _, Arc::clone(python) as _);
    factories.extend(layouts.factories());
    let server = Server::new(config.clone(), factories).map_err(|error| RankError::Server(error.to_string()))?;
    python.attach(&server);
    layouts.attach(&server);
    Ok(server)
}

/// Metrics of the machine, the backends and the start.
fn metrics_sources(
    args: &RankArgs,
    llm: &Arc<LlmFactory>,
    python: Arc<PythonFactory>,
    startup: &Arc<Startup>,
    control: &Control,
) -> Vec<Arc<dyn front::MetricsSource>> {
    let host =
        HostMetrics::new(args.metrics.interval(), args.metrics.allow_cpu_metrics, args.metrics.allow_gpu_metrics);
    vec![
        Arc::new(host),
        Arc::new(LlmMetrics { factory: Arc::clone(llm), vitals: Arc::clone(control.vitals()) }),
        Arc::new(PythonMetrics(python)),
        Arc::new(StartupMetrics(Arc::clone(startup))),
    ]
}

/// How loading ended.
#[derive(PartialEq)]
enum Loaded {
    All,
    Stopped,
}

/// Loads all models, until a signal.
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
            report_loading(args, &failures)?;
            check_served_names(args, &server.repository_index(false)).map(|()| Loaded::All)
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
    let offered = args.hand_over.as_ref().filter(|_| args.relay.is_none()).and_then(|path| {
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

/// Logs the failures. They are an error with `--exit-on-error`.
fn report_loading(args: &RankArgs, failures: &[serving::LoadFailure]) -> Result<(), RankError> {
    for failure in failures {
        tracing::error!("failed to load '{}': {}", failure.model, failure.reason);
    }
    match failures.is_empty() || !args.exit_on_error {
        true => Ok(()),
        false => Err(RankError::Server("Internal - failed to load all models".to_owned())),
    }
}

/// Checks that each `--served-model-name` is that of one model, which is in the repository, where no model comes later.
fn check_served_names(args: &RankArgs, index: &[ModelIndexEntry]) -> Result<(), RankError> {
    let mut named = HashMap::new();
    for (name, model) in &args.served_model_name {
        if let Some(other) = named.insert(name, model).filter(|other| *other != model) {
            return Err(RankError::Server(format!("--served-model-name gives `{name}` to `{other}` and to `{model}`")));
        }
    }
    let is_unknown = |(_, model): &&(String, String)| index.iter().all(|entry| entry.name != *model);
    match args.served_model_name.iter().find(is_unknown) {
        Some((name, model)) if args.model_control_mode == ControlModeFlag::None => {
            let flag = format!("--served-model-name={name}={model}");
            Err(RankError::Server(format!("{flag} names model `{model}`, which the repository does not have")))
        }
        _ => Ok(()),
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

#[cfg(test)]
mod tests {
    use std::ffi::OsString;

    use serving::ModelState;

    use super::*;

    #[test]
    fn a_further_name_of_a_model_that_is_not_there_is_refused_unless_models_come_later() {
        let entry =
            ModelIndexEntry { name: "llm".into(), version: "1".into(), state: ModelState::Ready, reason: "".into() };
        let check = |flags: &str| {
            let words = ["rank", "--model-repo=/m"].into_iter().chain(flags.split_whitespace()).map(OsString::from);
            let matches = crate::command().try_get_matches_from(words).unwrap();
            let (args, _) = crate::parse(&matches).unwrap();
            check_served_names(&args, std::slice::from_ref(&entry)).map_err(|error| error.to_string())
        };
        assert_eq!(check("--served-model-name=a=llm"), Ok(()));
        let error = check("--served-model-name=a=llm --served-model-name=b=lm").unwrap_err();
        assert!(error.contains("--served-model-name=b=lm names model `lm`"), "{error}");
        let error = check("--served-model-name=a=llm --served-model-name=a=lm").unwrap_err();
        assert!(error.contains("gives `a` to `llm` and to `lm`"), "{error}");
        assert_eq!(check("--served-model-name=a=llm --served-model-name=a=llm"), Ok(()));
        assert_eq!(check("--served-model-name=b=lm --model-control-mode=explicit"), Ok(()));
        assert_eq!(check("--served-model-name=b=lm --model-control-mode=poll"), Ok(()));
    }
}
