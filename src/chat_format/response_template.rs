//! The format that a checkpoint describes itself: `response_template` of transformers 5.

use serde_json::Value;

use crate::FormatError;
use crate::format::{Calls, ChatFormat, LIST, Named, Parameters, Reasoning, Syntax};
use crate::pattern::{Part, parse, texts};

impl ChatFormat {
    /// The format that `response_template` of a `tokenizer_config.json` describes.
    ///
    /// Understood are the fields `thinking`, `content` and `tool_calls` with literal markers, or with patterns of
    /// literal text, white space and named groups, and calls in JSON, as `xml-inline` and in the form of Gemma 4.
    /// Text outside all fields is content.
    ///
    /// # Errors
    /// When the template has anything else. The error names it.
    pub fn of_response_template(value: &Value) -> Result<ChatFormat, FormatError> {
        let known = ["version", "defaults", "fields", "start_anchor", "start_anchor_pattern"];
        only(value, "response_template", &known)?;
        if value.get("version").is_some_and(|version| version != 1) {
            return Err(error("version", "is not 1"));
        }
        let fields = value.get("fields").ok_or_else(|| error("fields", "is missing"))?;
        only(fields, "fields", &["thinking", "reasoning", "reasoning_content", "content", "tool_calls"])?;
        if is_harmony(fields) {
            let harmony = ChatFormat::named("harmony").map(|format| (*format).clone());
            return harmony.ok_or_else(|| error("fields", "is not known"));
        }
        let thinking = ["thinking", "reasoning", "reasoning_content"].iter().find_map(|name| fields.get(name));
        let reasoning = thinking.map(reasoning).transpose()?;
        let calls = fields.get("tool_calls").map(calls).transpose()?;
        let dropped = fields.get("content").map(content).transpose()?.unwrap_or_default();
        let turn = match value.get("start_anchor_pattern").and_then(Value::as_str) {
            Some(pattern) => pattern_texts("start_anchor_pattern", pattern)?.into_iter().take(1).collect(),
            None => literals(value, "start_anchor")?,
        };
        let format = ChatFormat {
            name: "response_template".into(),
            reasoning,
            calls,
            messages: false,
            // Templates end the prompt with or without the line break.
            turn: turn.iter().map(|turn| turn.trim_end().to_owned()).filter(|turn| !turn.is_empty()).collect(),
            dropped,
            special: Vec::new(),
        };
        Ok(format.with_markers())
    }
}

fn error(field: &str, reason: impl Into<String>) -> FormatError {
    FormatError::Template { field: field.to_owned(), reason: reason.into() }
}

/// Refuses keys that are not known.
fn only(value: &Value, field: &str, known: &[&str]) -> Result<(), FormatError> {
    let object = value.as_object().ok_or_else(|| error(field, "is not an object"))?;
    match object.keys().find(|key| !known.contains(&key.as_str())) {
        Some(key) => Err(error(field, format!("has `{key}`, expected one of {known:?}"))),
        None => Ok(()),
    }
}

fn only_field(value: &Value, field: &str) -> Result<(), FormatError> {
    let known = [
        "open",
        "open_pattern",
        "close",
        "close_pattern",
        "content",
        "content_args",
        "repeats",
        "join",
        "optional",
        "transform",
        "transform_each",
    ];
    only(value, field, &known)
}

/// A string or a list of strings; none if the key is missing.
fn literals(value: &Value, key: &str) -> Result<Vec<String>, FormatError> {
    let list = match value.get(key) {
        None => return Ok(Vec::new()),
        Some(Value::String(text)) => vec![text.clone()],
        Some(Value::Array(items)) => items.iter().filter_map(|item| item.as_str().map(str::to_owned)).collect(),
        Some(_) => Vec::new(),
    };
    // The end of the turn is no marker.
    let list: Vec<_> = list.into_iter().filter(|text| text != "eos").collect();
    match list.iter().any(String::is_empty) || list.is_empty() && value[key] != "eos" {
        true => Err(error(key, "is not a string or a list of strings")),
        false => Ok(list),
    }
}

fn pattern(field: &str, pattern: &str) -> Result<Vec<Part>, FormatError> {
    parse(pattern).map_err(|reason| error(field, format!("has {reason}, which is not understood here")))
}

fn pattern_texts(field: &str, text: &str) -> Result<Vec<String>, FormatError> {
    Ok(texts(&pattern(field, text)?))
}

/// The markers under `key`, or the texts of the pattern under `key_pattern`.
fn markers(value: &Value, key: &str) -> Result<Vec<String>, FormatError> {
    let name = format!("{key}_pattern");
    match value.get(&name).and_then(Value::as_str) {
        Some(text) => pattern_texts(&name, text),
        None => literals(value, key),
    }
}

/// The one marker under `key`, without the white space at its end.
fn marker(value: &Value, key: &str, field: &str) -> Result<String, FormatError> {
    match &markers(value, key)?[..] {
        [marker] => Ok(marker.trim_end().to_owned()),
        _ => Err(error(field, format!("needs one marker as `{key}`"))),
    }
}

fn is_harmony(fields: &Value) -> bool {
    let open = |field: &str, key: &str| fields.get(field).and_then(|field| field.get(key)).and_then(Value::as_str);
    ["thinking", "content"].iter().any(|field| {
        open(field, "open").is_some_and(|open| open.starts_with("<|channel|>") && open.ends_with("<|message|>"))
    })
}

