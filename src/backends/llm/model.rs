//! One loaded LLM: starts requests on its replicas.

mod constraint;

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::{Instant, SystemTime, UNIX_EPOCH};

use engine::{EngineConfig, Refused, Request};
use futures::FutureExt;
use futures::future::{BoxFuture, join_all};
use generation::{Constraints, GenerateRequest, Generator, RequestBounds, SequenceText};
use serving::{
    Adapters, Backend, GenerateCall, InferError, InferRequest, InferResponse, MemoryUsage, Name, ResponseStream,
    Sleeper, TextModel, TextOutputs,
};
use smallvec::{SmallVec, smallvec};
use text::Tokenizer;
use tokio::sync::{oneshot, watch};

use self::constraint::prepare;
use super::active_request::{ActiveRequest, SequenceTexts};
use super::adapters::{AdapterStore, AdapterUse};
use super::check_request;
use super::config::LlmConfig;
use super::event_queue::event_queue;
use super::event_source::EventSource;
use super::generate_stream::GenerateStream;
use super::inbox::Message;
use super::inputs::{self, Command, TaskAdapter, ValueBounds};
use super::llm_stream::LlmStream;
use super::logits::LogitsBudget;
use super::metrics::WorkerStatus;
use super::outputs::Responses;
use super::prompt_logprobs::PromptLogprobs;
use super::refusal::error_of;
use super::replicas::stop_all;
use super::router::{Admission, Router};
use super::sleeper::Replicas;
use super::submission::{StopHandle, StopHandles, Submission};
use super::text_stop::{self, TextStop};
use super::timing::Timing;
use super::weights::{ServedWeights, WeightUpdates};
use crate::encoder;

/// One loaded LLM.
pub(crate) struct Llm {
    config: Arc<LlmConfig>,
    version: String,
    tokenizer: Option<Arc<Tokenizer>>,
    /// Compiles constraints; `None` without a tokenizer.
    constraints: Option<Arc<Constraints>>,
    router: Arc<Router>,
    /// Its adapters, which requests choose by name.
    adapters: Arc<AdapterStore>,
    weights: Arc<ServedWeights>,
    /// The budget of all models.
    logits: Arc<LogitsBudget>,
    /// Handles of the running requests, for requests with `stop`.
    stop_handles: StopHandles,
    /// Number of requests in flight.
    in_flight: Arc<watch::Sender<usize>>,
    /// Load time in seconds since 1970.
    created: u64,
}

impl Llm {
    pub(crate) fn new(
        config: LlmConfig,
        version: i64,
        tokenizer: Option<Arc<Tokenizer>>,
        router: Arc<Router>,
        adapters: Arc<AdapterStore>,
        weights: Arc<ServedWeights>,
        logits: Arc<LogitsBudget>,
    ) -> Self {
        let constraints = tokenizer.clone().map(|tokenizer| {
            let constraints = Arc::new(Constraints::new(tokenizer, config.vocab_size, &config.end_ids));
            prepare(&constraints);
            constraints
        });
        Self {
            config: Arc::new(config),
            version: version.to_string(),
            tokenizer,
            constraints,
            router,
            adapters,
            weights,
            logits,
            stop_handles: Arc::default(),
            in_flight: Arc::new(watch::Sender::new(0)),
            created: SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs(),
        }
    }

