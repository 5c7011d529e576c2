//! Single cases: where turns begin, calls that are not as they should be, and formats that checkpoints describe.

mod support;

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use chat_format::{ChatDelta, ChatFormat, Choice, FormatError, ToolSchema, TurnStart};
use serde_json::{Value, json};
use support::{Parsed, joined, tools};

fn parse_with(format: &ChatFormat, start: TurnStart, tools: &[ToolSchema], text: &str) -> Parsed {
    let (mut parser, mut out) = (format.parser(start, tools), Vec::new());
    parser.push(text, &mut out);
    parser.finish(&mut out);
    Parsed::of(&joined(&out))
}

fn parse(family: &str, text: &str) -> Parsed {
    parse_with(&ChatFormat::named(family).unwrap(), TurnStart::Fresh, &tools(false), text)
}

fn calls(parsed: &Parsed) -> Vec<(&str, &str)> {
    parsed.calls.iter().map(|(_, name, text)| (name.as_str(), text.as_str())).collect()
}

#[test]
fn a_call_that_is_none_is_content_as_it_stands() {
    for text in [
        "<tool_call>\n{\"name\": \"unknown\", \"arguments\": {}}\n</tool_call> and more",
        "<tool_call> is how I call tools",
        "<tool_call>{\"arguments\": {}}</tool_call>",
        "<tool_call>\n{\"arguments\": {\"a\": \"<tool_call>",
        "<tool_call>",
        "<tool_cal",
        "</tool_call>",
    ] {
        let parsed = parse("hermes", text);
        assert_eq!((parsed.content.as_str(), calls(&parsed)), (text, vec![]));
    }
    let without_tools = "<tool_call>\n{\"name\": \"now\", \"arguments\": {}}\n</tool_call>";
    let format = ChatFormat::named("hermes").unwrap();
    assert_eq!(parse_with(&format, TurnStart::Fresh, &[], without_tools).content, without_tools);
}

#[test]
fn a_call_that_breaks_is_closed_and_the_rest_is_content() {
    for (text, arguments, content) in [
        ("<tool_call>{\"name\": \"now\", \"arguments\": {\"a\": [1, \"x", "{\"a\": [1, \"x\"]}", ""),
        ("<tool_call>{\"name\": \"now\", \"argum", "{}", ""),
        ("<tool_call>{\"name\": \"now\", \"arguments\": {\"a\": 1</tool_call> so", "{\"a\": 1}", " so"),
        ("<tool_call>{\"name\": \"now\", \"arguments\": {\"a\": foo}}\n</tool_call>", "{\"a\": null}", "foo}}"),
        ("<tool_call>{\"name\": \"now\", \"arguments\": [1]}\n</tool_call>", "{}", "[1]}"),
        ("<tool_call>{\"name\": \"now\"}</tool_call>", "{}", ""),
        ("<tool_call>{\"parameters\": \"{\\\"a\\\": 1}\", \"name\": \"now\"}</tool_call>", "{\"a\": 1}", ""),
        ("<tool_call>[{\"name\": \"now\", \"id\": 1, \"arguments\": null}]</tool_call>", "{}", ""),
    ] {
        let parsed = parse("hermes", text);
        assert_eq!((calls(&parsed), parsed.content.as_str()), (vec![("now", arguments)], content), "{text}");
    }
}

#[test]
fn a_call_behind_a_text_that_is_none_is_still_found() {
    let text = "<tool_call><tool_call>{\"x<tool_call>\n{\"name\": \"now\", \"arguments\": {}}</tool_call>";
    let parsed = parse("hermes", text);
    assert_eq!((calls(&parsed), parsed.content.as_str()), (vec![("now", "{}")], "<tool_call><tool_call>{\"x"));
}

