//! The markers of a chat format, and what each does in a turn.

use crate::format::ChatFormat;

#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Action {
    OpenReasoning {
        anywhere: bool,
    },
    /// Reasoning that the prompt opened is opened by the model too.
    ReopenReasoning,
    CloseReasoning,
    OpenWrap,
    CloseWrap,
    OpenCall,
    CloseCall,
    Drop,
    Header,
    EndMessage,
}

pub(crate) struct Marker {
    pub(crate) text: String,
    pub(crate) action: Action,
}

impl AsRef<str> for Marker {
    fn as_ref(&self) -> &str {
        &self.text
    }
}

/// The markers that are looked for.
pub(crate) struct Markers {
    pub(crate) reasoning: Vec<Marker>,
    /// Those that always count, then the end of the wrap, then the end of a call.
    pub(crate) content: Vec<Marker>,
    pub(crate) num_always: usize,
    pub(crate) num_wrapped: usize,
    pub(crate) header: [&'static str; 1],
}

impl Markers {
    pub(crate) fn new(format: &ChatFormat, has_tools: bool) -> Self {
        let marker = |text: &str, action| Marker { text: text.to_owned(), action };
        let (mut reasoning, mut content, mut wrapped, mut pending) = (Vec::new(), Vec::new(), Vec::new(), Vec::new());
        if let Some(r) = &format.reasoning {
            content.push(marker(&r.open, Action::OpenReasoning { anywhere: r.anywhere }));
            reasoning.push(marker(&r.open, Action::ReopenReasoning));
            reasoning.push(marker(&r.close, Action::CloseReasoning));
        }
        content.extend(format.dropped.iter().map(|text| marker(text, Action::Drop)));
        if let Some(calls) = format.calls.as_ref().filter(|_| has_tools) {
            let opens = calls.open.iter().map(|open| (open, Action::OpenCall));
            let wrap = calls.wrap.iter().map(|(open, _)| (open, Action::OpenWrap));
            for (open, action) in opens.chain(wrap) {
                content.push(marker(open, action));
                if calls.end_reasoning {
                    reasoning.push(marker(open, action));
                }
            }
            wrapped.extend(calls.wrap.iter().map(|(_, close)| marker(close, Action::CloseWrap)));
            pending.extend(calls.close.iter().map(|close| marker(close, Action::CloseCall)));
            pending.extend(calls.suffix.iter().map(|suffix| marker(suffix, Action::Drop)));
        }
        if format.messages {
            for list in [&mut reasoning, &mut content] {
                list.extend(["<|start|>", "<|channel|>"].map(|text| marker(text, Action::Header)));
                list.extend(["<|end|>", "<|call|>", "<|return|>"].map(|text| marker(text, Action::EndMessage)));
            }
        }
        let num_always = content.len();
        content.append(&mut wrapped);
        let num_wrapped = content.len();
        content.append(&mut pending);
        Self { reasoning, content, num_always, num_wrapped, header: ["<|message|>"] }
    }
}
