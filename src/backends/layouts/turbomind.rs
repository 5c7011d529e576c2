//! TurboMind's `interactive` model: token ids in sessions that the server remembers.
//!
//! A request names its session in `CORRID`. `START` begins it, `END` ends it with this request, `STOP` ends what it runs,
//! `step` says how much of its history to keep. The prompt is the history and what the request adds; KV blocks of the
//! history are found again by the prefix cache. Answers hold the whole session's tokens, as clients expect.

use std::collections::HashMap;
use std::sync::{Arc, Mutex};
use std::time::Instant;

use futures::FutureExt as _;
use futures::future::BoxFuture;
use repository::ModelConfig;
use repository::proto::{DataType as ConfigType, ModelParameter};
use serving::{
    Backend, BackendFactory, CorrelationId, DataType, InferError, InferRequest, InferResponse, LoadRequest, Name,
    ResponseSender, ResponseStream, Tensor,
};
use tokio::sync::watch;

use super::engine_config::{engine_output, with_checkpoint};

/// Sessions that are remembered at once; beyond them the one longest idle is forgotten.
const MAX_SESSIONS: usize = 4096;

/// Inputs that are the session's own and no business of the engine.
const OF_SESSIONS: [&str; 7] = ["START", "END", "STOP", "CORRID", "step", "session_len", "start_id"];

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
            let request = with_checkpoint(&model, fit)?;
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

/// Instances are what runs at once there; here they are rows of one engine.
fn fit(config: &mut ModelConfig) {
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

/// What is remembered between two requests of a session.
struct Session {
    tokens: Vec<u32>,
    /// Bumped to end what the session runs.
    stop: watch::Sender<u64>,
    is_running: bool,
    last_used: Instant,
}

impl Session {
    fn new() -> Self {
        Self { tokens: Vec::new(), stop: watch::Sender::new(0), is_running: false, last_used: Instant::now() }
    }
}

/// What a request says of its session.
struct Wanted {
    id: CorrelationId,
    starts: bool,
    ends: bool,
    stops: bool,
    /// Tokens of the history to keep.
    step: Option<usize>,
    session_len: Option<usize>,
}

impl Wanted {
    fn of(request: &InferRequest) -> Result<Self, InferError> {
        let number = |name: &str| integer(request, name);
        let id = match number("CORRID")? {
            Some(id) => CorrelationId::Number(id.cast_unsigned()),
            None => request.correlation_id.clone(),
        };
        let is = |name: &str, flag: bool| Ok::<bool, InferError>(number(name)?.map_or(flag, |value| value != 0));
        Ok(Self {
            id,
            starts: is("START", request.sequence_start)?,
            ends: is("END", request.sequence_end)?,
            stops: is("STOP", false)?,
            step: number("step")?.and_then(|step| usize::try_from(step).ok()),
            session_len: number("session_len")?.and_then(|length| usize::try_from(length).ok()),
        })
    }
}

impl Backend for Sessions {
    fn infer(&self, request: InferRequest) -> Result<ResponseStream, InferError> {
        let wanted = Wanted::of(&request)?;
        if wanted.stops {
            return Ok(self.stop(&wanted));
        }
        let max_tokens = integer(&request, "request_output_len")?.unwrap_or(0);
        if max_tokens == 0 {
            return Ok(self.touch(&wanted));
        }
        let (prompt, stopped) = self.begin(&wanted, &new_tokens(&request)?, max_tokens)?;
        let engine = self.llm.infer(engine_request(&request, &prompt)).inspect_err(|_| self.forget_run(&wanted.id))?;
        let run = Run { sessions: self.sessions.clone(), outputs: self.outputs.clone(), wanted, tokens: prompt };
        Ok(ResponseStream::from_future(|sender| run.answer(engine, sender, stopped)))
    }

    fn is_ready(&self) -> bool {
        self.llm.is_ready()
    }

    fn drain(&self) -> BoxFuture<'_, ()> {
        self.llm.drain()
    }
}

