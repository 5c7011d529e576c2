//! `/v1/completions` and `/v1/chat/completions`.

use std::sync::Arc;
use std::time::{Duration, Instant};

use futures::stream::SelectAll;
use generation::{Generator, SamplingDefaults};
use http::HeaderMap;
use hyper::body::Incoming;
use serving::{GenerateCall, Limit, Limits, Name};

use super::choices::{CallOptions, Choices, pieces};
use super::error::ApiError;
use super::fields::{Fields, UnknownFields, check, tree_bytes};
use super::parameters::{COMPLETION_TOKENS, Parameters};
use super::prompt::{Conversation, Prompt, encode_all, read_prompts};
use super::reply::{Echo, Head, OpenAiFormat};
use super::respond::{Pieces, respond};
use super::turn::{PlainParser, TurnOptions, divided};
use super::{models, tensor_model};
use crate::aside::aside_in_turn;
use crate::budget::Charge;
use crate::kserve_http::{Held, Reply, read_body};
use crate::state::State;

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
        let (input, mut echo) = (read_input(&mut fields, is_chat, limits)?, false);
        if is_chat {
            parameters.max_tokens = Parameters::token_count(&mut fields, "max_completion_tokens")?.or(max_tokens);
            parameters.logprobs = chat_logprobs(&mut fields)?;
        } else {
            parameters.max_tokens = Some(max_tokens.unwrap_or(COMPLETION_TOKENS));
            parameters.logprobs = Parameters::num_logprobs(&mut fields, "logprobs")?;
            echo = fields.flag("echo")?.unwrap_or(false);
            fields.refuse_unless("suffix", |suffix| suffix == "", "models continue a prompt, they do not fill gaps")?;
        }
        // They are for the provider's accounting and change no answer.
        fields.ignore(&["user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key"]);
        fields.finish(unknown)?;
        Ok(Self { model, input, parameters, echo })
    }

    fn is_chat(&self) -> bool {
        matches!(self.input, Input::Conversation(_))
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
    let Held { bytes: body, charge } = read_body(state, headers, body).await?;
    let limits = state.server.limits();
    let read = || {
        charge.add(tree_bytes(&body)?)?;
        CompletionRequest::read(&body, is_chat, limits, state.config.unknown_fields)
    };
    let request = aside_in_turn(body.len(), read).await?;
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

async fn generate(
    state: &Arc<State>,
    mut request: CompletionRequest,
    generator: &Generator,
    charge: Charge,
) -> Result<Reply, ApiError> {
    let is_chat = request.is_chat();
    let prompts = take_prompts(state, &mut request).await?;
    charge_prompts(state.server.limits(), &charge, &request, &prompts)?;
    if request.echo && request.parameters.logprobs.is_some() {
        request.parameters.prompt_logprobs = request.parameters.prompt_logprobs.or(request.parameters.logprobs);
    }
    let texts: Vec<Prompt> = if request.echo { prompts.clone() } else { Vec::new() };
    let started = Instant::now();
    // A template spells the special tokens out.
    let adds_special = generator.adds_special_tokens && !is_chat;
    let prompts = encode_all(prompts, generator, adds_special, &request.parameters).await?;
    let encode_time = started.elapsed();
    let begin_bytes = prompts.len() * request.parameters.n * REQUEST_BYTES;
    let begin = || begin(state, &request, generator, &prompts, encode_time);
    let choices = aside_in_turn(begin_bytes, begin).await?;
    let count = prompts.len() * request.parameters.n;
    let head = Head::new(&request.parameters, &request.model, is_chat, prompts, Some(generator.tokenizer.clone()));
    let echoes = texts.into_iter().map(|prompt| text_of(prompt, generator)).collect();
    answer(&request, head, choices, echoes, count, charge).await
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
                lists_tokens: parameters.logprobs.is_some() || parameters.return_token_ids,
                drops_output: parameters.max_tokens == Some(0),
                tokenizer: generator.tokenizer.clone(),
            };
            choices.push(pieces(events, num_sequences, options));
        }
    }
    Ok(choices)
}