#[test]
fn arguments_stream_as_they_come() {
    let format = ChatFormat::named("hermes").unwrap();
    let (mut parser, mut out) = (format.parser(TurnStart::Content, &tools(false)), Vec::new());
    parser.push("<tool_call>\n{\"name\": \"now\"", &mut out);
    assert_eq!(out, [ChatDelta::ToolCallStart { index: 0, id: None, name: "now".into() }]);
    out.clear();
    parser.push(", \"arguments\": {\"a\": \"hel", &mut out);
    assert_eq!(out, [ChatDelta::ToolCallArguments { index: 0, json: "{\"a\": \"hel".into() }]);
    out.clear();
    parser.push("lo, </tool_call>\"", &mut out);
    assert_eq!(out, [ChatDelta::ToolCallArguments { index: 0, json: "lo, </tool_call>\"".into() }]);
}

#[test]
fn ids_that_the_model_gives_are_kept() {
    let text =
        "<|tool_calls_section_begin|><|tool_call_begin|>functions.now:7<|tool_call_argument_begin|>{}<|tool_call_end|>";
    assert_eq!(parse("kimi_k2", text).calls, [(Some("functions.now:7".into()), "now".into(), "{}".into())]);
    let text = "[TOOL_CALLS]now[CALL_ID]abc123def[ARGS]{}";
    assert_eq!(parse("mistral", text).calls, [(Some("abc123def".into()), "now".into(), "{}".into())]);
}

#[test]
fn the_prompt_tells_where_the_turn_begins() {
    for (family, tail, start) in [
        ("qwen3", "<think>\nold</think>x<|im_end|>\n<|im_start|>assistant\n", TurnStart::Fresh),
        ("qwen3", "<|im_start|>assistant\n<think>\n", TurnStart::Thinking),
        ("qwen3", "<|im_start|>assistant\n<think>\n\n</think>\n\n", TurnStart::Content),
        ("qwen3", "some text <think>", TurnStart::Thinking),
        ("hermes", "<|im_start|>assistant\n<think>\n", TurnStart::Content),
        ("deepseek_v31", "<｜User｜>hi<｜Assistant｜></think>", TurnStart::Content),
        ("deepseek_r1", "<｜User｜>hi<｜Assistant｜><think>\n", TurnStart::Thinking),
        ("gemma4", "<|turn>model\n<|channel>thought\n<channel|>", TurnStart::Content),
        ("harmony", "<|start|>assistant", TurnStart::Fresh),
        // Without a marker of the turn, those of reasoning count at the end of the prompt.
        ("hunyuan", "some text<|extra_0|><think>\n", TurnStart::Thinking),
        ("hunyuan", "some text<|extra_0|><think>\n\n</think>\n", TurnStart::Content),
        ("hy_v3", "some text <think>", TurnStart::Thinking),
        ("think", "some text <think>\n", TurnStart::Thinking),
    ] {
        assert_eq!(ChatFormat::named(family).unwrap().turn_start(tail), start, "{family} {tail}");
    }
    let format = ChatFormat::named("qwen3").unwrap();
    let parsed = parse_with(&format, TurnStart::Thinking, &tools(false), "so\n</think>\n\n  yes\n");
    assert_eq!((parsed.reasoning.as_str(), parsed.content.as_str()), ("so", "  yes\n"));
    assert_eq!(parse("deepseek_r1", "so</think>yes").reasoning, "so");
    assert_eq!(parse("qwen3", "the tag <think> opens it").content, "the tag <think> opens it");
}

