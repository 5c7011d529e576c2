//! Answers in the form of OpenAI's Responses API.

use bytes::Bytes;
use chat_format::ChatDelta;
use serde_json::{Value, json};

use super::choices::{Finish, Piece, Usage};
use super::error::ApiError;
use super::parameters::Parameters;
use super::reply::chat_logprob;
use super::respond::AnswerFormat;
use super::turn::call_id;
use crate::api::request_key;

/// Fields of a request that its response repeats.
pub(super) struct Echoed {
    model: String,
    instructions: Option<String>,
    temperature: Option<f32>,
    top_p: Option<f32>,
    max_output_tokens: Option<u32>,
    pub(super) tools: Value,
    pub(super) tool_choice: Value,
    pub(super) parallel_tool_calls: bool,
    pub(super) metadata: Value,
    pub(super) reasoning: Value,
    pub(super) text: Value,
    lists_logprobs: bool,
}

impl Echoed {
    pub(super) fn new(model: &str, instructions: Option<String>, parameters: &Parameters) -> Self {
        Self {
            model: model.to_owned(),
            instructions,
            temperature: parameters.temperature,
            top_p: parameters.top_p,
            max_output_tokens: parameters.max_tokens,
            tools: json!([]),
            tool_choice: json!("auto"),
            parallel_tool_calls: true,
            metadata: json!({}),
            reasoning: json!({"effort": null, "summary": null}),
            text: json!({"format": {"type": "text"}}),
            lists_logprobs: parameters.logprobs.is_some(),
        }
    }
}

/// The answer to one request.
pub(super) struct ResponsesFormat {
    unique: String,
    created: u64,
    echoed: Echoed,
    /// Items that are complete, in order.
    output: Vec<Value>,
    open: Option<Item>,
    finish: Option<Finish>,
    usage: Usage,
    /// Number of the next event.
    sequence: u64,
}

/// An item of the output that is being generated.
struct Item {
    kind: Kind,
    id: String,
    text: String,
    logprobs: Vec<Value>,
}

#[derive(Debug, Clone, PartialEq, Eq)]
enum Kind {
    Reasoning,
    Message,
    /// A call: its number, its id for the client, and the function.
    Call(usize, String, String),
}

impl Item {
    /// The item in a status of `in_progress`, `completed` or `incomplete`.
    fn json(&self, status: &str) -> Value {
        let text = &self.text;
        match &self.kind {
            Kind::Reasoning => {
                let content =
                    if text.is_empty() { json!([]) } else { json!([{"type": "reasoning_text", "text": text}]) };
                json!({"type": "reasoning", "id": self.id, "summary": [], "content": content, "status": status})
            }
            Kind::Message => {
                let content = if status == "in_progress" { json!([]) } else { json!([self.part(text)]) };
                json!({"type": "message", "id": self.id, "role": "assistant", "status": status, "content": content})
            }
            Kind::Call(_, call_id, name) => json!({
                "type": "function_call", "id": self.id, "call_id": call_id, "name": name, "arguments": text, "status": status,
            }),
        }
    }

    fn part(&self, text: &str) -> Value {
        match self.kind {
            Kind::Reasoning => json!({"type": "reasoning_text", "text": text}),
            _ => json!({"type": "output_text", "text": text, "annotations": [], "logprobs": self.logprobs}),
        }
    }
}

impl ResponsesFormat {
    pub(super) fn new(unique: &str, echoed: Echoed) -> Self {
        let created = request_key::created();
        let (output, open, finish) = Default::default();
        Self { unique: unique.to_owned(), created, echoed, output, open, finish, usage: Usage::default(), sequence: 0 }
    }

    fn response(&self, status: &str, error: Option<&ApiError>) -> Value {
        let Echoed { model, instructions, temperature, top_p, max_output_tokens, .. } = &self.echoed;
        let is_cut = self.finish == Some(Finish::Length);
        let usage = (status != "in_progress").then(|| {
            let Usage { prompt_tokens, cached_tokens, output_tokens, reasoning_tokens } = self.usage;
            json!({
                "input_tokens": prompt_tokens, "input_tokens_details": {"cached_tokens": cached_tokens, "cache_write_tokens": 0},
                "output_tokens": output_tokens, "output_tokens_details": {"reasoning_tokens": reasoning_tokens},
                "total_tokens": prompt_tokens + output_tokens,
            })
        });
        json!({
            "id": format!("resp_{}", self.unique), "object": "response", "created_at": self.created, "status": status,
            "error": error.map(|error| json!({"code": "server_error", "message": error.message})),
            "incomplete_details": is_cut.then(|| json!({"reason": "max_output_tokens"})),
            "instructions": instructions, "max_output_tokens": max_output_tokens, "model": model, "output": self.output,
            "parallel_tool_calls": self.echoed.parallel_tool_calls, "previous_response_id": null,
            "reasoning": self.echoed.reasoning, "store": false, "temperature": temperature,
            "text": self.echoed.text, "tool_choice": self.echoed.tool_choice, "tools": self.echoed.tools,
            "top_p": top_p, "truncation": "disabled", "usage": usage, "user": null, "metadata": self.echoed.metadata,
        })
    }

