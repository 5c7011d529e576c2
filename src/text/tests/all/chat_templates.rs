//! Chat templates give the prompts of transformers, byte for byte.
//!
//! `scripts/goldens/make_chat_template_goldens.py` writes cases and prompts. `TRIREME_CHAT_TEMPLATES` names another folder to compare.

use std::fs;
use std::path::{Path, PathBuf};

use jiff::ZonedDateTime;
use serde_json::{Map, Value, json};
use text::{ChatRequest, ChatTemplate};

/// Days as the templates write the day of the goldens, and the formats that give today's.
const DAYS: [(&str, &str); 3] =
    [("1987-06-15", "%Y-%m-%d"), ("15 Jun 1987", "%d %b %Y"), ("June 15, 1987", "%B %d, %Y")];

fn folder() -> PathBuf {
    let own = || Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/goldens/chat_templates");
    std::env::var_os("TRIREME_CHAT_TEMPLATES").map_or_else(own, PathBuf::from)
}

fn read(file: &str) -> Value {
    serde_json::from_slice(&fs::read(folder().join(file)).unwrap()).unwrap()
}

/// The templates of a checkpoint whose only template is `source`.
fn template(source: &str) -> Result<ChatTemplate, String> {
    let dir = tempfile::tempdir().unwrap();
    fs::write(dir.path().join("chat_template.jinja"), source).unwrap();
    let tokens = json!({"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>", "unk_token": "<unk>"});
    fs::write(dir.path().join("tokenizer_config.json"), tokens.to_string()).unwrap();
    ChatTemplate::from_dir(dir.path()).map(Option::unwrap).map_err(|error| error.to_string())
}

fn render(template: &ChatTemplate, case: &Map<String, Value>) -> Result<String, String> {
    let list = |key: &str| case.get(key).and_then(Value::as_array).map(Vec::as_slice);
    let flag = |key: &str, default| case.get(key).and_then(Value::as_bool).unwrap_or(default);
    let continue_final_message = flag("continue_final_message", false);
    let request = ChatRequest {
        messages: list("messages").unwrap(),
        tools: list("tools").unwrap_or_default(),
        documents: list("documents"),
        variables: case.get("variables").and_then(Value::as_object),
        template: None,
        add_generation_prompt: flag("add_generation_prompt", !continue_final_message),
        continue_final_message,
    };
    template.render(&request).map_err(|error| error.to_string())
}

/// A case with the arguments of its tool calls as text, as clients send them.
fn with_text_arguments(case: &Map<String, Value>) -> Map<String, Value> {
    let mut case = case.clone();
    for message in case["messages"].as_array_mut().unwrap() {
        for call in message.get_mut("tool_calls").and_then(Value::as_array_mut).into_iter().flatten() {
            let arguments = &mut call["function"]["arguments"];
            // Python's spacing, because templates may print the text itself.
            let text = arguments.to_string().replace("\":", "\": ").replace(",\"", ", \"");
            *arguments = Value::String(text);
        }
    }
    case
}

/// What differs between a prompt and the golden; `None` if nothing does. An error must be one where the golden is one, with the
/// words of the template's `raise_exception`.
fn difference(expected: &Value, actual: &Result<String, String>) -> Option<String> {
    match (expected, actual) {
        (Value::String(expected), Ok(actual)) => {
            let now = ZonedDateTime::now();
            let expected = DAYS
                .iter()
                .fold(expected.clone(), |text, (day, format)| text.replace(day, &now.strftime(*format).to_string()));
            (expected != *actual)
                .then(|| format!("expected {}\n  actual   {}", around(&expected, actual), around(actual, &expected)))
        }
        (Value::String(_), Err(error)) => Some(format!("unexpected error: {error}")),
        (error, Err(words)) => {
            let expected = error["error"].as_str().unwrap();
            (!words.contains(expected)).then(|| format!("expected the error {expected:?}\n  error  {words}"))
        }
        (error, Ok(actual)) => Some(format!("expected the error {error}\n  actual   {}", around(actual, ""))),
    }
}

