//! `/v1/completions` and `/v1/chat/completions`.

use std::sync::Arc;
use std::time::{Duration, Instant};

use chat_format::ChatFormat;
use futures::stream::SelectAll;
use generation::{Generator, SamplingDefaults};
use http::HeaderMap;
use hyper::body::Incoming;
use serde_json::Value;
use serving::{GenerateCall, Limit, Limits, Name};

use super::choices::{CallOptions, Choices, pieces};
use super::error::ApiError;
use super::fields::{Fields, check, tree_bytes};
use super::parameters::{COMPLETION_TOKENS, Parameters, drawn_number};
use super::prompt::{Prompt, encode_all, read_prompts};
use super::reply::{Echo, Head, OpenAiFormat};
use super::respond::{AnswerFormat, Pieces, respond};
use super::tools::{Tool, ToolChoice, ToolForm, Tools};
use super::turn::{TurnOptions, divided};
use super::turn_plan::TurnPlan;
use super::{models, tensor_model};
use crate::api::triton::http::reply::Reply;
use crate::api::triton::http::request_body::{ChargedBody, read_body};
use crate::chat::{Conversation, UnknownFields};
use crate::state::State;
use crate::transport::budget::Charge;
use crate::transport::large_work::block_in_place_in_turn;

/// Times that an echoed prompt is in an answer while that is written.
const ECHO_COPIES: usize = 3;
/// Starting a request takes as long as reading this number of bytes.
const REQUEST_BYTES: usize = 4 << 10;

/// A request for completions.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct CompletionRequest {
    pub(super) model: String,
    pub(super) input: Input,
    pub(super) parameters: Parameters,
    /// Whether a completion begins with its prompt.
    pub(super) echo: bool,
    /// Tools that a chat may call.
    pub(super) tools: Tools,
    /// Whether the answer of a chat has the model's reasoning.
    pub(super) includes_reasoning: bool,
    /// Whether a call that `tool_choice` names ends with the reason `stop`, as in OpenAI's chats.
    pub(super) ends_named_call_with_stop: bool,
    pub(super) is_chat: bool,
}

/// What is completed.
#[derive(Debug, Clone, PartialEq)]
pub(crate) enum Input {
    Prompts(Vec<Prompt>),
    Conversation(Conversation),
}

impl CompletionRequest {
    /// Reads a body.
    ///
    /// # Errors
    /// When it is not a JSON object, a field has an invalid value or is not known, or one is larger than `limits` allow.
    pub(super) fn read(body: &[u8], is_chat: bool, limits: &Limits, unknown: UnknownFields) -> Result<Self, ApiError> {
        let mut fields = Fields::read(body)?;
        let model = fields.text("model")?.ok_or_else(|| ApiError::of_field("model", "`model` is missing."))?;
        check(limits, Limit::NameBytes, "model", model.len())?;
        let mut parameters = Parameters::read(&mut fields, limits)?;
        let max_tokens = Parameters::token_count(&mut fields, "max_tokens")?;
        let (mut input, mut echo) = (read_input(&mut fields, is_chat, limits)?, false);
        let (mut tools, mut includes_reasoning) = (Tools::default(), true);
        if is_chat {
            parameters.max_tokens = Parameters::token_count(&mut fields, "max_completion_tokens")?.or(max_tokens);
            parameters.logprobs = chat_logprobs(&mut fields)?;
            tools = Tools::read(&mut fields, ToolForm::Chat)?;
            includes_reasoning = fields.flag("include_reasoning")?.unwrap_or(true);
            let is_text =
                |modalities: &Value| modalities.as_array().is_some_and(|list| list.iter().all(|it| it == "text"));
            fields.refuse_unless("modalities", is_text, "models answer with text")?;
            if let Input::Conversation(conversation) = &mut input {
                conversation.tools = tools.offered().iter().map(Tool::json).collect();
            }
        } else {
            parameters.max_tokens = Some(max_tokens.unwrap_or(COMPLETION_TOKENS));
            parameters.logprobs = Parameters::num_logprobs(&mut fields, "logprobs")?;
            echo = fields.flag("echo")?.unwrap_or(false);
            fields.refuse_unless("suffix", |suffix| suffix == "", "models continue a prompt, they do not fill gaps")?;
        }
        // They are for the provider's accounting and change no answer.
        fields.ignore(&["user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key"]);
        fields.finish(unknown)?;
        let ends_named_call_with_stop = true;
        Ok(Self { model, input, parameters, echo, tools, includes_reasoning, ends_named_call_with_stop, is_chat })
    }
}

fn read_input(fields: &mut Fields, is_chat: bool, limits: &Limits) -> Result<Input, ApiError> {
    match is_chat {
        true => Conversation::read(fields, limits).map(Input::Conversation),
        false => read_prompts(fields, limits).map(Input::Prompts),
    }
}