impl Sessions {
    /// The prompt with the session's history, and what tells of a stop.
    fn begin(
        &self,
        wanted: &Wanted,
        added: &[u32],
        max_tokens: i64,
    ) -> Result<(Vec<u32>, watch::Receiver<u64>), InferError> {
        let shown = shown(&wanted.id);
        let mut sessions = ipc::lock(&self.sessions);
        if wanted.starts {
            if let Some(old) = sessions.insert(wanted.id.clone(), Session::new()) {
                old.stop.send_modify(|count| *count += 1);
            }
            drop_oldest(&mut sessions);
        }
        let session = sessions.get_mut(&wanted.id).ok_or_else(|| {
            InferError::invalid(format!("session {shown} is not known; send its first request with START = 1"))
        })?;
        if session.is_running {
            let words = format!("session {shown} still answers its last request; wait for it, or send STOP = 1");
            return Err(InferError::invalid(words));
        }
        if let Some(step) = wanted.step {
            if step > session.tokens.len() {
                let words = format!("`step` is {step}, but session {shown} holds {} tokens", session.tokens.len());
                return Err(InferError::invalid(words));
            }
            session.tokens.truncate(step);
        }
        let length = session.tokens.len() + added.len() + usize::try_from(max_tokens).unwrap_or(0);
        if let Some(session_len) = wanted.session_len.filter(|&session_len| session_len > 0 && length > session_len) {
            let words = format!(
                "session {shown} would come to {length} tokens, more than `session_len` ({session_len}); start a new one, \
                 or ask for fewer tokens"
            );
            return Err(InferError::invalid(words));
        }
        session.is_running = true;
        session.last_used = Instant::now();
        let mut prompt = session.tokens.clone();
        prompt.extend_from_slice(added);
        Ok((prompt, session.stop.subscribe()))
    }

    /// Ends what the session runs, and the session if the request says so.
    fn stop(&self, wanted: &Wanted) -> ResponseStream {
        let mut sessions = ipc::lock(&self.sessions);
        if let Some(session) = sessions.get(&wanted.id) {
            session.stop.send_modify(|count| *count += 1);
        }
        if wanted.ends {
            sessions.remove(&wanted.id);
        }
        ResponseStream::ready(InferResponse::default())
    }

    /// A request for no token: begins or ends a session.
    fn touch(&self, wanted: &Wanted) -> ResponseStream {
        let mut sessions = ipc::lock(&self.sessions);
        if wanted.starts {
            sessions.insert(wanted.id.clone(), Session::new());
            drop_oldest(&mut sessions);
        }
        let num_tokens = sessions.get(&wanted.id).map_or(0, |session| session.tokens.len());
        if wanted.ends {
            sessions.remove(&wanted.id);
        }
        let outputs = vec![
            Tensor::from_u32("output_ids", &[1, 1, 0], &[]),
            Tensor::from_u32("sequence_length", &[1, 1], &[num_tokens as u32]),
        ];
        ResponseStream::ready(InferResponse { outputs, ..InferResponse::default() })
    }

    fn forget_run(&self, id: &CorrelationId) {
        if let Some(session) = ipc::lock(&self.sessions).get_mut(id) {
            session.is_running = false;
        }
    }
}

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
    wanted: Wanted,
    /// The whole session's, grown with each response.
    tokens: Vec<u32>,
}

impl Run {
    async fn answer(mut self, mut engine: ResponseStream, sender: ResponseSender, mut stopped: watch::Receiver<u64>) {
        loop {
            let item = tokio::select! {
                item = engine.next_response() => item,
                _ = stopped.changed() => {
                    // What was generated so far stays part of the session.
                    let response = self.response(InferResponse { is_final: true, ..InferResponse::default() });
                    sender.send(Ok(response)).await;
                    return;
                }
            };
            sender.mark_scheduled();
            engine.generation().into_iter().for_each(|told| sender.report(told));
            match item {
                None => return,
                Some(Err(error)) => {
                    sender.send(Err(error)).await;
                    return;
                }
                Some(Ok(response)) => {
                    let is_final = response.is_final;
                    let told = self.response(response);
                    if is_final {
                        // Before the client hears of it: its next request may come at once.
                        self.leave();
                    }
                    if !sender.send(Ok(told)).await || is_final {
                        return;
                    }
                }
            }
        }
    }

