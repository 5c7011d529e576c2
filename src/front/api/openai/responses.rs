//! OpenAI's Responses API: `/v1/responses`. Nothing is stored: a client sends the whole conversation each time.

use std::sync::Arc;

use generation::ConstraintSpec;
use http::HeaderMap;
use hyper::body::Incoming;
use serde_json::{Map, Value, json};
use serving::{Limit, Limits};

use super::complete::{self, ChatRun};
use super::conversation::{check_messages, set_effort};
use super::error::ApiError;
use super::fields::{FOR_THE_PROVIDER, Fields, check, tree_bytes};
use super::guide;
use super::parameter_fields::{num_logprobs, token_count};
use super::parameters::Parameters;
use super::request::{CompletionRequest, Input};
use super::respond::AnswerFormat;
use super::responses_reply::{Echoed, ResponsesFormat};
use super::tools::{ToolForm, Tools};
use crate::api::status::shown;
use crate::api::triton::http::reply::Reply;
use crate::api::triton::http::request_body::{ChargedBody, read_body};
use crate::chat::{Conversation, UnknownFields};
use crate::state::State;
use crate::transport::large_work::block_in_place_in_turn;

/// Outputs that `include` may name. Reasoning is always sent as it is, so that nothing is encrypted.
const LOGPROBS: &str = "message.output_text.logprobs";
const ENCRYPTED: &str = "reasoning.encrypted_content";

/// `POST /v1/responses`.
pub(super) async fn responses(state: &Arc<State>, headers: &HeaderMap, body: Incoming) -> Result<Reply, ApiError> {
    let ChargedBody { bytes: body, charge } = read_body(state, headers, body).await?;
    let read = || {
        charge.add(tree_bytes(&body)?)?;
        read(&body, state.server.limits(), state.config.unknown_fields)
    };
    let (request, echoed) = block_in_place_in_turn(body.len(), read).await?;
    drop(body);
    let format = move |run: ChatRun| -> Box<dyn AnswerFormat> { Box::new(ResponsesFormat::new(&run.unique, echoed)) };
    complete::chat(state, request, charge, format).await
}

fn read(body: &[u8], limits: &Limits, unknown: UnknownFields) -> Result<(CompletionRequest, Echoed), ApiError> {
    let mut fields = Fields::read(body)?;
    let model = fields.text("model")?.ok_or_else(|| ApiError::of_field("model", "`model` is missing."))?;
    check(limits, Limit::NameBytes, "model", model.len())?;
    refuse_storage(&mut fields)?;
    let instructions = fields.text("instructions")?;
    let messages = read_input(&mut fields, instructions.as_deref(), limits)?;
    let mut parameters = Parameters::read(&mut fields, limits)?;
    parameters.max_tokens = token_count(&mut fields, "max_output_tokens")?;
    parameters.logprobs = logprobs(&mut fields)?;
    let mut echoed = Echoed::new(&model, instructions, &parameters);
    echoed.tools = fields.peek("tools").cloned().unwrap_or_else(|| json!([]));
    echoed.tool_choice = fields.peek("tool_choice").cloned().unwrap_or_else(|| json!("auto"));
    echoed.metadata = fields.take("metadata").unwrap_or_else(|| json!({}));
    let mut tools = Tools::read(&mut fields, ToolForm::Responses)?;
    echoed.parallel_tool_calls = tools.parallel;
    let mut conversation = Conversation {
        messages,
        tools: tools.take_for_template(),
        variables: fields.object("chat_template_kwargs")?.unwrap_or_default(),
        add_generation_prompt: true,
        ..Conversation::default()
    };
    if let Some(reasoning) = fields.object("reasoning")? {
        read_reasoning(&reasoning, &mut conversation)?;
        echoed.reasoning = reasoning.into();
    }
    echoed.text = fields.peek("text").cloned().unwrap_or_else(|| json!({"format": {"type": "text"}}));
    let spec = read_text(&mut fields)?;
    parameters.for_one_turn("text", spec)?;
    fields.ignore(&FOR_THE_PROVIDER);
    fields.finish(unknown)?;
    let request = CompletionRequest {
        model,
        input: Input::Conversation(conversation),
        parameters,
        echo: false,
        tools,
        includes_reasoning: true,
        ends_named_call_with_stop: false,
        is_chat: true,
    };
    Ok((request, echoed))
}

