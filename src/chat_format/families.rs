//! The families of models.

use std::sync::{Arc, LazyLock};

use crate::format::{Calls, ChatFormat, Reasoning, Syntax};

static FAMILIES: LazyLock<Vec<Arc<ChatFormat>>> =
    LazyLock::new(|| vec![hermes("hermes", false), hermes("qwen3", true)].into_iter().map(Arc::new).collect());

pub(crate) fn named(name: &str) -> Option<Arc<ChatFormat>> {
    FAMILIES.iter().find(|format| format.name == name).cloned()
}

pub(crate) fn names() -> impl Iterator<Item = &'static str> {
    FAMILIES.iter().map(|format| format.name.as_str())
}

pub(crate) fn detect(template: &str) -> Option<Arc<ChatFormat>> {
    template.contains("<tool_call>").then(|| named("hermes")).flatten()
}

fn think() -> Reasoning {
    Reasoning { open: "<think>".into(), close: "</think>".into(), implied: false, anywhere: false }
}

fn hermes(name: &str, thinks: bool) -> ChatFormat {
    ChatFormat {
        name: name.into(),
        reasoning: thinks.then(think),
        calls: Some(Calls {
            wrap: None,
            open: vec!["<tool_call>".into()],
            bare: None,
            close: Some("</tool_call>".into()),
            suffix: None,
            separators: String::new(),
            end_reasoning: false,
            syntax: Syntax::Object { arguments: "arguments".into(), list: false },
        }),
        messages: false,
        turn: vec!["<|im_start|>assistant".into()],
        special: Vec::new(),
    }
    .with_markers()
}
