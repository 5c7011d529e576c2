//! The turns of each family, written as its chat template writes them.

use super::{Rng, Turn, text, tools, value};
use serde_json::Value;

/// What the texts of a family cannot contain, since it would be a marker.
fn markers(family: &str) -> &'static [&'static str] {
    match family {
        "hermes" => &["<tool_call>"],
        "qwen3" => &["<tool_call>", "<think>", "</think>"],
        other => panic!("{other}"),
    }
}

pub fn thinks(family: &str) -> bool {
    !matches!(family, "hermes")
}

/// A random turn that can be written in the format of the family.
pub fn turn(family: &str, rng: &mut Rng) -> Turn {
    let plain = |rng: &mut Rng| {
        let mut plain = text(rng, 30);
        while let Some(marker) = markers(family).iter().find(|marker| plain.contains(**marker)) {
            plain = plain.replacen(marker, "", 1);
        }
        plain.trim().to_owned()
    };
    let reasoning = if thinks(family) && !rng.one_in(3) { plain(rng) } else { String::new() };
    let content = if rng.one_in(3) { String::new() } else { plain(rng) };
    let tools = tools(false);
    let call = |rng: &mut Rng| {
        let tool = &tools[rng.below(tools.len())];
        (tool.name.clone(), value(&tool.parameters, rng))
    };
    let calls = (0..rng.below(4)).map(|_| call(rng)).collect();
    Turn { reasoning, content, calls }
}

/// The text of the turn, and the texts of the arguments where the parser must give them unchanged.
pub fn write(family: &str, turn: &Turn, rng: &mut Rng) -> (String, Option<Vec<String>>) {
    let arguments: Vec<String> = turn.calls.iter().map(|(_, value)| json(value, rng)).collect();
    let calls: Vec<(&str, &str)> =
        turn.calls.iter().zip(&arguments).map(|((name, _), text)| (name.as_str(), text.as_str())).collect();
    let mut out = String::new();
    match family {
        "hermes" | "qwen3" => {
            if thinks(family) {
                think(turn, rng, &mut out);
            }
            out.push_str(&turn.content);
            for (name, text) in calls {
                let space = if out.is_empty() { "" } else { "\n" };
                out.push_str(&format!(
                    "{space}<tool_call>\n{{\"name\": \"{name}\", \"arguments\": {text}}}\n</tool_call>"
                ));
            }
        }
        other => panic!("{other}"),
    }
    (out, Some(arguments))
}

fn think(turn: &Turn, rng: &mut Rng, out: &mut String) {
    if !turn.reasoning.is_empty() || rng.one_in(4) && turn.content.is_empty() {
        out.push_str(&format!("<think>\n{}\n</think>\n\n", turn.reasoning));
    }
}

/// JSON as Python writes it, in ASCII or not, or as serde_json does.
pub fn json(value: &Value, rng: &mut Rng) -> String {
    if rng.one_in(4) {
        return value.to_string();
    }
    let mut out = String::new();
    python_json(value, rng.one_in(2), &mut out);
    out
}

fn python_json(value: &Value, ascii: bool, out: &mut String) {
    match value {
        Value::Array(items) => {
            out.push('[');
            for (index, item) in items.iter().enumerate() {
                out.push_str(if index > 0 { ", " } else { "" });
                python_json(item, ascii, out);
            }
            out.push(']');
        }
        Value::Object(fields) => {
            out.push('{');
            for (index, (key, item)) in fields.iter().enumerate() {
                out.push_str(if index > 0 { ", " } else { "" });
                python_json(&Value::from(key.as_str()), ascii, out);
                out.push_str(": ");
                python_json(item, ascii, out);
            }
            out.push('}');
        }
        Value::String(text) if ascii => {
            for c in Value::from(text.as_str()).to_string().chars() {
                let mut units = [0; 2];
                match c.is_ascii() && c != '\u{7f}' {
                    true => out.push(c),
                    false => c.encode_utf16(&mut units).iter().for_each(|unit| out.push_str(&format!("\\u{unit:04x}"))),
                }
            }
        }
        value => out.push_str(&value.to_string()),
    }
}