#[test]
fn a_template_names_its_family_by_its_markers() {
    for (template, family) in [
        ("{{'<|im_start|>'}}<tool_call>{{ x }}</tool_call>", Some("hermes")),
        ("<think>{{ x }}</think><tool_call>", Some("qwen3")),
        ("<tool_call>\n<function={{ f }}>\n<parameter={{ p }}>", Some("qwen3_coder")),
        ("<tool_call>{{ f }}<arg_key>", Some("glm45")),
        ("<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>```json", Some("deepseek_v3")),
        ("<｜Assistant｜><think>\n<｜tool▁call▁begin｜>```json", Some("deepseek_r1")),
        ("<｜tool▁call▁begin｜>```json{{ x.split('<think>') }}", Some("deepseek_v3")),
        ("<｜tool▁call▁begin｜>{{ f }}<｜tool▁sep｜></think>", Some("deepseek_v31")),
        ("<|start|>assistant<|channel|>final<|message|>", Some("harmony")),
        ("[INST][TOOL_CALLS]", Some("mistral")),
        ("{{ message }}", None),
    ] {
        assert_eq!(
            ChatFormat::detect(template).map(|format| format.name().to_owned()).as_deref(),
            family,
            "{template}"
        );
    }
}

/// The table of `docs/openai.md` names the format of each published template of the goldens.
#[test]
fn every_published_template_is_detected_as_the_documentation_says() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let docs = fs::read_to_string(root.join("docs/openai.md")).unwrap();
    let table = docs.split("| templates | detected format |").nth(1).expect("the table of formats");
    let rows = table.lines().skip(2).take_while(|line| line.starts_with('|'));
    let mut documented = BTreeMap::new();
    for row in rows {
        let cells: Vec<&str> = row.split('|').map(str::trim).collect();
        let format = cells[2].split('`').nth(1).map(str::to_owned);
        documented.extend(cells[1].split('`').skip(1).step_by(2).map(|name| (name.to_owned(), format.clone())));
    }
    let mut detected = BTreeMap::new();
    for entry in fs::read_dir(root.join("tests/goldens/chat_templates")).unwrap() {
        let path = entry.unwrap().path();
        if path.extension().is_some_and(|extension| extension == "jinja") {
            let found = ChatFormat::detect(&fs::read_to_string(&path).unwrap()).map(|format| format.name().to_owned());
            detected.insert(path.file_stem().unwrap().to_str().unwrap().to_owned(), found);
        }
    }
    detected.retain(|name, _| !name.ends_with("_like") && !name.ends_with("_training"));
    assert_eq!(documented, detected);
}

#[test]
fn tools_are_refused_by_a_format_without_calls() {
    let format = ChatFormat::named("think").unwrap();
    let grammar = |tools: &[ToolSchema]| format.tool_grammar(tools, Choice::Auto, true, TurnStart::Content, &|_| false);
    assert!(matches!(grammar(&tools(false)), Err(FormatError::NoCalls { .. })));
    let parsed = parse_with(&format, TurnStart::Fresh, &[], "<think>so</think>yes");
    assert_eq!((parsed.reasoning.as_str(), parsed.content.as_str()), ("so", "yes"));
}

#[test]
fn what_a_grammar_cannot_hold_to_is_refused_by_name() {
    let format = ChatFormat::named("qwen3_coder").unwrap();
    let tool = |parameters: Value| [ToolSchema { name: "f".into(), parameters, strict: true }];
    let grammar =
        |tools: &[ToolSchema], choice| format.tool_grammar(tools, choice, true, TurnStart::Content, &|_| false);
    let short = tool(json!({"type": "object", "properties": {"a": {"type": "string", "maxLength": 3}}}));
    assert!(grammar(&short, Choice::Auto).unwrap_err().to_string().contains("`maxLength` of `a`"));
    let one_of = tool(json!({"type": "object", "oneOf": []}));
    assert!(grammar(&one_of, Choice::Required).unwrap_err().to_string().contains("`oneOf`"));
    let named = grammar(&short, Choice::Named("g".into())).unwrap_err();
    assert!(matches!(named, FormatError::UnknownTool { .. }), "{named}");
    let mut odd = short.clone();
    odd[0].name = "a\"b".into();
    assert!(matches!(grammar(&odd, Choice::Auto), Err(FormatError::Name { .. })));
    assert_eq!(grammar(&tools(false), Choice::Auto), Ok(None));
    assert_eq!(grammar(&[], Choice::Required), Ok(None));
}

