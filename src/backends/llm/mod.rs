//! The LLM engine as a backend: tensors to engine requests, token events back to tensors.
//!
//! A model has one or more replicas behind one queue. Each has a step thread on rank 0, and a worker process per rank that
//! it is spread over.

mod check;
mod check_request;
mod config;
mod dispatcher;
mod event_queue;
mod event_source;
mod figures;
#[cfg(feature = "fuzzing")]
pub(crate) mod fuzz;
mod generate;
mod group;
mod inbox;
mod inputs;
mod ledger;
mod llm_stream;
mod logits;
mod masks;
mod outputs;
mod plan;
mod prefixes;
mod prompt_logprobs;
mod queue_rules;
mod refusal;
mod replica_state;
mod replicas;
mod request_event;
mod router;
mod step_thread;
mod text_stop;
mod texts;
mod timing;

use std::collections::VecDeque;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex, Weak};
use std::time::{Instant, SystemTime, UNIX_EPOCH};

use engine::{EngineConfig, EngineStats, Refused, Request, RequestConstraint};
use futures::future::BoxFuture;
use futures::stream::FuturesUnordered;
use futures::{FutureExt, StreamExt};
use generation::{ConstraintError, Constraints, GenerateRequest, Generator, SequenceText};
use ipc::Prefix;
use serving::{
    Backend, BackendFactory, CallCounter, GenerateCall, InferError, InferRequest, InferResponse, LoadRequest,
    MemoryUsage, Name, ResponseStream, TextModel, TextOutputs,
};
use smallvec::{SmallVec, smallvec};
use supervision::Agents;
use text::Tokenizer;
use tokio::runtime::{Handle, RuntimeFlavor};
use tokio::sync::watch;

use crate::encoder;
pub use check::{CheckFactory, Sound};
use config::LlmConfig;
pub use config::LlmDefaults;
use event_queue::event_queue;
use event_source::EventSource;
pub use figures::{ENDS, FigureValues, STEP_KINDS, STEP_PHASES, Start, WorkerFigures};
use generate::{ById, GenerateStream, Generating, Pending, SequenceTexts, Stop};
use inbox::Message;
use inputs::Command;
pub use ledger::LlmLedger;
use llm_stream::LlmStream;
use logits::LogitsBudget;
use outputs::Responses;
pub use plan::{ModelPlan, PlanFactory};
use prompt_logprobs::PromptLogprobs;
use refusal::error_of;
use replicas::{checkpoint_fingerprint, start_replicas, stop_all};
use router::{Admission, Replica, Router};
use text_stop::TextStop;
use timing::Timing;

/// Loads LLMs: `tensorrtllm`, `trireme` and the other names in users' configurations.
pub struct LlmFactory {
    defaults: LlmDefaults,
    agents: Arc<Agents>,
    prefix: Prefix,
    event_runtime: Handle,
    logits: Arc<LogitsBudget>,
    loaded: Arc<Mutex<Vec<Loaded>>>,
}

/// A model that was loaded; gone when its state is.
struct Loaded {
    name: String,
    version: String,
    block_size: usize,
    max_rows: usize,
    router: Weak<Router>,
}

/// What a replica of an LLM is doing, for metrics.
#[derive(Debug, Clone)]
pub struct LlmStatus {
    /// Model name.
    pub name: String,
    /// Its version.
    pub version: String,
    /// Which replica it is; `None` for a model that has one.
    pub replica: Option<u32>,
    /// Sequences that wait for a replica; counted with the first.
    pub num_queued: usize,
    /// Whether a step can run now.
    pub is_ready: bool,
    /// Starts of its workers after the first.
    pub num_restarts: u64,
    /// Positions in a KV block.
    pub block_size: usize,
    /// Most sequences that run at once.
    pub max_rows: usize,
    /// The engine after its last step.
    pub engine: EngineStats,
    /// What was counted.
    pub figures: FigureValues,
}

