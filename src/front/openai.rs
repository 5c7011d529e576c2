//! OpenAI's protocol over the same models: `/v1/models`, `/v1/completions` and `/v1/chat/completions`.
//!
//! Any model that answers text with text is offered under its own name. A request becomes one request of that model for
//! each choice; stop strings are cut here, so that an answer never holds a part of one.

use std::sync::{Arc, Mutex, PoisonError};

use bytes::Bytes;
use futures::stream::{self, SelectAll, StreamExt};
use http::header::WWW_AUTHENTICATE;
use http::{HeaderMap, Method, StatusCode};
use hyper::body::Incoming;
use repository::ModelConfig;
use repository::proto::DataType as ConfigType;
use serde_json::{Value, json};
use serving::{ErrorKind, InferError, InferRequest, Limit, Limits, Name, Parameter, Tensor};

use crate::aside::aside_in_turn;
use crate::body::ReplyBody;
use crate::budget::Charge;
use crate::kserve_http::{BEARER, EVENTS, Held, JSON, Reply, read_body, reply};
use crate::openai_answer::{Choices, Head, Piece};
use crate::openai_request::{Asked, Prompts};
use crate::restricted::Api;
use crate::state::State;
use crate::status::shown;
use crate::{forward, generate, json, openai_request};

/// Turns conversations into prompts. The caller of the front provides it, because it knows where chat templates are.
pub trait ChatPrompts: Send + Sync {
    /// The prompt of a conversation for `model`, special tokens spelled out.
    ///
    /// # Errors
    /// When the model has no chat template, or it refuses the conversation.
    fn prompt(&self, model: &str, messages: &[Value]) -> Result<String, InferError>;
}

/// A place for [`ChatPrompts`] among plain settings.
#[derive(Clone, Default)]
pub struct Chat(pub Option<Arc<dyn ChatPrompts>>);

impl std::fmt::Debug for Chat {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.debug_tuple("Chat").field(&self.0.is_some()).finish()
    }
}

/// OpenAI's code for a key that is missing or wrong.
const INVALID_KEY: &str = "invalid_api_key";

/// What goes wrong, in OpenAI's form.
#[derive(Debug)]
pub(crate) struct ApiError {
    status: StatusCode,
    code: Option<&'static str>,
    param: Option<&'static str>,
    message: String,
}

impl ApiError {
    /// A request that cannot be, for a field of it.
    pub(crate) fn of_field(param: &'static str, message: impl Into<String>) -> Self {
        Self { status: StatusCode::BAD_REQUEST, code: None, param: Some(param), message: message.into() }
    }

    fn no_model(model: &str) -> Self {
        let message =
            format!("The model `{model}` does not exist or answers no text; `GET /v1/models` lists those that do.");
        Self { status: StatusCode::NOT_FOUND, code: Some("model_not_found"), param: Some("model"), message }
    }

    pub(crate) fn json(&self) -> Value {
        let kind = if self.status.is_server_error() { "server_error" } else { "invalid_request_error" };
        json!({"error": {"message": shown(&self.message), "type": kind, "param": self.param, "code": self.code}})
    }
}

impl From<InferError> for ApiError {
    fn from(error: InferError) -> Self {
        let status = match error.kind {
            ErrorKind::Unsupported => StatusCode::BAD_REQUEST,
            kind => crate::status::http_status(kind),
        };
        Self { status, code: None, param: None, message: error.message }
    }
}

/// Whether a path is OpenAI's.
pub(crate) fn is_path(path: &str) -> bool {
    path == "/v1" || path.starts_with("/v1/")
}

/// Answers one request; what goes wrong is an answer too.
pub(crate) async fn handle(state: &Arc<State>, head: &http::request::Parts, body: Incoming) -> Reply {
    let result = answer(state, head, body).await;
    result.unwrap_or_else(|error| {
        let mut reply = reply(error.status, JSON, error.json().to_string().into_bytes());
        if error.code == Some(INVALID_KEY) {
            reply.headers_mut().insert(WWW_AUTHENTICATE, BEARER);
        }
        reply
    })
}

