//! Anthropic's Messages API: `/v1/messages` and `/v1/messages/count_tokens`.

use std::sync::Arc;

use generation::ConstraintSpec;
use http::{HeaderMap, StatusCode};
use hyper::body::Incoming;
use serde_json::{Map, Value, json};
use serving::{Limit, Limits};

use super::anthropic_reply::AnthropicFormat;
use super::complete::{self, ChatRun};
use super::conversation::{set_effort, set_thinking};
use super::error::ApiError;
use super::fields::{Fields, check, tree_bytes};
use super::guide;
use super::parameter_fields::token_count;
use super::parameters::{MAX_STOPS, Parameters, ThinkingBudget};
use super::request::{CompletionRequest, Input};
use super::respond::AnswerFormat;
use super::tools::Tools;
use crate::api::status::shown;
use crate::api::triton::http::reply::{JSON, Reply, reply};
use crate::api::triton::http::request_body::{ChargedBody, read_body};
use crate::chat::{Conversation, UnknownFields};
use crate::state::State;
use crate::transport::large_work::block_in_place_in_turn;

/// Anthropic's smallest budget of thinking tokens.
const MIN_THINKING_TOKENS: i64 = 1024;

/// What a request is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Purpose {
    Generate,
    CountTokens,
}

/// `POST /v1/messages`.
pub(super) async fn messages(state: &Arc<State>, headers: &HeaderMap, body: Incoming) -> Result<Reply, ApiError> {
    let ChargedBody { bytes: body, charge } = read_body(state, headers, body).await?;
    let read = || {
        charge.add(tree_bytes(&body)?)?;
        read(&body, state.server.limits(), state.config.unknown_fields, Purpose::Generate)
    };
    let request = block_in_place_in_turn(body.len(), read).await?;
    drop(body);
    let model = request.model.clone();
    let format = move |run: ChatRun| -> Box<dyn AnswerFormat> {
        Box::new(AnthropicFormat::new(&run.unique, model, run.prompt_tokens))
    };
    complete::chat(state, request, charge, format).await
}

/// `POST /v1/messages/count_tokens`.
pub(super) async fn count_tokens(state: &Arc<State>, headers: &HeaderMap, body: Incoming) -> Result<Reply, ApiError> {
    let ChargedBody { bytes: body, charge } = read_body(state, headers, body).await?;
    let read = || {
        charge.add(tree_bytes(&body)?)?;
        read(&body, state.server.limits(), state.config.unknown_fields, Purpose::CountTokens)
    };
    let request = block_in_place_in_turn(body.len(), read).await?;
    drop(body);
    let prompt = complete::encode_chat(state, request, &charge).await?;
    Ok(reply(StatusCode::OK, JSON, json!({"input_tokens": prompt.len()}).to_string().into_bytes()))
}

fn read(body: &[u8], limits: &Limits, unknown: UnknownFields, purpose: Purpose) -> Result<CompletionRequest, ApiError> {
    let mut fields = Fields::read(body)?;
    let model = fields.text("model")?.ok_or_else(|| ApiError::of_field("model", "`model` is missing."))?;
    check(limits, Limit::NameBytes, "model", model.len())?;
    let max_tokens = token_count(&mut fields, "max_tokens")?;
    if purpose == Purpose::Generate && max_tokens.is_none_or(|count| count == 0) {
        return Err(ApiError::of_field(
            "max_tokens",
            "`max_tokens` is missing or 0: it is the number of tokens to generate.",
        ));
    }
    let mut parameters = parameters(&mut fields, limits)?;
    parameters.max_tokens = max_tokens;
    let mut tools = Tools::read_anthropic(&mut fields)?;
    let mut conversation = Conversation {
        messages: read_messages(&mut fields, limits)?,
        tools: tools.take_for_template(),
        variables: fields.object("chat_template_kwargs")?.unwrap_or_default(),
        ..Conversation::default()
    };
    let thinking = thinking(&mut fields)?;
    parameters.thinking_budget = thinking.budget;
    set_thinking(&mut conversation.variables, thinking.is_on);
    // A last message of the assistant is the start of the answer.
    let is_prefilled = conversation.messages.last().is_some_and(|message| message["role"] == "assistant");
    conversation.continue_final_message = is_prefilled;
    conversation.add_generation_prompt = !is_prefilled;
    let spec = output_config(&mut fields, &mut conversation)?;
    parameters.for_one_turn("output_config", spec)?;
    fields.ignore(&["metadata", "service_tier", "anthropic_version", "cache_control"]);
    fields.finish(unknown)?;
    Ok(CompletionRequest {
        model,
        input: Input::Conversation(conversation),
        parameters,
        echo: false,
        tools,
        includes_reasoning: thinking.is_shown,
        ends_named_call_with_stop: false,
        is_chat: true,
    })
}