impl LlmFactory {
    /// A factory whose models run on the workers of `agents`; rank 0's own shared memory is named by `prefix`. A
    /// step's events are delivered to its requests on `event_runtime`: best where most of them are served.
    pub fn new(defaults: LlmDefaults, agents: Arc<Agents>, prefix: Prefix, event_runtime: Handle) -> Self {
        Self { defaults, agents, prefix, event_runtime, logits: Arc::default(), loaded: Arc::default() }
    }

    /// Every replica of every loaded LLM.
    pub fn status(&self) -> Vec<LlmStatus> {
        let mut loaded = ipc::lock(&self.loaded);
        loaded.retain(|model| model.router.strong_count() > 0);
        loaded.iter().flat_map(Loaded::status).collect()
    }
}

impl Loaded {
    fn status(&self) -> Vec<LlmStatus> {
        let Some(router) = self.router.upgrade() else { return Vec::new() };
        let has_many = router.replicas().len() > 1;
        let num_queued = router.num_waiting();
        let status = |(replica, Replica { shared, .. }): (u32, &Replica)| LlmStatus {
            name: self.name.clone(),
            version: self.version.clone(),
            replica: has_many.then_some(replica),
            num_queued: if replica == 0 { num_queued } else { 0 },
            is_ready: shared.is_ready(),
            num_restarts: shared.restarts.load(Ordering::Relaxed),
            block_size: self.block_size,
            max_rows: self.max_rows,
            engine: *ipc::lock(&shared.stats),
            figures: shared.figures.read(),
        };
        (0..).zip(router.replicas()).map(status).collect()
    }
}

impl BackendFactory for LlmFactory {
    /// Two copies of a model's weights and KV blocks do not fit a device.
    fn is_exclusive(&self) -> bool {
        true
    }

    fn load(&self, load: LoadRequest) -> BoxFuture<'static, Result<Arc<dyn Backend>, InferError>> {
        let (defaults, agents, prefix) = (self.defaults.clone(), Arc::clone(&self.agents), self.prefix.clone());
        let (all_loaded, event_runtime, logits) =
            (Arc::clone(&self.loaded), self.event_runtime.clone(), Arc::clone(&self.logits));
        async move {
            let mut config = LlmConfig::new(&load, &defaults)?;
            if agents.nodes().names().len() > 1 {
                config.checkpoint_fingerprint = Some(checkpoint_fingerprint(&config).await?);
            }
            let (router, loads) = start_replicas(&config, &agents, &prefix, &event_runtime)?;
            let tokenizer = tokenizer(&config).await;
            let mut loads: FuturesUnordered<_> = loads.into_iter().collect();
            while let Some(is_loaded) = loads.next().await {
                if let Err(reason) = is_loaded.unwrap_or_else(|_| Err("its step thread ended".to_owned())) {
                    stop_all(&router);
                    return Err(InferError::internal(format!("model `{}`: {reason}", config.name)));
                }
            }
            ipc::lock(&all_loaded).push(Loaded {
                name: config.name.clone(),
                version: load.version.to_string(),
                block_size: config.engine.block_size,
                max_rows: config.engine.max_rows,
                router: Arc::downgrade(&router),
            });
            Ok(Arc::new(Llm::new(config, load.version, tokenizer, router, logits)) as Arc<dyn Backend>)
        }
        .boxed()
    }
}

/// The checkpoint's tokenizer, which finds stop words in the text; a checkpoint need not have one.
async fn tokenizer(config: &LlmConfig) -> Option<Arc<Tokenizer>> {
    let dir = config.checkpoint.clone();
    if !crate::checkpoint::has_tokenizer(&dir) {
        return None;
    }
    match tokio::task::spawn_blocking(move || generation::tokenizer(&dir)).await {
        Ok(Ok(tokenizer)) => Some(tokenizer),
        Ok(Err(error)) => {
            tracing::warn!(model = %config.name, %error, "stop words are found by their tokens alone");
            None
        }
        Err(_) => None,
    }
}