#[test]
fn formats_that_checkpoints_describe_are_read() {
    let function = json!({"type": "function", "function": {"name": "{name}", "arguments": "{content}"}});
    let thinking = json!({"open": "<think>", "close": "</think>", "content": "text"});
    let weather = r#"{"city": "Köln", "days": 2}"#;
    let cases = [
        (
            json!({"defaults": {"role": "assistant"}, "start_anchor": "<|CHATBOT|>", "fields": {
                "content": {"open": "<|START_RESPONSE|>", "close": "<|END_RESPONSE|>", "content": "text"},
                "thinking": {"open": "<|START_THINKING|>", "close": "<|END_THINKING|>", "content": "text"},
                "tool_calls": {"open": "<|START_ACTION|>", "close": "<|END_ACTION|>", "content": "json", "transform_each": true,
                    "transform": {"function": {"name": "{tool_name}", "arguments": "{parameters}"}}},
            }}),
            format!("<|START_THINKING|>so<|END_THINKING|><|START_RESPONSE|>yes<|END_RESPONSE|><|START_ACTION|>[{{\"tool_name\": \"get_weather\", \"parameters\": {weather}}}]<|END_ACTION|>"),
        ),
        (
            json!({"version": 1, "start_anchor": "<|im_start|>assistant\n", "fields": {
                "thinking": thinking, "content": {"close": "<|im_end|>", "content": "text"},
                "tool_calls": {"open": "<tool_call>", "close": "</tool_call>", "repeats": true, "content": "json",
                    "transform": {"function": "{content}"}},
            }}),
            format!("<think>\nso\n</think>\nyes\n<tool_call>{{\"name\": \"get_weather\", \"arguments\": {weather}}}</tool_call><|im_end|>"),
        ),
        (
            json!({"fields": {"thinking": thinking, "content": {}, "tool_calls": {
                "open_pattern": r"<tool_call>\s*<function=(?P<name>\w+)>", "close": "</tool_call>", "repeats": true,
                "content": "xml-inline", "transform": function, "content_args": {
                    "tag_pattern": r"<parameter=(?P<key>\w+)>\s*(?P<value>.*?)\s*</parameter>",
                    "value_parser": {"name": "json", "args": {"allow_non_json": true}}}},
            }}),
            "<think>so</think>yes<tool_call>\n<function=get_weather>\n<parameter=city>\nKöln\n</parameter>\n<parameter=days>\n2\n</parameter>\n</function>\n</tool_call>".into(),
        ),
        (
            json!({"start_anchor": ["<|turn>model\n", "<tool_response|>"], "fields": {
                "thinking": {"open": "<|channel>thought\n", "close": "<channel|>", "content": "text"},
                "content": {"close": ["<turn|>", "<eos>"], "content": "text"},
                "tool_calls": {"open_pattern": r"<\|tool_call>call:(?P<name>\w+)", "close": "<tool_call|>", "repeats": true,
                    "content": "json", "transform": function,
                    "content_args": {"unquoted_keys": true, "string_delims": [["<|\"|>", "<|\"|>"]]}},
            }}),
            "<|channel>thought\nso<channel|>yes<|tool_call>call:get_weather{city:<|\"|>Köln<|\"|>,days:2}<tool_call|><turn|>".into(),
        ),
        (
            json!({"fields": {
                "thinking": {"open": "<|channel|>analysis<|message|>", "close": "<|end|>", "content": "text"},
                "content": {"open": "<|channel|>final<|message|>", "close": "<|end|>", "content": "text"},
                "tool_calls": {"open_pattern": r"<\|channel\|>commentary to=functions\.(?P<name>\w+).*?<\|message\|>",
                    "close": "<|call|>", "repeats": true, "content": "json", "transform": function},
            }}),
            format!("<|channel|>analysis<|message|>so<|end|><|start|>assistant<|channel|>final<|message|>yes<|end|><|start|>assistant<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>{weather}<|call|>"),
        ),
        (
            json!({"fields": {"thinking": {"open_pattern": r"(?:^|<think>\s*)", "close": "</think>", "content": "text"},
                "content": {"open": "<response>\n", "close_pattern": r"\n?</response>", "content": "text"},
                "tool_calls": {"open_pattern": r"<call>(?P<name>\w+)<sep>", "close": "</call>", "content": "json", "transform": function},
            }}),
            format!("so</think>\n<response>\nyes\n</response><call>get_weather<sep>{weather}</call>"),
        ),
    ];
    for (template, text) in cases {
        let format = ChatFormat::of_response_template(&template).unwrap();
        let parsed = parse_with(&format, TurnStart::Fresh, &tools(false), &text);
        let turn = parsed.turn();
        assert_eq!((turn.reasoning.as_str(), turn.content.as_str()), ("so", "yes"), "{text}");
        assert_eq!(turn.calls, [("get_weather".to_owned(), json!({"city": "Köln", "days": 2}))], "{text}");
        let grammar = format.tool_grammar(&tools(true), Choice::Required, true, TurnStart::Content, &|_| false);
        assert!(grammar.unwrap().unwrap().lark.contains("get_weather"));
    }
}

