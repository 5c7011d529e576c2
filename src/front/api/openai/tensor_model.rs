//! Models that take text as a tensor and are no text generators of ours, for example Python models: a request becomes tensors
//! by the names that such models use. Settings that a model has no input for are refused.

use bytes::Bytes;
use futures::stream::{BoxStream, SelectAll, StreamExt, unfold};
use generation::ConstraintSpec;
use http::HeaderMap;
use repository::ModelConfig;
use repository::proto::DataType as ConfigType;
use serde_json::{Value, json};
use serving::{InferError, InferRequest, InferResponse, Limits, Name, Parameter, ResponseStream, Tensor};
use text::StopText;

use super::choices::{Choices, Finish, Piece, StoppedAt, TokenLogprob, Usage};
use super::error::ApiError;
use super::models::{ANSWER, PROMPT};
use super::parameters::Parameters;
use super::prompt::Prompt;
use super::reply::{Echo, Head, OpenAiFormat};
use super::request::{CompletionRequest, charge_prompts, take_prompts};
use super::respond::{Pieces, respond};
use super::turn_plan::TurnPlan;
use crate::api::triton::header_parameters;
use crate::api::triton::http::reply::Reply;
use crate::api::triton::http::{generate, json};
use crate::state::State;
use crate::transport::budget::Charge;
use crate::transport::large_work::block_in_place_in_turn;

/// Names of the number of tokens to generate.
const LENGTH: [&str; 4] = ["max_tokens", "request_output_len", "max_new_tokens", "sampling_param_max_tokens"];
const SEED: [&str; 3] = ["seed", "random_seed", "sampling_param_seed"];

/// Tokens to generate in a chat that does not say.
const CHAT_TOKENS: u32 = 512;
/// Starting a request takes as long as reading this number of bytes.
const REQUEST_BYTES: usize = 4 << 10;

/// Serves a request.
pub(super) async fn complete(
    state: &std::sync::Arc<State>,
    headers: &HeaderMap,
    mut request: CompletionRequest,
    config: &ModelConfig,
    charge: Charge,
) -> Result<Reply, ApiError> {
    let is_chat = request.is_chat;
    if let Some(field) = unsupported(&request) {
        return Err(no_input(field, &request.model));
    }
    let prompts = take_prompts(state, &mut request).await?;
    charge_prompts(state.server.limits(), &charge, &request, &prompts)?;
    let text = |prompt| match prompt {
        Prompt::Text(text) => Ok(text),
        Prompt::Tokens(_) => {
            let words = format!("`prompt` must be text: model `{}` takes no token ids.", request.model);
            Err(ApiError::of_field("prompt", words))
        }
    };
    let prompts = prompts.into_iter().map(text).collect::<Result<Vec<String>, _>>()?;
    let forwarded = state.config.http_forward.select(headers)?;
    let count = prompts.len() * request.parameters.n;
    let num_bytes: usize = prompts.iter().map(String::len).sum();
    let echoes = if request.echo { prompts.clone() } else { Vec::new() };
    let begin = || begin(state, config, &request, is_chat, prompts, &forwarded);
    let choices = block_in_place_in_turn(num_bytes + count * REQUEST_BYTES, begin).await?;
    let head = Head::new(&request.parameters, &request.model, is_chat, Vec::new(), None);
    let pieces: Pieces =
        if is_chat { TurnPlan::plain().divide(&request, choices, vec![None; count]) } else { Box::pin(choices) };
    let echo = Echo { texts: echoes, lists_tokens: request.parameters.logprobs.is_some() };
    let format = Box::new(OpenAiFormat::new(head, echo, count));
    respond(pieces, count, format, request.parameters.stream, charge).await
}

