//! The LLM engine as a backend: tensors to engine requests, token events back to tensors.
//!
//! Each model has one step thread on rank 0 and one worker process per rank of its tensor-parallel group.

mod check;
mod config;
mod figures;
mod group;
mod inbox;
mod inputs;
mod ledger;
mod logits;
mod outputs;
mod plan;
mod queue_rules;
mod request;
mod step_thread;
mod text_stop;
mod timing;

use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex, Weak};
use std::time::Instant;

use engine::{EngineStats, Request};
use futures::FutureExt;
use futures::future::BoxFuture;
use ipc::Prefix;
use serving::{
    Backend, BackendFactory, InferError, InferRequest, InferResponse, LoadRequest, MemoryUsage, ResponseStream,
};
use text::Tokenizer;
use tokio::sync::{mpsc, oneshot, watch};
use worker::Agents;

pub use check::{CheckFactory, Sound};
use config::LlmConfig;
pub use config::LlmDefaults;
pub use figures::{ENDS, FigureValues, STEP_KINDS, STEP_PHASES, Start, WorkerFigures};
use inbox::{Inbox, Message};
use inputs::Wanted;
pub use ledger::LlmLedger;
use outputs::Responses;
pub use plan::{ModelPlan, PlanFactory};
use request::{ById, RequestTask};
use step_thread::{Shared, StepThread};
use text_stop::TextStop;
use timing::Timing;

/// Responses of one request that may wait unread; more wait as bare tokens.
const UNREAD_RESPONSES: usize = 64;

/// Loads LLMs: `tensorrtllm`, `trireme` and the other names in users' configurations.
pub struct LlmFactory {
    defaults: LlmDefaults,
    agents: Arc<Agents>,
    prefix: Prefix,
    loaded: Arc<Mutex<Vec<Loaded>>>,
}

/// A model that was loaded; gone when its state is.
struct Loaded {
    name: String,
    version: String,
    block_size: usize,
    max_rows: usize,
    shared: Weak<Shared>,
    inbox: Inbox,
}

/// What an LLM is doing, for metrics.
#[derive(Debug, Clone)]
pub struct LlmStatus {
    /// Model name.
    pub name: String,
    /// Its version.
    pub version: String,
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
    /// A factory whose models run on the workers of `agents`; rank 0's own shared memory is named by `prefix`.
    pub fn new(defaults: LlmDefaults, agents: Arc<Agents>, prefix: Prefix) -> Self {
        Self { defaults, agents, prefix, loaded: Arc::default() }
    }

    /// Every loaded LLM.
    pub fn status(&self) -> Vec<LlmStatus> {
        let mut loaded = self.loaded.lock().unwrap();
        loaded.retain(|model| model.shared.strong_count() > 0);
        loaded.iter().filter_map(Loaded::status).collect()
    }
}

impl Loaded {
    fn status(&self) -> Option<LlmStatus> {
        let shared = self.shared.upgrade()?;
        Some(LlmStatus {
            name: self.name.clone(),
            version: self.version.clone(),
            is_ready: shared.ready.load(Ordering::Acquire),
            num_restarts: shared.restarts.load(Ordering::Relaxed),
            block_size: self.block_size,
            max_rows: self.max_rows,
            engine: *shared.stats.lock().unwrap(),
            figures: shared.figures.read(),
        })
    }
}

impl BackendFactory for LlmFactory {
    /// Two copies of a model's weights and KV blocks do not fit a device.
    fn is_exclusive(&self) -> bool {
        true
    }

