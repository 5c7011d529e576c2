//! Loads LLMs, and reports the status of their replicas.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, Weak};

use engine::EngineStats;
use futures::future::{BoxFuture, join_all};
use futures::stream::FuturesUnordered;
use futures::{FutureExt, StreamExt};
use ipc::Prefix;
use record::Recorder;
use serving::{Backend, BackendFactory, InferError, LoadRequest};
use supervision::{Agents, DeviceDrafter};
use text::Tokenizer;
use tokio::runtime::Handle;
use tokio::sync::oneshot;

use super::adapters::{AdapterStatus, AdapterStore};
use super::config::{LlmConfig, LlmDefaults};
use super::inbox::{Inbox, Message};
use super::ledger::{LlmLedger, Report};
use super::logits::LogitsBudget;
use super::metrics::MetricValues;
use super::model::Llm;
use super::replicas::{fingerprint, start_replicas, stop_all};
use super::router::{Replica, Router};
use super::turns::Turns;
use super::weights::ServedWeights;

/// Loads LLMs: `tensorrtllm`, `trireme` and the other names in users' configurations.
pub struct LlmFactory {
    defaults: LlmDefaults,
    agents: Arc<Agents>,
    prefix: Prefix,
    event_runtime: Handle,
    logits: Arc<LogitsBudget>,
    loaded: Arc<Mutex<Vec<Loaded>>>,
    /// Number of models that are being loaded.
    num_loading: Arc<AtomicUsize>,
    recorder: Option<Arc<Recorder>>,
    /// If models share the devices.
    turns: Option<Arc<Turns>>,
}

/// A loaded model. The weak reference ends when the model is unloaded.
struct Loaded {
    name: String,
    version: String,
    block_size: usize,
    max_rows: usize,
    /// Number of ranks of a replica.
    group_size: u32,
    router: Weak<Router>,
    adapters: Arc<AdapterStore>,
    weights: Arc<ServedWeights>,
}

/// The status of one replica of an LLM, for metrics.
#[derive(Debug, Clone)]
pub struct LlmStatus {
    /// Model name.
    pub name: String,
    /// Its version.
    pub version: String,
    /// Index of the replica; `None` for a model with one replica.
    pub replica: Option<u32>,
    /// Number of sequences that wait for a replica of the model; 0 for all replicas but the first.
    pub num_queued: usize,
    /// Whether a step can run now, or once the replica is woken.
    pub is_ready: bool,
    /// Whether the replica sleeps.
    pub is_sleeping: bool,
    /// Whether a rank of the replica is lost.
    pub is_lost: bool,
    /// Number of times that its workers were started again.
    pub num_restarts: u64,
    /// Positions in a KV block.
    pub block_size: usize,
    /// Maximum number of sequences that run at once.
    pub max_rows: usize,
    /// State of the engine after its last step.
    pub engine: EngineStats,
    /// The adapters of requests in flight; those of all replicas for the first one, none for the others.
    pub adapters: AdapterStatus,
    /// The version of the weights that it serves.
    pub weights_version: String,
    /// Counters and histograms.
    pub metrics: MetricValues,
}

impl LlmFactory {
    /// A factory whose models run on the workers of `agents`. `prefix` is the name prefix of rank 0's shared memory. Events are
    /// delivered to requests on `event_runtime`, which should be the runtime that serves most requests.
    pub fn new(defaults: LlmDefaults, agents: Arc<Agents>, prefix: Prefix, event_runtime: Handle) -> Self {
        let turns = defaults.longest_turn.map(Turns::new);
        if let Some(turns) = &turns {
            event_runtime.spawn(Arc::clone(turns).run());
        }
        let (logits, loaded) = (Arc::default(), Arc::default());
        let num_loading = Arc::default();
        Self { defaults, agents, prefix, event_runtime, logits, loaded, num_loading, recorder: None, turns }
    }

    /// The same, with the steps of all models recorded.
    pub fn with_recorder(self, recorder: Option<Arc<Recorder>>) -> Self {
        Self { recorder, ..self }
    }

    /// The status of every replica of every loaded LLM.
    pub fn status(&self) -> Vec<LlmStatus> {
        let mut loaded = ipc::lock(&self.loaded);
        loaded.retain(|model| model.router.strong_count() > 0);
        loaded.iter().flat_map(Loaded::status).collect()
    }

