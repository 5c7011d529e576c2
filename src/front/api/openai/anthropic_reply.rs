//! Answers in the form of Anthropic's Messages API.

use bytes::Bytes;
use chat_format::ChatDelta;
use http::StatusCode;
use http::header::HeaderValue;
use serde_json::{Value, json};

use super::choices::{Finish, Piece, StoppedAt, Usage};
use super::error::ApiError;
use super::respond::AnswerFormat;
use super::turn::{Message, ToolCall, call_id};
use crate::api::status::shown;

/// The answer to one request.
pub(super) struct AnthropicFormat {
    id: String,
    model: String,
    prompt_tokens: u64,
    /// Number of content blocks that have begun.
    num_blocks: usize,
    /// The kind of the block that is open.
    open: Option<Block>,
    finish: Option<Finish>,
    usage: Usage,
}

/// A kind of content block.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Block {
    Thinking,
    Text,
    ToolUse(usize),
}

impl AnthropicFormat {
    pub(super) fn new(unique: &str, model: String, prompt_tokens: usize) -> Self {
        let prompt_tokens = prompt_tokens as u64;
        let usage = Usage { prompt_tokens, ..Usage::default() };
        Self { id: format!("msg_{unique}"), model, prompt_tokens, num_blocks: 0, open: None, finish: None, usage }
    }

    /// The part of the id that is different for each answer.
    fn unique(&self) -> &str {
        self.id.trim_start_matches("msg_")
    }

    fn message(&self, content: Vec<Value>, finish: Option<&Finish>, usage: Usage) -> Value {
        let (stop_reason, stop_sequence) = stop_of(finish);
        json!({
            "id": self.id, "type": "message", "role": "assistant", "model": self.model, "content": content,
            "stop_reason": stop_reason, "stop_sequence": stop_sequence, "usage": usage_json(usage),
        })
    }

    /// Ends the open block, and begins one of another kind.
    fn switch_to(&mut self, block: Option<Block>, content: Value, events: &mut Vec<u8>) {
        if self.open.take().is_some() {
            write(events, json!({"type": "content_block_stop", "index": self.num_blocks - 1}));
        }
        if block.is_some() {
            write(events, json!({"type": "content_block_start", "index": self.num_blocks, "content_block": content}));
            self.num_blocks += 1;
        }
        self.open = block;
    }

    fn delta(&mut self, delta: ChatDelta, events: &mut Vec<u8>) {
        let (block, content, delta) = match delta {
            ChatDelta::Reasoning(text) => (
                Block::Thinking,
                json!({"type": "thinking", "thinking": "", "signature": ""}),
                Some(json!({"type": "thinking_delta", "thinking": text})),
            ),
            ChatDelta::Content(text) => {
                (Block::Text, json!({"type": "text", "text": ""}), Some(json!({"type": "text_delta", "text": text})))
            }
            ChatDelta::ToolCallStart { index, id, name } => {
                let id = id.unwrap_or_else(|| call_id(self.unique(), 0, index));
                (Block::ToolUse(index), json!({"type": "tool_use", "id": id, "name": name, "input": {}}), None)
            }
            ChatDelta::ToolCallArguments { index, json } => {
                (Block::ToolUse(index), Value::Null, Some(json!({"type": "input_json_delta", "partial_json": json})))
            }
        };
        if self.open != Some(block) {
            self.switch_to(Some(block), content, events);
        }
        if let Some(delta) = delta {
            write(events, json!({"type": "content_block_delta", "index": self.num_blocks - 1, "delta": delta}));
        }
    }
}

impl AnswerFormat for AnthropicFormat {
    fn whole(&mut self, choices: Vec<Piece>) -> Vec<u8> {
        let piece = choices.into_iter().next().unwrap_or_default();
        let Message { reasoning, content, tool_calls } = Message::of(piece.deltas, self.unique(), 0);
        let mut blocks = Vec::new();
        if !reasoning.is_empty() {
            blocks.push(json!({"type": "thinking", "thinking": reasoning, "signature": ""}));
        }
        if !content.is_empty() || (tool_calls.is_empty() && blocks.is_empty()) {
            blocks.push(json!({"type": "text", "text": content}));
        }
        blocks.extend(tool_calls.into_iter().map(tool_use));
        self.message(blocks, piece.finish.as_ref(), piece.usage).to_string().into_bytes()
    }

    fn begin(&mut self) -> Bytes {
        let mut events = Vec::new();
        let usage = Usage { prompt_tokens: self.prompt_tokens, ..Usage::default() };
        write(&mut events, json!({"type": "message_start", "message": self.message(Vec::new(), None, usage)}));
        events.into()
    }

    fn piece(&mut self, piece: Piece) -> Bytes {
        let mut events = Vec::new();
        piece.deltas.into_iter().for_each(|delta| self.delta(delta, &mut events));
        self.finish = piece.finish.or(self.finish.take());
        self.usage = piece.usage;
        events.into()
    }

    fn end(&mut self, has_failed: bool) -> Bytes {
        if has_failed {
            return Bytes::new();
        }
        let mut events = Vec::new();
        self.switch_to(None, Value::Null, &mut events);
        let (stop_reason, stop_sequence) = stop_of(self.finish.as_ref());
        let delta = json!({"stop_reason": stop_reason, "stop_sequence": stop_sequence});
        write(&mut events, json!({"type": "message_delta", "delta": delta, "usage": usage_json(self.usage)}));
        write(&mut events, json!({"type": "message_stop"}));
        events.into()
    }

