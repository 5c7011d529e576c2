//! TurboMind's `interactive` model: token ids in sessions.
//!
//! `CORRID` is the id of a request's session. `START` begins the session, `END` ends it with this request, `STOP` cancels its running
//! request, and `step` truncates its history. The prompt is the history and the request's tokens. The prefix cache has the KV blocks of
//! the history. Responses have all tokens of the session, as clients expect.

use std::collections::HashMap;
use std::sync::{Arc, Mutex};
use std::time::Instant;

use futures::FutureExt as _;
use futures::future::BoxFuture;
use repository::ModelConfig;
use repository::proto::{DataType as ConfigType, ModelParameter};
use serving::{
    Backend, BackendFactory, CorrelationId, InferError, InferRequest, InferResponse, LoadRequest, Name, ResponseSender,
    ResponseStream, Tensor,
};
use tokio::sync::watch;

use super::engine_config::{engine_output, with_checkpoint};
use super::engine_request::{EngineInputs, EngineOutput, Renames, rename};
use crate::tensor_values::first;

/// Maximum number of sessions. Beyond it, the session that has been idle for longest is dropped.
const MAX_SESSIONS: usize = 4096;

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

    fn load(&self, model: LoadRequest) -> BoxFuture<'static, Result<Arc<dyn Backend>, InferError>> {
        let llm = self.llm.clone();
        async move {
            let request = with_checkpoint(&model, configure_engine)?;
            let sessions = Sessions {
                outputs: model.config.output.iter().map(|output| Name::from(&output.name)).collect(),
                sessions: Arc::default(),
                llm: llm.load(request).await?,
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
    config.model_transaction_policy.get_or_insert_default().decoupled = true;
    let outputs = [
        ("output_ids", ConfigType::TypeInt32),
        ("cum_log_probs", ConfigType::TypeFp32),
        ("output_log_probs", ConfigType::TypeFp32),
    ];
    config.output = outputs.map(|(name, data_type)| engine_output(name, data_type)).to_vec();
    config.parameters.insert("exclude_input_in_output".to_owned(), ModelParameter { string_value: "true".to_owned() });
    // TurboMind's name for `tp`.
    if let Some(size) = config.parameter("tensor_para_size").map(str::to_owned) {
        config.parameters.entry("tp".to_owned()).or_insert(ModelParameter { string_value: size });
    }
}

struct Sessions {
    llm: Arc<dyn Backend>,
    outputs: Vec<Name>,
    sessions: Arc<Mutex<HashMap<CorrelationId, Session>>>,
}

/// The state of a session between two requests.
struct Session {
    tokens: Vec<u32>,
    /// Incremented to cancel the running request.
    stop: watch::Sender<u64>,
    is_running: bool,
    last_used: Instant,
}

impl Session {
    fn new() -> Self {
        Self { tokens: Vec::new(), stop: watch::Sender::new(0), is_running: false, last_used: Instant::now() }
    }

    /// Truncates the history to the `step` of a request.
    ///
    /// # Errors
    /// When another request is running, or the history is shorter.
    fn truncate(&mut self, request: &SessionRequest) -> Result<(), InferError> {
        let shown = display(&request.id);
        if self.is_running {
            let message = format!("session {shown} still answers its last request; wait for it, or send STOP = 1");
            return Err(InferError::invalid(message));
        }
        let num_tokens = self.tokens.len();
        match request.step {
            Some(step) if step > num_tokens => {
                Err(InferError::invalid(format!("`step` is {step}, but session {shown} holds {num_tokens} tokens")))
            }
            step => {
                self.tokens.truncate(step.unwrap_or(num_tokens));
                Ok(())
            }
        }
    }
}

/// The session inputs of a request.
struct SessionRequest {
    id: CorrelationId,
    starts: bool,
    ends: bool,
    stops: bool,
    /// Number of tokens of the history to keep.
    step: Option<usize>,
    session_len: Option<usize>,
}

impl SessionRequest {
    fn new(request: &InferRequest) -> Result<Self, InferError> {
        let id = first(request, &["CORRID"])?.map_or_else(|| request.correlation_id.clone(), CorrelationId::Number);
        let is_set = |name: &str, default: bool| {
            Ok::<bool, InferError>(first::<i64>(request, &[name])?.map_or(default, |value| value != 0))
        };
        Ok(Self {
            id,
            starts: is_set("START", request.sequence_start)?,
            ends: is_set("END", request.sequence_end)?,
            stops: is_set("STOP", false)?,
            step: size(request, "step")?,
            session_len: size(request, "session_len")?,
        })
    }
}

impl SessionRequest {
    /// Checks the length of the session after this request.
    fn check_len(&self, num_tokens: usize) -> Result<(), InferError> {
        match self.session_len {
            Some(session_len) if session_len > 0 && num_tokens > session_len => Err(InferError::invalid(format!(
                "session {} would come to {num_tokens} tokens, more than `session_len` ({session_len}); start a new one, \
                 or ask for fewer tokens",
                display(&self.id)
            ))),
            _ => Ok(()),
        }
    }
}

impl Backend for Sessions {
    fn infer(&self, request: InferRequest) -> Result<ResponseStream, InferError> {
        let session_request = SessionRequest::new(&request)?;
        if session_request.stops {
            return Ok(self.stop(&session_request));
        }
        let max_tokens = first::<i64>(&request, &["request_output_len"])?.unwrap_or(0);
        if max_tokens == 0 {
            return Ok(self.touch(&session_request));
        }
        let (prompt, stopped) = self.begin(&session_request, &new_tokens(&request)?, max_tokens)?;
        let engine =
            self.llm.infer(engine_request(&request, &prompt)).inspect_err(|_| self.abort_run(&session_request.id))?;
        let run =
            Run { sessions: self.sessions.clone(), outputs: self.outputs.clone(), session_request, tokens: prompt };
        Ok(ResponseStream::from_future(|sender| run.respond(engine, sender, stopped)))
    }

    fn is_ready(&self) -> bool {
        self.llm.is_ready()
    }

    fn drain(&self) -> BoxFuture<'_, ()> {
        self.llm.drain()
    }
}