fn reasoning(value: &Value) -> Result<Reasoning, FormatError> {
    only_field(value, "thinking")?;
    let close = marker(value, "close", "thinking")?;
    let start = match value.get("open_pattern").and_then(Value::as_str) {
        Some(text) => pattern("open_pattern", text)?.into_iter().find_map(|part| match part {
            Part::Start(text) => Some(text),
            _ => None,
        }),
        None => None,
    };
    let implied = start.is_some();
    let open = match start {
        Some(open) => open,
        None => marker(value, "open", "thinking")?,
    };
    Ok(Reasoning { open, close, implied, anywhere: false })
}

/// The markers around content, which are dropped.
fn content(value: &Value) -> Result<Vec<String>, FormatError> {
    only_field(value, "content")?;
    if value.get("content").is_some_and(|content| content != "text") || value.get("transform").is_some() {
        return Err(error("content", "is not plain text"));
    }
    let all = [markers(value, "open")?, markers(value, "close")?].concat();
    Ok(all.into_iter().map(|marker| marker.trim().to_owned()).filter(|marker| !marker.is_empty()).collect())
}

fn calls(value: &Value) -> Result<Calls, FormatError> {
    only_field(value, "tool_calls")?;
    let args = value.get("content_args").unwrap_or(&Value::Null);
    let close = marker(value, "close", "tool_calls")?;
    let open = match value.get("open_pattern").and_then(Value::as_str) {
        Some(text) => pattern("open_pattern", text)?,
        None => vec![Part::Text(marker(value, "open", "tool_calls")?)],
    };
    let split = open.iter().position(|part| *part == Part::Group("name".into()));
    let before = texts(&open[..split.unwrap_or(open.len())]);
    let behind = split.map(|at| texts(&open[at + 1..])).unwrap_or_default();
    let first = before.first().cloned().ok_or_else(|| error("tool_calls", "has no literal marker"))?;
    let loose = args.get("string_delims").and_then(|delims| delims.get(0)).and_then(|pair| pair.get(0)?.as_str());
    let (open, syntax) = match (value.get("content").and_then(Value::as_str), split, loose) {
        (Some("json"), Some(_), Some(quote)) => {
            let open = first.strip_suffix("call:").ok_or_else(|| error("open_pattern", "does not end with `call:`"))?;
            (open.to_owned(), Syntax::Loose { quote: quote.to_owned() })
        }
        (Some("json"), Some(_), None) => {
            let prefix = before[1..].concat();
            (first, Syntax::Named(Named { prefix, separator: behind.concat(), ..Named::default() }))
        }
        (Some("json"), None, None) => (first, object(value)?),
        (Some("xml-inline"), Some(_), _) => (first, parameters(args, &before[1..], &behind)?),
        _ => return Err(error("tool_calls", "has a form of content that is not understood here")),
    };
    if matches!(&syntax, Syntax::Named(named) if named.separator.is_empty()) {
        return Err(error("open_pattern", "has nothing between the name and the arguments"));
    }
    Ok(Calls {
        wrap: None,
        open: vec![open],
        bare: None,
        close: Some(close),
        suffix: None,
        separators: String::new(),
        end_reasoning: false,
        syntax,
    })
}

/// Calls in JSON, whose keys the transformation names.
fn object(value: &Value) -> Result<Syntax, FormatError> {
    let list = value.get("transform_each") == Some(&Value::Bool(true));
    let function = value.get("transform").and_then(|transform| transform.get("function"));
    let key = |name: &str| match function {
        None => Ok(name.to_owned()),
        Some(Value::String(text)) if text == "{content}" => Ok(name.to_owned()),
        Some(function) => {
            let text = function.get(name).and_then(Value::as_str).unwrap_or_default();
            let key = text.strip_prefix('{').and_then(|text| text.strip_suffix('}')).unwrap_or_default();
            let key = key.strip_prefix("content.").unwrap_or(key);
            match !key.is_empty() && key.chars().all(|c| c.is_alphanumeric() || c == '_') {
                true => Ok(key.to_owned()),
                false => Err(error("transform", format!("does not take `{name}` from a key of the call"))),
            }
        }
    };
    Ok(Syntax::Object { name: key("name")?, arguments: key("arguments")?, id: None, list: list.then_some(LIST) })
}

fn parameters(args: &Value, before: &[String], behind: &[String]) -> Result<Syntax, FormatError> {
    let field = "tag_pattern";
    let tag = args.get(field).and_then(Value::as_str).ok_or_else(|| error(field, "is missing"))?;
    let parts = pattern(field, tag)?;
    let at = |name: &str| parts.iter().position(|part| *part == Part::Group(name.into()));
    let (Some(key), Some(value)) = (at("key"), at("value")) else {
        return Err(error(field, "has no groups `key` and `value`"));
    };
    if key > value {
        return Err(error(field, "has the value before the key"));
    }
    let (open, middle, close) =
        (texts(&parts[..key]).concat(), texts(&parts[key + 1..value]), texts(&parts[value + 1..]).concat());
    let key_end = middle.first().cloned().unwrap_or_default();
    if open.is_empty() || key_end.is_empty() || close.is_empty() {
        return Err(error(field, "has no markers around the key and the value"));
    }
    let name = (before.concat(), behind.concat());
    // `<function=` is closed by `</function>`, of which the template says nothing.
    let end = name.0.strip_prefix('<').and_then(|name| name.strip_suffix('='));
    let end = end.map(|name| format!("</{name}>")).unwrap_or_default();
    let lines = parts[value - 1] == Part::Space && middle.len() == 1;
    Ok(Syntax::Parameters(Parameters { name, key: (open, key_end), value: (middle[1..].concat(), close), lines, end }))
}
