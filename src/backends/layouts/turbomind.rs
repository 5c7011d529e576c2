//! TurboMind's `interactive` model: token ids in sessions.
//!
//! `CORRID` is the id of a request's session. `START` begins the session, `END` ends it with this request, `STOP` cancels its running
//! request, and `step` truncates its history. The prompt is the history and the request's tokens. The prefix cache has the KV blocks of
//! the history. Responses have all tokens of the session, as clients expect.

mod sessions;

use std::sync::Arc;

use engine::{FinishReason, TokenId};
use futures::FutureExt as _;
use futures::future::BoxFuture;
use generation::{Delta, GenerateEvent, Timestamp};
use repository::ModelConfig;
use repository::proto::ModelParameter;
use serving::{
    Backend, BackendFactory, CorrelationId, EventStream, GenerateCall, InferError, InferRequest, InferResponse,
    LoadRequest, Name, ResponseSender, ResponseStream, Tensor,
};

use super::engine_bounds::EngineBounds;
use super::engine_config::{check_engine, with_checkpoint};
use super::engine_request::{Renames, rename};
use crate::llm::inputs::{
    RequestDefaults, check_streaming, generation, refuse_task_adapters, refuse_unsupported, words,
};
use crate::tensor_values::first;
use sessions::{Run, SessionRequest, Sessions};

/// Inputs that are not passed to the engine.
const SESSION_INPUTS: [&str; 9] =
    ["START", "END", "STOP", "CORRID", "step", "session_len", "start_id", "input_ids", "input_lengths"];

/// Inputs whose names differ from those of the engine.
const RENAMES: &Renames = &[
    ("is_return_log_probs", "return_log_probs"),
    ("top_p_decay", "runtime_top_p_decay"),
    ("top_p_min", "runtime_top_p_min"),
    ("top_p_reset_ids", "runtime_top_p_reset_ids"),
];

/// Loads `backend: "turbomind"` with its session inputs.
pub(super) struct SessionsFactory {
    pub(super) llm: Arc<dyn BackendFactory>,
}

impl BackendFactory for SessionsFactory {
    fn is_exclusive(&self) -> bool {
        true
    }

    fn check(&self, model: LoadRequest) -> BoxFuture<'static, Result<(), InferError>> {
        check_engine(&self.llm, with_checkpoint(&model, configure_engine))
    }

    fn load(&self, model: LoadRequest) -> BoxFuture<'static, Result<Arc<dyn Backend>, InferError>> {
        let llm = self.llm.clone();
        async move {
            let llm = llm.load(with_checkpoint(&model, configure_engine)?).await?;
            let sessions = SessionModel {
                outputs: model.config.output.iter().map(|output| Name::from(&output.name)).collect(),
                sessions: Sessions::default(),
                bounds: EngineBounds::new(&model, &*llm),
                llm,
            };
            Ok(Arc::new(sessions) as Arc<dyn Backend>)
        }
        .boxed()
    }
}

/// TurboMind runs one request per instance, the engine one per row.
fn configure_engine(config: &mut ModelConfig) {
    let instances = i32::try_from(config.num_instances()).unwrap_or(i32::MAX);
    config.max_batch_size = config.max_batch_size.max(instances);
    config.output.clear(); // It sends events.
    // TurboMind's name for `tp`.
    if let Some(size) = config.parameter("tensor_para_size").map(str::to_owned) {
        config.parameters.entry("tp".to_owned()).or_insert(ModelParameter { string_value: size });
    }
}

/// The model, with its sessions.
struct SessionModel {
    llm: Arc<dyn Backend>,
    bounds: Arc<EngineBounds>,
    outputs: Arc<[Name]>,
    sessions: Sessions,
}

impl Backend for SessionModel {
    fn infer(&self, request: InferRequest) -> Result<ResponseStream, InferError> {
        let session = session_request(&request)?;
        if is_set(&request, "STOP", false)? {
            self.sessions.stop(&session);
            return Ok(ResponseStream::ready(InferResponse::default()));
        }
        let max_tokens = first::<i64>(&request, &["request_output_len"])?.unwrap_or(0);
        if max_tokens == 0 {
            let outputs = tokens(&[], self.sessions.touch(&session)).into();
            return Ok(ResponseStream::ready(InferResponse { outputs, ..InferResponse::default() }));
        }
        let max_tokens = usize::try_from(max_tokens).unwrap_or(0);
        let run = self.sessions.begin(&session, &new_tokens(&request)?, max_tokens)?;
        match self.generate(&request, &run.tokens) {
            Ok((events, outputs)) => Ok(ResponseStream::from_future(|sender| respond(run, events, outputs, sender))),
            Err(error) => {
                run.abort();
                Err(error)
            }
        }
    }

    fn reset_prefix_cache(&self) -> BoxFuture<'_, bool> {
        self.llm.reset_prefix_cache()
    }

    fn is_ready(&self) -> bool {
        self.llm.is_ready()
    }

    fn drain(&self) -> BoxFuture<'_, ()> {
        self.llm.drain()
    }
}