/// `reasoning`: the effort. Summaries are not made; the reasoning is sent as it is.
fn read_reasoning(reasoning: &Map<String, Value>, conversation: &mut Conversation) -> Result<(), ApiError> {
    for (name, value) in reasoning {
        match (name.as_str(), value) {
            ("effort", Value::String(effort)) => set_effort(&mut conversation.variables, effort, "reasoning")?,
            ("summary" | "generate_summary", Value::String(_)) | (_, Value::Null) => {}
            (name, _) => {
                let words = format!("`reasoning.{}` is not known or has the wrong type.", shown(name));
                return Err(ApiError::of_field("reasoning", words));
            }
        }
    }
    Ok(())
}

/// Refuses what needs stored responses.
fn refuse_storage(fields: &mut Fields) -> Result<(), ApiError> {
    let why = "this server stores no responses; send the whole conversation in `input`";
    fields.refuse_unless("previous_response_id", |_| false, why)?;
    fields.refuse_unless("conversation", |_| false, why)?;
    fields.refuse_unless("background", |value| value == false, why)?;
    fields.refuse_unless("truncation", |value| value == "disabled", "an input that is too long is refused")?;
    Ok(())
}

/// `include` and `top_logprobs`.
fn logprobs(fields: &mut Fields) -> Result<Option<u32>, ApiError> {
    let mut is_included = false;
    for name in fields.list("include")?.unwrap_or_default() {
        match name.as_str() {
            Some(LOGPROBS) => is_included = true,
            Some(ENCRYPTED) => {}
            _ => {
                let words =
                    format!("`include` names {}, which is not known; `{LOGPROBS}` is.", shown(&name.to_string()));
                return Err(ApiError::of_field("include", words));
            }
        }
    }
    let top = num_logprobs(fields, "top_logprobs")?;
    Ok(top.or(is_included.then_some(0)))
}

/// `text`: the format of the answer.
fn read_text(fields: &mut Fields) -> Result<Option<ConstraintSpec>, ApiError> {
    let wrong = |words: String| ApiError::of_field("text", words);
    let mut spec = None;
    for (name, value) in fields.object("text")?.unwrap_or_default() {
        match (name.as_str(), value) {
            ("format", Value::Object(format)) => spec = guide::read_format("text.format", format)?,
            // How long the answer is; models do not know of it.
            ("verbosity", Value::String(_)) | (_, Value::Null) => {}
            (name, _) => return Err(wrong(format!("`text.{}` is not supported.", shown(name)))),
        }
    }
    Ok(spec)
}

/// `input` as the messages of a chat.
fn read_input(fields: &mut Fields, instructions: Option<&str>, limits: &Limits) -> Result<Vec<Value>, ApiError> {
    let mut messages: Vec<Value> = Vec::new();
    messages.extend(instructions.map(|text| json!({"role": "system", "content": text})));
    let items = match fields.take("input") {
        Some(Value::String(text)) => vec![json!({"role": "user", "content": text})],
        Some(Value::Array(items)) if !items.is_empty() => items,
        _ => return Err(ApiError::of_field("input", "`input` must be text or a list of at least one item.")),
    };
    check(limits, Limit::Messages, "input", items.len())?;
    for (at, item) in items.into_iter().enumerate() {
        add_item(at, item, &mut messages)?;
    }
    check_messages("input", &messages)?;
    Ok(messages)
}

/// Adds an item. Reasoning, text and calls of one turn are one message.
fn add_item(at: usize, mut item: Value, messages: &mut Vec<Value>) -> Result<(), ApiError> {
    let wrong = |words: String| ApiError::of_field("input", format!("`input[{at}]` {words}."));
    match item["type"].as_str().unwrap_or("message") {
        "message" => {
            let role = match item["role"].as_str() {
                Some("developer") => "system".to_owned(),
                Some(role) => role.to_owned(),
                None => return Err(wrong("has no `role`".to_owned())),
            };
            let content = item["content"].take();
            match role.as_str() {
                "assistant" => {
                    // A text that is there already is an earlier message.
                    if messages.last().is_some_and(|last| !last["content"].is_null()) {
                        messages.push(json!({"role": "assistant", "content": null}));
                    }
                    turn(messages).insert("content".to_owned(), content);
                }
                _ => messages.push(json!({"role": role, "content": content})),
            }
        }
        "reasoning" => {
            let parts = item["content"].as_array().or(item["summary"].as_array());
            let texts = parts.into_iter().flatten().filter_map(|part| part["text"].as_str());
            let text = texts.collect::<Vec<_>>().join("\n");
            messages.push(json!({"role": "assistant", "content": null}));
            turn(messages).insert("reasoning_content".to_owned(), json!(text));
        }
        "function_call" => {
            let function = json!({"name": item["name"], "arguments": item["arguments"]});
            let call = json!({"id": item["call_id"], "type": "function", "function": function});
            match turn(messages).entry("tool_calls").or_insert(json!([])) {
                Value::Array(calls) => calls.push(call),
                _ => unreachable!("`tool_calls` of a turn is a list"),
            }
        }
        "function_call_output" => {
            let output = item["output"].take();
            messages.push(json!({"role": "tool", "tool_call_id": item["call_id"], "content": output}));
        }
        other => return Err(wrong(format!("has the type `{}`, which is not supported", shown(other)))),
    }
    Ok(())
}