    fn load(&self, load: LoadRequest) -> BoxFuture<'static, Result<Arc<dyn Backend>, InferError>> {
        let (defaults, agents, prefix) = (self.defaults.clone(), Arc::clone(&self.agents), self.prefix.clone());
        let all_loaded = Arc::clone(&self.loaded);
        async move {
            let config = LlmConfig::new(&load, &defaults)?;
            let (inbox, messages) = Inbox::new();
            let shared = Arc::new(Shared::default());
            let thread = StepThread {
                config: config.clone(),
                agents,
                prefix,
                inbox: inbox.clone(),
                messages,
                shared: Arc::clone(&shared),
            };
            let (loaded, is_loaded) = oneshot::channel();
            let name = format!("steps-{}", config.name);
            let spawned = std::thread::Builder::new().name(name).spawn(move || thread.run(loaded));
            spawned.map_err(|error| InferError::internal(format!("cannot start a thread: {error}")))?;
            let tokenizer = tokenizer(&config).await;
            match is_loaded.await {
                Ok(Ok(())) => {
                    all_loaded.lock().unwrap().push(Loaded {
                        name: config.name.clone(),
                        version: load.version.to_string(),
                        block_size: config.engine.block_size,
                        max_rows: config.engine.max_rows,
                        shared: Arc::downgrade(&shared),
                        inbox: inbox.clone(),
                    });
                    Ok(Arc::new(Llm::new(config, load.version, tokenizer, inbox, shared)) as Arc<dyn Backend>)
                }
                Ok(Err(reason)) => Err(InferError::internal(format!("model `{}`: {reason}", config.name))),
                Err(_) => Err(InferError::internal(format!("model `{}`: its step thread ended", config.name))),
            }
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
    match tokio::task::spawn_blocking(move || Tokenizer::from_dir(&dir)).await {
        Ok(Ok(tokenizer)) => Some(Arc::new(tokenizer)),
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
    inbox: Inbox,
    shared: Arc<Shared>,
    /// For `stop`.
    by_id: ById,
    /// Requests in flight, for drain.
    in_flight: Arc<watch::Sender<usize>>,
}

impl Llm {
    fn new(
        config: LlmConfig,
        version: i64,
        tokenizer: Option<Arc<Tokenizer>>,
        inbox: Inbox,
        shared: Arc<Shared>,
    ) -> Self {
        Self {
            config: Arc::new(config),
            version: version.to_string(),
            tokenizer,
            inbox,
            shared,
            by_id: Arc::default(),
            in_flight: Arc::new(watch::Sender::new(0)),
        }
    }

    /// Ends the running request of the same id; answers with one empty final response.
    fn stop(&self, request: &InferRequest) -> ResponseStream {
        let sequences = self.by_id.lock().unwrap().get(&request.id).cloned();
        for sequence in sequences.into_iter().flatten() {
            self.inbox.send(Message::Cancel(sequence));
        }
        let (sender, stream) = ResponseStream::channel(1);
        let response = InferResponse {
            model_name: self.config.name.clone(),
            model_version: self.version.clone(),
            id: request.id.clone(),
            is_final: true,
            ..InferResponse::default()
        };
        sender.send(Ok(response)).now_or_never();
        stream
    }
}

impl Llm {
    /// A search of the text for each sequence, where there are stop words to search for.
    fn text_stops(&self, sequences: &[Request]) -> Vec<TextStop> {
        let Some(tokenizer) = &self.tokenizer else { return Vec::new() };
        let text_stop = |request: &Request| {
            let before = *request.prompt.last()?;
            TextStop::new(tokenizer, &request.stop_words, before)
        };
        sequences.iter().map_while(text_stop).collect()
    }
}

impl Backend for Llm {
    fn infer(&self, request: InferRequest) -> Result<ResponseStream, InferError> {
        let parsed = match inputs::parse(&self.config, &request)? {
            Wanted::Stop => return Ok(self.stop(&request)),
            Wanted::Generate(parsed) => *parsed,
        };
        if let Some(reason) = &*self.shared.failure.lock().unwrap() {
            return Err(InferError::unavailable(reason.clone()));
        }
        let limit = self.config.engine.max_queue + self.config.engine.max_rows;
        if *self.in_flight.borrow() >= limit {
            return Err(InferError::unavailable(format!(
                "model `{}` has {limit} requests waiting or running; try again later",
                self.config.name
            )));
        }
        let responses = Responses::new(&self.config, &self.version, &request, &parsed);
        let num_sequences = parsed.num_sequences;
        let timeout = parsed.timeout.map(|timeout| (Instant::now() + timeout.after, timeout.rejects));
        let sequences = parsed.sequences();
        let text_stops = self.text_stops(&sequences);
        let prompt_tokens = sequences.first().map_or(0, |sequence| sequence.prompt.len());
        let timing = Timing::new(&self.shared, self.config.engine.block_size, prompt_tokens, sequences.len());
        let (events, receiver) = mpsc::unbounded_channel();
        if !self.inbox.send(Message::Submit { sequences, timeout, events }) {
            return Err(InferError::unavailable(format!("model `{}` is being unloaded", self.config.name)));
        }
        let (sender, stream) = ResponseStream::channel(UNREAD_RESPONSES);
        let task = RequestTask {
            client_id: request.id,
            inbox: self.inbox.clone(),
            by_id: Arc::clone(&self.by_id),
            in_flight: Arc::clone(&self.in_flight),
            responses,
            timing,
            text_stops,
            sequences: Vec::new(),
            ended: vec![false; num_sequences],
            client_left: false,
        };
        self.in_flight.send_modify(|count| *count += 1);
        tokio::spawn(task.run(receiver, sender));
        Ok(stream)
    }

    fn is_ready(&self) -> bool {
        self.shared.ready.load(Ordering::Acquire)
    }

    fn memory_usage(&self) -> Vec<MemoryUsage> {
        self.shared.figures.start().workers.iter().map(memory_usage).collect()
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
        let (done, is_done) = oneshot::channel();
        if self.inbox.send(Message::Stop { done }) {
            // Unloading is done once the workers are told; memory comes back as they end.
            drop(is_done);
        }
    }
}