impl Sessions {
    /// Starts a request of a session. Returns the prompt with the session's history, and the receiver of cancellations.
    fn begin(
        &self,
        session_request: &SessionRequest,
        added: &[u32],
        max_tokens: i64,
    ) -> Result<(Vec<u32>, watch::Receiver<u64>), InferError> {
        let shown = display(&session_request.id);
        let mut sessions = ipc::lock(&self.sessions);
        if session_request.starts {
            if let Some(old) = sessions.insert(session_request.id.clone(), Session::new()) {
                old.stop.send_modify(|count| *count += 1);
            }
            drop_oldest(&mut sessions);
        }
        let session = sessions.get_mut(&session_request.id).ok_or_else(|| {
            InferError::invalid(format!("session {shown} is not known; send its first request with START = 1"))
        })?;
        session.truncate(session_request)?;
        let num_added = added.len() + usize::try_from(max_tokens).unwrap_or(0);
        session_request.check_len(session.tokens.len() + num_added)?;
        session.is_running = true;
        session.last_used = Instant::now();
        let mut prompt = session.tokens.clone();
        prompt.extend_from_slice(added);
        Ok((prompt, session.stop.subscribe()))
    }

    /// Cancels the running request of a session, and ends the session if the request has `END`.
    fn stop(&self, session_request: &SessionRequest) -> ResponseStream {
        let mut sessions = ipc::lock(&self.sessions);
        if let Some(session) = sessions.get(&session_request.id) {
            session.stop.send_modify(|count| *count += 1);
        }
        if session_request.ends {
            sessions.remove(&session_request.id);
        }
        ResponseStream::ready(InferResponse::default())
    }

    /// Begins or ends a session, for a request of 0 tokens.
    fn touch(&self, session_request: &SessionRequest) -> ResponseStream {
        let mut sessions = ipc::lock(&self.sessions);
        if session_request.starts {
            sessions.insert(session_request.id.clone(), Session::new());
            drop_oldest(&mut sessions);
        }
        let num_tokens = sessions.get(&session_request.id).map_or(0, |session| session.tokens.len());
        if session_request.ends {
            sessions.remove(&session_request.id);
        }
        let outputs = vec![
            Tensor::from_u32("output_ids", &[1, 1, 0], &[]),
            Tensor::from_u32("sequence_length", &[1, 1], &[num_tokens as u32]),
        ];
        ResponseStream::ready(InferResponse { outputs, ..InferResponse::default() })
    }

