//! The model's turn of a conversation: its text as reasoning, content and tool calls.

use std::collections::BTreeMap;

use chat_format::{ChatDelta, TurnParser};
use futures::StreamExt as _;
use serde_json::{Map, Value, json};
use serving::ProgressReporter;

use super::choices::{Choices, Finish, Piece, StoppedAt};

/// How the choices of a chat are divided.
pub(crate) struct TurnOptions {
    /// Whether reasoning is part of the answer.
    pub includes_reasoning: bool,
    /// Whether a turn with a tool call ends with the reason `tool_calls`. A call that the client demanded by name ends with
    /// `stop`.
    pub ends_with_tool_calls: bool,
    /// Markers of the model's form of a turn, which end a call if they are stop strings.
    pub markers: Vec<String>,
}

impl TurnOptions {
    /// Whether a turn that ends so is cut, `in_call` or elsewhere. A stop string may stand anywhere in the arguments of a call.
    fn is_cut(&self, finish: &Finish, in_call: bool) -> bool {
        match finish {
            Finish::Length => true,
            Finish::Stop(Some(StoppedAt::Text(stop))) => in_call && !self.markers.contains(stop),
            Finish::Stop(_) | Finish::ToolCalls => false,
        }
    }
}

/// One choice.
struct Turn {
    /// `None`: all text is content.
    parser: Option<TurnParser>,
    has_tool_call: bool,
    num_tokens: u64,
    reasoning_tokens: u64,
    /// The request that generates the choice, where it counts reasoning.
    request: Option<ProgressReporter>,
}

/// The pieces of a chat, each with the deltas of its text. `requests` has the request of each choice, where it counts reasoning;
/// `parser` makes the parser of one choice.
pub(crate) fn divided(
    choices: Choices,
    requests: Vec<Option<ProgressReporter>>,
    options: TurnOptions,
    parser: impl Fn() -> Option<TurnParser>,
) -> impl futures::Stream<Item = Result<Piece, serving::InferError>> + Send {
    let turn = |request| Turn { parser: parser(), has_tool_call: false, num_tokens: 0, reasoning_tokens: 0, request };
    let mut turns: Vec<Turn> = requests.into_iter().map(turn).collect();
    choices.filter_map(move |piece| {
        let piece = piece.map(|piece| turns[piece.index].divide(piece, &options));
        let says_something = |piece: &Piece| !piece.deltas.is_empty() || piece.says_more_than_text();
        std::future::ready(Some(piece).filter(|piece| piece.as_ref().map_or(true, says_something)))
    })
}

impl Turn {
    fn divide(&mut self, mut piece: Piece, options: &TurnOptions) -> Piece {
        let deltas = &mut piece.deltas;
        let mut is_cut = false;
        match &mut self.parser {
            Some(parser) => {
                parser.push(&piece.text, deltas);
                if let Some(finish) = &piece.finish {
                    is_cut = options.is_cut(finish, parser.is_in_call());
                    if is_cut { parser.cut(deltas) } else { parser.finish(deltas) }
                }
            }
            None if piece.text.is_empty() => {}
            None => deltas.push(ChatDelta::Content(piece.text.clone())),
        }
        let new_tokens = piece.usage.output_tokens.saturating_sub(self.num_tokens);
        self.num_tokens = piece.usage.output_tokens;
        // A token belongs to the reasoning if the turn still reasons behind it.
        if deltas.last().is_some_and(|delta| matches!(delta, ChatDelta::Reasoning(_))) {
            self.reasoning_tokens += new_tokens;
            self.request.iter().for_each(|request| request.add_reasoning_tokens(new_tokens));
        }
        piece.usage.reasoning_tokens = self.reasoning_tokens;
        self.has_tool_call |= deltas.iter().any(|delta| matches!(delta, ChatDelta::ToolCallStart { .. }));
        let has_calls = self.has_tool_call && !is_cut;
        if has_calls && options.ends_with_tool_calls && matches!(piece.finish, Some(Finish::Stop(_))) {
            piece.finish = Some(Finish::ToolCalls);
        }
        if !options.includes_reasoning {
            deltas.retain(|delta| !matches!(delta, ChatDelta::Reasoning(_)));
        }
        piece
    }
}