    fn status(&self) -> &'static str {
        if self.finish == Some(Finish::Length) { "incomplete" } else { "completed" }
    }

    /// Appends an event with its number.
    fn write(&mut self, events: &mut Vec<u8>, kind: &str, mut event: Value) {
        event["type"] = json!(kind);
        event["sequence_number"] = json!(self.sequence);
        self.sequence += 1;
        events.extend_from_slice(format!("event: {kind}\ndata: {event}\n\n").as_bytes());
    }

    /// Completes the open item.
    fn close(&mut self, events: &mut Vec<u8>) {
        let Some(item) = self.open.take() else { return };
        let place = json!({"item_id": item.id, "output_index": self.output.len()});
        let done = |name: &str, value: Value| {
            let mut event = place.clone();
            event[name] = value;
            event
        };
        match &item.kind {
            Kind::Call(_, _, name) => {
                let mut event = done("arguments", json!(item.text));
                event["name"] = json!(name);
                self.write(events, "response.function_call_arguments.done", event);
            }
            kind => {
                let is_message = *kind == Kind::Message;
                let name = if is_message { "response.output_text.done" } else { "response.reasoning_text.done" };
                let mut event = done("text", json!(item.text));
                event["content_index"] = json!(0);
                if is_message {
                    event["logprobs"] = json!(item.logprobs);
                }
                self.write(events, name, event);
                let mut event = done("part", item.part(&item.text));
                event["content_index"] = json!(0);
                self.write(events, "response.content_part.done", event);
            }
        }
        let value = item.json(self.status());
        self.write(events, "response.output_item.done", json!({"output_index": self.output.len(), "item": value}));
        self.output.push(value);
    }

    /// Completes the output. An answer without text is an empty message.
    fn end_output(&mut self, events: &mut Vec<u8>) {
        if self.output.is_empty() && self.open.is_none() {
            self.begin_item(Kind::Message, events);
        }
        self.close(events);
    }

    /// Begins an item.
    fn begin_item(&mut self, kind: Kind, events: &mut Vec<u8>) {
        self.close(events);
        let prefix = match kind {
            Kind::Reasoning => "rs",
            Kind::Message => "msg",
            Kind::Call(..) => "fc",
        };
        let id = format!("{prefix}_{}{:02x}", self.unique, self.output.len());
        let item = Item { kind, id, text: String::new(), logprobs: Vec::new() };
        let (value, index) = (item.json("in_progress"), self.output.len());
        self.write(events, "response.output_item.added", json!({"output_index": index, "item": value}));
        if !matches!(item.kind, Kind::Call(..)) {
            let part = json!({"item_id": item.id, "output_index": index, "content_index": 0, "part": item.part("")});
            self.write(events, "response.content_part.added", part);
        }
        self.open = Some(item);
    }

    fn delta(&mut self, delta: ChatDelta, logprobs: &mut Vec<Value>, events: &mut Vec<u8>) {
        let (kind, text) = match delta {
            ChatDelta::Reasoning(text) => (Kind::Reasoning, text),
            ChatDelta::Content(text) => (Kind::Message, text),
            ChatDelta::ToolCallStart { index, id, name } => {
                let id = id.unwrap_or_else(|| call_id(&self.unique, 0, index));
                return self.begin_item(Kind::Call(index, id, name), events);
            }
            ChatDelta::ToolCallArguments { json, .. } => {
                let Some(item) = &mut self.open else { return };
                item.text.push_str(&json);
                let event = json!({"item_id": item.id, "output_index": self.output.len(), "delta": json});
                return self.write(events, "response.function_call_arguments.delta", event);
            }
        };
        if self.open.as_ref().is_none_or(|item| item.kind != kind) {
            self.begin_item(kind.clone(), events);
        }
        let Some(item) = &mut self.open else { return };
        item.text.push_str(&text);
        let mut event =
            json!({"item_id": item.id, "output_index": self.output.len(), "content_index": 0, "delta": text});
        let is_message = kind == Kind::Message;
        if is_message {
            let new = std::mem::take(logprobs);
            event["logprobs"] = json!(new);
            item.logprobs.extend(new);
        }
        self.write(
            events,
            if is_message { "response.output_text.delta" } else { "response.reasoning_text.delta" },
            event,
        );
    }
}

impl AnswerFormat for ResponsesFormat {
    fn whole(&mut self, choices: Vec<Piece>) -> Vec<u8> {
        choices.into_iter().for_each(|piece| drop(self.piece(piece)));
        self.end_output(&mut Vec::new());
        self.response(self.status(), None).to_string().into_bytes()
    }