/// The sampling fields of Anthropic's API under the names of OpenAI's.
fn parameters(fields: &mut Fields, limits: &Limits) -> Result<Parameters, ApiError> {
    let has_sequences = fields.peek("stop_sequences").is_some();
    if has_sequences && fields.peek("stop").is_some() {
        return Err(ApiError::of_field("stop", "`stop` and `stop_sequences` are the same; send one of them."));
    }
    let sequences = fields.texts("stop_sequences", MAX_STOPS, limits)?;
    let mut parameters = Parameters::read(fields, limits)?;
    if has_sequences {
        parameters.stop = sequences;
    }
    Ok(parameters)
}

/// `output_config`: the form of the answer, and the effort. The form was named `output_format` first.
fn output_config(fields: &mut Fields, conversation: &mut Conversation) -> Result<Option<ConstraintSpec>, ApiError> {
    let early = fields.object("output_format")?;
    let mut config = fields.object("output_config")?.unwrap_or_default();
    let format = match config.remove("format") {
        Some(Value::Object(format)) => Some(format),
        None | Some(Value::Null) => early,
        Some(_) => return Err(ApiError::of_field("output_config", "`output_config.format` must be an object.")),
    };
    if let Some(effort) = config.remove("effort") {
        let effort = effort.as_str().unwrap_or_default();
        set_effort(&mut conversation.variables, effort, "output_config")?;
    }
    if let Some(name) = config.keys().next() {
        let words = format!("`output_config.{}` is not supported.", shown(name));
        return Err(ApiError::of_field("output_config", words));
    }
    format.map_or(Ok(None), |format| guide::read_format("output_config.format", format))
}

/// `thinking`: whether the model reasons before its answer.
#[derive(Default)]
struct Thinking {
    is_on: bool,
    /// Whether the answer has the reasoning.
    is_shown: bool,
    budget: Option<ThinkingBudget>,
}

fn thinking(fields: &mut Fields) -> Result<Thinking, ApiError> {
    let wrong = |words: String| Err(ApiError::of_field("thinking", words));
    let Some(mut given) = fields.object("thinking")? else { return Ok(Thinking::default()) };
    given.retain(|_, value| !value.is_null());
    let (kind, budget) = (given.remove("type"), given.remove("budget_tokens"));
    let is_shown = match given.remove("display").as_ref().map(|display| display.as_str().unwrap_or_default()) {
        None | Some("summarized") => true,
        Some("omitted") => false,
        Some(_) => return wrong("`thinking.display` must be summarized or omitted.".to_owned()),
    };
    if let Some(name) = given.keys().next() {
        return wrong(format!("`thinking.{}` is not known.", shown(name)));
    }
    match (kind.as_ref().and_then(Value::as_str), budget.as_ref().map(Value::as_i64)) {
        (Some("disabled"), _) => Ok(Thinking::default()),
        (Some("adaptive"), None) => Ok(Thinking { is_on: true, is_shown, budget: None }),
        (Some("enabled"), Some(Some(tokens @ MIN_THINKING_TOKENS..))) => {
            let budget = Some(ThinkingBudget { tokens: tokens as usize, is_demanded: false });
            Ok(Thinking { is_on: true, is_shown, budget })
        }
        (Some("enabled"), _) => wrong(format!("`thinking.budget_tokens` must be at least {MIN_THINKING_TOKENS}.")),
        (Some("adaptive"), _) => wrong("`thinking.budget_tokens` needs the type enabled.".to_owned()),
        _ => wrong("`thinking.type` must be enabled, disabled or adaptive.".to_owned()),
    }
}