/// Starts a request for each choice of each prompt. Those of one prompt share its bytes.
fn begin(
    state: &State,
    config: &ModelConfig,
    request: &CompletionRequest,
    is_chat: bool,
    prompts: Vec<String>,
    forwarded: &[(String, String)],
) -> Result<Choices, ApiError> {
    let max_tokens = request.parameters.max_tokens.unwrap_or(CHAT_TOKENS).max(1);
    let mut common = tensors(config, request, max_tokens, state.server.limits())?;
    // The template of a chat has spelled them out.
    if let Some(adds) = request.parameters.add_special_tokens.or(is_chat.then_some(false)) {
        common.parameters.insert("add_special_tokens".to_owned(), Parameter::Bool(adds));
    }
    header_parameters::forward(&mut common, forwarded);
    let input = |names: &[&str]| common.inputs.iter().position(|input| names.contains(&&*input.name));
    let (prompt_at, seed_at) = (input(&PROMPT), input(&SEED));
    let mut choices = SelectAll::new();
    let mut indexes = 0..;
    for prompt in prompts {
        let data = Tensor::from_byte_strings("", &[], &[&prompt]).data;
        drop(prompt);
        for index in indexes.by_ref().take(request.parameters.n) {
            let mut of_choice = common.clone();
            if let Some(at) = prompt_at {
                of_choice.inputs[at].data = data.clone();
            }
            if let Some(at) = seed_at {
                of_choice.inputs[at].data = seed(config, &request.parameters, &common.inputs[at].name, index)?;
            }
            let responses = state.server.infer(of_choice)?;
            choices.push(pieces(index, responses, &request.parameters, max_tokens));
        }
    }
    Ok(choices)
}

/// The seed of a choice as raw data. Each choice is drawn with its own; a seed makes all of them repeatable.
fn seed(config: &ModelConfig, parameters: &Parameters, name: &str, choice: usize) -> Result<Bytes, ApiError> {
    let seed = parameters.seed_of(choice);
    let input = config.input.iter().find(|input| input.name == name).expect("the request was made for this model");
    let text = match input.data_type() {
        ConfigType::TypeInt64 => seed.cast_signed().to_string(),
        _ => seed.to_string(),
    };
    let tensor = generate::tensor(config, input, &json::Value::Number(&text));
    let wrong = |error: InferError| ApiError::of_field("seed", format!("`seed` cannot be {text}: {}", error.message));
    Ok(tensor.map_err(wrong)?.data)
}

/// The request without prompt and seed: the values that the model has inputs for, by its names.
fn tensors(
    config: &ModelConfig,
    request: &CompletionRequest,
    max_tokens: u32,
    limits: &Limits,
) -> Result<InferRequest, ApiError> {
    let parameters = &request.parameters;
    let mut body = serde_json::Map::new();
    let mut offer = |names: &[&str], value: Value| {
        let name = names.iter().find(|name| config.input.iter().any(|input| input.name == **name));
        name.map(|name| body.insert((*name).to_owned(), value)).is_some()
    };
    offer(&PROMPT, json!(""));
    offer(&LENGTH, json!(max_tokens));
    offer(&["stream", "streaming"], json!(config.is_decoupled()));
    let temperature = parameters.temperature.unwrap_or(1.0);
    // Temperature 0 is greedy, which other servers spell as one candidate.
    let (temperature, top_k) = if temperature == 0.0 { (1.0, Some(1)) } else { (temperature, parameters.top_k) };
    offer(&["temperature", "sampling_param_temperature"], json!(temperature));
    // Without a number of candidates some models are greedy; 0 takes all of them.
    offer(&["top_k", "runtime_top_k", "sampling_param_top_k"], json!(top_k.unwrap_or(0)));
    offer(&["top_p", "runtime_top_p", "sampling_param_top_p"], json!(parameters.top_p.unwrap_or(1.0)));
    for (field, names, value) in required_inputs(parameters) {
        if !offer(names, value) {
            return Err(no_input(field, &request.model));
        }
    }
    let mut optional = |names: &[&str], value: Option<Value>| value.is_some_and(|value| offer(names, value));
    optional(&SEED, Some(json!(0)));
    optional(&["return_num_input_tokens"], Some(json!(true)));
    optional(&["return_num_output_tokens"], Some(json!(true)));
    optional(&["exclude_input_in_output"], Some(json!(true)));
    if !optional(&["ignore_eos"], Some(json!(parameters.ignore_eos))) && parameters.ignore_eos {
        optional(&["end_id"], Some(json!(-1)));
    }
    if !parameters.stop.is_empty() {
        optional(&["stop_words"], Some(json!(parameters.stop)));
    }
    let mut tensors = generate::read(&serde_json::to_vec(&body).expect("a map of values"), config, limits, &|| false)?;
    tensors.model_name = Name::from(&request.model);
    Ok(tensors)
}

fn no_input(field: &'static str, model: &str) -> ApiError {
    ApiError::of_field(field, format!("`{field}` is not supported by model `{model}`, which has no input for it."))
}