    /// Stops the running request with the same id. Returns one empty final response.
    fn stop(&self, request: &InferRequest) -> ResponseStream {
        if let Some(stop) = ipc::lock(&self.stop_handles).get(&request.id) {
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
    /// Assigns the sequences of a request to a replica, or queues them.
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

    /// A text search for stop words for each sequence; empty without stop words. Removes spellings from the request whose white space
    /// belongs to the output.
    fn text_stops(&self, request: &mut GenerateRequest) -> Vec<TextStop> {
        let num_requests = if request.sequence.beams.is_some() { 1 } else { request.num_sequences };
        let (Some(tokenizer), Some(&before)) = (&self.tokenizer, request.sequence.prompt.last()) else {
            return Vec::new();
        };
        text_stop::keep_space(tokenizer, &mut request.sequence.stop_words, before);
        let texts = text_stop::stop_texts(tokenizer, &request.sequence.stop_words, before);
        (0..num_requests).map_while(|_| TextStop::new(tokenizer, &texts, before)).collect()
    }
}

impl Llm {
    /// Starts a request as tensors. `text` has the outputs of a text ensemble.
    fn start_tensor_request(
        &self,
        request: InferRequest,
        text: Option<TextOutputs>,
    ) -> Result<ResponseStream, InferError> {
        let started = Instant::now();
        let task = inputs::task(&request)?;
        let mut parsed = match inputs::parse(&self.config, &request)? {
            Command::Stop => return Ok(self.stop(&request)),
            Command::Generate(parsed) => *parsed,
        };
        let decoder = text.as_ref().map(|text| text.decoder.clone());
        decoder.iter().for_each(|decoder| parsed.decode(decoder));
        let responses = Responses::new(&self.config, &self.version, &request, &parsed, text);
        let tokenizer = decoder.map(|decoder| decoder.tokenizer).or_else(|| self.tokenizer.clone());
        let adapter = self.adapter(&parsed.generate, task.as_ref())?;
        let events = self.start(request.id, parsed.generate, adapter, tokenizer)?;
        Ok(ResponseStream::from_source(|progress| {
            progress.add_input_time(started.elapsed());
            Box::new(LlmStream { events, responses, progress })
        }))
    }

    /// Starts a request and returns its events. `tokenizer` decodes its tokens.
    fn start(
        &self,
        client_id: Name,
        mut request: GenerateRequest,
        adapter: Option<AdapterUse>,
        tokenizer: Option<Arc<Tokenizer>>,
    ) -> Result<GenerateStream, InferError> {
        let LlmConfig { limits, queue, .. } = &*self.config;
        let logits_bytes = check_request::check(&self.config, &request)?;
        request.sequence.constraint = self.constraint(&request)?;
        let logits = self.logits.charge(limits, logits_bytes)?;
        let num_sequences = request.num_sequences;
        request.sequence.adapter = adapter.as_ref().map(|adapter| Arc::clone(adapter.adapter()));
        let timeout = queue.timeout(request.priority, request.timeout_us);
        let timeout = timeout.map(|timeout| (Instant::now() + timeout.after, timeout.rejects));
        request.sequence.priority = queue.priority(request.priority).saturating_add_signed(-request.priority_offset);
        let level = if queue.num_levels() > 0 { queue.level(request.priority) } else { 0 };
        let texts = self.sequence_texts(&mut request, tokenizer)?;
        let text_stops = if request.text.is_some() { Vec::new() } else { self.text_stops(&mut request) };
        let sequences = request.into_sequences();
        let admission = self.admit(&sequences)?;
        let timing = self.timing(&admission, &sequences).with_level(level);
        let (events, receiver) = event_queue();
        let stop = Arc::new(StopHandle::new(events.downgrade()));
        let submit = Some(Message::Submit { sequences, timeout, events });
        let mut submission = Submission { admission, submit, timeout };
        if !submission.submit_if_assigned() {
            return Err(InferError::unavailable(format!("model `{}` is being unloaded", self.config.name)));
        }
        if !client_id.is_empty() {
            ipc::lock(&self.stop_handles).insert(client_id.clone(), Arc::clone(&stop));
        }
        self.in_flight.send_modify(|count| *count += 1);
        let request = ActiveRequest {
            client_id,
            submission,
            stop_handles: Arc::clone(&self.stop_handles),
            stop,
            in_flight: Arc::clone(&self.in_flight),
            _logits: logits,
            _adapter: adapter,
            timing,
            text_stops,
            texts,
            sequences: SmallVec::new(),
            moved: Vec::new(),
            ended: smallvec![false; num_sequences],
            is_cancelled: false,
            ready: VecDeque::new(),
        };
        Ok(GenerateStream::new(request, receiver))
    }

    /// The adapter of a request: by its name, or by TensorRT-LLM's inputs.
    fn adapter(&self, request: &GenerateRequest, task: Option<&TaskAdapter>) -> Result<Option<AdapterUse>, InferError> {
        let num_sequences = request.num_sequences;
        match (&request.adapter, task) {
            (None, None) => Ok(None),
            (Some(name), None) => self.adapters.take(name, num_sequences).map(Some),
            (None, Some(task)) => self.adapters.take_task(task, num_sequences).map(Some),
            (Some(name), Some(TaskAdapter { id, .. })) => Err(InferError::invalid(format!(
                "the request names adapter `{name}` and `lora_task_id` {id}; send one of them"
            ))),
        }
    }

    /// The durations of a request. A queued one counts for the first replica.
    fn timing(&self, admission: &Admission, sequences: &[Request]) -> Timing {
        let prompt_len = sequences.first().map_or(0, |first| first.prompt.len());
        let shared = match admission {
            Admission::Assigned(reservation) => &reservation.replica().shared,
            Admission::Queued(_) => &self.router.replicas()[0].shared,
        };
        Timing::new(shared, self.config.engine.block_size, prompt_len, sequences.len())
    }

    /// Decoders of the request's sequences; none without text options.
    fn sequence_texts(
        &self,
        request: &mut GenerateRequest,
        tokenizer: Option<Arc<Tokenizer>>,
    ) -> Result<SequenceTexts, InferError> {
        let Some(options) = request.text else { return Ok(SequenceTexts::new()) };
        let tokenizer = tokenizer.ok_or_else(|| {
            InferError::invalid(format!("model `{}` has no tokenizer that can be read", self.config.name))
        })?;
        let stop = Arc::new(std::mem::take(&mut request.stop));
        let prompt = if request.includes_prompt { &request.sequence.prompt[..] } else { &[] };
        let sequence = || SequenceText::new(&tokenizer, options, &stop).with_prompt(prompt);
        Ok(std::iter::repeat_with(sequence).take(request.num_sequences).collect())
    }
}

impl Backend for Llm {
    fn infer(&self, request: InferRequest) -> Result<ResponseStream, InferError> {
        self.start_tensor_request(request, None)
    }

    fn text_model(&self) -> Option<TextModel> {
        Some(TextModel::Generator)
    }

    fn infer_text(&self, request: InferRequest, outputs: TextOutputs) -> Result<ResponseStream, InferError> {
        self.start_tensor_request(request, Some(outputs))
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
                .map_or(max_sequence_len, |count| self.config.engine.max_positions(count)),
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

    fn request_bounds(&self) -> Option<RequestBounds> {
        let bounds = ValueBounds::of(&self.config);
        let (vocab_size, max_rows, max_drafts) = (bounds.vocab_size, bounds.max_rows, bounds.max_drafts);
        Some(RequestBounds { vocab_size, max_rows, max_drafts, end_ids: bounds.end_ids.to_vec() })
    }

    fn generate(&self, call: GenerateCall) -> Result<ResponseStream, InferError> {
        let GenerateCall { id, mut request, decode_calls, .. } = call;
        let started = Instant::now();
        request.sequence.sampling.context_logits = request.prompt_logprobs.is_some();
        let prompt_logprobs = request.prompt_logprobs.map(|num_top| {
            let num_top = (num_top as usize).min(engine::MAX_LOGPROBS as usize);
            PromptLogprobs::new(request.sequence.prompt.clone(), num_top, self.config.vocab_size)
        });
        let num_open = request.num_sequences;
        let adapter = self.adapter(&request, None)?;
        let events = self.start(id, request, adapter, self.tokenizer.clone())?;
        let counted_by = Arc::clone(&self.router.replicas()[0].shared);
        Ok(ResponseStream::from_source(|progress| {
            progress.add_input_time(started.elapsed());
            Box::new(EventSource { events, progress, prompt_logprobs, next: None, num_open, decode_calls, counted_by })
        }))
    }

    fn adapters(&self) -> Option<Arc<dyn Adapters>> {
        let adapters = Arc::clone(&self.adapters) as Arc<dyn Adapters>;
        Some(adapters).filter(|_| self.config.adapters.num_slots > 0)
    }

    fn sleeper(&self) -> Option<Arc<dyn Sleeper>> {
        let sleeper = || Replicas { model: self.config.name.clone(), router: Arc::clone(&self.router) };
        (self.config.worker.sleep_mode && !self.config.takes_turns).then(|| Arc::new(sleeper()) as Arc<dyn Sleeper>)
    }

    fn weights(&self) -> Option<Arc<dyn serving::Weights>> {
        let (config, router, served) = (&self.config, Arc::clone(&self.router), Arc::clone(&self.weights));
        let updates = || WeightUpdates { config: Arc::clone(config), router, served };
        config.weight_updates_dir.is_some().then(|| Arc::new(updates()) as Arc<dyn serving::Weights>)
    }

    fn reset_prefix_cache(&self) -> BoxFuture<'_, bool> {
        if !self.config.engine.prefix_cache {
            return std::future::ready(false).boxed();
        }
        let replicas = self.router.replicas().iter().map(|replica| {
            let (reply, done) = oneshot::channel();
            replica.inbox.send(Message::ResetPrefixCache(reply));
            done
        });
        // A step thread that has ended has no cache any more.
        join_all(replicas.collect::<Vec<_>>()).map(|_| true).boxed()
    }

    fn returns_only_requested_outputs(&self) -> bool {
        true
    }

    fn is_ready(&self) -> bool {
        self.router.is_ready()
    }

    fn memory_usage(&self) -> Vec<MemoryUsage> {
        let workers = self.router.replicas().iter().flat_map(|replica| replica.shared.metrics.start().workers);
        workers.map(|worker| memory_usage(&worker)).collect()
    }

    fn drain(&self) -> BoxFuture<'_, ()> {
        async {
            let _ = self.in_flight.subscribe().wait_for(|&count| count == 0).await;
        }
        .boxed()
    }
}

fn memory_usage(worker: &WorkerStatus) -> MemoryUsage {
    let ordinal = worker.device.strip_prefix("cuda:").and_then(|ordinal| ordinal.parse().ok());
    let kind = if ordinal.is_some() { "GPU" } else { "CPU" };
    MemoryUsage { kind, id: ordinal.unwrap_or(0), num_bytes: worker.memory_bytes }
}

impl Drop for Llm {
    fn drop(&mut self) {
        stop_all(&self.router);
    }
}
