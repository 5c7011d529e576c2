//! The parser of a turn.

use std::collections::VecDeque;

use crate::calls::{Body, Deltas, find};
use crate::format::{Calls, ChatFormat, Named, Syntax};
use crate::harmony::{self, Message};
use crate::json::Step;
use crate::marker::MarkerScan;
use crate::markers::{Action, Markers};
use crate::named::NamedBody;
use crate::object::ObjectBody;
use crate::parameters::ParametersBody;
use crate::python::{LooseBody, PythonBody};
use crate::section::Section;
use crate::{ChatDelta, ToolSchema, TurnStart};

/// The most text, in bytes, that is held back until it is certain to be a call.
const MAX_HEAD: usize = 16 << 10;

/// Splits the text of one turn into deltas, as it comes.
pub struct TurnParser {
    tools: Vec<ToolSchema>,
    calls: Option<Calls>,
    messages: bool,
    markers: Markers,
    state: State,
    kind: Kind,
    section: Section,
    scan: MarkerScan,
    /// The closing markers of calls are still expected: they are dropped.
    close_pending: bool,
    wrap_pending: bool,
    /// A call without marker was looked for in this section and not found.
    bare_tried: bool,
    deltas: Deltas,
    /// Text of what was not a call: it is read again as content.
    replay: VecDeque<char>,
}

#[derive(Clone, Copy, PartialEq)]
enum Kind {
    Reasoning,
    Content,
}

enum State {
    Text,
    /// The header of a message of Harmony.
    Header(String),
    Call(Call),
}

/// A text that may be one or more calls.
struct Call {
    body: Box<dyn Body>,
    /// The marker before the body.
    opening: String,
    /// The text since it was last certain that this is a call.
    raw: String,
    certain: bool,
}

impl ChatFormat {
    /// A parser of one turn. Calls are looked for only if there are `tools`.
    pub fn parser(&self, start: TurnStart, tools: &[ToolSchema]) -> TurnParser {
        TurnParser::new(self, start, tools)
    }
}

impl TurnParser {
    pub(crate) fn new(format: &ChatFormat, start: TurnStart, tools: &[ToolSchema]) -> Self {
        let implied = format.reasoning.as_ref().is_some_and(|reasoning| reasoning.implied);
        let kind = match start {
            TurnStart::Thinking => Kind::Reasoning,
            TurnStart::Fresh if implied => Kind::Reasoning,
            _ => Kind::Content,
        };
        let header = format.messages && start == TurnStart::Fresh;
        let section =
            if format.messages { Section::exact() } else { Section::new(start != TurnStart::Fresh || implied) };
        Self {
            tools: tools.to_vec(),
            calls: format.calls.clone().filter(|_| !tools.is_empty()),
            messages: format.messages,
            markers: Markers::new(format, !tools.is_empty()),
            state: if header { State::Header(String::new()) } else { State::Text },
            kind,
            section,
            scan: MarkerScan::default(),
            close_pending: false,
            wrap_pending: false,
            bare_tried: false,
            deltas: Deltas::default(),
            replay: VecDeque::new(),
        }
    }

    /// Takes more text and appends the deltas that are certain now.
    pub fn push(&mut self, text: &str, out: &mut Vec<ChatDelta>) {
        for c in text.chars() {
            self.step(c);
            self.drain();
        }
        self.deltas.drain_into(out);
    }

    /// Ends the turn: gives the text that was held back, and closes a call that was cut.
    pub fn finish(&mut self, out: &mut Vec<ChatDelta>) {
        while let State::Call(_) = self.state {
            self.fail(true);
            self.drain();
        }
        if let State::Header(header) = std::mem::replace(&mut self.state, State::Text) {
            let header = header + &self.scan.take();
            // A turn that has no header at all is content.
            if !header.contains("<|") {
                header.chars().for_each(|c| self.text(c));
            }
        }
        let held = self.scan.take();
        if !self.is_cut_end(&held) {
            held.chars().for_each(|c| self.text(c));
        }
        let mut rest = String::new();
        self.section.finish(&mut rest);
        self.give(&rest);
        self.deltas.drain_into(out);
    }