/// Settings that change the answer and are not at their defaults: the field, the inputs that models have for it, its value.
fn required_inputs(parameters: &Parameters) -> Vec<(&'static str, &'static [&'static str], Value)> {
    let other_than = |value: Option<f32>, default: f32| value.filter(|it| *it != default).map(|it| json!(it));
    let (guide_type, guide) = guide(parameters).unzip();
    let constrained_by = parameters.constraint.as_ref().map_or("", |(field, _)| *field);
    let inputs: [(_, &[&str], _); 10] = [
        (
            "presence_penalty",
            &["presence_penalty", "sampling_param_presence_penalty"],
            other_than(parameters.presence_penalty, 0.0),
        ),
        (
            "frequency_penalty",
            &["frequency_penalty", "sampling_param_frequency_penalty"],
            other_than(parameters.frequency_penalty, 0.0),
        ),
        ("repetition_penalty", &["repetition_penalty"], other_than(parameters.repetition_penalty, 1.0)),
        ("min_p", &["min_p", "runtime_min_p", "sampling_param_min_p"], other_than(parameters.min_p, 0.0)),
        ("min_tokens", &["min_tokens", "min_length"], parameters.min_tokens.filter(|it| *it > 0).map(|it| json!(it))),
        ("logprobs", &["return_log_probs"], parameters.logprobs.map(|_| json!(true))),
        ("bad_words", &["bad_words"], (!parameters.bad_words.is_empty()).then(|| json!(parameters.bad_words))),
        ("skip_special_tokens", &["skip_special_tokens"], (!parameters.skip_special_tokens).then(|| json!(false))),
        (constrained_by, &["guided_decoding_guide_type"], guide_type),
        (constrained_by, &["guided_decoding_guide"], guide),
    ];
    inputs.into_iter().filter_map(|(field, names, value)| Some((field, names, value?))).collect()
}

/// The constraint of a request as the values of Triton's inputs `guided_decoding_guide_type` and `guided_decoding_guide`.
fn guide(parameters: &Parameters) -> Option<(Value, Value)> {
    let text_of = |value: &Value| value.as_str().map_or_else(|| value.to_string(), str::to_owned);
    let (kind, guide) = match &parameters.constraint.as_ref()?.1 {
        ConstraintSpec::JsonObject => ("json_schema", r#"{"type": "object"}"#.to_owned()),
        ConstraintSpec::JsonSchema(schema) => ("json_schema", text_of(schema)),
        ConstraintSpec::Regex(pattern) => ("regex", pattern.clone()),
        ConstraintSpec::Choice(texts) => {
            ("regex", texts.iter().map(|text| literal(text)).collect::<Vec<_>>().join("|"))
        }
        ConstraintSpec::Grammar(grammar) | ConstraintSpec::Lark(grammar) => ("ebnf_grammar", grammar.clone()),
        ConstraintSpec::StructuralTag(tag) => ("structural_tag", text_of(tag)),
    };
    Some((json!(kind), json!(guide)))
}

/// A regular expression that matches this text only.
fn literal(text: &str) -> String {
    let mut pattern = String::with_capacity(text.len());
    for character in text.chars() {
        // Other punctuation means something else behind a backslash, or nothing.
        if r"\.+*?()|[]{}^$#&-~".contains(character) {
            pattern.push('\\');
        }
        pattern.push(character);
    }
    pattern
}

/// The first setting that changes the answer and that no model of tensors has an input for.
fn unsupported(request: &CompletionRequest) -> Option<&'static str> {
    let parameters = &request.parameters;
    let likeliest = if request.is_chat { ("top_logprobs", 1) } else { ("logprobs", 2) };
    let set = [
        // The tools are shown to the model, but its calls would be text.
        ("tools", !request.tools.offered().is_empty()),
        ("logit_bias", !parameters.logit_bias.is_empty()),
        ("allowed_token_ids", !parameters.allowed_token_ids.is_empty()),
        ("stop_token_ids", !parameters.stop_token_ids.is_empty()),
        ("include_stop_str_in_output", parameters.includes_stop),
        ("prompt_logprobs", parameters.prompt_logprobs.is_some()),
        ("echo", request.echo && parameters.logprobs.is_some()),
        (likeliest.0, parameters.logprobs.is_some_and(|count| count >= likeliest.1)),
        ("truncate_prompt_tokens", parameters.truncate_prompt_tokens.is_some()),
        ("return_token_ids", parameters.return_token_ids),
        ("use_beam_search", parameters.beams.is_some()),
        ("thinking_token_budget", parameters.thinking_budget.is_some()),
        ("include_reasoning", !request.includes_reasoning),
        ("cache_salt", parameters.cache_salt.is_some()),
        ("priority", parameters.priority != 0),
    ];
    set.into_iter().find(|(_, is_set)| *is_set).map(|(field, _)| field)
}

/// A choice that is being generated.
struct Choice {
    index: usize,
    responses: ResponseStream,
    search: StopText,
    stop: Vec<String>,
    max_tokens: u64,
    lists_logprobs: bool,
    /// Responses with text, for models that do not count.
    num_responses: u64,
    /// Numbers of tokens of prompt and answer in the model's outputs.
    counts: (u64, u64),
    has_ended: bool,
}

/// The pieces of one choice. Dropping the stream cancels the request.
fn pieces(
    index: usize,
    responses: ResponseStream,
    parameters: &Parameters,
    max_tokens: u32,
) -> BoxStream<'static, Result<Piece, InferError>> {
    let choice = Choice {
        index,
        responses,
        search: StopText::new(parameters.stop.iter().cloned()),
        stop: parameters.stop.clone(),
        max_tokens: u64::from(max_tokens),
        lists_logprobs: parameters.logprobs.is_some(),
        num_responses: 0,
        counts: (0, 0),
        has_ended: false,
    };
    unfold(choice, |mut choice| async move { choice.next().await.map(|piece| (piece, choice)) }).boxed()
}