    /// Whether every LLM has a replica in service without workers on `ranks`. False while none is loaded, and while one is being loaded.
    pub fn serves_without(&self, ranks: &[u32]) -> bool {
        let loaded = ipc::lock(&self.loaded);
        let mut models = loaded.iter().filter_map(|model| Some((model, model.router.upgrade()?))).peekable();
        let has_models = models.peek().is_some() && self.num_loading.load(Ordering::Acquire) == 0;
        has_models
            && models.all(|(model, router)| {
                let in_service = (0..).zip(router.replicas()).filter(|(_, replica)| replica.shared.failure().is_none());
                let group = |replica: u32| replica * model.group_size..(replica + 1) * model.group_size;
                in_service.into_iter().any(|(replica, _)| !ranks.iter().any(|rank| group(replica).contains(rank)))
            })
    }

    /// The error of a model that is to be loaded while ranks are lost.
    fn check_ranks(agents: &Agents, model: &str) -> Result<(), InferError> {
        let Some(reason) = agents.lost_ranks().first().and_then(|&rank| agents.loss_of(rank)) else { return Ok(()) };
        Err(InferError::unavailable(format!(
            "model `{model}` cannot be loaded while the world is not whole ({reason}); try again when all hosts are back, or restart it \
             (`launch restart`)"
        )))
    }

    /// The ledger of every replica of every loaded LLM, each taken between two of its steps.
    pub fn ledgers(&self) -> BoxFuture<'static, Vec<LlmLedger>> {
        let mut loaded = ipc::lock(&self.loaded);
        loaded.retain(|model| model.router.strong_count() > 0);
        let ledger = |model: &Loaded, replica: u32, inbox: Inbox| {
            let (name, version) = (model.name.clone(), model.version.clone());
            async move {
                let (reply, report) = oneshot::channel();
                inbox.send(Message::Ledger(reply));
                let Report { scheduler, num_open_sequences, wrong } = report.await.unwrap_or_default();
                LlmLedger { name, version, replica, scheduler, num_open_sequences, wrong }
            }
        };
        let ledgers = loaded.iter().flat_map(|model| {
            let router = model.router.upgrade();
            let inboxes: Vec<Inbox> =
                router.iter().flat_map(|router| router.replicas()).map(|replica| replica.inbox.clone()).collect();
            (0..).zip(inboxes).map(move |(replica, inbox)| ledger(model, replica, inbox))
        });
        join_all(ledgers.collect::<Vec<_>>()).boxed()
    }
}

/// A model that is being loaded, until this is dropped.
struct Loading(Arc<AtomicUsize>);

impl Loading {
    fn new(count: &Arc<AtomicUsize>) -> Self {
        count.fetch_add(1, Ordering::AcqRel);
        Self(Arc::clone(count))
    }
}

impl Drop for Loading {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::AcqRel);
    }
}

impl Loaded {
    fn status(&self) -> Vec<LlmStatus> {
        let Some(router) = self.router.upgrade() else { return Vec::new() };
        let has_many = router.replicas().len() > 1;
        let num_queued = router.num_waiting();
        let running: Vec<_> =
            router.replicas().iter().flat_map(|replica| ipc::lock(&replica.shared.adapters).clone()).collect();
        let status = |(replica, Replica { shared, .. }): (u32, &Replica)| LlmStatus {
            name: self.name.clone(),
            version: self.version.clone(),
            replica: has_many.then_some(replica),
            num_queued: if replica == 0 { num_queued } else { 0 },
            is_ready: shared.is_ready(),
            is_sleeping: shared.is_sleeping(),
            is_lost: shared.is_lost.load(Ordering::Relaxed),
            num_restarts: shared.restarts.load(Ordering::Relaxed),
            block_size: self.block_size,
            max_rows: self.max_rows,
            engine: *ipc::lock(&shared.stats),
            adapters: if replica == 0 { self.adapters.status(&running) } else { AdapterStatus::default() },
            weights_version: self.weights.version(),
            metrics: shared.metrics.read(),
        };
        (0..).zip(router.replicas()).map(status).collect()
    }
}

impl BackendFactory for LlmFactory {
    /// True: two copies of a model's weights and KV blocks do not fit into the memory of a device.
    fn is_exclusive(&self) -> bool {
        true
    }