async fn answer(state: &Arc<State>, head: &http::request::Parts, body: Incoming) -> Result<Reply, ApiError> {
    let path = head.uri.path().trim_end_matches('/');
    let (is_post, is_get) = (head.method == Method::POST, head.method == Method::GET);
    let api = if is_post { Api::Inference } else { Api::Metadata };
    if let Err(denied) = state.config.http_restrictions.check(api, &head.headers) {
        let message = format!("This API is restricted, expecting header '{}'", denied.header);
        let code = denied.is_bearer.then_some(INVALID_KEY);
        return Err(ApiError { status: StatusCode::UNAUTHORIZED, code, param: None, message });
    }
    match path {
        "/v1/models" if is_get => Ok(json_reply(&models(state))),
        "/v1/completions" if is_post => complete(state, &head.headers, body, false).await,
        "/v1/chat/completions" if is_post => complete(state, &head.headers, body, true).await,
        "/v1/completions" | "/v1/chat/completions" | "/v1/models" => {
            let message = format!("Method {} is not allowed for {path}.", head.method);
            Err(ApiError { status: StatusCode::METHOD_NOT_ALLOWED, code: None, param: None, message })
        }
        _ => match path.strip_prefix("/v1/models/").filter(|_| is_get) {
            Some(name) if text_model(state, name).is_some() => Ok(json_reply(&model_entry(name))),
            Some(name) => Err(ApiError::no_model(name)),
            None => {
                let message =
                    format!("Unknown path {path}: there are /v1/models, /v1/completions and /v1/chat/completions.");
                Err(ApiError { status: StatusCode::NOT_FOUND, code: None, param: None, message })
            }
        },
    }
}

fn json_reply(value: &Value) -> Reply {
    reply(StatusCode::OK, JSON, value.to_string().into_bytes())
}

/// Every ready model that answers text with text.
fn models(state: &State) -> Value {
    let mut names: Vec<String> = state.server.repository_index(true).into_iter().map(|entry| entry.name).collect();
    names.dedup();
    let entries = names.iter().filter(|name| text_model(state, name).is_some()).map(|name| model_entry(name));
    json!({"object": "list", "data": entries.collect::<Vec<_>>()})
}

fn model_entry(name: &str) -> Value {
    json!({"id": name, "object": "model", "created": 0, "owned_by": "trireme"})
}

/// Names of the prompt, of the most tokens to generate and of the answer.
const PROMPT: [&str; 5] = ["text_input", "prompt", "PROMPT", "INPUT_TEXT", "text"];
const LENGTH: [&str; 4] = ["max_tokens", "request_output_len", "max_new_tokens", "sampling_param_max_tokens"];
const SEED: [&str; 3] = ["seed", "random_seed", "sampling_param_seed"];
pub(crate) const ANSWER: [&str; 3] = ["text_output", "response", "OUTPUT_TEXT"];

/// The configuration of a ready model that answers text with text.
fn text_model(state: &State, name: &str) -> Option<Arc<ModelConfig>> {
    let config = state.server.model_config(name, "").ok()?;
    let is_text = |data_type: ConfigType| data_type == ConfigType::TypeString;
    let takes = config.input.iter().any(|input| PROMPT.contains(&input.name.as_str()) && is_text(input.data_type()));
    let gives =
        config.output.iter().any(|output| ANSWER.contains(&output.name.as_str()) && is_text(output.data_type()));
    let is_ready = state.server.model_is_ready(name, "").unwrap_or(false);
    (takes && gives && is_ready).then_some(config)
}

