//! The turns of each family, written as its chat template writes them.

use super::{Forms, Rng, Turn, text, tools, value};
use serde_json::Value;

/// What the texts of a family cannot contain, since it would be a marker.
fn markers(family: &str) -> &'static [&'static str] {
    match family {
        "hermes" => &["<tool_call>"],
        "qwen3" | "glm45" => &["<tool_call>", "<think>", "</think>"],
        "qwen3_coder" => &["<tool_call>", "<think>", "</think>", "<function="],
        "llama3_json" => &["<|python_tag|>"],
        "llama3_pythonic" => &["<|python_start|>"],
        "mistral" => &["[TOOL_CALLS]", "[THINK]", "[/THINK]"],
        "deepseek_v3" | "deepseek_r1" | "deepseek_v31" => {
            &["<think>", "</think>", "<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>"]
        }
        "harmony" => &["<|start|>", "<|channel|>", "<|end|>", "<|call|>", "<|return|>", "<|message|>"],
        "gemma3" => &[],
        "gemma4" => &["<|channel>thought", "<channel|>", "<|tool_call>"],
        "phi4" => &["<think>", "</think>", "<|tool_call|>", "functools"],
        "kimi_k2" => &["<think>", "</think>", "<|tool_calls_section_begin|>", "<|tool_call_begin|>"],
        "granite" => &["<think>", "</think>", "<|tool_call|>"],
        "seed_oss" => &["<seed:tool_call>", "<seed:think>", "</seed:think>"],
        "minimax_m2" => &["<minimax:tool_call>", "<think>", "</think>"],
        "lfm2" => &["<|tool_call_start|>", "<think>", "</think>"],
        "command_a" => {
            &["<|START_ACTION|>", "<|START_THINKING|>", "<|END_THINKING|>", "<|START_RESPONSE|>", "<|END_RESPONSE|>"]
        }
        "nemotron" => &["<TOOLCALL>", "<think>", "</think>"],
        "hy_v3" | "hunyuan" => &["<tool_calls>", "<think>", "</think>"],
        "functiongemma" => &["<start_function_call>"],
        "apertus" => &["<|tools_prefix|>", "<|inner_prefix|>", "<|inner_suffix|>"],
        "olmo3" => &["<function_calls>", "<think>", "</think>"],
        other => panic!("{other}"),
    }
}

pub fn thinks(family: &str) -> bool {
    !matches!(family, "hermes" | "llama3_json" | "llama3_pythonic" | "deepseek_v3" | "gemma3" | "functiongemma")
}

/// The character with which content cannot begin, since a call does.
fn bare(family: &str) -> Option<char> {
    match family {
        "llama3_json" => Some('{'),
        "llama3_pythonic" | "gemma3" => Some('['),
        _ => None,
    }
}

/// What a string in the arguments cannot contain.
fn end_of_string(family: &str) -> &'static str {
    match family {
        "qwen3_coder" | "seed_oss" | "minimax_m2" => "</parameter>",
        "glm45" | "hy_v3" => "</arg_value>",
        "functiongemma" => "<escape>",
        "gemma4" => "<|\"|>",
        _ => "\0",
    }
}

/// A random turn that can be written in the format of the family.
pub fn turn(family: &str, rng: &mut Rng) -> Turn {
    let plain = |rng: &mut Rng| {
        let mut plain = text(rng, 30);
        while let Some(marker) = markers(family).iter().find(|marker| plain.contains(**marker)) {
            plain = plain.replacen(marker, "", 1);
        }
        let plain = plain.trim().to_owned();
        if bare(family).is_some_and(|c| plain.starts_with(c)) { String::new() } else { plain }
    };
    let reasoning = if thinks(family) && !rng.one_in(3) { plain(rng) } else { String::new() };
    let content = if rng.one_in(3) { String::new() } else { plain(rng) };
    let tools = tools(false);
    let call = |rng: &mut Rng| {
        let tool = &tools[rng.below(tools.len())];
        let mut value = value(&tool.parameters, rng);
        while value.to_string().contains(Value::from(end_of_string(family)).to_string().trim_matches('"')) {
            value = super::value(&tool.parameters, rng);
        }
        (tool.name.clone(), value)
    };
    let mut calls: Vec<_> = (0..rng.below(4)).map(|_| call(rng)).collect();
    if family == "harmony" {
        calls.truncate(1);
    }
    // Where a call has no marker, content and calls exclude each other.
    let content = if bare(family).is_some() && !calls.is_empty() { String::new() } else { content };
    Turn { reasoning, content, calls }
}

