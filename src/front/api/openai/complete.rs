//! `/v1/completions` and `/v1/chat/completions`.

use std::sync::Arc;
use std::time::{Duration, Instant};

use chat_format::ChatFormat;
use futures::stream::SelectAll;
use generation::{Generator, SamplingDefaults};
use http::HeaderMap;
use hyper::body::Incoming;
use serving::{GenerateCall, Name, ProgressReporter};

use super::choices::{CallOptions, Choices, pieces};
use super::error::ApiError;
use super::fields::tree_bytes;
use super::prompt::{Prompt, encode_all};
use super::reply::{Echo, Head, OpenAiFormat};
use super::request::{CompletionRequest, charge_prompts, take_prompts};
use super::respond::{AnswerFormat, Pieces, respond};
use super::turn_plan::TurnPlan;
use super::{models, tensor_model};
use crate::api::request_key::drawn_number;
use crate::api::triton::http::reply::Reply;
use crate::api::triton::http::request_body::{ChargedBody, read_body};
use crate::state::State;
use crate::transport::budget::Charge;
use crate::transport::large_work::block_in_place_in_turn;

/// Starting a request takes as long as reading this number of bytes.
const REQUEST_BYTES: usize = 4 << 10;

/// Serves one request.
pub(super) async fn complete(
    state: &Arc<State>,
    headers: &HeaderMap,
    body: Incoming,
    is_chat: bool,
) -> Result<Reply, ApiError> {
    let ChargedBody { bytes: body, charge } = read_body(state, headers, body).await?;
    let limits = state.server.limits();
    let read = || {
        charge.add(tree_bytes(&body)?)?;
        CompletionRequest::read(&body, is_chat, limits, state.config.unknown_fields)
    };
    let request = block_in_place_in_turn(body.len(), read).await?;
    drop(body);
    let config = models::text_model(state, &request.model).ok_or_else(|| ApiError::no_model(state, &request.model))?;
    match models::generator(state, &request.model) {
        Some(generator) => generate(state, request, &generator, charge).await,
        None => tensor_model::complete(state, headers, request, &config, charge).await,
    }
}

/// A request whose generation has started.
struct Started {
    /// The pieces of its choices; in a chat with their deltas.
    pieces: Pieces,
    /// Number of choices.
    count: usize,
    /// The prompts' tokens.
    prompts: Vec<Arc<[u32]>>,
    /// The prompts' texts, where they are echoed.
    echoes: Vec<String>,
}

/// Encodes the prompts of a request and starts its generation.
async fn start(
    state: &State,
    request: &mut CompletionRequest,
    generator: &Generator,
    charge: &Charge,
) -> Result<Started, ApiError> {
    let is_chat = request.is_chat;
    let prompts = take_prompts(state, request).await?;
    charge_prompts(state.server.limits(), charge, request, &prompts)?;
    let plan = match (is_chat, prompts.first()) {
        (true, Some(prompt)) => TurnPlan::new(turn_format(state, request)?, prompt, request, generator)?,
        _ => TurnPlan::plain(),
    };
    let echoed: Vec<Prompt> = if request.echo { prompts.clone() } else { Vec::new() };
    let started = Instant::now();
    // A template spells the special tokens out.
    let adds_special = generator.adds_special_tokens && !is_chat;
    let prompts = encode_all(prompts, generator, adds_special, &request.parameters).await?;
    let encode_time = started.elapsed();
    let count = prompts.len() * request.parameters.n;
    let begin = || begin(state, request, generator, &prompts, encode_time);
    let (choices, requests) = block_in_place_in_turn(count * REQUEST_BYTES, begin).await?;
    let pieces: Pieces = match is_chat {
        true => plan.divide(request, choices, requests),
        false => Box::pin(choices),
    };
    let echoes = echoed.into_iter().map(|prompt| text_of(prompt, generator)).collect();
    Ok(Started { pieces, count, prompts, echoes })
}

/// How the model of a chat writes its turn.
fn turn_format(state: &State, request: &CompletionRequest) -> Result<Option<Arc<ChatFormat>>, ApiError> {
    let Some(chat) = &state.config.chat.0 else { return Ok(None) };
    Ok(chat.format(&request.model, !request.tools.offered().is_empty())?)
}