impl Choice {
    /// The next piece with text or an end.
    async fn next(&mut self) -> Option<Result<Piece, InferError>> {
        while !self.has_ended {
            let piece = match self.responses.next_response().await {
                Some(Ok(response)) => self.piece(&response),
                Some(Err(error)) => {
                    self.has_ended = true;
                    return Some(Err(error));
                }
                None => self.finished(String::new(), Vec::new()),
            };
            if piece.finish.is_some() || !piece.text.is_empty() {
                return Some(Ok(piece));
            }
        }
        None
    }

    fn piece(&mut self, response: &InferResponse) -> Piece {
        let (new_text, tokens) = self.content(response);
        let count = |name: &str| {
            let output = response.outputs.iter().find(|output| output.name == name)?.to_i32()?;
            u64::try_from(output.into_iter().map(i64::from).sum::<i64>()).ok()
        };
        let (input, output) = (count("num_input_tokens"), count("num_output_tokens"));
        self.counts = (input.unwrap_or(self.counts.0), output.unwrap_or(0).max(self.counts.1));
        self.num_responses += u64::from(!new_text.is_empty());
        let mut text = String::new();
        if let Some(found) = self.search.push(&new_text, &mut text) {
            self.has_ended = true;
            let finish = Some(Finish::Stop(Some(StoppedAt::Text(self.stop[found].clone()))));
            return Piece { text, tokens, finish, ..self.counted() };
        }
        match response.is_final {
            true => self.finished(text, tokens),
            false => Piece { text, tokens, ..self.counted() },
        }
    }

    fn finished(&mut self, mut text: String, tokens: Vec<TokenLogprob>) -> Piece {
        self.has_ended = true;
        self.search.finish(&mut text);
        let counted = self.counted();
        let finish = if counted.usage.output_tokens >= self.max_tokens { Finish::Length } else { Finish::Stop(None) };
        Piece { text, tokens, finish: Some(finish), ..counted }
    }

    fn counted(&self) -> Piece {
        let generation = self.responses.generation();
        let (prompt, output) = generation.map_or(self.counts, |it| (it.prompt_tokens, it.output_tokens));
        let usage = Usage {
            prompt_tokens: prompt.max(self.counts.0),
            output_tokens: if output > 0 { output } else { self.num_responses },
            ..Usage::default()
        };
        Piece { usage, ..Piece::empty(self.index) }
    }

    /// The text of a response, and its log-probability where the request has them. The tokens of one response share their text,
    /// so they share one entry.
    fn content(&self, response: &InferResponse) -> (String, Vec<TokenLogprob>) {
        let output = |name: &str| response.outputs.iter().find(|output| output.name == name);
        let texts =
            ANSWER.iter().find_map(|name| output(name)).and_then(|output| output.to_byte_strings()).unwrap_or_default();
        let text: String = texts.iter().map(|text| String::from_utf8_lossy(text)).collect();
        let logprobs = output("output_log_probs").filter(|_| self.lists_logprobs);
        let logprobs = logprobs.and_then(|output| output.to_f32()).unwrap_or_default();
        if logprobs.is_empty() {
            return (text, Vec::new());
        }
        let token = TokenLogprob {
            spelling: text.clone().into(),
            id: 0,
            logprob: Some(logprobs.iter().sum()),
            top: Vec::new(),
        };
        (text, vec![token])
    }
}

#[cfg(test)]
mod tests;