    fn error(&mut self, error: &ApiError) -> Bytes {
        let mut events = Vec::new();
        write(&mut events, error_json(error));
        events.into()
    }
}

/// The body of an error's reply, with the id of the request.
pub(super) fn answered_error(error: &ApiError, id: Option<&HeaderValue>) -> Value {
    let mut body = error_json(error);
    body["request_id"] = json!(id.and_then(|id| id.to_str().ok()));
    body
}

/// An error in Anthropic's form, as an event of a stream.
pub(super) fn error_json(error: &ApiError) -> Value {
    let kind = match error.status {
        StatusCode::UNAUTHORIZED => "authentication_error",
        StatusCode::FORBIDDEN => "permission_error",
        StatusCode::NOT_FOUND => "not_found_error",
        StatusCode::PAYLOAD_TOO_LARGE => "request_too_large",
        StatusCode::TOO_MANY_REQUESTS => "rate_limit_error",
        StatusCode::SERVICE_UNAVAILABLE => "overloaded_error",
        status if status.is_server_error() => "api_error",
        _ => "invalid_request_error",
    };
    let message = match error.overflow {
        Some((found, most)) => format!("prompt is too long: {found} tokens > {most} maximum"),
        None => shown(&error.message).to_string(),
    };
    json!({"type": "error", "error": {"type": kind, "message": message}})
}

/// A call as a block. Arguments that are no JSON object, because the answer was cut off, are kept as text.
fn tool_use(call: ToolCall) -> Value {
    let input = serde_json::from_str::<Value>(&call.arguments).unwrap_or_else(|_| json!({"arguments": call.arguments}));
    json!({"type": "tool_use", "id": call.id, "name": call.name, "input": input})
}

fn stop_of(finish: Option<&Finish>) -> (Option<&'static str>, Option<&str>) {
    match finish {
        None => (None, None),
        Some(Finish::Stop(None | Some(StoppedAt::Token(_)))) => (Some("end_turn"), None),
        Some(Finish::Stop(Some(StoppedAt::Text(text)))) => (Some("stop_sequence"), Some(text)),
        Some(Finish::Length) => (Some("max_tokens"), None),
        Some(Finish::ToolCalls) => (Some("tool_use"), None),
    }
}

/// Token counts. Tokens of the prefix cache are counted apart from other input tokens.
fn usage_json(usage: Usage) -> Value {
    json!({
        "input_tokens": usage.prompt_tokens - usage.cached_tokens.min(usage.prompt_tokens),
        "cache_creation_input_tokens": 0, "cache_read_input_tokens": usage.cached_tokens,
        "output_tokens": usage.output_tokens,
    })
}

/// Appends a server-sent event, named by its type.
fn write(events: &mut Vec<u8>, event: Value) {
    let kind = event["type"].as_str().unwrap_or_default();
    events.extend_from_slice(format!("event: {kind}\ndata: {event}\n\n").as_bytes());
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pieces() -> Vec<Piece> {
        let text = |text: &str| text.to_owned();
        let piece = |deltas, finish| Piece { deltas, finish, ..Piece::default() };
        vec![
            piece(vec![ChatDelta::Reasoning(text("so")), ChatDelta::Content(text("Hel"))], None),
            piece(vec![ChatDelta::Content(text("lo"))], None),
            piece(vec![ChatDelta::ToolCallStart { index: 0, id: None, name: text("f") }], None),
            piece(vec![ChatDelta::ToolCallArguments { index: 0, json: text("{\"a\":1}") }], Some(Finish::ToolCalls)),
        ]
    }

    fn format() -> AnthropicFormat {
        AnthropicFormat::new("abc", "m".to_owned(), 7)
    }

    #[test]
    fn a_stream_has_blocks_that_begin_and_end_in_order() {
        let mut format = format();
        let mut events = format.begin().to_vec();
        pieces().into_iter().for_each(|piece| events.extend_from_slice(&format.piece(piece)));
        events.extend_from_slice(&format.end(false));
        let events = String::from_utf8(events).unwrap();
        let kinds: Vec<&str> = events.lines().filter_map(|line| line.strip_prefix("event: ")).collect();
        let block = ["content_block_start", "content_block_delta", "content_block_stop"];
        let long = ["content_block_start", "content_block_delta", "content_block_delta", "content_block_stop"];
        let expected = [&["message_start"][..], &block, &long, &block, &["message_delta", "message_stop"]].concat();
        assert_eq!(kinds, expected);
        assert!(events.contains(r#""partial_json":"{\"a\":1}""#) && events.contains(r#""stop_reason":"tool_use""#));
        assert!(events.contains(r#""id":"call_abc0000""#) && events.contains(r#""index":2"#));
    }

    #[test]
    fn a_whole_message_has_the_same_blocks() {
        let mut whole = Piece::empty(0);
        pieces().into_iter().for_each(|piece| whole.join(piece));
        let message: Value = serde_json::from_slice(&format().whole(vec![whole])).unwrap();
        let kinds: Vec<&str> =
            message["content"].as_array().unwrap().iter().map(|block| block["type"].as_str().unwrap()).collect();
        assert_eq!(kinds, ["thinking", "text", "tool_use"]);
        assert_eq!(message["content"][2]["input"], json!({"a": 1}));
        assert_eq!(message["stop_reason"], "tool_use");
    }
}