/// Sends the answer in OpenAI's form. `echoes` has the texts of prompts that are echoed.
pub(super) async fn answer(
    request: &CompletionRequest,
    head: Head,
    choices: Choices,
    echoes: Vec<String>,
    count: usize,
    charge: Charge,
) -> Result<Reply, ApiError> {
    let pieces: Pieces = match head.is_chat {
        true => {
            let options = TurnOptions { includes_reasoning: true, ends_with_tool_calls: true };
            Box::pin(divided(choices, count, options, || Box::new(PlainParser)))
        }
        false => Box::pin(choices),
    };
    let echo = Echo { texts: echoes, lists_tokens: request.parameters.logprobs.is_some() };
    let format = Box::new(OpenAiFormat::new(head, echo, count));
    respond(pieces, count, format, request.parameters.stream, charge).await
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn read(body: &str, is_chat: bool) -> Result<CompletionRequest, String> {
        let read = CompletionRequest::read(body.as_bytes(), is_chat, &Limits::default(), UnknownFields::Refuse);
        read.map_err(|error| error.json()["error"]["message"].as_str().unwrap().to_owned())
    }

    fn with(fields: &str) -> Result<CompletionRequest, String> {
        read(&format!(r#"{{"model": "m", "prompt": "a", {fields}}}"#), false)
    }

    #[test]
    fn numbers_out_of_range_are_refused_with_their_field() {
        let whole = ["n", "max_tokens", "top_k", "min_tokens", "logprobs", "best_of", "prompt_logprobs"];
        let real = ["temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty"];
        for field in whole.into_iter().chain(real).chain(["seed"]) {
            for value in ["-9223372036854775808", "2147483648", "1e300", "-1", "18446744073709551616", "\"1\"", "[1]"] {
                let is_fine = match field {
                    "seed" => ["-9223372036854775808", "2147483648", "-1"].contains(&value),
                    "presence_penalty" | "frequency_penalty" | "top_k" => value == "-1",
                    _ => false,
                };
                match with(&format!(r#""{field}": {value}"#)) {
                    Ok(_) => assert!(is_fine, "{field}: {value}"),
                    Err(error) => {
                        assert!(!is_fine && error.contains(&format!("`{field}`")), "{field}: {value}: {error}")
                    }
                }
            }
            for value in ["NaN", "Infinity", "1e999"] {
                let error = with(&format!(r#""{field}": {value}"#)).unwrap_err();
                assert!(error.contains("not a JSON object"), "{field}: {value}");
            }
        }
    }

    #[test]
    fn lists_and_names_have_limits() {
        let messages = vec![r#"{"role": "user", "content": ""}"#; 16385].join(",");
        let error = read(&format!(r#"{{"model": "m", "messages": [{messages}]}}"#), true).unwrap_err();
        assert!(error.contains("16385 messages"), "{error}");
        let error = read(&format!(r#"{{"model": "{}", "prompt": "a"}}"#, "m".repeat(5000)), false).unwrap_err();
        assert!(error.contains("5000 bytes of name"), "{error}");
        let stop = "s".repeat(5000);
        let error = with(&format!(r#""stop": ["{stop}"]"#)).unwrap_err();
        assert!(error.contains("5000 bytes of one word"), "{error}");
        let ids = vec!["7"; 65].join(",");
        assert!(with(&format!(r#""stop_token_ids": [{ids}]"#)).unwrap_err().contains("65 token ids"));
        let bias: Vec<String> = (0..1025).map(|id| format!(r#""{id}": 1"#)).collect();
        assert!(with(&format!(r#""logit_bias": {{{}}}"#, bias.join(","))).unwrap_err().contains("1025 words"));
    }

    #[test]
    fn prompts_are_texts_or_token_ids() {
        let prompts = |json: &str| match read(&format!(r#"{{"model": "m", "prompt": {json}}}"#), false).unwrap().input {
            Input::Prompts(prompts) => prompts,
            other => panic!("{other:?}"),
        };
        let text = |text: &str| Prompt::Text(text.to_owned());
        assert_eq!(prompts(r#""a""#), [text("a")]);
        assert_eq!(prompts(r#"["a", "b"]"#), [text("a"), text("b")]);
        assert_eq!(prompts("[1, 2]"), [Prompt::Tokens(vec![1, 2])]);
        assert_eq!(prompts("[[1], [2, 3]]"), [Prompt::Tokens(vec![1]), Prompt::Tokens(vec![2, 3])]);
        for wrong in ["null", "[]", "5", "[1, \"a\"]", "[-1]", "[4294967296]", "[[1.5]]", "{}"] {
            let error = read(&format!(r#"{{"model": "m", "prompt": {wrong}}}"#), false).unwrap_err();
            assert!(error.contains("`prompt`"), "{wrong}: {error}");
        }
    }

    #[test]
    fn content_in_parts_becomes_text() {
        let body = r#"{"model": "m", "messages": [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}]}"#;
        let messages = |body: &str| match read(body, true).unwrap().input {
            Input::Conversation(conversation) => conversation.messages,
            other => panic!("{other:?}"),
        };
        assert_eq!(messages(body)[0]["content"], "ab");
        assert_eq!(messages(r#"{"model": "m", "messages": "ab"}"#), [json!({"role": "user", "content": "ab"})]);
        let image = body.replace(r#"{"type": "text", "text": "b"}"#, r#"{"type": "image_url", "image_url": {}}"#);
        assert!(read(&image, true).unwrap_err().contains("models read text only"));
    }

    #[test]
    fn invalid_fields_are_named() {
        for (fields, words) in [
            (r#""temperature": 3"#, "`temperature` is 3, expected a number from 0 to 2"),
            (r#""n": 0"#, "`n` is 0"),
            (r#""stop": 5"#, "`stop` must be text"),
            (r#""logprobs": 21"#, "`logprobs` is 21"),
            (r#""logit_bias": {"x": 1}"#, "`logit_bias` has the key `x`"),
            (r#""logit_bias": {"5": 101}"#, "`logit_bias.5` is 101"),
            (r#""best_of": 3"#, "`best_of` is not supported"),
            (r#""stream": "yes""#, "`stream` must be true or false"),
            (r#""temprature": 1"#, "`temprature` is not known"),
            (r#""guided_regexp": "a""#, "`guided_regexp` is not known"),
            (r#""stream_options": {"include_usage": true}"#, "`stream_options` is allowed only with"),
            (r#""stream": true, "stream_options": {"usage": true}"#, "`stream_options.usage` is not known"),
            (r#""stream": true, "prompt_logprobs": 1"#, "`prompt_logprobs` is not available"),
            (r#""use_beam_search": true"#, "needs `n` of at least 2"),
            (r#""length_penalty": 2"#, "`length_penalty` needs `use_beam_search"),
            (r#""truncate_prompt_tokens": 0"#, "`truncate_prompt_tokens` is 0"),
            (r#""suffix": "x""#, "`suffix` is not supported"),
        ] {
            let error = with(fields).unwrap_err();
            assert!(error.contains(words), "{fields}: {error}");
        }
        assert!(read(r#"{"prompt": "a"}"#, false).unwrap_err().contains("`model` is missing"));
        assert!(read("[]", false).unwrap_err().contains("not a JSON object"));
        let chat = r#"{"model": "m", "messages": "a", "top_logprobs": 2}"#;
        assert!(read(chat, true).unwrap_err().contains("needs `logprobs: true`"));
    }
}