#[test]
fn a_response_template_that_is_not_understood_is_refused_by_name() {
    for (template, named) in [
        (json!([]), "response_template"),
        (json!({"fields": {}, "extra": 1}), "`extra`"),
        (json!({"version": 2, "fields": {}}), "version"),
        (json!({"fields": {"audio": {}}}), "`audio`"),
        (json!({"fields": {"thinking": {"open_pattern": "[ab]", "close": "x"}}}), "[ab]"),
        (json!({"fields": {"tool_calls": {"open": "<c>", "close": "</c>", "content": "kv-lines"}}}), "tool_calls"),
        (
            json!({"fields": {"tool_calls": {"open": "<c>", "close": "</c>", "content": "json", "transform": {"function": {"name": "x"}}}}}),
            "transform",
        ),
    ] {
        let error = ChatFormat::of_response_template(&template).unwrap_err().to_string();
        assert!(error.contains(named), "{error}");
    }
}

#[test]
fn a_turn_that_is_cut_in_the_end_of_a_call_leaves_no_part_of_the_marker() {
    let format = ChatFormat::named("hermes").unwrap();
    let whole = "<tool_call>\n{\"name\": \"get_weather\", \"arguments\": {\"city\": \"Rome\"}}\n</tool_call>";
    let end = whole.rfind("</tool_call>").unwrap();
    for cut in end..=whole.len() {
        let turn = parse_with(&format, TurnStart::Content, &tools(false), &whole[..cut]).turn();
        assert_eq!((turn.content.as_str(), turn.calls.len()), ("", 1), "{}", &whole[..cut]);
    }
}

#[test]
fn a_turn_that_is_cut_has_a_prefix_of_its_arguments_and_no_markers() {
    let format = ChatFormat::named("hermes").unwrap();
    let arguments = "{\"city\": \"Rome\", \"days\": 3}";
    let whole = format!("\n<tool_call>\n{{\"name\": \"get_weather\", \"arguments\": {arguments}}}\n</tool_call>");
    for cut in (0..whole.len()).filter(|&cut| whole.is_char_boundary(cut)) {
        let (mut parser, mut out) = (format.parser(TurnStart::Content, &tools(false)), Vec::new());
        parser.push(&whole[..cut], &mut out);
        parser.cut(&mut out);
        let mut found = String::new();
        for delta in out {
            match delta {
                ChatDelta::ToolCallArguments { json, .. } => found.push_str(&json),
                ChatDelta::ToolCallStart { .. } => {}
                other => panic!("{other:?} of {:?}", &whole[..cut]),
            }
        }
        assert!(arguments.starts_with(&found), "{found:?} of {:?}", &whole[..cut]);
    }
}