async fn complete(state: &Arc<State>, headers: &HeaderMap, body: Incoming, is_chat: bool) -> Result<Reply, ApiError> {
    let Held { bytes: body, charge } = read_body(state, headers, body).await?;
    let limits = state.server.limits();
    let read = || {
        charge.add(openai_request::tree_bytes(&body)?)?;
        Asked::read(&body, is_chat, limits)
    };
    let mut asked = aside_in_turn(body.len(), read).await?;
    drop(body);
    let config = text_model(state, &asked.model).ok_or_else(|| ApiError::no_model(&asked.model))?;
    let prompts = prompts(state, &mut asked).await?;
    let count = prompts.len() * asked.n;
    limits.check(Limit::Sequences, count).map_err(|error| ApiError::of_field("n", error.message))?;
    let num_bytes: usize = prompts.iter().map(String::len).sum();
    // Each sequence has its prompt and its stop strings to itself sooner or later; an echo is put into the answer.
    let copies = if asked.echo { 1 + ECHO_COPIES } else { 1 };
    let stop_bytes: usize = asked.stop.iter().map(String::len).sum();
    charge.add(asked.n.saturating_mul(num_bytes).saturating_mul(copies).saturating_add(count * stop_bytes))?;
    let forwarded = state.config.http_forward.pick(headers)?;
    let begin = || begin(state, &config, &asked, prompts, &forwarded);
    let choices = aside_in_turn(num_bytes + count * REQUEST_BYTES, begin).await?;
    let head = Head::new(&asked, is_chat);
    match asked.stream {
        true => stream_reply(choices, head, count, charge).await,
        false => whole(choices, &head, count).await,
    }
}

/// Times that an echoed prompt is in an answer while that is written.
const ECHO_COPIES: usize = 3;
/// To begin a request takes as long as to read so many bytes.
const REQUEST_BYTES: usize = 4 << 10;

/// Begins a request for each choice of each prompt. Those of one prompt share its bytes.
fn begin(
    state: &State,
    config: &ModelConfig,
    asked: &Asked,
    prompts: Vec<String>,
    forwarded: &[(String, String)],
) -> Result<Choices, ApiError> {
    let mut common = request(config, asked, state.server.limits())?;
    forward::forward(&mut common, forwarded);
    let input = |names: &[&str]| common.inputs.iter().position(|input| names.contains(&&*input.name));
    let (prompt_at, seed_at) = (input(&PROMPT), input(&SEED));
    let mut choices = SelectAll::new();
    let mut indexes = 0..;
    for prompt in prompts {
        let data = Tensor::from_byte_strings("", &[], &[&prompt]).data;
        drop(prompt);
        for index in indexes.by_ref().take(asked.n) {
            let mut request = common.clone();
            if let Some(at) = prompt_at {
                request.inputs[at].data = data.clone();
            }
            if let Some(at) = seed_at {
                request.inputs[at].data = seed(config, asked, &common.inputs[at].name, index as u64)?;
            }
            let echo = if asked.echo { data.slice(STRING_HEAD_BYTES..) } else { Bytes::new() };
            choices.push(crate::openai_answer::choice(index, state.server.infer(request)?, asked, echo));
        }
    }
    Ok(choices)
}

/// A string in a tensor begins with its length.
const STRING_HEAD_BYTES: usize = size_of::<u32>();

/// The seed of a choice as raw data: each is another draw; a seed makes all of them repeatable.
fn seed(config: &ModelConfig, asked: &Asked, name: &str, index: u64) -> Result<Bytes, ApiError> {
    let seed = asked.seed.unwrap_or(asked.drawn_seed).wrapping_add(index);
    let input = config.input.iter().find(|input| input.name == name).expect("the request was made for this model");
    let text = match input.data_type() {
        ConfigType::TypeInt64 => seed.cast_signed().to_string(),
        _ => seed.to_string(),
    };
    let tensor = generate::tensor(config, input, &json::Value::Number(&text));
    let wrong = |error: InferError| ApiError::of_field("seed", format!("`seed` cannot be {text}: {}", error.message));
    Ok(tensor.map_err(wrong)?.data)
}