/// The assistant's message at the end of a conversation; a new one if the last message is another's.
fn turn(messages: &mut Vec<Value>) -> &mut Map<String, Value> {
    let is_open = messages.last().is_some_and(|last| last["role"] == "assistant");
    if !is_open {
        messages.push(json!({"role": "assistant", "content": null}));
    }
    messages.last_mut().and_then(Value::as_object_mut).expect("the last message is an object")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read_json(body: Value) -> Result<CompletionRequest, String> {
        let body = body.to_string();
        let read = read(body.as_bytes(), &Limits::default(), UnknownFields::Refuse);
        read.map(|(request, _)| request).map_err(|error| error.message)
    }

    #[test]
    fn items_become_messages_of_a_chat() {
        let body = json!({"model": "m", "instructions": "Be brief.", "input": [
            {"role": "user", "content": [{"type": "input_text", "text": "Weather?"}]},
            {"type": "reasoning", "id": "r", "summary": [], "content": [{"type": "reasoning_text", "text": "Hm."}]},
            {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "I look."}]},
            {"type": "function_call", "call_id": "c1", "name": "weather", "arguments": "{}"},
            {"type": "function_call", "call_id": "c2", "name": "time", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "c1", "output": "sun"},
        ]});
        let Input::Conversation(found) = read_json(body).unwrap().input else { panic!("a conversation") };
        let call =
            |id: &str, name: &str| json!({"id": id, "type": "function", "function": {"name": name, "arguments": "{}"}});
        assert_eq!(
            json!(found.messages),
            json!([
                {"role": "system", "content": "Be brief."},
                {"role": "user", "content": [{"type": "input_text", "text": "Weather?"}]},
                {"role": "assistant", "content": [{"type": "output_text", "text": "I look."}], "reasoning_content": "Hm.",
                 "tool_calls": [call("c1", "weather"), call("c2", "time")]},
                {"role": "tool", "tool_call_id": "c1", "content": "sun"},
            ])
        );
    }

    #[test]
    fn each_text_of_the_assistant_is_a_message_of_its_own() {
        let text = |text: &str| json!({"role": "assistant", "content": text});
        let call = json!({"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"});
        let body =
            json!({"model": "m", "input": [text("a"), text("b"), call, text("c"), {"role": "user", "content": "d"}]});
        let Input::Conversation(found) = read_json(body).unwrap().input else { panic!("a conversation") };
        let contents: Vec<&Value> = found.messages.iter().map(|message| &message["content"]).collect();
        assert_eq!(contents, ["a", "b", "c", "d"]);
        assert_eq!(found.messages[1]["tool_calls"][0]["id"], "c");
    }

    #[test]
    fn invalid_requests_are_named() {
        for (field, value, words) in [
            ("input", json!([]), "`input` must be text or a list"),
            ("input", json!([{"type": "image"}]), "`input[0]` has the type `image`"),
            ("input", json!([{"role": "user", "content": [{"type": "input_image"}]}]), "part of type `input_image`"),
            ("previous_response_id", json!("r"), "stores no responses"),
            ("background", json!(true), "stores no responses"),
            ("include", json!(["x"]), "`include` names"),
            ("reasoning", json!({"effort": "huge"}), "`reasoning.effort` must be one of"),
            ("n", json!(2), "`n` is not supported"),
            ("prompt", json!({"id": "p"}), "`prompt` is not known"),
        ] {
            let mut body = json!({"model": "m", "input": "a"});
            body[field] = value;
            let error = read_json(body).unwrap_err();
            assert!(error.contains(words), "{field}: {error}");
        }
    }
}