/// A whole turn.
#[derive(Debug, Clone, Default, PartialEq)]
pub(crate) struct Message {
    pub reasoning: String,
    pub content: String,
    pub tool_calls: Vec<ToolCall>,
}

/// A call of a tool.
#[derive(Debug, Clone, Default, PartialEq)]
pub(crate) struct ToolCall {
    pub id: String,
    pub name: String,
    /// A JSON object as text.
    pub arguments: String,
}

impl Message {
    /// The message that deltas lead to. Calls without an id get one that is made of `unique`.
    pub(crate) fn of(deltas: Vec<ChatDelta>, unique: &str, choice: usize) -> Self {
        let (mut message, mut calls) = (Self::default(), BTreeMap::<usize, ToolCall>::new());
        for delta in deltas {
            match delta {
                ChatDelta::Reasoning(text) => message.reasoning.push_str(&text),
                ChatDelta::Content(text) => message.content.push_str(&text),
                ChatDelta::ToolCallStart { index, id, name } => {
                    let call = calls.entry(index).or_default();
                    call.id = id.unwrap_or_else(|| call_id(unique, choice, index));
                    call.name = name;
                }
                ChatDelta::ToolCallArguments { index, json } => {
                    calls.entry(index).or_default().arguments.push_str(&json);
                }
            }
        }
        message.tool_calls = calls.into_values().collect();
        message
    }