    fn check(&self, load: LoadRequest) -> BoxFuture<'static, Result<(), InferError>> {
        let (defaults, agents) = (self.defaults.clone(), Arc::clone(&self.agents));
        async move {
            let config = LlmConfig::new(&load, &defaults)?;
            Self::check_ranks(&agents, &config.name)
        }
        .boxed()
    }

    fn load(&self, load: LoadRequest) -> BoxFuture<'static, Result<Arc<dyn Backend>, InferError>> {
        let (defaults, agents, prefix) = (self.defaults.clone(), Arc::clone(&self.agents), self.prefix.clone());
        let (all_loaded, event_runtime, logits) =
            (Arc::clone(&self.loaded), self.event_runtime.clone(), Arc::clone(&self.logits));
        let (recorder, turns) = (self.recorder.clone(), self.turns.clone());
        let loading = Loading::new(&self.num_loading);
        async move {
            let mut config = LlmConfig::new(&load, &defaults)?;
            // From now on the loss of a rank ends the world.
            let _loading = loading;
            Self::check_ranks(&agents, &config.name)?;
            if agents.nodes().names().len() > 1 {
                config.checkpoint_fingerprint = Some(fingerprint(&config.name, config.checkpoint.clone()).await?);
                if let Some(DeviceDrafter::Model(dir) | DeviceDrafter::Eagle3(dir)) = config.drafter.clone() {
                    config.draft_fingerprint = Some(fingerprint(&config.name, dir).await?);
                }
            }
            let adapters = read_adapters(&config).await?;
            let weights = served_weights(&config).await?;
            let turn = match &turns {
                Some(turns) => Some(turns.load().await),
                None => None,
            };
            let requests = turns.as_ref().map(|turns| turns.requests());
            let (router, loads) =
                start_replicas(&config, &agents, &prefix, &event_runtime, recorder.as_ref(), requests)?;
            let tokenizer = tokenizer(&config, load.clone()).await;
            let mut loads: FuturesUnordered<_> = loads.into_iter().collect();
            while let Some(is_loaded) = loads.next().await {
                if let Err(reason) = is_loaded.unwrap_or_else(|_| Err("its step thread ended".to_owned())) {
                    stop_all(&router);
                    return Err(InferError::internal(format!("model `{}`: {reason}", config.name)));
                }
            }
            if let Some(turn) = turn {
                turn.succeeded(&config.name, &router);
            }
            ipc::lock(&all_loaded).push(Loaded {
                name: config.name.clone(),
                version: load.version.to_string(),
                block_size: config.engine.block_size,
                max_rows: config.engine.max_rows,
                group_size: config.group_size(),
                router: Arc::downgrade(&router),
                adapters: Arc::clone(&adapters),
                weights: Arc::clone(&weights),
            });
            Ok(Arc::new(Llm::new(config, load.version, tokenizer, router, adapters, weights, logits))
                as Arc<dyn Backend>)
        }
        .boxed()
    }
}

/// Reads the adapters of a model.
async fn read_adapters(config: &LlmConfig) -> Result<Arc<AdapterStore>, InferError> {
    let config = config.clone();
    let read = move || {
        let model = config.model(config.target());
        let model = model.map_err(|error| InferError::invalid(format!("model `{}`: {error}", config.name)))?;
        AdapterStore::new(&config.name, model, &config.adapters).map(Arc::new)
    };
    tokio::task::spawn_blocking(read).await.unwrap_or_else(|_| Err(InferError::internal("reading adapters failed")))
}

/// The weights that a model begins with.
async fn served_weights(config: &LlmConfig) -> Result<Arc<ServedWeights>, InferError> {
    let config = config.clone();
    let read = tokio::task::spawn_blocking(move || Arc::new(ServedWeights::read(&config))).await;
    read.map_err(|_| InferError::internal("reading the form of a checkpoint failed"))
}

/// The tokenizer of the checkpoint, or else the one that the configuration names; `None` without either.
async fn tokenizer(config: &LlmConfig, load: LoadRequest) -> Option<Arc<Tokenizer>> {
    let dir = config.checkpoint.clone();
    let has_own = crate::checkpoint::has_tokenizer(&dir);
    if !has_own && load.config.parameter("tokenizer_dir").is_none() {
        return None;
    }
    let read = move || match has_own {
        true => generation::tokenizer(&dir).map_err(|error| error.to_string()),
        false => crate::checkpoint::tokenizer(&load).map(|(tokenizer, _)| tokenizer).map_err(|error| error.message),
    };
    match tokio::task::spawn_blocking(read).await {
        Ok(Ok(tokenizer)) => Some(tokenizer),
        Ok(Err(error)) => {
            tracing::warn!(model = %config.name, error, "stop words are found by their tokens alone");
            None
        }
        Err(_) => None,
    }
}
