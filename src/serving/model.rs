//! One loaded model version, with its checks and its statistics.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::SeqCst};
use std::time::{Duration, Instant};

use repository::ModelConfig;
use tokio::sync::Notify;

use crate::cache::ResponseCache;
use crate::check::Signature;
use crate::labels::Labels;
use crate::scheduler::{Scheduler, StateSpec};
use crate::statistics::{ModelStatistics, Statistics};
use crate::watch::{Cached, Watch};
use crate::{Backend, Changes, EnsembleStep, InferError, InferRequest, InferResponse, Name, ResponseStream};

/// One version of a model that answers requests.
pub(crate) struct ServedModel {
    pub config: Arc<ModelConfig>,
    pub name: Name,
    pub version: i64,
    pub version_text: Name,
    pub is_decoupled: bool,
    pub signature: Signature,
    /// Whether the signature leaves shapes as they are.
    pub keeps_shapes: bool,
    pub statistics: Statistics,
    pub in_flight: InFlight,
    /// Responses of this model, and others, where its configuration asks for it.
    pub cache: Option<Arc<ResponseCache>>,
    pub labels: Labels,
    load_time: Duration,
    /// Tells this load from earlier ones of the same version.
    load: u64,
    backend: Arc<dyn Backend>,
    /// Queues requests for a backend that leaves it to `serving`.
    scheduler: Option<Scheduler>,
}

impl ServedModel {
    pub fn new(
        config: Arc<ModelConfig>,
        version: i64,
        backend: Arc<dyn Backend>,
        cache: Option<Arc<ResponseCache>>,
        states: Vec<StateSpec>,
    ) -> Self {
        static NUM_LOADS: AtomicU64 = AtomicU64::new(0);
        let signature = Signature::new(&config);
        Self {
            keeps_shapes: signature.keeps_shapes(),
            signature,
            is_decoupled: config.is_decoupled(),
            version,
            version_text: Name::from(version.to_string()),
            statistics: Statistics::new(&config, false),
            load_time: Duration::ZERO,
            in_flight: InFlight::default(),
            cache: cache.filter(|_| config.response_cache.is_some_and(|cache| cache.enable)),
            labels: Labels::new(),
            load: NUM_LOADS.fetch_add(1, SeqCst),
            scheduler: Scheduler::new(&config, &backend, states),
            name: Name::from(config.name.as_str()),
            config,
            backend,
        }
    }

    /// The same model with names for the classes of its outputs.
    pub fn with_labels(self, labels: Labels) -> Self {
        Self { labels, ..self }
    }

    /// The same model, which took so long to load; with what quantiles need when they are wanted.
    pub fn loaded_in(self, load_time: Duration, keeps_recent_durations: bool) -> Self {
        Self { load_time, statistics: Statistics::new(&self.config, keeps_recent_durations), ..self }
    }

    /// Checks the request, hands it to the backend, and counts what comes of it.
    pub fn infer(self: &Arc<Self>, mut request: InferRequest) -> Result<ResponseStream, InferError> {
        let started = Instant::now();
        let batch_size = self.admit(&mut request, started)?;
        let (cached, answer) = self.look_up(&request);
        let mut watch = Watch::new(self.clone(), &request, batch_size, started, cached);
        // An ensemble leaves what it has no use for; a trace tells what was asked for.
        let is_told_what_is_kept = request.step.is_none() || request.trace.is_some();
        if is_told_what_is_kept && !self.backend.keeps_to_requested_outputs() {
            watch.keep_only(request.requested_outputs.clone());
        }
        if let Some(response) = answer {
            return Ok(ResponseStream::ready(response).watched(watch));
        }
        let accepted = match &self.scheduler {
            Some(scheduler) => scheduler.infer(request, batch_size),
            None => self.backend.infer(request),
        };
        match accepted {
            Ok(stream) => Ok(stream.watched(watch)),
            Err(error) => {
                watch.refused(&error);
                Err(error)
            }
        }
    }

    /// Whether [`ServedModel::answer`] may be asked.
    pub fn answers_at_once(&self) -> bool {
        self.cache.is_none() && self.backend.answers_at_once()
    }

    /// As [`ServedModel::infer`], of a model that answers at once. The request may be asked again with other inputs.
    pub fn answer(self: &Arc<Self>, request: &mut InferRequest) -> Result<InferResponse, InferError> {
        let started = Instant::now();
        let batch_size = self.admit(request, started)?;
        let mut watch = Watch::new(self.clone(), request, batch_size, started, Cached::Never);
        let response = match self.backend.answer(request) {
            Ok(response) => InferResponse { is_final: true, ..response },
            Err(error) => {
                watch.refused(&error);
                return Err(error);
            }
        };
        watch.keep_only(std::mem::take(&mut request.requested_outputs));
        let response = watch.see(Some(Ok(response))).expect("what is seen comes back");
        request.requested_outputs = watch.take_requested_outputs();
        response
    }

    /// Whether nothing has to be done for this request but to check, answer and count it: no trace, no tensors in a
    /// client's memory, no shapes to change, no responses counted one by one.
    pub fn answers_plainly(&self, request: &InferRequest) -> bool {
        self.keeps_shapes && !self.is_decoupled && request.trace.is_none() && request.client_memory.has_no_input()
    }

    /// What a model that answers at once answers to a request that has passed its checks; neither checked nor counted. It
    /// is not in flight for others: it is over before they could wait for it.
    pub fn answer_unseen(&self, request: &InferRequest) -> Result<InferResponse, InferError> {
        self.backend.answer(request)
    }

    /// What is new in the answer to a request that differs from the last of its `step` in `changes` alone, put into `told`.
    pub fn answer_again_unseen(
        &self,
        step: &EnsembleStep,
        changes: &Changes,
        told: &mut Changes,
    ) -> Option<Result<(), InferError>> {
        self.backend.answer_again(step, changes, told)
    }

    /// Checks a request and begins its trace. Returns its batch size.
    fn admit(&self, request: &mut InferRequest, started: Instant) -> Result<u64, InferError> {
        let in_place = self.backend.reads_client_memory() && self.cache.is_none() && request.trace.is_none();
        if !in_place {
            request.fetch_client_memory()?;
        }
        // Nothing is counted of a request that is no request to this model, as in Triton.
        let batch_size = self.signature.check(request)?;
        if let Some(trace) = &request.trace {
            trace.name(&self.config.name, self.version, &request.id);
            trace.mark_at("REQUEST_START", started);
            trace.mark("QUEUE_START");
            trace.tensors("TENSOR_QUEUE_INPUT", &request.inputs);
        }
        Ok(batch_size)
    }

    fn look_up(&self, request: &InferRequest) -> (Cached, Option<InferResponse>) {
        let Some(cache) = &self.cache else { return (Cached::Never, None) };
        let started = Instant::now();
        let key = cache.key(self.load, request);
        match cache.get(key) {
            Some(response) => (Cached::Hit(started.elapsed()), Some(response)),
            None => (Cached::Miss(key, started.elapsed()), None),
        }
    }

    /// Whether a request would be served now.
    pub fn is_ready(&self) -> bool {
        self.backend.is_ready()
    }

    /// The same, as the model itself sees it.
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

impl fmt::Debug for ServedModel {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "ServedModel({} version {})", self.config.name, self.version)
    }
}

/// Counts requests, and wakes who waits for none.
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
