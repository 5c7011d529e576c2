//! The families of models.

use std::sync::{Arc, LazyLock};

use crate::format::{Calls, ChatFormat, LIST, Named, Parameters, Reasoning, Syntax};

static FAMILIES: LazyLock<Vec<Arc<ChatFormat>>> = LazyLock::new(|| all().into_iter().map(Arc::new).collect());

/// Texts of a template, all of which it must have, and the family that has them. The first match counts.
const DETECTED: &[(&[&str], &str)] = &[
    (&["<|channel|>", "<|message|>"], "harmony"),
    (&["<|tool_call>"], "gemma4"),
    (&["<|tool_calls_section_begin|>"], "kimi_k2"),
    (&["<tool_sep>", "<arg_key>"], "hy_v3"),
    (&["<arg_key>"], "glm45"),
    (&["<seed:tool_call>"], "seed_oss"),
    (&["<minimax:tool_call>"], "minimax_m2"),
    (&["<|tool_list_start|>"], "lfm2"),
    (&["<|START_ACTION|>"], "command_a"),
    (&["<TOOLCALL>"], "nemotron"),
    (&["<tool_calls>["], "hunyuan"),
    (&["<start_function_call>"], "functiongemma"),
    (&["<function_calls>"], "olmo3"),
    (&["<|tools_prefix|>"], "apertus"),
    (&["<tool_call>", "<function=", "<parameter="], "qwen3_coder"),
    (&["<｜tool▁call▁begin｜>", "```json", "<｜Assistant｜><think>"], "deepseek_r1"),
    (&["<｜tool▁call▁begin｜>", "```json"], "deepseek_v3"),
    (&["<｜tool▁call▁begin｜>"], "deepseek_v31"),
    (&["[TOOL_CALLS]"], "mistral"),
    (&["<|start_of_role|>", "<|tool_call|>"], "granite"),
    (&["<|tool_call|>"], "phi4"),
    (&["<|/tool_call|>"], "phi4"),
    (&["<|python_start|>"], "llama3_pythonic"),
    (&["<|python_tag|>"], "llama3_json"),
    (&["<|start_header_id|>", "\"parameters\""], "llama3_json"),
    (&["<tool_call>", "<think>"], "qwen3"),
    (&["<tool_call>", "</think>"], "qwen3"),
    (&["<tool_call>"], "hermes"),
    (&["<｜Assistant｜><think>"], "deepseek_r1"),
    (&["<start_of_turn>"], "gemma3"),
    // Reasoning between the usual markers, without tools or with calls of another form.
    (&["<think>"], "think"),
    (&["</think>"], "think"),
];

impl ChatFormat {
    /// The format of a family, by its name.
    pub fn named(name: &str) -> Option<Arc<ChatFormat>> {
        FAMILIES.iter().find(|format| format.name == name).cloned()
    }

    /// The names of all families.
    pub fn names() -> impl Iterator<Item = &'static str> {
        FAMILIES.iter().map(|format| format.name.as_str())
    }

    /// The family whose markers the text of a chat template has.
    pub fn detect(chat_template: &str) -> Option<Arc<ChatFormat>> {
        let (_, name) = DETECTED.iter().find(|(texts, _)| texts.iter().all(|text| chat_template.contains(text)))?;
        Self::named(name)
    }
}

fn think() -> Reasoning {
    reasoning("<think>", "</think>")
}

fn reasoning(open: &str, close: &str) -> Reasoning {
    Reasoning { open: open.into(), close: close.into(), implied: false, anywhere: false }
}

/// Calls between two markers.
fn marked(open: &str, close: &str, syntax: Syntax) -> Calls {
    Calls {
        wrap: None,
        open: vec![open.into()],
        bare: None,
        close: Some(close.to_owned()).filter(|close| !close.is_empty()),
        suffix: None,
        separators: String::new(),
        end_reasoning: false,
        syntax,
    }
}

/// Calls that begin with a character.
fn bare(first: char, separators: &str, syntax: Syntax) -> Calls {
    Calls { open: Vec::new(), bare: Some(first), separators: separators.into(), ..marked("", "", syntax) }
}

fn object(list: bool) -> Syntax {
    Syntax::Object { name: "name".into(), arguments: "arguments".into(), id: None, list: list.then_some(LIST) }
}

fn pair(open: &str, close: &str) -> (String, String) {
    (open.into(), close.into())
}

