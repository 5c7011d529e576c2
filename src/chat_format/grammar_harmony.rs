//! The grammar of a turn of Harmony. A turn has at most one call: `<|call|>` ends it.

use crate::arguments_schema::{Hold, arguments_schema};
use crate::lark::Lark;
use crate::{ToolGrammar, ToolSchema, TurnStart};

pub(crate) fn grammar(tools: &[(&ToolSchema, Hold)], free: bool, start: TurnStart, mut lark: Lark) -> ToolGrammar {
    let [channel, message, constrain, begin, call_end, end] =
        ["<|channel|>", "<|message|>", "<|constrain|>", "<|start|>", "<|call|>", "<|end|>"]
            .map(|text| lark.token(text));
    let mut calls = Vec::new();
    for tool in tools {
        let header = lark.literal(&format!("commentary to=functions.{} ", tool.0.name));
        let json = lark.json(&arguments_schema(tool));
        calls.push(format!("{channel} {header} {constrain} \"json\" {message} {json}"));
    }
    let calls = lark.rule("", &calls.join(" | "));
    let call = lark.rule("", &format!("{calls} ({call_end})?"));
    let text = lark.text_to("<|end|>", None);
    let before =
        lark.rule("", &format!("{channel} (\"analysis\" | \"commentary\") {message} {text} {begin} \"assistant\""));
    let messages = if free {
        let last = lark.text(None);
        format!("{before}* ({call} | {channel} (\"final\" | \"analysis\" | \"commentary\") {message} {last} ({end})?)")
    } else {
        format!("{before}* {call}")
    };
    match start {
        TurnStart::Fresh => lark.grammar(&messages, None),
        TurnStart::Thinking => lark.grammar(&format!("{begin} \"assistant\" {messages}"), Some("<|end|>".into())),
        TurnStart::Content if free => {
            let text = lark.text(None);
            lark.grammar(&format!("{text} ({end})?"), None)
        }
        TurnStart::Content => lark.grammar(&format!("{end} {begin} \"assistant\" {messages}"), None),
    }
}