/// The prompts of a request, which are taken out of `asked`.
async fn prompts(state: &Arc<State>, asked: &mut Asked) -> Result<Vec<String>, ApiError> {
    let messages = match std::mem::take(&mut asked.prompts) {
        Prompts::Texts(texts) => return Ok(texts),
        Prompts::Messages(messages) => messages,
    };
    let none =
        || ApiError::of_field("messages", "This server has no chat templates; send the prompt to /v1/completions.");
    let chat = state.config.chat.0.clone().ok_or_else(none)?;
    let model = asked.model.clone();
    let rendered = tokio::task::spawn_blocking(move || chat.prompt(&model, &messages)).await;
    Ok(vec![rendered.map_err(|error| InferError::internal(error.to_string()))??])
}

/// The model's own request, without prompt and seed: the values that the model has inputs for, by its names.
fn request(config: &ModelConfig, asked: &Asked, limits: &Limits) -> Result<InferRequest, ApiError> {
    let mut body = serde_json::Map::new();
    let mut offer = |names: &[&str], value: Value| {
        let name = names.iter().find(|name| config.input.iter().any(|input| input.name == **name));
        name.map(|name| body.insert((*name).to_owned(), value)).is_some()
    };
    offer(&PROMPT, json!(""));
    offer(&LENGTH, json!(asked.max_tokens));
    offer(&["stream", "streaming"], json!(config.is_decoupled()));
    // Temperature 0 is greedy, which other servers spell as one candidate.
    let (temperature, top_k) = if asked.temperature == 0.0 { (1.0, Some(1)) } else { (asked.temperature, asked.top_k) };
    offer(&["temperature", "sampling_param_temperature"], json!(temperature));
    // Without a number of candidates some models are greedy; 0 takes all of them.
    offer(&["top_k", "runtime_top_k", "sampling_param_top_k"], json!(top_k.unwrap_or(0)));
    offer(&["top_p", "runtime_top_p", "sampling_param_top_p"], json!(asked.top_p));
    for (field, names, value) in wishes(asked) {
        if !offer(names, value) {
            let words = format!("`{field}` is not supported by model `{}`, which has no input for it.", asked.model);
            return Err(ApiError::of_field(field, words));
        }
    }
    let mut optional = |names: &[&str], value: Option<Value>| value.is_some_and(|value| offer(names, value));
    optional(&SEED, Some(json!(0)));
    optional(&["return_num_input_tokens"], Some(json!(true)));
    optional(&["return_num_output_tokens"], Some(json!(true)));
    optional(&["exclude_input_in_output"], Some(json!(true)));
    if !optional(&["ignore_eos"], Some(json!(asked.ignore_eos))) && asked.ignore_eos {
        optional(&["end_id"], Some(json!(-1)));
    }
    if !asked.stop.is_empty() {
        optional(&["stop_words"], Some(json!(asked.stop)));
    }
    let mut request = generate::read(&serde_json::to_vec(&body).expect("a map of values"), config, limits)?;
    request.model_name = Name::from(&asked.model);
    if asked.is_chat {
        // The template has spelled them out.
        request.parameters.insert("add_special_tokens".to_owned(), Parameter::Bool(false));
    }
    Ok(request)
}

