//! Random turns, and writers of them that know nothing of the parser.
#![allow(dead_code, missing_docs)]

pub mod random_tools;
pub mod turns;
pub mod walks;
pub mod write;

use chat_format::{ChatDelta, ChatFormat, ToolSchema};
use serde_json::{Map, Value, json};

/// The names of the families that have tool calls.
pub fn with_calls() -> impl Iterator<Item = &'static str> {
    ChatFormat::names().filter(|name| ChatFormat::named(name).unwrap().has_calls())
}

/// A small generator of random numbers (SplitMix64).
pub struct Rng(pub u64);

/// Whether the writers use the forms that a parser accepts and a grammar does not write.
#[derive(Clone, Copy, PartialEq)]
pub enum Forms {
    All,
    Canonical,
}

impl Rng {
    pub fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    pub fn below(&mut self, n: usize) -> usize {
        (self.next() % n as u64) as usize
    }

    pub fn one_in(&mut self, n: usize) -> bool {
        self.below(n) == 0
    }

    pub fn pick<'a, T: ?Sized>(&mut self, list: &[&'a T]) -> &'a T {
        list[self.below(list.len())]
    }
}

/// A turn as it was meant, or as it was parsed.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Turn {
    pub reasoning: String,
    pub content: String,
    pub calls: Vec<(String, Value)>,
}

/// A turn as it was parsed, with the texts of the arguments.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Parsed {
    pub reasoning: String,
    pub content: String,
    pub calls: Vec<(Option<String>, String, String)>,
}

impl Parsed {
    pub fn of(deltas: &[ChatDelta]) -> Parsed {
        let mut parsed = Parsed::default();
        for delta in deltas {
            match delta {
                ChatDelta::Reasoning(text) => parsed.reasoning.push_str(text),
                ChatDelta::Content(text) => parsed.content.push_str(text),
                ChatDelta::ToolCallStart { index, id, name } => {
                    assert_eq!(*index, parsed.calls.len());
                    parsed.calls.push((id.clone(), name.clone(), String::new()));
                }
                ChatDelta::ToolCallArguments { index, json } => {
                    assert_eq!(*index + 1, parsed.calls.len(), "arguments belong to the call that began last");
                    assert!(!json.is_empty());
                    parsed.calls[*index].2.push_str(json);
                }
            }
        }
        parsed
    }

    /// Whether an argument is a number beyond a double, which serde_json does not read.
    pub fn is_out_of_range(&self) -> bool {
        let error = |text: &str| serde_json::from_str::<Value>(text).err().map(|error| error.to_string());
        self.calls.iter().any(|(_, _, text)| error(text).is_some_and(|error| error.contains("out of range")))
    }

    pub fn turn(&self) -> Turn {
        let value = |text: &str| serde_json::from_str(text).unwrap_or_else(|e| panic!("`{text}` is not JSON: {e}"));
        let calls = self.calls.iter().map(|(_, name, text)| (name.clone(), value(text))).collect();
        Turn { reasoning: self.reasoning.clone(), content: self.content.clone(), calls }
    }
}

/// Neighbours of one kind joined.
pub fn joined(deltas: &[ChatDelta]) -> Vec<ChatDelta> {
    let mut out: Vec<ChatDelta> = Vec::new();
    for delta in deltas {
        match (out.last_mut(), delta) {
            (Some(ChatDelta::Reasoning(last)), ChatDelta::Reasoning(text))
            | (Some(ChatDelta::Content(last)), ChatDelta::Content(text)) => last.push_str(text),
            (Some(ChatDelta::ToolCallArguments { json: last, .. }), ChatDelta::ToolCallArguments { json, .. }) => {
                last.push_str(json);
            }
            _ => out.push(delta.clone()),
        }
    }
    out
}

pub fn tools(strict: bool) -> Vec<ToolSchema> {
    let weather = json!({
        "type": "object",
        "properties": {
            "city": {"type": "string"},
            "days": {"type": "integer"},
            "exact": {"type": "boolean"},
            "ratio": {"type": "number"},
            "tags": {"type": "array", "items": {"type": "string"}},
            "where": {"type": "object", "properties": {"x": {"type": "number"}, "name": {"type": "string"}},
                "required": ["x"], "additionalProperties": false},
            "unit": {"type": "string", "enum": ["celsius", "kelvin"]},
        },
        "required": ["city"], "additionalProperties": false,
    });
    let write = json!({
        "type": "object",
        "properties": {"path": {"type": "string"}, "text": {"type": "string"}, "mode": {"type": ["integer", "null"]}},
        "required": ["path", "text"], "additionalProperties": false,
    });
    let now = json!({"type": "object", "properties": {}, "additionalProperties": false});
    [("get_weather", weather), ("fs.write-file", write), ("now", now)]
        .map(|(name, parameters)| ToolSchema { name: name.into(), parameters, strict })
        .to_vec()
}

/// Texts full of what looks like a marker.
pub fn text(rng: &mut Rng, max: usize) -> String {
    let pieces = [
        "a",
        "Hello",
        " ",
        "\n",
        "\t",
        "é",
        "日本",
        "😀",
        "<",
        ">",
        "</",
        "<think",
        "</think",
        "<tool_call",
        "</tool_call",
        "{",
        "}",
        "[",
        "]",
        "\"",
        "'",
        "\\",
        "\\n",
        "\\u12",
        "```",
        "<|",
        "|>",
        "<｜tool",
        "[TOOL",
        "call:",
        "=",
        ",",
        ":",
        "{\"name\": \"now\"}",
        "0",
        "true",
        "<function",
        "</parameter",
        "<arg_value",
        "<|channel",
        "now()",
        "; ",
        "&amp;",
        "\u{7f}",
        "\u{2028}",
        "functions.now:0",
        "<start",
        "<escape",
    ];
    (0..rng.below(max)).map(|_| rng.pick(&pieces)).collect()
}

/// A value of the schema.
pub fn value(schema: &Value, rng: &mut Rng) -> Value {
    if let Some(values) = schema["enum"].as_array() {
        return values[rng.below(values.len())].clone();
    }
    let kind = match &schema["type"] {
        Value::Array(kinds) => kinds[rng.below(kinds.len())].as_str().unwrap(),
        kind => kind.as_str().unwrap(),
    };
    match kind {
        "string" => text(rng, 12).into(),
        "integer" => ((rng.next() as i64) >> rng.below(64)).into(),
        "number" => json!(((rng.next() as i64) >> (11 + rng.below(50))) as f64 / 8.0),
        "boolean" => rng.one_in(2).into(),
        "null" => Value::Null,
        "array" => (0..rng.below(4)).map(|_| value(&schema["items"], rng)).collect(),
        "object" => {
            let mut object = Map::new();
            for (key, schema_of) in schema["properties"].as_object().unwrap() {
                let required = schema["required"].as_array().is_some_and(|list| list.contains(&json!(key)));
                if required || rng.one_in(2) {
                    object.insert(key.clone(), value(schema_of, rng));
                }
            }
            Value::Object(object)
        }
        kind => panic!("{kind}"),
    }
}

/// `text` cut at random places.
pub fn chunks<'a>(text: &'a str, rng: &mut Rng) -> Vec<&'a str> {
    let size = 1 + rng.below(20);
    let (mut list, mut rest) = (Vec::new(), text);
    while !rest.is_empty() {
        let end = rest.char_indices().map(|(at, c)| at + c.len_utf8()).nth(rng.below(size)).unwrap_or(rest.len());
        let (chunk, after) = rest.split_at(end);
        list.push(chunk);
        rest = after;
    }
    list
}