    fn response(&mut self, response: InferResponse) -> InferResponse {
        let ids = response.outputs.iter().find(|tensor| tensor.name == "output_ids").and_then(Tensor::to_i32);
        self.tokens.extend(ids.unwrap_or_default().into_iter().map(i32::cast_unsigned));
        let length = self.tokens.len();
        let mut outputs = vec![
            Tensor::from_u32("output_ids", &[1, 1, length as i64], &self.tokens),
            Tensor::from_u32("sequence_length", &[1, 1], &[length as u32]),
        ];
        outputs.extend(response.outputs.iter().filter(|tensor| tensor.name.ends_with("log_probs")).cloned());
        outputs.retain(|tensor| self.outputs.contains(&tensor.name));
        InferResponse { outputs, ..response }
    }

    /// Leaves the session as the next request finds it.
    fn leave(&mut self) {
        let mut sessions = ipc::lock(&self.sessions);
        if self.wanted.ends {
            sessions.remove(&self.wanted.id);
        } else if let Some(session) = sessions.get_mut(&self.wanted.id) {
            session.tokens.clone_from(&self.tokens);
            session.is_running = false;
            session.last_used = Instant::now();
        }
    }
}

impl Drop for Run {
    fn drop(&mut self) {
        let is_running = |session: &Session| session.is_running;
        if ipc::lock(&self.sessions).get(&self.wanted.id).is_some_and(is_running) {
            self.leave();
        }
    }
}

/// The engine's request: everything but the session, streamed.
fn engine_request(request: &InferRequest, prompt: &[u32]) -> InferRequest {
    let is_engines = |tensor: &&Tensor| {
        !OF_SESSIONS.contains(&tensor.name.as_str()) && !["input_ids", "input_lengths"].contains(&tensor.name.as_str())
    };
    let mut inputs: Vec<Tensor> = request.inputs.iter().filter(is_engines).cloned().collect();
    for tensor in &mut inputs {
        let name = match tensor.name.as_str() {
            "is_return_log_probs" => "return_log_probs",
            "top_p_decay" => "runtime_top_p_decay",
            "top_p_min" => "runtime_top_p_min",
            "top_p_reset_ids" => "runtime_top_p_reset_ids",
            name => name,
        };
        tensor.name = Name::from(name);
    }
    inputs.push(Tensor::from_u32("input_ids", &[1, prompt.len() as i64], prompt));
    inputs.push(Tensor::from_bool("streaming", &[1, 1], &[true]));
    InferRequest { inputs, requested_outputs: Vec::new(), ..request.clone() }
}

fn new_tokens(request: &InferRequest) -> Result<Vec<u32>, InferError> {
    let missing = || InferError::invalid("input `input_ids` is missing or not UINT32: it holds the prompt's token ids");
    let mut ids = request.input("input_ids").and_then(Tensor::to_u32).ok_or_else(missing)?;
    if let Some(length) = integer(request, "input_lengths")?.and_then(|length| usize::try_from(length).ok()) {
        ids.truncate(length);
    }
    Ok(ids)
}

/// The first value of an integer input.
fn integer(request: &InferRequest, name: &str) -> Result<Option<i64>, InferError> {
    let Some(tensor) = request.input(name) else { return Ok(None) };
    let first = match tensor.datatype {
        DataType::Int32 => tensor.to_i32().and_then(|values| values.first().copied().map(i64::from)),
        DataType::Uint32 => tensor.to_u32().and_then(|values| values.first().copied().map(i64::from)),
        DataType::Int64 => tensor.to_i64().and_then(|values| values.first().copied()),
        DataType::Uint64 => tensor.to_u64().and_then(|values| values.first().copied().map(u64::cast_signed)),
        other => return Err(InferError::invalid(format!("input `{name}` is {}, expected INT32", other.name()))),
    };
    Ok(first)
}

fn shown(id: &CorrelationId) -> String {
    match id {
        CorrelationId::Number(number) => number.to_string(),
        CorrelationId::Text(text) => format!("`{text}`"),
    }
}