/// What the answer would not be without: the field, the inputs that models have for it, and its value where it is no default.
fn wishes(asked: &Asked) -> impl Iterator<Item = (&'static str, &'static [&'static str], Value)> {
    let other_than = |value: Option<f64>, default: f64| value.filter(|it| *it != default).map(|it| json!(it));
    let (presence, frequency) = (other_than(asked.presence_penalty, 0.0), other_than(asked.frequency_penalty, 0.0));
    let min_tokens = asked.min_tokens.filter(|it| *it > 0).map(|it| json!(it));
    let wishes: [(_, &[&str], _); 5] = [
        ("presence_penalty", &["presence_penalty", "sampling_param_presence_penalty"], presence),
        ("frequency_penalty", &["frequency_penalty", "sampling_param_frequency_penalty"], frequency),
        ("repetition_penalty", &["repetition_penalty"], other_than(asked.repetition_penalty, 1.0)),
        ("min_tokens", &["min_tokens", "min_length"], min_tokens),
        ("logprobs", &["return_log_probs"], asked.logprobs.then_some(Value::Bool(true))),
    ];
    wishes.into_iter().filter_map(|(field, names, value)| Some((field, names, value?)))
}

/// One response with every choice.
async fn whole(mut choices: Choices, head: &Head, count: usize) -> Result<Reply, ApiError> {
    let mut whole: Vec<Piece> = (0..count).map(Piece::empty).collect();
    while let Some(piece) = choices.next().await {
        let piece = piece?;
        whole[piece.index].join(piece);
    }
    Ok(json_reply(&head.whole(&whole)))
}

/// Server-sent events, the first of which decides the status.
async fn stream_reply(mut choices: Choices, head: Head, count: usize, charge: Charge) -> Result<Reply, ApiError> {
    let first = match choices.next().await {
        Some(Err(error)) => return Err(error.into()),
        first => first,
    };
    let opening: Vec<Bytes> = (0..count).filter_map(|index| head.opening(index)).map(|value| event(&value)).collect();
    // The usage of all choices follows the last piece, unless that is an error.
    let totals: Vec<Piece> = (0..count).map(Piece::empty).collect();
    let totals = Arc::new(Mutex::new((totals, false)));
    let shared = Arc::new(head);
    let (of_piece, counted) = (Arc::clone(&shared), Arc::clone(&totals));
    let body = stream::iter(first).chain(choices).map(move |piece| {
        let (totals, is_fine) = &mut *counted.lock().unwrap_or_else(PoisonError::into_inner);
        *is_fine = piece.is_ok();
        match piece {
            Ok(piece) => {
                totals[piece.index].count(&piece);
                event(&of_piece.chunk(&piece))
            }
            Err(error) => event(&ApiError::from(error).json()),
        }
    });
    let end = stream::once(async move {
        let _held_until_now = charge;
        let (totals, is_fine) = &*totals.lock().unwrap_or_else(PoisonError::into_inner);
        let usage = shared.usage_chunk(totals).filter(|_| *is_fine);
        let mut end = usage.map(|usage| event(&usage).to_vec()).unwrap_or_default();
        end.extend_from_slice(b"data: [DONE]\n\n");
        Bytes::from(end)
    });
    let body = stream::iter(opening).chain(body).chain(end);
    Ok(reply(StatusCode::OK, EVENTS, ReplyBody::Events(Box::pin(body))))
}

fn event(value: &Value) -> Bytes {
    format!("data: {value}\n\n").into()
}

#[cfg(test)]
mod tests {
    use super::*;
    use repository::proto::ModelInput;

    #[test]
    fn what_a_model_has_no_input_for_is_refused_where_it_would_change_the_answer() {
        let mut prompt = ModelInput { name: "prompt".to_owned(), dims: vec![1], ..ModelInput::default() };
        prompt.set_data_type(ConfigType::TypeString);
        let config = ModelConfig { name: "m".to_owned(), input: vec![prompt], ..ModelConfig::default() };
        let ask = |more: &str| {
            let body = format!(r#"{{"model": "m", "prompt": "a"{more}}}"#);
            let asked = Asked::read(body.as_bytes(), false, &Limits::default()).unwrap();
            request(&config, &asked, &Limits::default()).map_err(|error| error.message)
        };
        for more in ["", r#", "seed": 3, "presence_penalty": 0, "repetition_penalty": 1, "min_tokens": 0"#] {
            assert_eq!(ask(more).unwrap().inputs.len(), 1, "{more}");
        }
        for (field, value) in [("presence_penalty", "0.5"), ("min_tokens", "2"), ("logprobs", "1")] {
            let refusal = ask(&format!(r#", "{field}": {value}"#)).unwrap_err();
            assert_eq!(refusal, format!("`{field}` is not supported by model `m`, which has no input for it."));
        }
    }
}