/// One loaded LLM.
struct Llm {
    config: Arc<LlmConfig>,
    version: String,
    tokenizer: Option<Arc<Tokenizer>>,
    /// Compiles what texts must be; `None` without a tokenizer.
    constraints: Option<Constraints>,
    router: Arc<Router>,
    /// Shared with the other models.
    logits: Arc<LogitsBudget>,
    /// For `stop`.
    by_id: ById,
    /// Requests in flight, for drain.
    in_flight: Arc<watch::Sender<usize>>,
    /// When it was loaded, in seconds since 1970.
    created: u64,
}

impl Llm {
    fn new(
        config: LlmConfig,
        version: i64,
        tokenizer: Option<Arc<Tokenizer>>,
        router: Arc<Router>,
        logits: Arc<LogitsBudget>,
    ) -> Self {
        let constraints =
            tokenizer.clone().map(|tokenizer| Constraints::new(tokenizer, config.vocab_size, &config.end_ids));
        Self {
            config: Arc::new(config),
            version: version.to_string(),
            tokenizer,
            constraints,
            router,
            logits,
            by_id: Arc::default(),
            in_flight: Arc::new(watch::Sender::new(0)),
            created: SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs(),
        }
    }

    /// Ends the running request of the same id; answers with one empty final response.
    fn stop(&self, request: &InferRequest) -> ResponseStream {
        if let Some(stop) = ipc::lock(&self.by_id).get(&request.id) {
            stop.send();
        }
        let (sender, stream) = ResponseStream::channel(1);
        let response = InferResponse {
            model_name: Name::from(&self.config.name),
            model_version: Name::from(&self.version),
            id: request.id.clone(),
            is_final: true,
            ..InferResponse::default()
        };
        sender.send(Ok(response)).now_or_never();
        stream
    }
}

impl Llm {
    /// A replica for these sequences of one request, or a place in the queue.
    fn admit(&self, sequences: &[Request]) -> Result<Admission, InferError> {
        if let Some(reason) = self.router.failure() {
            return Err(InferError::unavailable(reason));
        }
        let EngineConfig { max_queue, max_rows, .. } = self.config.engine;
        let limit = max_queue + max_rows * self.router.replicas().len();
        if *self.in_flight.borrow() >= limit {
            return Err(InferError::unavailable(format!(
                "model `{}` has {limit} requests waiting or running; try again later",
                self.config.name
            )));
        }
        let first = sequences.first().expect("a request has a sequence");
        let num_rows = first.beams.map_or(sequences.len(), |beams| beams.width as usize);
        let admission = self.router.admit(&first.prompt, num_rows, first.priority);
        admission.map_err(|full| error_of(&Refused::QueueFull { max: full.max }))
    }

    /// A search of the text for each sequence, where there are stop words to search for.
    fn text_stops(&self, sequences: &[Request]) -> Vec<TextStop> {
        let (Some(tokenizer), Some(first)) = (&self.tokenizer, sequences.first()) else { return Vec::new() };
        let Some(&before) = first.prompt.last() else { return Vec::new() };
        // The sequences have the prompt and the words in common.
        let texts = TextStop::texts(tokenizer, &first.stop_words, before);
        sequences.iter().map_while(|_| TextStop::new(tokenizer, &texts, before)).collect()
    }
}

impl Llm {
    /// Begins a request, whose responses are the model's own or those of a text ensemble.
    fn begin(&self, request: InferRequest, text: Option<TextOutputs>) -> Result<ResponseStream, InferError> {
        let begun = Instant::now();
        let parsed = match inputs::parse(&self.config, &request)? {
            Command::Stop => return Ok(self.stop(&request)),
            Command::Generate(parsed) => *parsed,
        };
        let responses = Responses::new(&self.config, &self.version, &request, &parsed, text);
        let events = self.start(request.id, parsed.generate, None)?;
        Ok(ResponseStream::from_source(|progress| {
            progress.add_input_time(begun.elapsed());
            Box::new(LlmStream { events, responses, progress })
        }))
    }