async fn generate(
    state: &Arc<State>,
    mut request: CompletionRequest,
    generator: &Generator,
    charge: Charge,
) -> Result<Reply, ApiError> {
    let Started { pieces, count, prompts, echoes } = start(state, &mut request, generator, &charge).await?;
    let tokenizer = Some(generator.tokenizer.clone());
    let head = Head::new(&request.parameters, &request.model, request.is_chat, prompts, tokenizer);
    let echo = Echo { texts: echoes, lists_tokens: request.parameters.logprobs.is_some() };
    let format = Box::new(OpenAiFormat::new(head, echo, count));
    respond(pieces, count, format, request.parameters.stream, charge).await
}

/// What the form of an answer needs to know of a chat.
pub(super) struct ChatRun {
    /// A number for ids, different for each answer.
    pub(super) unique: String,
    /// Tokens of the prompt.
    pub(super) prompt_tokens: usize,
}

/// Serves a chat of an endpoint with its own form of answers.
pub(super) async fn chat(
    state: &Arc<State>,
    mut request: CompletionRequest,
    charge: Charge,
    format: impl FnOnce(ChatRun) -> Box<dyn AnswerFormat>,
) -> Result<Reply, ApiError> {
    let generator = chat_generator(state, &request.model)?;
    let Started { pieces, count, prompts, .. } = start(state, &mut request, &generator, &charge).await?;
    let prompt_tokens = prompts.first().map_or(0, |prompt| prompt.len());
    let run = ChatRun { unique: format!("{:016x}", drawn_number()), prompt_tokens };
    respond(pieces, count, format(run), request.parameters.stream, charge).await
}

/// The tokens of a chat's prompt.
pub(super) async fn encode_chat(
    state: &State,
    mut request: CompletionRequest,
    charge: &Charge,
) -> Result<Arc<[u32]>, ApiError> {
    let generator = chat_generator(state, &request.model)?;
    let prompts = take_prompts(state, &mut request).await?;
    charge_prompts(state.server.limits(), charge, &request, &prompts)?;
    let prompts = encode_all(prompts, &generator, false, &request.parameters).await?;
    prompts.into_iter().next().ok_or_else(|| ApiError::of_field("messages", "The conversation has no prompt."))
}

fn chat_generator(state: &State, model: &str) -> Result<Generator, ApiError> {
    models::text_model(state, model).ok_or_else(|| ApiError::no_model(state, model))?;
    models::generator(state, model).ok_or_else(|| {
        let words = format!("Model `{model}` takes tensors only; this endpoint needs a language model of the server.");
        ApiError::of_field("model", words)
    })
}

/// The text of a prompt.
fn text_of(prompt: Prompt, generator: &Generator) -> String {
    match prompt {
        Prompt::Text(text) => text,
        Prompt::Tokens(tokens) => generator.tokenizer.decode(&tokens, false),
    }
}

/// Starts the requests to the model. Returns their choices, and the request of each choice.
fn begin(
    state: &State,
    request: &CompletionRequest,
    generator: &Generator,
    prompts: &[Arc<[u32]>],
    encode_time: Duration,
) -> Result<(Choices, Vec<Option<ProgressReporter>>), ApiError> {
    let parameters = &request.parameters;
    let none = SamplingDefaults::default();
    let defaults = if state.config.uses_generation_config { &generator.defaults } else { &none };
    let stop: Arc<[String]> = parameters.stop.clone().into();
    let stop_ids = parameters.own_stop_ids(generator);
    let (mut choices, mut requests) = (SelectAll::new(), Vec::new());
    for (at, prompt) in prompts.iter().enumerate() {
        for call in 0..parameters.calls_per_prompt() {
            let first = at * parameters.n + call;
            let generate = parameters.request(generator, defaults, prompt, first)?;
            let num_sequences = generate.num_sequences;
            // Encoding counts for the first call.
            let encode_time = if requests.is_empty() { encode_time } else { Duration::ZERO };
            let call = GenerateCall { encode_time, ..GenerateCall::new(Name::from(&request.model), generate) };
            let events = state.server.generate(call)?;
            requests.extend(std::iter::repeat_n(events.progress(), num_sequences));
            let options = CallOptions {
                first,
                prompt: Arc::clone(prompt),
                stop: Arc::clone(&stop),
                stop_ids: Arc::clone(&stop_ids),
                lists_tokens: parameters.logprobs.is_some() || parameters.return_token_ids,
                drops_output: parameters.max_tokens == Some(0),
                tokenizer: generator.tokenizer.clone(),
            };
            choices.push(pieces(events, num_sequences, options));
        }
    }
    Ok((choices, requests))
}