    /// Ends a turn that was cut at its maximum length. The arguments of a call stay as far as they came, so they are no JSON:
    /// values are never made up. The first part of a call or of a marker is dropped.
    pub fn cut(&mut self, out: &mut Vec<ChatDelta>) {
        if let State::Text = std::mem::replace(&mut self.state, State::Text) {
            let held = self.scan.take();
            if !self.section.is_blank() {
                held.chars().for_each(|c| self.text(c));
            }
            let mut rest = String::new();
            self.section.finish(&mut rest);
            self.give(&rest);
        }
        self.deltas.drain_into(out);
    }

    /// Whether the arguments of a call have begun and not ended.
    pub fn is_in_call(&self) -> bool {
        matches!(&self.state, State::Call(call) if call.certain)
    }

    /// Whether the text is the first part of the marker that closes the call before it.
    fn is_cut_end(&self, held: &str) -> bool {
        let closes = |action| matches!(action, Action::CloseCall | Action::CloseWrap);
        let is_due = (self.close_pending || self.wrap_pending) && self.section.is_blank();
        is_due && self.markers.content.iter().any(|marker| closes(marker.action) && marker.text.starts_with(held))
    }

    fn drain(&mut self) {
        while let Some(c) = self.replay.pop_front() {
            self.step(c);
        }
    }

    fn step(&mut self, c: char) {
        match &mut self.state {
            State::Text => self.text_step(c),
            State::Header(_) => self.header_step(c),
            State::Call(_) => self.call_step(c),
        }
    }

    fn text_step(&mut self, c: char) {
        let bare = self.calls.as_ref().and_then(|calls| calls.bare) == Some(c);
        let at_start = self.kind == Kind::Content && self.section.is_blank() && self.scan.held().is_empty();
        if bare && at_start && !self.bare_tried && !self.close_pending {
            self.open_call(String::new());
            return self.call_step(c);
        }
        let markers = match self.kind {
            Kind::Reasoning => &self.markers.reasoning[..],
            Kind::Content if self.close_pending => &self.markers.content[..],
            Kind::Content if self.wrap_pending => &self.markers.content[..self.markers.num_wrapped],
            Kind::Content => &self.markers.content[..self.markers.num_always],
        };
        let mut text = String::new();
        let found =
            self.scan.push(c, markers, &mut text).map(|index| (markers[index].action, markers[index].text.clone()));
        text.chars().for_each(|c| self.text(c));
        if let Some((action, marker)) = found {
            self.act(action, marker);
        }
    }

    /// A character of reasoning or content.
    fn text(&mut self, c: char) {
        let separators = self.calls.as_ref().map_or("", |calls| &calls.separators);
        let separators = if self.deltas.has_calls() { separators } else { "" };
        let mut text = String::new();
        self.section.push(c, separators, &mut text);
        self.give(&text);
    }

    fn give(&mut self, text: &str) {
        match self.kind {
            Kind::Reasoning => self.deltas.reasoning(text),
            Kind::Content => self.deltas.content(text),
        }
    }

    fn act(&mut self, action: Action, marker: String) {
        match action {
            Action::OpenReasoning { anywhere } if anywhere || self.section.is_blank() => self.begin(Kind::Reasoning),
            Action::ReopenReasoning if self.section.is_blank() => {}
            Action::OpenReasoning { .. } | Action::ReopenReasoning => marker.chars().for_each(|c| self.text(c)),
            Action::CloseReasoning | Action::EndMessage => self.begin(Kind::Content),
            Action::OpenWrap => {
                self.begin(Kind::Content);
                self.wrap_pending = true;
            }
            Action::CloseWrap => {
                self.begin(Kind::Content);
                self.wrap_pending = false;
                self.close_pending = false;
            }
            Action::CloseCall => {
                self.begin(Kind::Content);
                self.close_pending = false;
            }
            // The section goes on, and line breaks beside the marker go with it.
            Action::Drop => self.begin(self.kind),
            Action::OpenCall => self.open_call(marker),
            Action::Header => {
                self.begin(Kind::Content);
                // `<|start|>` is not a part of a header.
                self.state = State::Header(if marker == "<|start|>" { String::new() } else { marker });
            }
        }
    }

