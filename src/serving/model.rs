//! One loaded model version, with its statistics.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::SeqCst};
use std::time::Duration;

use generation::Generator;
use repository::ModelConfig;
use tokio::sync::Notify;

use crate::cache::ResponseCache;
use crate::check::Signature;
use crate::counters::Statistics;
use crate::labels::Labels;
use crate::scheduler::{Scheduler, StateSpec};
use crate::statistics::ModelStatistics;
use crate::{Adapters, Backend, InferRequest, Name, Sleeper, TextModel, Weights};

/// One version of a model that answers requests.
pub(crate) struct ServedModel {
    pub config: Arc<ModelConfig>,
    pub name: Name,
    pub version: i64,
    pub version_text: Name,
    pub is_decoupled: bool,
    pub signature: Signature,
    pub statistics: Arc<Statistics>,
    pub in_flight: InFlight,
    /// The server's response cache, where the model's configuration enables it.
    pub cache: Option<Arc<ResponseCache>>,
    pub labels: Labels,
    load_time: Duration,
    /// Number of this load, or of its last weights. It is different from those of earlier loads of the same version.
    load_id: AtomicU64,
    pub backend: Arc<dyn Backend>,
    /// Queues and batches requests, for a backend that does not do so itself.
    pub scheduler: Option<Scheduler>,
}

impl ServedModel {
    pub fn new(
        config: Arc<ModelConfig>,
        version: i64,
        backend: Arc<dyn Backend>,
        cache: Option<Arc<ResponseCache>>,
        states: Vec<StateSpec>,
    ) -> Self {
        let signature = Signature::new(&config);
        Self {
            signature,
            is_decoupled: config.is_decoupled(),
            version,
            version_text: Name::from(version.to_string()),
            statistics: Arc::new(Statistics::new(&config, false)),
            load_time: Duration::ZERO,
            in_flight: InFlight::default(),
            cache: cache.filter(|_| config.response_cache.is_some_and(|cache| cache.enable)),
            labels: Labels::new(),
            load_id: AtomicU64::new(next_load_id()),
            scheduler: Scheduler::new(&config, &backend, states),
            name: Name::from(config.name.as_str()),
            config,
            backend,
        }
    }

    /// The number with which responses are cached.
    pub fn load_id(&self) -> u64 {
        self.load_id.load(SeqCst)
    }

    /// Makes later requests miss what the response cache has: the weights of the model, or of one that it uses, are others now.
    pub fn forget_cached(&self) {
        self.load_id.store(next_load_id(), SeqCst);
    }

    /// Sets the names of its outputs' classes.
    pub fn with_labels(self, labels: Labels) -> Self {
        Self { labels, ..self }
    }

    /// Sets the time that loading took, and whether recent durations are kept for quantiles.
    pub fn with_load_time(self, load_time: Duration, keeps_recent_durations: bool) -> Self {
        let statistics = Arc::new(Statistics::new(&self.config, keeps_recent_durations));
        Self { load_time, statistics, ..self }
    }

    /// What adapters of protocols need to make [`GenerateCall`]s.
    pub fn generator(&self) -> Option<Generator> {
        self.backend.generator()
    }

    /// Its adapters (LoRA), if it takes any.
    pub fn adapters(&self) -> Option<Arc<dyn Adapters>> {
        self.backend.adapters()
    }

    /// The model as one that can sleep, if it can.
    pub fn sleeper(&self) -> Option<Arc<dyn Sleeper>> {
        self.backend.sleeper()
    }

    /// The model as one whose weights can be replaced, if they can.
    pub fn weights(&self) -> Option<Arc<dyn Weights>> {
        self.backend.weights()
    }

    /// Empties its prefix cache; false for a model that has none.
    pub async fn reset_prefix_cache(&self) -> bool {
        self.backend.reset_prefix_cache().await
    }

    /// Batch size of a request that is not checked yet.
    pub fn num_rows(&self, request: &InferRequest) -> i64 {
        let first = request.inputs.first().and_then(|tensor| tensor.shape.first());
        first.copied().filter(|_| self.config.max_batch_size > 0).unwrap_or(1)
    }

    /// What this model does in a text ensemble. `None` where its requests are queued, or its responses cached or reshaped:
    /// only the general interpreter of ensembles handles these.
    pub fn text_model(&self) -> Option<TextModel> {
        let is_plain = self.cache.is_none() && self.scheduler.is_none() && self.signature.keeps_output_shapes();
        if is_plain { self.backend.text_model() } else { None }
    }

    /// Whether the model can serve a request now.
    pub fn is_ready(&self) -> bool {
        self.backend.is_ready()
    }

    /// Whether the models that this one passes its requests to are loaded, ready or not.
    pub fn is_complete(&self) -> bool {
        self.backend.is_complete()
    }

    /// Whether the model can serve a request now, by its own check where it has one.
    pub async fn probe(&self) -> bool {
        self.backend.probe().await
    }

    /// Resolves when no request is in flight, here and in the backend.
    pub async fn drain(&self) {
        self.in_flight.idle().await;
        self.backend.drain().await;
    }

    pub fn statistics(&self) -> ModelStatistics {
        let pending = match &self.scheduler {
            Some(scheduler) => scheduler.num_waiting() as u64,
            None => self.in_flight.count(),
        };
        ModelStatistics {
            is_decoupled: self.is_decoupled,
            is_cached: self.cache.is_some(),
            load_time: self.load_time,
            memory: self.backend.memory_usage(),
            tags: self.config.metric_tags.clone().into_iter().collect(),
            ..self.statistics.snapshot(&self.config.name, &self.version_text, pending)
        }
    }
}

fn next_load_id() -> u64 {
    static NUM_LOADS: AtomicU64 = AtomicU64::new(0);
    NUM_LOADS.fetch_add(1, SeqCst)
}

impl fmt::Debug for ServedModel {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "ServedModel({} version {})", self.config.name, self.version)
    }
}

/// Counts requests in flight, and notifies waiters when there are none.
#[derive(Debug, Default)]
pub(crate) struct InFlight {
    count: AtomicU64,
    idle: Notify,
}

impl InFlight {
    pub fn enter(&self) {
        self.count.fetch_add(1, SeqCst);
    }

    pub fn leave(&self) {
        if self.count.fetch_sub(1, SeqCst) == 1 {
            self.idle.notify_waiters();
        }
    }

    pub fn count(&self) -> u64 {
        self.count.load(SeqCst)
    }

    pub async fn idle(&self) {
        loop {
            let idle = self.idle.notified();
            tokio::pin!(idle);
            idle.as_mut().enable();
            if self.count() == 0 {
                return;
            }
            idle.await;
        }
    }
}