    /// Starts a request; its events are the stream. `decode_calls` counts the calls that decode its tokens.
    fn start(
        &self,
        client_id: Name,
        mut request: GenerateRequest,
        decode_calls: Option<CallCounter>,
    ) -> Result<GenerateStream, InferError> {
        let logits_bytes = check_request::check(&self.config, &request)?;
        request.sequence.constraint = self.constraint(&request)?;
        let logits = self.logits.charge(&self.config.limits, logits_bytes)?;
        let num_sequences = request.num_sequences;
        let timeout = self.config.queue.timeout(request.priority, request.timeout_us);
        let timeout = timeout.map(|timeout| (Instant::now() + timeout.after, timeout.rejects));
        request.sequence.priority =
            self.config.queue.priority(request.priority).saturating_add_signed(-request.priority_offset);
        let texts = self.sequence_texts(&mut request, decode_calls)?;
        if let (None, Some(tokenizer), Some(&before)) = (&texts, &self.tokenizer, request.sequence.prompt.last()) {
            TextStop::keep_space(tokenizer, &mut request.sequence.stop_words, before);
        }
        let sequences = request.into_sequences();
        let text_stops = if texts.is_some() { Vec::new() } else { self.text_stops(&sequences) };
        let admission = self.admit(&sequences)?;
        let prompt_len = sequences.first().map_or(0, |first| first.prompt.len());
        let shared = match &admission {
            Admission::Placed(place) => &place.replica().shared,
            Admission::Queued(_) => &self.router.replicas()[0].shared,
        };
        let timing = Timing::new(shared, self.config.engine.block_size, prompt_len, sequences.len());
        let (events, receiver) = event_queue();
        let stop = Arc::new(Stop::new(events.downgrade()));
        let submit = Some(Message::Submit { sequences, timeout, events });
        let mut pending = Pending { admission, submit, timeout };
        if !pending.submit_if_placed() {
            return Err(InferError::unavailable(format!("model `{}` is being unloaded", self.config.name)));
        }
        if !client_id.is_empty() {
            ipc::lock(&self.by_id).insert(client_id.clone(), Arc::clone(&stop));
        }
        self.in_flight.send_modify(|count| *count += 1);
        let generating = Generating {
            client_id,
            pending,
            by_id: Arc::clone(&self.by_id),
            stop,
            in_flight: Arc::clone(&self.in_flight),
            _logits: logits,
            timing,
            text_stops,
            texts,
            sequences: SmallVec::new(),
            ended: smallvec![false; num_sequences],
            is_cancelled: false,
            ready: VecDeque::new(),
        };
        Ok(GenerateStream::new(generating, receiver))
    }

    /// The constraint of a request's first sequence, where it has one. Compiling it takes time, meanwhile other threads
    /// serve other requests.
    fn constraint(&self, request: &GenerateRequest) -> Result<Option<RequestConstraint>, InferError> {
        if request.guide.is_free() {
            return Ok(None);
        }
        if request.sequence.beams.is_some() {
            return Err(error_of(&Refused::ConstrainedBeams));
        }
        let constraints = self.constraints.as_ref().ok_or_else(|| {
            InferError::invalid(format!(
                "model `{}` has no tokenizer, so its texts cannot be constrained",
                self.config.name
            ))
        })?;
        let compile = || constraints.compile(&request.guide, &request.sequence.sampling.end_ids);
        let can_hand_over = Handle::try_current().is_ok_and(|it| it.runtime_flavor() == RuntimeFlavor::MultiThread);
        let compiled = if can_hand_over { tokio::task::block_in_place(compile) } else { compile() };
        compiled.map(Some).map_err(|error| match error {
            ConstraintError::Busy { .. } => InferError::unavailable(error.to_string()),
            error => InferError::invalid(error.to_string()),
        })
    }