    /// Begins a section behind a marker.
    fn begin(&mut self, kind: Kind) {
        self.kind = kind;
        self.section = if self.messages { Section::exact() } else { Section::new(true) };
        self.bare_tried = false;
    }

    fn open_call(&mut self, opening: String) {
        let Some(calls) = &self.calls else { return };
        let body = calls.body(&opening);
        self.state = State::Call(Call { body, opening, raw: String::new(), certain: false });
    }

    fn header_step(&mut self, c: char) {
        let State::Header(header) = &mut self.state else { return };
        if self.scan.push(c, &self.markers.header, header).is_none() {
            if header.len() > harmony::MAX_HEADER {
                let text = std::mem::take(header) + &self.scan.take();
                self.state = State::Text;
                text.chars().for_each(|c| self.text(c));
            }
            return;
        }
        let message = harmony::read(header);
        self.state = State::Text;
        match message {
            Message::Reasoning => self.begin(Kind::Reasoning),
            Message::Content => self.begin(Kind::Content),
            Message::Call(name) if find(&self.tools, &name).is_some() => {
                let body = Box::new(NamedBody::arguments(Named::default(), &mut self.deltas, &name));
                self.state = State::Call(Call { body, opening: String::new(), raw: String::new(), certain: true });
            }
            Message::Call(_) => self.begin(Kind::Content),
        }
    }

    fn call_step(&mut self, c: char) {
        let State::Call(call) = &mut self.state else { return };
        self.deltas.committed = false;
        let step = call.body.push(c, &self.tools, &mut self.deltas);
        if self.deltas.committed {
            call.raw.clear();
            if !call.certain {
                call.certain = true;
                self.kind = Kind::Content;
            }
        } else if matches!(step, Step::More | Step::Done) {
            call.raw.push(c);
        }
        match step {
            Step::More if call.raw.len() <= MAX_HEAD => {}
            Step::More => self.fail(false),
            Step::Done => self.end_call(),
            Step::Before => {
                self.end_call();
                self.replay.push_front(c);
            }
            Step::Broken => {
                // The text of the call is read before `c`.
                self.replay.push_front(c);
                self.fail(false);
            }
        }
    }

    fn end_call(&mut self) {
        self.state = State::Text;
        self.begin(Kind::Content);
        self.close_pending = self.calls.as_ref().is_some_and(|calls| calls.close.is_some());
    }

    /// The text is no call from here on: what is not certain is read again as text. The unfinished rest of a call
    /// that was cut is dropped.
    fn fail(&mut self, cut: bool) {
        let State::Call(mut call) = std::mem::replace(&mut self.state, State::Text) else { return };
        call.body.close(&mut self.deltas);
        if call.certain {
            self.end_call();
            if cut {
                return;
            }
        }
        self.bare_tried = true;
        call.raw.chars().rev().for_each(|c| self.replay.push_front(c));
        if !call.certain {
            call.opening.chars().for_each(|c| self.text(c));
        }
    }
}

impl Calls {
    fn body(&self, opening: &str) -> Box<dyn Body> {
        match &self.syntax {
            Syntax::Object { name, arguments, .. } => Box::new(ObjectBody::new(name, arguments)),
            Syntax::Named(named) => Box::new(NamedBody::new(named.clone())),
            Syntax::Parameters(parameters) => {
                Box::new(ParametersBody::new(parameters.clone(), self.close.clone(), opening))
            }
            Syntax::Keyed => Box::new(ObjectBody::keyed()),
            Syntax::Python { lines } => Box::new(PythonBody::new(*lines)),
            Syntax::Loose { quote } => Box::new(LooseBody::new(quote.clone())),
        }
    }
}