/// The text of the turn, and the texts of the arguments where the parser must give them unchanged.
pub fn write(family: &str, turn: &Turn, rng: &mut Rng, forms: Forms) -> (String, Option<Vec<String>>) {
    let arguments: Vec<String> = turn.calls.iter().map(|(_, value)| json(value, rng, forms)).collect();
    let calls: Vec<(&str, &str)> =
        turn.calls.iter().zip(&arguments).map(|((name, _), text)| (name.as_str(), text.as_str())).collect();
    let mut out = String::new();
    match family {
        "hermes" | "qwen3" => {
            if thinks(family) {
                think(turn, rng, forms, &mut out);
            }
            out.push_str(&turn.content);
            for (name, text) in calls {
                let space = if out.is_empty() { "" } else { "\n" };
                out.push_str(&format!(
                    "{space}<tool_call>\n{{\"name\": \"{name}\", \"arguments\": {text}}}\n</tool_call>"
                ));
            }
        }
        "qwen3_coder" | "glm45" | "seed_oss" | "minimax_m2" => {
            match family {
                "seed_oss" if !turn.reasoning.is_empty() => {
                    out.push_str(&format!("<seed:think>{}</seed:think>", turn.reasoning));
                }
                "seed_oss" => {}
                _ => think(turn, rng, forms, &mut out),
            }
            out.push_str(&turn.content);
            if family == "minimax_m2" && !turn.calls.is_empty() {
                out.push_str("\n<minimax:tool_call>\n");
            }
            for (name, value) in &turn.calls {
                let space = if out.is_empty() { "" } else { "\n" };
                match family {
                    "glm45" => out.push_str(&glm45(name, value, rng, forms, space)),
                    "seed_oss" => out.push_str(&seed_oss(name, value, rng, forms, space)),
                    "minimax_m2" => out.push_str(&minimax_m2(name, value, rng, forms)),
                    _ => out.push_str(&qwen3_coder(name, value, rng, forms, space)),
                }
            }
            if family == "minimax_m2" && !turn.calls.is_empty() {
                out.push_str("</minimax:tool_call>");
            }
            return (out, None);
        }
        "hy_v3" => {
            think(turn, rng, forms, &mut out);
            out.push_str(&turn.content);
            let calls: String = turn.calls.iter().map(|(name, value)| hy_v3(name, value, rng, forms)).collect();
            if !calls.is_empty() {
                out.push_str(&format!("<tool_calls>\n{calls}</tool_calls>"));
            }
            return (out, None);
        }
        "lfm2" | "olmo3" => {
            think(turn, rng, forms, &mut out);
            out.push_str(&turn.content);
            let calls: Vec<_> = turn.calls.iter().map(|(name, value)| python_call(name, value, rng, forms)).collect();
            match family {
                _ if calls.is_empty() => {}
                "lfm2" => out.push_str(&format!("<|tool_call_start|>[{}]<|tool_call_end|>", calls.join(", "))),
                _ => out.push_str(&format!("<function_calls>{}</function_calls>", calls.join("\n"))),
            }
            return (out, None);
        }
        "apertus" => {
            if !turn.reasoning.is_empty() {
                out.push_str(&format!("<|inner_prefix|>{}<|inner_suffix|>", turn.reasoning));
            }
            out.push_str(&turn.content);
            let calls: Vec<_> = calls.iter().map(|(name, text)| format!("{{\"{name}\": {text}}}")).collect();
            if !calls.is_empty() {
                out.push_str(&format!("<|tools_prefix|>[{}]<|tools_suffix|>", calls.join(", ")));
            }
        }
        "command_a" => {
            if !turn.reasoning.is_empty() {
                out.push_str(&format!("<|START_THINKING|>{}<|END_THINKING|>", turn.reasoning));
            }
            match turn.content.is_empty() || !calls.is_empty() {
                true => out.push_str(&turn.content),
                false => out.push_str(&format!("<|START_RESPONSE|>{}<|END_RESPONSE|>", turn.content)),
            }
            let calls: Vec<_> = calls
                .iter()
                .enumerate()
                .map(|(index, (name, text))| {
                    format!("    {{\"tool_call_id\": \"{index}\", \"tool_name\": \"{name}\", \"parameters\": {text}}}")
                })
                .collect();
            if !calls.is_empty() {
                out.push_str(&format!("<|START_ACTION|>[\n{}\n]<|END_ACTION|>", calls.join(",\n")));
            }
        }
        "llama3_json" => {
            out.push_str(&turn.content);
            let calls: Vec<_> =
                calls.iter().map(|(name, text)| format!("{{\"name\": \"{name}\", \"parameters\": {text}}}")).collect();
            let tag = if varies(2, rng, forms) && !calls.is_empty() { "<|python_tag|>" } else { "" };
            out.push_str(&format!("{tag}{}", calls.join("; ")));
        }
        "llama3_pythonic" | "gemma3" => {
            out.push_str(&turn.content);
            let calls: Vec<_> = turn.calls.iter().map(|(name, value)| python_call(name, value, rng, forms)).collect();
            let text = if calls.is_empty() { String::new() } else { format!("[{}]", calls.join(", ")) };
            let wrap = varies(2, rng, forms) && family == "llama3_pythonic" && !text.is_empty();
            out.push_str(&if wrap { format!("<|python_start|>{text}<|python_end|>") } else { text });
            return (out, None);
        }
        "mistral" => {
            if !turn.reasoning.is_empty() {
                out.push_str(&format!("[THINK]{}[/THINK]", turn.reasoning));
            }
            out.push_str(&turn.content);
            if varies(3, rng, forms) && !calls.is_empty() {
                let calls: Vec<_> = calls
                    .iter()
                    .map(|(name, text)| format!("{{\"name\": \"{name}\", \"arguments\": {text}}}"))
                    .collect();
                out.push_str(&format!("[TOOL_CALLS] [{}]", calls.join(", ")));
            } else {
                let id = if varies(2, rng, forms) { "[CALL_ID]abcdef123" } else { "" };
                calls.iter().for_each(|(name, text)| out.push_str(&format!("[TOOL_CALLS]{name}{id}[ARGS]{text}")));
            }
        }
        "deepseek_v3" | "deepseek_r1" | "deepseek_v31" | "kimi_k2" => {
            // A turn of R1 always has reasoning.
            if family == "deepseek_r1" && turn.reasoning.is_empty() {
                out.push_str("<think>\n\n</think>\n\n");
            } else if thinks(family) {
                think(turn, rng, forms, &mut out);
            }
            out.push_str(&turn.content);
            let calls: Vec<_> = calls
                .iter()
                .enumerate()
                .map(|(index, (name, text))| match family {
                    "kimi_k2" => format!(
                        "<|tool_call_begin|>functions.{name}:{index}<|tool_call_argument_begin|>{text}<|tool_call_end|>"
                    ),
                    "deepseek_v31" => format!("<｜tool▁call▁begin｜>{name}<｜tool▁sep｜>{text}<｜tool▁call▁end｜>"),
                    _ => format!(
                        "<｜tool▁call▁begin｜>function<｜tool▁sep｜>{name}\n```json\n{text}\n```<｜tool▁call▁end｜>"
                    ),
                })
                .collect();
            let (open, end) = match family {
                "kimi_k2" => ("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"),
                _ => ("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"),
            };
            if !calls.is_empty() {
                let space = if family == "deepseek_v31" || family == "kimi_k2" { "" } else { "\n" };
                out.push_str(&format!("{open}{}{end}", calls.join(space)));
            }
        }
        "harmony" => {
            let mut messages = Vec::new();
            if !turn.reasoning.is_empty() {
                messages.push(format!("<|channel|>analysis<|message|>{}<|end|>", turn.reasoning));
            }
            if !turn.content.is_empty() {
                let channel = if calls.is_empty() { "final" } else { "commentary" };
                messages.push(format!("<|channel|>{channel}<|message|>{}<|end|>", turn.content));
            }
            for (name, text) in calls {
                messages.push(format!(
                    "<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>{text}<|call|>"
                ));
            }
            out = messages.join("<|start|>assistant");
        }
        "gemma4" => {
            if !turn.reasoning.is_empty() {
                out.push_str(&format!("<|channel>thought\n{}\n<channel|>", turn.reasoning));
            }
            out.push_str(&turn.content);
            for (name, value) in &turn.calls {
                out.push_str(&format!("<|tool_call>call:{name}{}<tool_call|>", loose(value, "<|\"|>")));
            }
            return (out, None);
        }
        "functiongemma" => {
            out.push_str(&turn.content);
            for (name, value) in &turn.calls {
                let arguments = loose(value, "<escape>");
                out.push_str(&format!("<start_function_call>call:{name}{arguments}<end_function_call>"));
            }
            return (out, None);
        }
        "phi4" | "granite" | "nemotron" | "hunyuan" => {
            think(turn, rng, forms, &mut out);
            out.push_str(&turn.content);
            let calls: Vec<_> =
                calls.iter().map(|(name, text)| format!("{{\"name\": \"{name}\", \"arguments\": {text}}}")).collect();
            if !calls.is_empty() {
                let (open, end) = match family {
                    "phi4" => ("<|tool_call|>", "<|/tool_call|>"),
                    "nemotron" => ("<TOOLCALL>", "</TOOLCALL>"),
                    "hunyuan" => ("<tool_calls>", "</tool_calls>"),
                    _ => ("<|tool_call|>", ""),
                };
                out.push_str(&format!("{open}[{}]{end}", calls.join(", ")));
            }
        }
        other => panic!("{other}"),
    }
    (out, Some(arguments))
}