    /// The texts of a request's sequences, where it has text options.
    fn sequence_texts(
        &self,
        request: &mut GenerateRequest,
        decode_calls: Option<CallCounter>,
    ) -> Result<Option<SequenceTexts>, InferError> {
        let Some(options) = request.text else { return Ok(None) };
        let tokenizer = self.tokenizer.as_ref().ok_or_else(|| {
            InferError::invalid(format!("model `{}` has no tokenizer that can be read", self.config.name))
        })?;
        let stop = Arc::new(std::mem::take(&mut request.stop));
        let sequence = || SequenceText::new(tokenizer, options, &stop);
        let sequences = std::iter::repeat_with(sequence).take(request.num_sequences).collect();
        Ok(Some(SequenceTexts { sequences, decode_calls }))
    }
}

impl Backend for Llm {
    fn infer(&self, request: InferRequest) -> Result<ResponseStream, InferError> {
        self.begin(request, None)
    }

    fn text_model(&self) -> Option<TextModel> {
        Some(TextModel::Generator)
    }

    fn infer_text(&self, request: InferRequest, outputs: TextOutputs) -> Result<ResponseStream, InferError> {
        self.begin(request, Some(outputs))
    }

    fn generator(&self) -> Option<Generator> {
        let tokenizer = self.tokenizer.clone()?;
        let EngineConfig { max_sequence_len, max_rows, block_size, max_drafts, .. } = self.config.engine;
        let num_blocks = self.router.replicas().iter().map(|replica| ipc::lock(&replica.shared.stats).num_blocks).min();
        Some(Generator {
            max_prompt_bytes: encoder::max_prompt_bytes(&tokenizer, Some(max_sequence_len), &self.config.limits),
            tokenizer,
            checkpoint: self.config.checkpoint.clone(),
            max_sequence_len,
            num_kv_positions: num_blocks
                .filter(|&count| count > 0)
                .map_or(max_sequence_len, |count| count * block_size),
            max_rows,
            block_size,
            vocab_size: self.config.vocab_size,
            end_ids: self.config.end_ids.clone(),
            adds_special_tokens: true,
            defaults: self.config.sampling_defaults,
            max_drafts: max_drafts as u32,
            created: self.created,
        })
    }

    fn generate(&self, call: GenerateCall) -> Result<ResponseStream, InferError> {
        let GenerateCall { id, mut request, decode_calls, .. } = call;
        let begun = Instant::now();
        request.sequence.sampling.context_logits = request.prompt_logprobs.is_some();
        let prompt_logprobs = request.prompt_logprobs.map(|num_top| {
            let num_top = (num_top as usize).min(engine::MAX_LOGPROBS as usize);
            PromptLogprobs::new(request.sequence.prompt.clone(), num_top, self.config.vocab_size)
        });
        let num_open = request.num_sequences;
        let events = self.start(id, request, decode_calls)?;
        Ok(ResponseStream::from_source(|progress| {
            progress.add_input_time(begun.elapsed());
            Box::new(EventSource { events, progress, prompt_logprobs, next: None, num_open })
        }))
    }

    fn returns_only_requested_outputs(&self) -> bool {
        true
    }

    fn is_ready(&self) -> bool {
        self.router.is_ready()
    }

    fn memory_usage(&self) -> Vec<MemoryUsage> {
        let workers = self.router.replicas().iter().flat_map(|replica| replica.shared.figures.start().workers);
        workers.map(|worker| memory_usage(&worker)).collect()
    }

    fn drain(&self) -> BoxFuture<'_, ()> {
        async {
            let _ = self.in_flight.subscribe().wait_for(|&count| count == 0).await;
        }
        .boxed()
    }
}

fn memory_usage(worker: &WorkerFigures) -> MemoryUsage {
    let ordinal = worker.device.strip_prefix("cuda:").and_then(|ordinal| ordinal.parse().ok());
    let kind = if ordinal.is_some() { "GPU" } else { "CPU" };
    MemoryUsage { kind, id: ordinal.unwrap_or(0), num_bytes: worker.memory_bytes }
}

impl Drop for Llm {
    fn drop(&mut self) {
        stop_all(&self.router);
    }
}