    fn begin(&mut self) -> Bytes {
        let mut events = Vec::new();
        for kind in ["response.created", "response.in_progress"] {
            let response = self.response("in_progress", None);
            self.write(&mut events, kind, json!({"response": response}));
        }
        events.into()
    }

    fn piece(&mut self, piece: Piece) -> Bytes {
        let mut events = Vec::new();
        let listed = piece.tokens.iter().filter(|_| self.echoed.lists_logprobs);
        let mut logprobs: Vec<Value> = listed.map(chat_logprob).collect();
        piece.deltas.into_iter().for_each(|delta| self.delta(delta, &mut logprobs, &mut events));
        self.finish = piece.finish.or(self.finish.take());
        self.usage = piece.usage;
        events.into()
    }

    fn end(&mut self, has_failed: bool) -> Bytes {
        if has_failed {
            return Bytes::new();
        }
        let mut events = Vec::new();
        self.end_output(&mut events);
        let (status, response) = (self.status(), self.response(self.status(), None));
        self.write(&mut events, &format!("response.{status}"), json!({"response": response}));
        events.into()
    }

    fn error(&mut self, error: &ApiError) -> Bytes {
        let mut events = Vec::new();
        let response = self.response("failed", Some(error));
        self.write(&mut events, "response.failed", json!({"response": response}));
        events.into()
    }
}

#[cfg(test)]
mod tests {
    use super::super::fields::Fields;
    use super::*;
    use serving::Limits;

    fn format() -> ResponsesFormat {
        let parameters = Parameters::read(&mut Fields::read(b"{}").unwrap(), &Limits::default()).unwrap();
        ResponsesFormat::new("abc", Echoed::new("m", None, &parameters))
    }

    fn whole_of(mut format: ResponsesFormat, piece: Piece) -> Value {
        serde_json::from_slice(&format.whole(vec![piece])).unwrap()
    }

    fn pieces() -> Vec<Piece> {
        let text = |text: &str| text.to_owned();
        let piece = |deltas, finish| Piece { deltas, finish, ..Piece::default() };
        vec![
            piece(vec![ChatDelta::Reasoning(text("so")), ChatDelta::Content(text("Hel"))], None),
            piece(vec![ChatDelta::Content(text("lo"))], None),
            piece(vec![ChatDelta::ToolCallStart { index: 0, id: None, name: text("f") }], None),
            piece(vec![ChatDelta::ToolCallArguments { index: 0, json: text("{}") }], Some(Finish::ToolCalls)),
        ]
    }

    #[test]
    fn a_stream_completes_each_item_and_ends_with_the_whole_response() {
        let mut format = format();
        let mut events = format.begin().to_vec();
        pieces().into_iter().for_each(|piece| events.extend_from_slice(&format.piece(piece)));
        events.extend_from_slice(&format.end(false));
        let events = String::from_utf8(events).unwrap();
        let values: Vec<Value> = events
            .lines()
            .filter_map(|line| line.strip_prefix("data: "))
            .map(|line| serde_json::from_str(line).unwrap())
            .collect();
        assert!(values.iter().enumerate().all(|(at, value)| value["sequence_number"] == at));
        let last = values.last().unwrap();
        assert_eq!(last["type"], "response.completed");
        let mut whole = Piece::empty(0);
        pieces().into_iter().for_each(|piece| whole.join(piece));
        assert_eq!(whole_of(self::format(), whole)["output"], last["response"]["output"]);
        let kinds: Vec<&str> =
            last["response"]["output"].as_array().unwrap().iter().map(|item| item["type"].as_str().unwrap()).collect();
        assert_eq!(kinds, ["reasoning", "message", "function_call"]);
        let done = values.iter().filter(|value| value["type"] == "response.output_item.done").count();
        assert_eq!(done, 3);
    }

    #[test]
    fn an_empty_answer_and_a_cut_one_are_responses_too() {
        let mut cut = Piece::empty(0);
        cut.finish = Some(Finish::Length);
        let response = whole_of(format(), cut);
        assert_eq!(
            (&response["status"], &response["incomplete_details"]["reason"]),
            (&json!("incomplete"), &json!("max_output_tokens"))
        );
        assert_eq!(response["output"][0]["content"][0]["text"], "");
        let mut cut = Piece::empty(0);
        cut.finish = Some(Finish::Length);
        let mut format = format();
        format.piece(cut);
        let events = String::from_utf8(format.end(false).to_vec()).unwrap();
        let last = events.lines().rfind(|line| line.starts_with("data: ")).unwrap();
        let last: Value = serde_json::from_str(&last["data: ".len()..]).unwrap();
        assert_eq!(last["response"]["output"], response["output"]);
    }
}