fn format(name: &str, turn: &str, reasoning: Option<Reasoning>, calls: Calls) -> ChatFormat {
    ChatFormat {
        name: name.into(),
        reasoning,
        calls: Some(calls),
        messages: false,
        turn: Some(turn.to_owned()).filter(|turn| !turn.is_empty()).into_iter().collect(),
        dropped: Vec::new(),
        special: Vec::new(),
    }
    .with_markers()
}

fn all() -> Vec<ChatFormat> {
    let chatml = "<|im_start|>assistant";
    let tag = || marked("<tool_call>", "</tool_call>", object(false));
    let llama = "<|start_header_id|>assistant<|end_header_id|>";
    let llama_json = Syntax::Object { name: "name".into(), arguments: "parameters".into(), id: None, list: None };
    let gemma4 = Calls {
        end_reasoning: true,
        ..marked("<|tool_call>", "<tool_call|>", Syntax::Loose { quote: "<|\"|>".into() })
    };
    let gemma4_reasoning = Reasoning { anywhere: true, ..reasoning("<|channel>thought", "<channel|>") };
    let mut phi4 = marked("<|tool_call|>", "<|/tool_call|>", object(true));
    phi4.open.push("functools".into());
    vec![
        format("hermes", chatml, None, tag()),
        format("qwen3", chatml, Some(think()), tag()),
        format("qwen3_coder", chatml, Some(think()), qwen3_coder()),
        format("llama3_json", llama, None, Calls { open: vec!["<|python_tag|>".into()], ..bare('{', ";", llama_json) }),
        format(
            "llama3_pythonic",
            llama,
            None,
            Calls {
                wrap: Some(pair("<|python_start|>", "<|python_end|>")),
                ..bare('[', "", Syntax::Python { lines: false })
            },
        ),
        format("mistral", "[/INST]", Some(Reasoning { anywhere: true, ..reasoning("[THINK]", "[/THINK]") }), mistral()),
        format("deepseek_v3", "<｜Assistant｜>", None, deepseek_v3()),
        format("deepseek_r1", "<｜Assistant｜>", Some(Reasoning { implied: true, ..think() }), deepseek_v3()),
        format("deepseek_v31", "<｜Assistant｜>", Some(think()), deepseek_v31()),
        harmony(),
        format("gemma3", "<start_of_turn>model", None, bare('[', "", Syntax::Python { lines: false })),
        format("gemma4", "<|turn>model", Some(gemma4_reasoning), gemma4),
        format("phi4", "<|assistant|>", Some(think()), phi4),
        format("glm45", "<|assistant|>", Some(think()), glm45()),
        format("kimi_k2", "<|im_assistant|>assistant<|im_middle|>", Some(think()), kimi_k2()),
        format(
            "granite",
            "<|start_of_role|>assistant<|end_of_role|>",
            Some(think()),
            marked("<|tool_call|>", "", object(true)),
        ),
        format(
            "seed_oss",
            "<seed:bos>assistant",
            Some(reasoning("<seed:think>", "</seed:think>")),
            marked("<seed:tool_call>", "</seed:tool_call>", Syntax::Parameters(functions(false))),
        ),
        format("minimax_m2", "]~b]ai", Some(think()), minimax_m2()),
        format(
            "lfm2",
            chatml,
            Some(think()),
            marked("<|tool_call_start|>", "<|tool_call_end|>", Syntax::Python { lines: false }),
        ),
        command_a(),
        format(
            "olmo3",
            chatml,
            Some(think()),
            marked("<function_calls>", "</function_calls>", Syntax::Python { lines: true }),
        ),
        format(
            "apertus",
            "<|assistant_start|>",
            Some(reasoning("<|inner_prefix|>", "<|inner_suffix|>")),
            marked("<|tools_prefix|>", "<|tools_suffix|>", Syntax::Keyed),
        ),
        format("hy_v3", "", Some(think()), hy_v3()),
        format("hunyuan", "", Some(think()), marked("<tool_calls>", "</tool_calls>", object(true))),
        format(
            "functiongemma",
            "<start_of_turn>model",
            None,
            marked("<start_function_call>", "<end_function_call>", Syntax::Loose { quote: "<escape>".into() }),
        ),
        format("nemotron", "<SPECIAL_11>Assistant", Some(think()), marked("<TOOLCALL>", "</TOOLCALL>", object(true))),
        ChatFormat { calls: None, ..format("think", "", Some(think()), tag()) }.with_markers(),
    ]
}

