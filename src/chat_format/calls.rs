//! What the parsers of call texts share: the tools, and the deltas that are gathered.

use crate::json::Step;
use crate::{ChatDelta, ToolSchema};

/// The deltas of one push, where neighbours of one kind are one.
#[derive(Default)]
pub(crate) struct Deltas {
    list: Vec<ChatDelta>,
    /// How many calls have begun in the turn.
    calls: usize,
    /// The characters so far are part of a call for good: they are never given as content.
    pub(crate) committed: bool,
}

impl Deltas {
    pub(crate) fn reasoning(&mut self, text: &str) {
        if text.is_empty() {
            return;
        }
        match self.list.last_mut() {
            Some(ChatDelta::Reasoning(last)) => last.push_str(text),
            _ => self.list.push(ChatDelta::Reasoning(text.to_owned())),
        }
    }

    pub(crate) fn content(&mut self, text: &str) {
        if text.is_empty() {
            return;
        }
        match self.list.last_mut() {
            Some(ChatDelta::Content(last)) => last.push_str(text),
            _ => self.list.push(ChatDelta::Content(text.to_owned())),
        }
    }

    pub(crate) fn has_calls(&self) -> bool {
        self.calls > 0
    }

    /// Begins the next call.
    pub(crate) fn start(&mut self, id: Option<String>, name: String) {
        self.list.push(ChatDelta::ToolCallStart { index: self.calls, id, name });
        self.calls += 1;
        self.committed = true;
    }

    /// More of the arguments of the call that began last.
    pub(crate) fn arguments(&mut self, text: &str) {
        if text.is_empty() {
            return;
        }
        match self.list.last_mut() {
            Some(ChatDelta::ToolCallArguments { json, .. }) => json.push_str(text),
            _ => {
                let index = self.calls.saturating_sub(1);
                self.list.push(ChatDelta::ToolCallArguments { index, json: text.to_owned() });
            }
        }
    }

    pub(crate) fn drain_into(&mut self, out: &mut Vec<ChatDelta>) {
        out.append(&mut self.list);
    }
}

/// The text of calls in one syntax, from behind the opening marker.
///
/// Characters before `Deltas::committed` become content again when the text turns out not to be a call.
pub(crate) trait Body: Send {
    /// Takes `c`.
    fn push(&mut self, c: char, tools: &[ToolSchema], deltas: &mut Deltas) -> Step;

    /// Makes the arguments of an unfinished call whole: the text was cut or broke.
    fn close(&mut self, deltas: &mut Deltas);
}

/// The tool of that name.
pub(crate) fn find<'a>(tools: &'a [ToolSchema], name: &str) -> Option<&'a ToolSchema> {
    tools.iter().find(|tool| tool.name == name)
}