    fn abort_run(&self, id: &CorrelationId) {
        if let Some(session) = ipc::lock(&self.sessions).get_mut(id) {
            session.is_running = false;
        }
    }
}

/// Drops the sessions that have been idle for longest, beyond [`MAX_SESSIONS`].
fn drop_oldest(sessions: &mut HashMap<CorrelationId, Session>) {
    while sessions.len() > MAX_SESSIONS {
        let idle = sessions.iter().filter(|(_, session)| !session.is_running);
        let oldest = idle.min_by_key(|(_, session)| session.last_used).map(|(id, _)| id.clone());
        let Some(oldest) = oldest else { return };
        sessions.remove(&oldest);
    }
}

/// One request of a session in flight.
struct Run {
    sessions: Arc<Mutex<HashMap<CorrelationId, Session>>>,
    outputs: Vec<Name>,
    session_request: SessionRequest,
    /// All tokens of the session.
    tokens: Vec<u32>,
}

impl Run {
    /// Sends the responses of the engine with all tokens of the session.
    async fn respond(mut self, mut engine: ResponseStream, sender: ResponseSender, mut stopped: watch::Receiver<u64>) {
        loop {
            let item = tokio::select! {
                item = engine.next_response() => item,
                _ = stopped.changed() => {
                    // The tokens so far stay part of the session.
                    let response = self.response(InferResponse { is_final: true, ..InferResponse::default() });
                    sender.send(Ok(response)).await;
                    return;
                }
            };
            sender.mark_scheduled();
            engine.generation().into_iter().for_each(|generation| sender.report(generation));
            match item {
                None => return,
                Some(Err(error)) => {
                    sender.send(Err(error)).await;
                    return;
                }
                Some(Ok(response)) => {
                    let is_final = response.is_final;
                    let response = self.response(response);
                    if is_final {
                        // Before the response is sent, because the client may send its next request at once.
                        self.finish();
                    }
                    if !sender.send(Ok(response)).await || is_final {
                        return;
                    }
                }
            }
        }
    }

    /// A response with all tokens of the session.
    fn response(&mut self, response: InferResponse) -> InferResponse {
        self.tokens.extend(EngineOutput::new(&response).tokens);
        let length = self.tokens.len();
        let mut outputs = vec![
            Tensor::from_u32("output_ids", &[1, 1, length as i64], &self.tokens),
            Tensor::from_u32("sequence_length", &[1, 1], &[length as u32]),
        ];
        outputs.extend(response.outputs.iter().filter(|tensor| tensor.name.ends_with("log_probs")).cloned());
        outputs.retain(|tensor| self.outputs.contains(&tensor.name));
        InferResponse { outputs, ..response }
    }

    /// Stores the session for its next request, or ends it.
    fn finish(&mut self) {
        let mut sessions = ipc::lock(&self.sessions);
        if self.session_request.ends {
            sessions.remove(&self.session_request.id);
        } else if let Some(session) = sessions.get_mut(&self.session_request.id) {
            session.tokens.clone_from(&self.tokens);
            session.is_running = false;
            session.last_used = Instant::now();
        }
    }
}

impl Drop for Run {
    fn drop(&mut self) {
        let is_running = |session: &Session| session.is_running;
        if ipc::lock(&self.sessions).get(&self.session_request.id).is_some_and(is_running) {
            self.finish();
        }
    }
}

/// The engine's request: all inputs except those of the session, streamed.
fn engine_request(request: &InferRequest, prompt: &[u32]) -> InferRequest {
    let is_other = |tensor: &&Tensor| !SESSION_INPUTS.contains(&tensor.name.as_str());
    let mut others: Vec<Tensor> = request.inputs.iter().filter(is_other).cloned().collect();
    rename(RENAMES, &mut others);
    let mut inputs = EngineInputs::new(prompt, true);
    others.into_iter().for_each(|input| inputs.replace(input));
    inputs.into_request(request)
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

/// The id in messages.
fn display(id: &CorrelationId) -> String {
    match id {
        CorrelationId::Number(number) => number.to_string(),
        CorrelationId::Text(text) => format!("`{text}`"),
    }
}