/// `logprobs` and `top_logprobs` of a chat.
fn chat_logprobs(fields: &mut Fields) -> Result<Option<u32>, ApiError> {
    let top = Parameters::num_logprobs(fields, "top_logprobs")?;
    match (fields.flag("logprobs")?.unwrap_or(false), top) {
        (true, top) => Ok(Some(top.unwrap_or(0))),
        (false, None | Some(0)) => Ok(None),
        (false, Some(_)) => Err(ApiError::of_field("top_logprobs", "`top_logprobs` needs `logprobs: true`.")),
    }
}

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
    let config = models::text_model(state, &request.model).ok_or_else(|| ApiError::no_model(&request.model))?;
    match models::generator(state, &request.model) {
        Some(generator) => generate(state, request, &generator, charge).await,
        None => tensor_model::complete(state, headers, request, &config, charge).await,
    }
}

/// Checks how much the request holds of memory, and charges it.
pub(super) fn charge_prompts(
    limits: &Limits,
    charge: &Charge,
    request: &CompletionRequest,
    prompts: &[Prompt],
) -> Result<(), ApiError> {
    let Parameters { n, stop, .. } = &request.parameters;
    let count = prompts.len() * n;
    limits.check(Limit::Sequences, count).map_err(|error| ApiError::of_field("n", error.message))?;
    let num_bytes: usize = prompts.iter().map(Prompt::num_bytes).sum();
    // Each choice has its own copy of the prompt and the stop strings at some time; an echo is part of the answer.
    let copies = if request.echo { 1 + ECHO_COPIES } else { 1 };
    let stop_bytes: usize = stop.iter().map(String::len).sum();
    charge.add(n.saturating_mul(num_bytes).saturating_mul(copies).saturating_add(count * stop_bytes))?;
    Ok(())
}

/// The prompts of a request, which are taken out of it.
pub(super) async fn take_prompts(state: &State, request: &mut CompletionRequest) -> Result<Vec<Prompt>, ApiError> {
    match std::mem::replace(&mut request.input, Input::Prompts(Vec::new())) {
        Input::Prompts(prompts) => Ok(prompts),
        Input::Conversation(conversation) => Ok(vec![conversation.render(state, &request.model).await?]),
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
    if request.echo && request.parameters.logprobs.is_some() {
        request.parameters.prompt_logprobs = request.parameters.prompt_logprobs.or(request.parameters.logprobs);
    }
    let echoed: Vec<Prompt> = if request.echo { prompts.clone() } else { Vec::new() };
    let started = Instant::now();
    // A template spells the special tokens out.
    let adds_special = generator.adds_special_tokens && !is_chat;
    let prompts = encode_all(prompts, generator, adds_special, &request.parameters).await?;
    let encode_time = started.elapsed();
    let count = prompts.len() * request.parameters.n;
    let begin = || begin(state, request, generator, &prompts, encode_time);
    let choices = block_in_place_in_turn(count * REQUEST_BYTES, begin).await?;
    let pieces: Pieces = match is_chat {
        true => divide(request, choices, count, plan),
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

/// The pieces of a chat with their deltas.
pub(super) fn divide(request: &CompletionRequest, choices: Choices, count: usize, plan: TurnPlan) -> Pieces {
    let is_named = matches!(request.tools.choice, ToolChoice::Named(_));
    let options = TurnOptions {
        includes_reasoning: request.includes_reasoning,
        ends_with_tool_calls: !(is_named && request.ends_named_call_with_stop),
    };
    Box::pin(divided(choices, count, options, move || plan.parser()))
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
    models::text_model(state, model).ok_or_else(|| ApiError::no_model(model))?;
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

/// Starts the requests to the model.
fn begin(
    state: &State,
    request: &CompletionRequest,
    generator: &Generator,
    prompts: &[Arc<[u32]>],
    encode_time: Duration,
) -> Result<Choices, ApiError> {
    let parameters = &request.parameters;
    let none = SamplingDefaults::default();
    let defaults = if state.config.uses_generation_config { &generator.defaults } else { &none };
    let stop: Arc<[String]> = parameters.stop.clone().into();
    let stop_ids = parameters.own_stop_ids(generator);
    let mut choices = SelectAll::new();
    let mut num_calls = 0;
    for (at, prompt) in prompts.iter().enumerate() {
        for call in 0..parameters.calls_per_prompt() {
            let first = at * parameters.n + call;
            let generate = parameters.request(generator, defaults, prompt, first)?;
            let num_sequences = generate.num_sequences;
            // Encoding counts for the first call.
            let encode_time = if num_calls == 0 { encode_time } else { Duration::ZERO };
            num_calls += 1;
            let call = GenerateCall { encode_time, ..GenerateCall::new(Name::from(&request.model), generate) };
            let events = state.server.generate(call)?;
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
    Ok(choices)
}

#[cfg(test)]
mod tests;