/// A text around the first place where it differs from another.
fn around(text: &str, other: &str) -> String {
    let same = text.chars().zip(other.chars()).take_while(|(one, two)| one == two).count();
    format!("…{:?}…", text.chars().skip(same.saturating_sub(40)).take(120).collect::<String>())
}

#[test]
fn prompts_are_those_of_transformers() {
    let (cases, prompts) = (read("cases.json"), read("prompts.json"));
    let mut differences = Vec::new();
    let mut num_compared = 0;
    for (name, prompts) in prompts.as_object().unwrap() {
        let template = template(&fs::read_to_string(folder().join(format!("{name}.jinja"))).unwrap()).unwrap();
        for (case_name, case) in cases.as_object().unwrap() {
            let case = case.as_object().unwrap();
            let Some(prompt) = prompts.get(case_name) else { continue };
            for (form, case) in [("objects", case), ("text", &with_text_arguments(case))] {
                num_compared += 1;
                let difference = difference(prompt, &render(&template, case));
                differences
                    .extend(difference.map(|words| format!("{name} × {case_name}, arguments as {form}\n  {words}")));
            }
        }
    }
    println!("{num_compared} prompts of {} templates compared", prompts.as_object().unwrap().len());
    assert!(differences.is_empty(), "{} differ:\n{}", differences.len(), differences.join("\n"));
}

#[test]
fn jinja_is_pythons() {
    let probes = read("probes.json");
    let mut differences = Vec::new();
    for probe in probes["probes"].as_array().unwrap() {
        let source = probe[0].as_str().unwrap();
        let request = ChatRequest { variables: probes["context"].as_object(), ..ChatRequest::default() };
        let rendered = |template: ChatTemplate| template.render(&request).map_err(|error| error.to_string());
        let actual = template(source).and_then(rendered);
        let expected = match &probe[1] {
            Value::Object(_) => json!({"error": ""}),
            text => text.clone(),
        };
        if let Some(words) = difference(&expected, &actual) {
            differences.push(format!(
                "{source}\n  {words} {}",
                if probe[1].is_object() { probe[1].to_string() } else { String::new() }
            ));
        }
    }
    assert!(differences.is_empty(), "{} differ:\n{}", differences.len(), differences.join("\n"));
}

/// The scheduler finds the ends of messages by this token (docs/scheduling.md, recurrent states).
#[test]
fn a_token_that_ends_generation_is_behind_tools_and_system_prompt_in_templates_of_models_with_recurrent_layers() {
    let (cases, prompts) = (read("cases.json"), read("prompts.json"));
    let templates = [
        ("qwen3_instruct_2507", "<|im_end|>"),
        ("qwen3_5_think", "<|im_end|>"),
        ("qwen3_6", "<|im_end|>"),
        ("granite4_0", "<|end_of_text|>"),
        ("lfm2", "<|im_end|>"),
        ("nemotron3_nano", "<|im_end|>"),
        // That of Kimi Linear writes tools and system prompt in the same way.
        ("kimi_k2", "<|im_end|>"),
    ];
    for (template, end) in templates {
        for case in ["system", "tools", "parallel_calls_answered"] {
            let (messages, prompt) = (&cases[case]["messages"], prompts[template][case].as_str().unwrap());
            let [system, user] = [0, 1].map(|index| messages[index]["content"].as_str().unwrap().trim());
            let user = prompt.rfind(user).unwrap();
            let first = prompt.match_indices(end).take(2).filter(|&(at, _)| at < user).last();
            let first = &prompt[..first.unwrap_or_else(|| panic!("{template}, {case}")).0];
            assert!(first.contains(system), "{template}, {case}: {first}");
            if case != "system" {
                let tools = cases[case]["tools"].as_array().unwrap();
                let has = |tool: &Value| first.contains(tool["function"]["name"].as_str().unwrap());
                assert!(tools.iter().all(has), "{template}, {case}: {first}");
            }
            // Each message has an end, but for the one that is to be generated.
            assert!(prompt.matches(end).count() >= 2, "{template}, {case}");
        }
    }
}