fn varies(n: usize, rng: &mut Rng, forms: Forms) -> bool {
    forms == Forms::All && rng.one_in(n)
}

fn think(turn: &Turn, rng: &mut Rng, forms: Forms, out: &mut String) {
    if !turn.reasoning.is_empty() || varies(4, rng, forms) && turn.content.is_empty() {
        out.push_str(&format!("<think>\n{}\n</think>\n\n", turn.reasoning));
    }
}

/// JSON as Python writes it, in ASCII or not, or as serde_json does.
pub fn json(value: &Value, rng: &mut Rng, forms: Forms) -> String {
    if varies(4, rng, forms) {
        return value.to_string();
    }
    let mut out = String::new();
    python_json(value, varies(2, rng, forms), &mut out);
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

fn plain(value: &Value, rng: &mut Rng, forms: Forms) -> String {
    match value {
        Value::String(text) => text.clone(),
        Value::Bool(value) if varies(2, rng, forms) => if *value { "True" } else { "False" }.to_owned(),
        Value::Null if varies(2, rng, forms) => "None".to_owned(),
        value => json(value, rng, forms),
    }
}

fn fields(value: &Value) -> impl Iterator<Item = (&String, &Value)> {
    value.as_object().unwrap().iter()
}

fn qwen3_coder(name: &str, value: &Value, rng: &mut Rng, forms: Forms, space: &str) -> String {
    let parameters: String = fields(value)
        .map(|(key, value)| format!("<parameter={key}>\n{}\n</parameter>\n", plain(value, rng, forms)))
        .collect();
    format!("{space}<tool_call>\n<function={name}>\n{parameters}</function>\n</tool_call>")
}

fn seed_oss(name: &str, value: &Value, rng: &mut Rng, forms: Forms, space: &str) -> String {
    let parameters: String = fields(value)
        .map(|(key, value)| format!("<parameter={key}>{}</parameter>\n", plain(value, rng, forms)))
        .collect();
    format!("{space}<seed:tool_call>\n<function={name}>\n{parameters}</function>\n</seed:tool_call>")
}

fn minimax_m2(name: &str, value: &Value, rng: &mut Rng, forms: Forms) -> String {
    let parameters: String = fields(value)
        .map(|(key, value)| format!("<parameter name=\"{key}\">{}</parameter>\n", plain(value, rng, forms)))
        .collect();
    format!("<invoke name=\"{name}\">\n{parameters}</invoke>\n")
}

fn hy_v3(name: &str, value: &Value, rng: &mut Rng, forms: Forms) -> String {
    let parameters: String = fields(value)
        .map(|(key, value)| format!("<arg_key>{key}</arg_key>\n<arg_value>{}</arg_value>\n", plain(value, rng, forms)))
        .collect();
    format!("<tool_call>{name}<tool_sep>\n{parameters}</tool_call>\n")
}

fn glm45(name: &str, value: &Value, rng: &mut Rng, forms: Forms, space: &str) -> String {
    let parameters: String = fields(value)
        .map(|(key, value)| format!("<arg_key>{key}</arg_key>\n<arg_value>{}</arg_value>\n", plain(value, rng, forms)))
        .collect();
    format!("{space}<tool_call>{name}\n{parameters}</tool_call>")
}

fn python_call(name: &str, value: &Value, rng: &mut Rng, forms: Forms) -> String {
    let arguments: Vec<_> = fields(value).map(|(key, value)| format!("{key}={}", python(value, rng, forms))).collect();
    format!("{name}({})", arguments.join(", "))
}

fn python(value: &Value, rng: &mut Rng, forms: Forms) -> String {
    match value {
        Value::String(_) | Value::Array(_) | Value::Object(_) if forms == Forms::Canonical => json(value, rng, forms),
        Value::Null => "None".into(),
        Value::Bool(value) => if *value { "True" } else { "False" }.into(),
        Value::String(text) if varies(2, rng, forms) => Value::from(text.as_str()).to_string(),
        Value::String(text) => {
            let text = text.replace('\\', "\\\\").replace('\'', "\\'").replace('\n', "\\n").replace('\u{7f}', "\\x7f");
            format!("'{text}'")
        }
        Value::Array(items) => {
            let items: Vec<_> = items.iter().map(|item| python(item, rng, forms)).collect();
            format!("[{}]", items.join(", "))
        }
        Value::Object(fields) => {
            let fields: Vec<_> =
                fields.iter().map(|(key, value)| format!("'{key}': {}", python(value, rng, forms))).collect();
            format!("{{{}}}", fields.join(", "))
        }
        value => value.to_string(),
    }
}

fn loose(value: &Value, quote: &str) -> String {
    match value {
        Value::String(text) => format!("{quote}{text}{quote}"),
        Value::Array(items) => {
            format!("[{}]", items.iter().map(|item| loose(item, quote)).collect::<Vec<_>>().join(","))
        }
        Value::Object(fields) => {
            let fields: Vec<_> = fields.iter().map(|(key, value)| format!("{key}:{}", loose(value, quote))).collect();
            format!("{{{}}}", fields.join(","))
        }
        value => value.to_string(),
    }
}