/// `<function=NAME>` and `<parameter=KEY>VALUE</parameter>`, with line breaks around values or not.
fn functions(lines: bool) -> Parameters {
    Parameters {
        name: pair("<function=", ">"),
        key: pair("<parameter=", ">"),
        value: pair("", "</parameter>"),
        lines,
        end: "</function>".into(),
    }
}

fn qwen3_coder() -> Calls {
    let mut calls = marked("<tool_call>", "</tool_call>", Syntax::Parameters(functions(true)));
    // The outer marker is sometimes left out.
    calls.open.push("<function=".into());
    calls
}

fn glm45() -> Calls {
    let syntax = Parameters {
        name: pair("", ""),
        key: pair("<arg_key>", "</arg_key>"),
        value: pair("<arg_value>", "</arg_value>"),
        lines: false,
        end: String::new(),
    };
    marked("<tool_call>", "</tool_call>", Syntax::Parameters(syntax))
}

/// GLM's parameters behind a marker, within outer markers.
fn hy_v3() -> Calls {
    let mut calls = glm45();
    calls.wrap = Some(pair("<tool_calls>", "</tool_calls>"));
    if let Syntax::Parameters(parameters) = &mut calls.syntax {
        parameters.name = pair("", "<tool_sep>");
    }
    calls
}

fn minimax_m2() -> Calls {
    let syntax = Parameters {
        name: pair("", "\">"),
        key: pair("<parameter name=\"", "\">"),
        value: pair("", "</parameter>"),
        lines: false,
        end: String::new(),
    };
    Calls {
        wrap: Some(pair("<minimax:tool_call>", "</minimax:tool_call>")),
        ..marked("<invoke name=\"", "</invoke>", Syntax::Parameters(syntax))
    }
}

/// Command A and R7B: objects with a number, and markers around the content.
fn command_a() -> ChatFormat {
    let syntax = Syntax::Object {
        name: "tool_name".into(),
        arguments: "parameters".into(),
        id: Some("tool_call_id".into()),
        list: Some(["[\n    ", ",\n    ", "\n]"]),
    };
    let calls = Calls { end_reasoning: true, ..marked("<|START_ACTION|>", "<|END_ACTION|>", syntax) };
    let thinking = reasoning("<|START_THINKING|>", "<|END_THINKING|>");
    ChatFormat {
        dropped: ["<|START_RESPONSE|>", "<|END_RESPONSE|>"].map(str::to_owned).to_vec(),
        ..format("command_a", "<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>", Some(thinking), calls)
    }
    .with_markers()
}

fn mistral() -> Calls {
    let syntax = Named { separator: "[ARGS]".into(), id: Some("[CALL_ID]".into()), or_list: true, ..Named::default() };
    Calls { end_reasoning: true, ..marked("[TOOL_CALLS]", "", Syntax::Named(syntax)) }
}

fn deepseek(named: Named) -> Calls {
    let syntax = Syntax::Named(named);
    Calls {
        wrap: Some(pair("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>")),
        end_reasoning: true,
        ..marked("<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", syntax)
    }
}

fn deepseek_v3() -> Calls {
    let prefix = "function<｜tool▁sep｜>".into();
    let named = Named { prefix, separator: "```json".into(), space: "\n", ..Named::default() };
    Calls { suffix: Some("```".into()), ..deepseek(named) }
}

fn deepseek_v31() -> Calls {
    deepseek(Named { separator: "<｜tool▁sep｜>".into(), ..Named::default() })
}

fn kimi_k2() -> Calls {
    let separator = "<|tool_call_argument_begin|>".into();
    let named = Named { prefix: "functions.".into(), separator, numbered: true, ..Named::default() };
    Calls {
        wrap: Some(pair("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>")),
        end_reasoning: true,
        ..marked("<|tool_call_begin|>", "<|tool_call_end|>", Syntax::Named(named))
    }
}

fn harmony() -> ChatFormat {
    ChatFormat {
        name: "harmony".into(),
        reasoning: None,
        calls: None,
        messages: true,
        turn: vec!["<|start|>assistant".into()],
        dropped: Vec::new(),
        special: Vec::new(),
    }
    .with_markers()
}