    /// OpenAI's form.
    pub(crate) fn json(&self) -> Value {
        let content =
            if self.content.is_empty() && !self.tool_calls.is_empty() { Value::Null } else { json!(self.content) };
        let mut message = json!({"role": "assistant", "content": content, "refusal": null});
        if !self.reasoning.is_empty() {
            // Servers differ in the name; clients read one of them.
            message["reasoning"] = json!(self.reasoning);
            message["reasoning_content"] = json!(self.reasoning);
        }
        if !self.tool_calls.is_empty() {
            let call = |call: &ToolCall| json!({"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}});
            message["tool_calls"] = self.tool_calls.iter().map(call).collect();
        }
        message
    }
}

/// The id of a call that the model gave none.
pub(crate) fn call_id(unique: &str, choice: usize, index: usize) -> String {
    format!("call_{unique}{choice:02x}{index:02x}")
}

/// The `delta` objects of a chunk: several where a piece has deltas of different kinds.
pub(crate) fn delta_json(deltas: Vec<ChatDelta>, unique: &str, choice: usize) -> Value {
    let mut object = Map::new();
    let mut append = |name: &str, text: String| match object.get_mut(name) {
        Some(Value::String(known)) => known.push_str(&text),
        _ => drop(object.insert(name.to_owned(), Value::String(text))),
    };
    let mut calls: Vec<Value> = Vec::new();
    for delta in deltas {
        match delta {
            ChatDelta::Reasoning(text) => {
                append("reasoning", text.clone());
                append("reasoning_content", text);
            }
            ChatDelta::Content(text) => append("content", text),
            ChatDelta::ToolCallStart { index, id, name } => {
                let id = id.unwrap_or_else(|| call_id(unique, choice, index));
                let function = json!({"name": name, "arguments": ""});
                calls.push(json!({"index": index, "id": id, "type": "function", "function": function}));
            }
            ChatDelta::ToolCallArguments { index, json } => {
                match calls.iter_mut().find(|call| call["index"] == index) {
                    Some(call) => {
                        let known = call["function"]["arguments"].as_str().unwrap_or_default();
                        call["function"]["arguments"] = json!(format!("{known}{json}"));
                    }
                    None => calls.push(json!({"index": index, "function": {"arguments": json}})),
                }
            }
        }
    }
    if !calls.is_empty() {
        object.insert("tool_calls".to_owned(), calls.into());
    }
    Value::Object(object)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn deltas() -> Vec<ChatDelta> {
        let text = |text: &str| text.to_owned();
        vec![
            ChatDelta::Reasoning(text("so")),
            ChatDelta::Reasoning(text(" then")),
            ChatDelta::Content(text("Hello")),
            ChatDelta::ToolCallStart { index: 0, id: None, name: text("f") },
            ChatDelta::ToolCallArguments { index: 0, json: text("{\"a\":") },
            ChatDelta::ToolCallArguments { index: 0, json: text("1}") },
            ChatDelta::ToolCallStart { index: 1, id: Some(text("functions.g:1")), name: text("g") },
        ]
    }

    #[test]
    fn deltas_lead_to_a_message_and_chunks_join_to_it() {
        let message = Message::of(deltas(), "abc", 0).json();
        assert_eq!(message["reasoning"], "so then");
        assert_eq!(message["content"], "Hello");
        assert_eq!(message["tool_calls"][0]["id"], "call_abc0000");
        assert_eq!(message["tool_calls"][0]["function"], json!({"name": "f", "arguments": "{\"a\":1}"}));
        assert_eq!(message["tool_calls"][1]["id"], "functions.g:1");
        let whole = delta_json(deltas(), "abc", 0);
        assert_eq!(whole["reasoning_content"], "so then");
        assert_eq!(whole["tool_calls"][0]["function"], message["tool_calls"][0]["function"]);
        let only_arguments = delta_json(vec![ChatDelta::ToolCallArguments { index: 3, json: "{".to_owned() }], "x", 0);
        assert_eq!(only_arguments, json!({"tool_calls": [{"index": 3, "function": {"arguments": "{"}}]}));
    }

    #[test]
    fn a_stop_string_in_the_arguments_of_a_call_cuts_it() {
        let format = chat_format::ChatFormat::named("qwen3_coder").unwrap();
        let options = TurnOptions {
            includes_reasoning: true,
            ends_with_tool_calls: true,
            markers: format.special_tokens().to_vec(),
        };
        let parameters = json!({"type": "object", "properties": {"city": {"type": "string"}}});
        let tools = [chat_format::ToolSchema { name: "f".to_owned(), parameters, strict: true }];
        let stopped = |text: &str, stop: Option<&str>| {
            let parser = Some(format.parser(chat_format::TurnStart::Content, &tools));
            let mut turn = Turn { parser, has_tool_call: false, num_tokens: 0, reasoning_tokens: 0, request: None };
            let finish = Some(Finish::Stop(stop.map(|stop| StoppedAt::Text(stop.to_owned()))));
            let piece = turn.divide(Piece { text: text.to_owned(), finish, ..Piece::default() }, &options);
            (Message::of(piece.deltas, "x", 0).tool_calls[0].arguments.clone(), piece.finish.unwrap())
        };
        let text = "<tool_call><function=f><parameter=city>\nRo";
        let (arguments, finish) = stopped(text, Some("me"));
        assert!(serde_json::from_str::<Value>(&arguments).is_err(), "{arguments}");
        assert_eq!(finish, Finish::Stop(Some(StoppedAt::Text("me".to_owned()))));
        let whole = ("{\"city\": \"Ro\"}".to_owned(), Finish::ToolCalls);
        assert_eq!(stopped(&format!("{text}\n</parameter>"), Some("</function>")), whole);
        assert_eq!(stopped(&format!("{text}\n</parameter></function>"), Some("me")), whole);
        assert_eq!(stopped(text, None), whole);
    }

    #[test]
    fn a_message_with_calls_alone_has_no_content() {
        let call = ChatDelta::ToolCallStart { index: 0, id: None, name: "f".to_owned() };
        assert_eq!(Message::of(vec![call], "x", 0).json()["content"], Value::Null);
        assert_eq!(Message::default().json()["content"], "");
    }
}