/// `system` and `messages` in the form of OpenAI's chats.
fn read_messages(fields: &mut Fields, limits: &Limits) -> Result<Vec<Value>, ApiError> {
    let mut messages = Vec::new();
    if let Some(system) = fields.take("system") {
        let text = text_of(&system)
            .ok_or_else(|| ApiError::of_field("system", "`system` must be text or a list of text blocks."))?;
        messages.push(json!({"role": "system", "content": text}));
    }
    let given = fields.list("messages")?.filter(|messages| !messages.is_empty());
    let given =
        given.ok_or_else(|| ApiError::of_field("messages", "`messages` must be a list of at least one message."))?;
    check(limits, Limit::Messages, "messages", given.len())?;
    for (at, message) in given.into_iter().enumerate() {
        match message["role"].as_str() {
            Some("user") => user_messages(at, &message["content"], &mut messages)?,
            Some("assistant") => messages.push(assistant_message(at, &message["content"])?),
            Some("system") => {
                let text = text_of(&message["content"]).ok_or_else(|| wrong_block(at, "none"))?;
                messages.push(json!({"role": "system", "content": text}));
            }
            _ => {
                let words = format!("`messages[{at}].role` must be user or assistant.");
                return Err(ApiError::of_field("messages", words));
            }
        }
    }
    Ok(messages)
}

/// The text of a string, or of a list of text blocks.
fn text_of(content: &Value) -> Option<String> {
    match content {
        Value::String(text) => Some(text.clone()),
        Value::Array(blocks) => {
            let text = |block: &Value| (block["type"] == "text").then(|| block["text"].as_str().map(str::to_owned))?;
            blocks.iter().map(text).collect::<Option<Vec<_>>>().map(|texts| texts.join("\n"))
        }
        _ => None,
    }
}

fn wrong_block(at: usize, kind: &str) -> ApiError {
    let words = format!(
        "`messages[{at}].content` has a block of type `{}`, which is not supported here; models read text only.",
        shown(kind)
    );
    ApiError::of_field("messages", words)
}

/// A user's message: results of tools are messages of their own, before the user's text.
fn user_messages(at: usize, content: &Value, messages: &mut Vec<Value>) -> Result<(), ApiError> {
    let Value::Array(blocks) = content else {
        let text = content.as_str().ok_or_else(|| wrong_block(at, "none"))?;
        messages.push(json!({"role": "user", "content": text}));
        return Ok(());
    };
    let mut texts: Vec<&str> = Vec::new();
    for block in blocks {
        match (block["type"].as_str().unwrap_or("none"), block["text"].as_str()) {
            ("text", Some(text)) => texts.push(text),
            ("tool_result", _) => {
                let result = match &block["content"] {
                    Value::Null => String::new(),
                    content => text_of(content).ok_or_else(|| wrong_block(at, "tool_result with more than text"))?,
                };
                messages.push(json!({"role": "tool", "tool_call_id": block["tool_use_id"], "content": result}));
            }
            (kind, _) => return Err(wrong_block(at, kind)),
        }
    }
    if !texts.is_empty() {
        messages.push(json!({"role": "user", "content": texts.join("\n")}));
    }
    Ok(())
}

