//! What a client sends for a chat template, and the messages in the form that templates expect.

use std::borrow::Cow;

use serde_json::{Map, Value};

use super::json;

/// A conversation, and how a chat template turns it into a prompt.
#[derive(Debug, Clone, Copy, Default)]
pub struct ChatRequest<'a> {
    /// Objects with `role` and `content`, in the form of OpenAI's chats.
    pub messages: &'a [Value],
    /// Tools in the form of OpenAI's chats; empty for none.
    pub tools: &'a [Value],
    /// Documents for templates that answer from documents.
    pub documents: Option<&'a [Value]>,
    /// Further variables of the template, `chat_template_kwargs` of a client. They replace the special tokens of the same name.
    pub variables: Option<&'a Map<String, Value>>,
    /// The name of one of the model's templates, or the Jinja source of a template that replaces the model's.
    pub template: Option<&'a str>,
    /// Whether the prompt ends with the start of the model's turn.
    pub add_generation_prompt: bool,
    /// Whether the prompt ends behind the text of the last message, which the model then continues.
    pub continue_final_message: bool,
}

/// Names of a message's reasoning, the one that templates usually read first.
const REASONING: [&str; 3] = ["reasoning_content", "thinking", "reasoning"];

/// How messages are changed before a template reads them.
#[derive(Debug, Clone, Copy)]
pub(super) struct Form {
    /// Content in parts stays a list of parts, instead of becoming one text.
    pub(super) keeps_parts: bool,
    /// The form of the arguments of tool calls.
    pub(super) arguments: Arguments,
    /// Messages with tool calls but without content have null as content, instead of none.
    pub(super) has_null_content: bool,
}

/// In which form a template reads the arguments of tool calls.
#[derive(Debug, Clone, Copy)]
pub(super) enum Arguments {
    /// As objects. Text that is not the JSON of an object stays text.
    Objects,
    /// As JSON: text as the client sent it, objects with Python's spacing.
    Text,
}

/// The forms in which a template may read these messages. The first is the usual one, the others are for templates that fail on it: some
/// join arguments to text, and some read null content as the sign of tool calls.
pub(super) fn forms(messages: &[Value], keeps_parts: bool) -> impl Iterator<Item = Form> {
    let arguments = [Arguments::Objects, Arguments::Text].into_iter().take(1 + usize::from(has_arguments(messages)));
    let nulls = [false, true].into_iter().take(1 + usize::from(messages.iter().any(has_calls_alone)));
    nulls.flat_map(move |has_null_content| {
        arguments.clone().map(move |arguments| Form { keeps_parts, arguments, has_null_content })
    })
}

/// The messages as a template reads them.
///
/// # Errors
/// When a message is not an object.
pub(super) fn messages(messages: &[Value], form: Form) -> Result<Vec<Map<String, Value>>, String> {
    let object = |(at, message): (usize, &Value)| match message {
        Value::Object(fields) => {
            let mut fields = self::message(fields, form);
            if form.has_null_content && has_calls_alone(message) {
                fields.insert("content".to_owned(), Value::Null);
            }
            Ok(fields)
        }
        _ => Err(format!("`messages[{at}]` must be an object with `role` and `content`")),
    };
    messages.iter().enumerate().map(object).collect()
}

/// A message without its null fields, with its reasoning under every name, and with the content and tool calls that `form` asks
/// for.
fn message(message: &Map<String, Value>, form: Form) -> Map<String, Value> {
    let given = |(key, value): (&String, &Value)| (!value.is_null()).then(|| (key.clone(), value.clone()));
    let mut fields = Map::new();
    let reasoning = REASONING.iter().find_map(|name| message.get(*name).filter(|value| !value.is_null()));
    if let Some(reasoning) = reasoning {
        fields.insert("thinking".to_owned(), reasoning.clone());
    }
    fields.extend(message.iter().filter_map(given));
    if let Some(reasoning) = reasoning {
        fields.insert("reasoning_content".to_owned(), reasoning.clone());
        fields.entry("reasoning").or_insert_with(|| reasoning.clone());
    }
    if let Some(Value::Array(parts)) = fields.get_mut("content") {
        if form.keeps_parts {
            parts.iter_mut().for_each(name_text);
        } else if let Some(text) = joined(parts) {
            fields.insert("content".to_owned(), Value::String(text));
        }
    }
    let calls = fields.get_mut("tool_calls").and_then(Value::as_array_mut).into_iter().flatten();
    for arguments in calls.filter_map(|call| call.pointer_mut("/function/arguments")) {
        match form.arguments {
            Arguments::Objects => parse_arguments(arguments),
            Arguments::Text => write_arguments(arguments),
        }
    }
    fields
}

/// The text of a part; `None` if it has none.
fn part_text(part: &Value) -> Option<&str> {
    part.as_str().or_else(|| part.get("text")?.as_str()).or_else(|| part.get("refusal")?.as_str())
}

/// The texts of all parts, one a line; `None` if a part has no text.
fn joined(parts: &[Value]) -> Option<String> {
    let texts: Option<Vec<&str>> = parts.iter().map(part_text).collect();
    Some(texts?.join("\n"))
}

/// Gives a part of text the type `text`, which templates know, instead of `input_text`, `output_text` or `refusal`.
fn name_text(part: &mut Value) {
    let is_other = matches!(part["type"].as_str(), Some("input_text" | "output_text" | "refusal"));
    if let Some(text) = part_text(part).map(str::to_owned)
        && (is_other || part.is_string())
    {
        *part = serde_json::json!({"type": "text", "text": text});
    }
}

/// Replaces arguments that are the text of a JSON object by the object. Other text stays.
fn parse_arguments(arguments: &mut Value) {
    let Value::String(text) = arguments else { return };
    let text: Cow<str> = if text.trim().is_empty() { "{}".into() } else { text.as_str().into() };
    if let Ok(object) = serde_json::from_str::<Map<String, Value>>(&text) {
        *arguments = Value::Object(object);
    }
}

/// Replaces arguments that are an object by its JSON.
fn write_arguments(arguments: &mut Value) {
    if arguments.is_object() {
        *arguments = Value::String(json::python_text(arguments));
    }
}

/// Whether a message has tool calls and no content.
fn has_calls_alone(message: &Value) -> bool {
    message.get("content").is_none_or(Value::is_null) && message.get("tool_calls").is_some_and(Value::is_array)
}

/// Whether a message of the conversation has tool calls with arguments.
fn has_arguments(messages: &[Value]) -> bool {
    let mut calls = messages.iter().filter_map(|message| message.get("tool_calls")?.as_array()).flatten();
    calls.any(|call| call.pointer("/function/arguments").is_some())
}