impl SessionModel {
    /// Starts a request of the engine with the session's tokens as its prompt. Returns its events, and the outputs of its responses.
    fn generate(&self, request: &InferRequest, prompt: &[u32]) -> Result<(EventStream, SessionOutputs), InferError> {
        let is_other = |tensor: &&Tensor| !SESSION_INPUTS.contains(&tensor.name.as_str());
        let mut inputs: Vec<Tensor> = request.inputs.iter().filter(is_other).cloned().collect();
        rename(RENAMES, &mut inputs);
        let request = InferRequest { inputs, ..request.clone() };
        refuse_unsupported(&request)?;
        refuse_task_adapters(&request)?;
        let bounds = self.bounds.of_values()?;
        let mut generate = generation(&bounds, &request, &RequestDefaults::default())?;
        check_streaming(true, true, generate.sequence.beams.as_ref())?;
        generate.num_sequences = 1;
        generate.sequence.prompt = prompt.iter().copied().map(TokenId).collect();
        generate.sequence.stop_words = words(&bounds, &request, "stop_words_list")?;
        let returns_log_probs = generate.sequence.sampling.num_logprobs.is_some();
        let outputs = SessionOutputs { declared: self.outputs.clone(), returns_log_probs, cum_log_prob: 0.0 };
        let call = GenerateCall { id: request.id, ..GenerateCall::new("", generate) };
        Ok((self.llm.generate(call)?.into(), outputs))
    }
}

/// Sends the events of the engine with all tokens of the session.
async fn respond(mut run: Run, mut events: EventStream, mut outputs: SessionOutputs, sender: ResponseSender) {
    loop {
        let event = tokio::select! {
            event = events.next_event() => event,
            // The tokens so far stay part of the session.
            () = run.stopped() => Some(Ok(GenerateEvent::Delta(cancelled()))),
        };
        sender.mark_scheduled();
        events.generation().into_iter().for_each(|generation| sender.report(generation));
        let delta = match event {
            None => return,
            Some(Ok(GenerateEvent::Delta(delta))) => delta,
            Some(Ok(_)) => continue,
            Some(Err(error)) => {
                sender.send(Err(error)).await;
                return;
            }
        };
        let is_final = delta.finished.is_some();
        if delta.tokens.is_empty() && !is_final {
            continue;
        }
        let response = outputs.response(&mut run, &delta);
        if is_final {
            // Before the response is sent, because the client may send its next request at once.
            run.finish();
        }
        if !sender.send(Ok(response)).await || is_final {
            return;
        }
    }
}

/// The end of a request that its session stopped.
fn cancelled() -> Delta {
    Delta { finished: Some(FinishReason::Cancelled), ..Delta::new(0, Timestamp::now()) }
}

/// The outputs of a request's responses.
struct SessionOutputs {
    declared: Arc<[Name]>,
    returns_log_probs: bool,
    /// Sum of the log-probabilities of all tokens so far.
    cum_log_prob: f64,
}

impl SessionOutputs {
    /// A response with all tokens of the session, to which those of `delta` are added.
    fn response(&mut self, run: &mut Run, delta: &Delta) -> InferResponse {
        run.tokens.extend(delta.tokens.iter().map(|token| token.token.0));
        let mut outputs = tokens(&run.tokens, run.tokens.len()).to_vec();
        if self.returns_log_probs {
            let log_probs: Vec<f32> = delta.tokens.iter().map(|token| token.logprob.unwrap_or(0.0)).collect();
            self.cum_log_prob += log_probs.iter().copied().map(f64::from).sum::<f64>();
            outputs.push(Tensor::from_f32("cum_log_probs", &[1, 1], &[self.cum_log_prob as f32]));
            outputs.push(Tensor::from_f32("output_log_probs", &[1, 1, log_probs.len() as i64], &log_probs));
        }
        outputs.retain(|tensor| self.declared.contains(&tensor.name));
        InferResponse { outputs, is_final: delta.finished.is_some(), ..InferResponse::default() }
    }
}

/// The outputs of tokens, and of the length of the session.
fn tokens(tokens: &[u32], length: usize) -> [Tensor; 2] {
    [
        Tensor::from_u32("output_ids", &[1, 1, tokens.len() as i64], tokens),
        Tensor::from_u32("sequence_length", &[1, 1], &[length as u32]),
    ]
}

/// The session inputs of a request.
fn session_request(request: &InferRequest) -> Result<SessionRequest, InferError> {
    Ok(SessionRequest {
        id: first(request, &["CORRID"])?.map_or_else(|| request.correlation_id.clone(), CorrelationId::Number),
        starts: is_set(request, "START", request.sequence_start)?,
        ends: is_set(request, "END", request.sequence_end)?,
        step: size(request, "step")?,
        session_len: size(request, "session_len")?,
    })
}

/// Whether an integer input is not 0.
fn is_set(request: &InferRequest, name: &str, default: bool) -> Result<bool, InferError> {
    Ok(first::<i64>(request, &[name])?.map_or(default, |value| value != 0))
}

/// The token ids of a request, without padding.
fn new_tokens(request: &InferRequest) -> Result<Vec<u32>, InferError> {
    let missing = || InferError::invalid("input `input_ids` is missing or not UINT32: it holds the prompt's token ids");
    let mut ids = request.input("input_ids").and_then(Tensor::to_u32).ok_or_else(missing)?;
    if let Some(length) = size(request, "input_lengths")? {
        ids.truncate(length);
    }
    Ok(ids)
}

/// The first value of an integer input; `None` without the input, or when it is negative.
fn size(request: &InferRequest, name: &str) -> Result<Option<usize>, InferError> {
    Ok(first::<i64>(request, &[name])?.and_then(|value| usize::try_from(value).ok()))
}
