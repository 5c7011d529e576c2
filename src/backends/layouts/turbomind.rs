//! TurboMind's `interactive` model: token ids in sessions.
//!
//! `CORRID` is the id of a request's session. `START` begins the session, `END` ends it with this request, `STOP` cancels its running
//! request, and `step` truncates its history. The prompt is the history and the request's tokens. The prefix cache has the KV blocks of
//! the history. Responses have all tokens of the session, as clients expect.

mod sessions;

use std::sync::Arc;

use futures::FutureExt as _;
use futures::future::BoxFuture;
use repository::ModelConfig;
use repository::proto::{DataType as ConfigType, ModelParameter};
use serving::{
    Backend, BackendFactory, CorrelationId, InferError, InferRequest, InferResponse, LoadRequest, Name, ResponseSender,
    ResponseStream, Tensor,
};

use super::engine_config::{engine_output, with_checkpoint};
use super::engine_request::{Renames, add_missing, rename};
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

    fn load(&self, model: LoadRequest) -> BoxFuture<'static, Result<Arc<dyn Backend>, InferError>> {
        let llm = self.llm.clone();
        async move {
            let request = with_checkpoint(&model, configure_engine)?;
            let sessions = SessionModel {
                outputs: model.config.output.iter().map(|output| Name::from(&output.name)).collect(),
                sessions: Sessions::default(),
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

/// The model, with its sessions.
struct SessionModel {
    llm: Arc<dyn Backend>,
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
        match self.llm.infer(engine_request(&request, &run.tokens)) {
            Ok(engine) => {
                let outputs = self.outputs.clone();
                Ok(ResponseStream::from_future(|sender| respond(run, engine, outputs, sender)))
            }
            Err(error) => {
                run.abort();
                Err(error)
            }
        }
    }

    fn is_ready(&self) -> bool {
        self.llm.is_ready()
    }

    fn drain(&self) -> BoxFuture<'_, ()> {
        self.llm.drain()
    }
}

/// Sends the responses of the engine with all tokens of the session.
async fn respond(mut run: Run, mut engine: ResponseStream, outputs: Arc<[Name]>, sender: ResponseSender) {
    loop {
        let item = tokio::select! {
            item = engine.next_response() => item,
            // The tokens so far stay part of the session.
            () = run.stopped() => Some(Ok(InferResponse { is_final: true, ..InferResponse::default() })),
        };
        sender.mark_scheduled();
        engine.generation().into_iter().for_each(|generation| sender.report(generation));
        let Some(item) = item else { return };
        let ends = item.as_ref().map_or(true, |response| response.is_final);
        let item = item.map(|response| with_session(&mut run, &outputs, response));
        if ends && item.is_ok() {
            // Before the response is sent, because the client may send its next request at once.
            run.finish();
        }
        if !sender.send(item).await || ends {
            return;
        }
    }
}

/// A response of the engine with all tokens of the session in place of the new ones.
fn with_session(run: &mut Run, declared: &[Name], response: InferResponse) -> InferResponse {
    let new = response.outputs.iter().find(|tensor| tensor.name == "output_ids").and_then(Tensor::to_i32);
    run.tokens.extend(new.unwrap_or_default().into_iter().map(i32::cast_unsigned));
    let mut outputs = tokens(&run.tokens, run.tokens.len()).to_vec();
    outputs.extend(response.outputs.iter().filter(|tensor| tensor.name.ends_with("log_probs")).cloned());
    outputs.retain(|tensor| declared.contains(&tensor.name));
    InferResponse { outputs, ..response }
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

/// The engine's request: all inputs except those of the session, streamed.
fn engine_request(request: &InferRequest, prompt: &[u32]) -> InferRequest {
    let is_other = |tensor: &&Tensor| !SESSION_INPUTS.contains(&tensor.name.as_str());
    let mut inputs: Vec<Tensor> = request.inputs.iter().filter(is_other).cloned().collect();
    rename(RENAMES, &mut inputs);
    let ids = Tensor::from_u32("input_ids", &[1, prompt.len() as i64], prompt);
    add_missing(&mut inputs, [ids, Tensor::from_bool("streaming", &[1, 1], &[true])]);
    InferRequest { inputs, requested_outputs: Vec::new(), ..request.clone() }
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