/// An assistant's message with its reasoning and calls.
fn assistant_message(at: usize, content: &Value) -> Result<Value, ApiError> {
    let mut message = Map::new();
    message.insert("role".to_owned(), json!("assistant"));
    let Value::Array(blocks) = content else {
        let text = content.as_str().ok_or_else(|| wrong_block(at, "none"))?;
        message.insert("content".to_owned(), json!(text));
        return Ok(message.into());
    };
    let (mut texts, mut reasoning, mut calls) = (Vec::new(), Vec::new(), Vec::new());
    for block in blocks {
        match block["type"].as_str().unwrap_or("none") {
            "text" => texts.push(block["text"].as_str().ok_or_else(|| wrong_block(at, "text"))?),
            "thinking" => reasoning.push(block["thinking"].as_str().unwrap_or_default()),
            // Only the service that wrote it can read it.
            "redacted_thinking" => {}
            "tool_use" => {
                let function = json!({"name": block["name"], "arguments": block["input"]});
                calls.push(json!({"id": block["id"], "type": "function", "function": function}));
            }
            kind => return Err(wrong_block(at, kind)),
        }
    }
    message.insert("content".to_owned(), json!(texts.join("\n")));
    if !reasoning.is_empty() {
        message.insert("reasoning_content".to_owned(), json!(reasoning.join("\n")));
    }
    if !calls.is_empty() {
        message.insert("tool_calls".to_owned(), calls.into());
    }
    Ok(message.into())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read_json(body: Value) -> Result<CompletionRequest, String> {
        let body = body.to_string();
        read(body.as_bytes(), &Limits::default(), UnknownFields::Refuse, Purpose::Generate)
            .map_err(|error| error.message)
    }

    fn conversation(body: Value) -> Conversation {
        match read_json(body).unwrap().input {
            Input::Conversation(conversation) => conversation,
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn blocks_become_messages_of_a_chat() {
        let found = conversation(
            json!({"model": "m", "max_tokens": 5, "system": [{"type": "text", "text": "Be brief."}],
            "messages": [
                {"role": "user", "content": "Weather?"},
                {"role": "assistant", "content": [{"type": "thinking", "thinking": "Hm.", "signature": ""}, {"type": "text", "text": "I look."},
                    {"type": "tool_use", "id": "toolu_1", "name": "weather", "input": {"city": "Bern"}}]},
                {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "toolu_1", "content": [{"type": "text", "text": "sun"}]},
                    {"type": "text", "text": "And?"}]},
            ]}),
        );
        let call = json!({"id": "toolu_1", "type": "function", "function": {"name": "weather", "arguments": {"city": "Bern"}}});
        assert_eq!(
            json!(found.messages),
            json!([
                {"role": "system", "content": "Be brief."}, {"role": "user", "content": "Weather?"},
                {"role": "assistant", "content": "I look.", "reasoning_content": "Hm.", "tool_calls": [call]},
                {"role": "tool", "tool_call_id": "toolu_1", "content": "sun"}, {"role": "user", "content": "And?"},
            ])
        );
        assert!(found.add_generation_prompt);
        let prefilled = json!({"model": "m", "max_tokens": 5, "messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]});
        let found = conversation(prefilled);
        assert!(found.continue_final_message && !found.add_generation_prompt);
        assert_eq!(found.variables["enable_thinking"], false);
    }

    #[test]
    fn invalid_requests_are_named() {
        let base = json!({"model": "m", "max_tokens": 5, "messages": [{"role": "user", "content": "a"}]});
        for (field, value, words) in [
            ("max_tokens", Value::Null, "`max_tokens` is missing"),
            ("messages", json!([]), "`messages` must be a list"),
            ("messages", json!([{"role": "robot", "content": "a"}]), "`messages[0].role` must be user or assistant"),
            (
                "messages",
                json!([{"role": "user", "content": [{"type": "image", "source": {}}]}]),
                "block of type `image`",
            ),
            ("thinking", json!({"type": "enabled", "budget_tokens": 5}), "must be at least 1024"),
            ("thinking", json!({"type": "adaptive", "budget_tokens": 2000}), "needs the type enabled"),
            ("thinking", json!({"type": "adaptive", "display": "short"}), "must be summarized or omitted"),
            ("thinking", json!({"type": "adaptive", "effort": "low"}), "`thinking.effort` is not known"),
            ("stop_sequences", json!(5), "`stop_sequences` must be text or a list"),
            ("container", json!("c"), "`container` is not known"),
            ("tool_choice", json!({"type": "any"}), "lists no tool"),
        ] {
            let mut body = base.clone();
            body[field] = value;
            let error = read_json(body).unwrap_err();
            assert!(error.contains(words), "{field}: {error}");
        }
        let mut body = base.clone();
        body["thinking"] = json!({"type": "adaptive", "display": "omitted"});
        let hidden = read_json(body).unwrap();
        let Input::Conversation(conversation) = hidden.input else { panic!("a conversation") };
        assert!(!hidden.includes_reasoning && conversation.variables["enable_thinking"] == true);
        let mut body = base;
        body["stop_sequences"] = json!(["x"]);
        body["thinking"] = json!({"type": "enabled", "budget_tokens": 2000});
        body["output_config"] = json!({"effort": "max"});
        body["cache_control"] = json!({"type": "ephemeral"});
        let request = read_json(body).unwrap();
        assert!(request.includes_reasoning && request.parameters.stop == ["x"]);
    }
}
