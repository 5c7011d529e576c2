//! The grammar of a turn whose calls are constrained.

use crate::arguments_schema::{Hold, arguments_schema};
use crate::format::{Calls, ChatFormat, LIST, Syntax};
use crate::lark::Lark;
use crate::{Choice, FormatError, ToolGrammar, ToolSchema, TurnStart};
use crate::{grammar_harmony, grammar_values};

/// The rules of one call: the text between its markers.
pub(crate) struct Bodies<'a> {
    pub(crate) format: &'a str,
    pub(crate) tools: Vec<(&'a ToolSchema, Hold)>,
}

impl ChatFormat {
    /// The grammar that constrains the calls of a turn, or none where nothing is to be constrained.
    ///
    /// - `Auto`: text is free, and a call is constrained from its opening marker on. Without a strict tool and with
    ///   `parallel` there is no grammar. In families whose calls have no marker, content does not begin as calls do.
    /// - `Required`, `Named`: the turn is calls and, where it may begin so, reasoning.
    ///
    /// Arguments of strict tools are held to their schema, those of others to an object, or under `Required` and
    /// `Named` to as much of the schema as a grammar can express. Parameters come in the order of the schema.
    /// `is_special` returns whether a text is a special token of the tokenizer.
    ///
    /// # Errors
    /// When `choice` names no tool, the format has no calls, or the schema of a strict tool cannot be expressed.
    pub fn tool_grammar(
        &self,
        tools: &[ToolSchema],
        choice: Choice,
        parallel: bool,
        start: TurnStart,
        is_special: &dyn Fn(&str) -> bool,
    ) -> Result<Option<ToolGrammar>, FormatError> {
        if !tools.is_empty() && !self.has_calls() {
            return Err(FormatError::NoCalls { format: self.name.clone() });
        }
        let free = choice == Choice::Auto;
        if tools.is_empty() || free && parallel && !tools.iter().any(|tool| tool.strict) {
            return match choice {
                Choice::Named(tool) => Err(unknown(tool, tools)),
                _ => Ok(None),
            };
        }
        let tools = chosen(tools, &choice)?;
        let one = !parallel || matches!(choice, Choice::Named(_));
        let mut lark = Lark::new(is_special);
        if self.messages {
            return Ok(Some(grammar_harmony::grammar(&tools, free, start, lark)));
        }
        let Some(calls) = &self.calls else { return Err(FormatError::NoCalls { format: self.name.clone() }) };
        let bodies = Bodies { format: &self.name, tools };
        let turn = Turn { calls, dropped: &self.dropped, one, free, bodies: &bodies };
        let expression = turn.expression(self.thinking(start, &mut lark), &mut lark)?;
        let starts_after = self.reasoning_end(start);
        Ok(Some(lark.grammar(&expression, starts_after)))
    }

    /// The end of the reasoning that goes on where the turn begins; `None` if the turn does not begin in reasoning.
    pub fn reasoning_end(&self, start: TurnStart) -> Option<String> {
        let reasoning = self.reasoning.as_ref()?;
        let open = start == TurnStart::Thinking || start == TurnStart::Fresh && reasoning.implied;
        open.then(|| reasoning.close.clone())
    }

    /// The markers of reasoning with which the turn may begin.
    fn thinking(&self, start: TurnStart, lark: &mut Lark) -> Option<Thinking> {
        let reasoning = self.reasoning.as_ref().filter(|r| start == TurnStart::Fresh && !r.implied)?;
        let opened = reasoning.open.split_inclusive('>').next().is_some_and(|token| lark.is_special(token));
        let rule = match opened {
            true => {
                let open = lark.texts(&reasoning.open);
                let text = lark.text_to(&reasoning.close, None);
                lark.rule("", &format!("{open} {text}"))
            }
            false => lark.text_between(&reasoning.open, &reasoning.close),
        };
        Some(Thinking { rule, not_in_text: (!opened).then(|| reasoning.open.clone()) })
    }
}

/// Reasoning at the start of a turn.
struct Thinking {
    rule: String,
    /// The marker with which free text must not begin, since it opens reasoning.
    not_in_text: Option<String>,
}

fn chosen<'a>(tools: &'a [ToolSchema], choice: &Choice) -> Result<Vec<(&'a ToolSchema, Hold)>, FormatError> {
    let hold = |tool: &ToolSchema| match (tool.strict, choice) {
        (true, _) => Hold::Strict,
        (false, Choice::Auto) => Hold::Free,
        (false, _) => Hold::Lenient,
    };
    let mut list = Vec::new();
    for tool in tools {
        let valid = |b: u8| b.is_ascii_alphanumeric() || matches!(b, b'_' | b'-' | b'.');
        if tool.name.is_empty() || !tool.name.bytes().all(valid) {
            return Err(FormatError::Name { name: tool.name.clone() });
        }
        if !matches!(choice, Choice::Named(name) if *name != tool.name) {
            list.push((tool, hold(tool)));
        }
    }
    match choice {
        Choice::Named(name) if list.is_empty() => Err(unknown(name.clone(), tools)),
        _ => Ok(list),
    }
}

fn unknown(tool: String, tools: &[ToolSchema]) -> FormatError {
    let known: Vec<_> = tools.iter().map(|tool| format!("`{}`", tool.name)).collect();
    FormatError::UnknownTool { tool, known: known.join(", ") }
}

/// A turn of the formats that mark calls.
struct Turn<'a> {
    calls: &'a Calls,
    /// Markers around content.
    dropped: &'a [String],
    one: bool,
    free: bool,
    bodies: &'a Bodies<'a>,
}

impl Turn<'_> {
    fn expression(&self, thinking: Option<Thinking>, lark: &mut Lark) -> Result<String, FormatError> {
        let think = thinking.as_ref().map(|thinking| format!("({} SPACE)? ", thinking.rule)).unwrap_or_default();
        let not_in_text = thinking.and_then(|thinking| thinking.not_in_text);
        let not_in_text = not_in_text.as_deref();
        let group = self.group(lark)?;
        let Some(trigger) = self.trigger() else { return Ok(self.bare(&think, &group, lark)) };
        let more = if self.one { "" } else { "*" };
        if self.free {
            let (text, tail) = (lark.text_to(trigger, not_in_text), self.tail(not_in_text, lark));
            return Ok(match self.one {
                true => format!("{think}({tail} | {text} {group} SPACE)"),
                false => format!("{think}({text} {group})* {tail}"),
            });
        }
        let call = lark.token(trigger);
        let call = lark.rule("", &format!("SPACE {call} {group}"));
        Ok(if self.one { format!("{think}{call}") } else { format!("{think}{call} {call}{more}") })
    }

    /// Content to the end of the turn, between its markers. Those that are no special tokens are a part of any text.
    fn tail(&self, not_in_text: Option<&str>, lark: &mut Lark) -> String {
        let text = lark.text(not_in_text);
        let special: Vec<_> = self.dropped.iter().filter(|marker| lark.is_special(marker)).collect();
        if special.is_empty() {
            return text;
        }
        let markers: Vec<_> = special.into_iter().map(|marker| lark.token(marker)).collect();
        let marker = lark.rule("", &markers.join(" | "));
        lark.rule("", &format!("({marker})? {text} ({marker} SPACE)?"))
    }

    /// The marker with which calls begin.
    fn trigger(&self) -> Option<&str> {
        match &self.calls.wrap {
            _ if self.calls.bare.is_some() => None,
            Some((open, _)) => Some(open),
            None => self.calls.open.first().map(String::as_str),
        }
    }

    /// A turn whose calls have no marker.
    fn bare(&self, think: &str, group: &str, lark: &mut Lark) -> String {
        let first = self.calls.bare.unwrap_or('{');
        let text = lark.rule("", &format!("/\\s*[^\\s{}](?s:.*)/", lark_escape(first)));
        if self.free { format!("{think}({group} | SPACE {text} | SPACE)") } else { format!("{think}SPACE {group}") }
    }

    /// The text behind the first marker.
    fn group(&self, lark: &mut Lark) -> Result<String, FormatError> {
        let body = self.body(lark)?;
        let suffix =
            self.calls.suffix.as_deref().map(|suffix| lark.literal(&format!("\n{suffix}"))).unwrap_or_default();
        let close = self.calls.close.as_deref().map(|close| lark.token(close)).unwrap_or_default();
        let call = format!("{body} {suffix} {close}");
        let wrap = self.calls.wrap.as_ref().filter(|_| self.calls.bare.is_none());
        let Some((_, end)) = wrap else { return Ok(lark.rule("", &call)) };
        let (open, end) = (self.calls.open.first().map(|open| lark.token(open)).unwrap_or_default(), lark.token(end));
        // Calls of parameters stand in lines of their own.
        let line = lark.literal(if matches!(self.calls.syntax, Syntax::Parameters(_)) { "\n" } else { "" });
        let call = lark.rule("", &format!("{line} {open} {call}"));
        let more = match (self.one, line.is_empty()) {
            (true, _) => String::new(),
            (false, true) => format!("(SPACE {call})*"),
            (false, false) => format!("{call}*"),
        };
        Ok(lark.rule("", &format!("{call} {more} {line} {end}")))
    }

    fn body(&self, lark: &mut Lark) -> Result<String, FormatError> {
        let space = if self.calls.close.is_some() { "\n" } else { "" };
        Ok(match &self.calls.syntax {
            Syntax::Object { name, arguments, id, list } => {
                let space = if list.is_some() { "" } else { space };
                let object = self.alternatives(lark, |tool, lark| {
                    let head = format!("\"{name}\": \"{}\", \"{arguments}\": ", tool.0.name);
                    let head = match id {
                        None => lark.literal(&format!("{{{head}")),
                        Some(id) => {
                            let (open, head) =
                                (lark.literal(&format!("{{\"{id}\": \"")), lark.literal(&format!("\", {head}")));
                            format!("{open} /[0-9]{{1,4}}/ {head}")
                        }
                    };
                    format!("{head} {} \"}}\"", lark.json(&arguments_schema(tool)))
                });
                match (list, self.calls.separators.as_str()) {
                    (Some(texts), _) => self.list(texts, &object, lark),
                    (None, separators) if !separators.is_empty() && !self.one => {
                        let separator = lark.literal(&format!("{separators} "));
                        format!("{object} ({separator} {object})*")
                    }
                    (None, _) => format!("{} {object} {}", lark.literal(space), lark.literal(space)),
                }
            }
            Syntax::Keyed => {
                let object = self.alternatives(lark, |tool, lark| {
                    let head = lark.literal(&format!("{{\"{}\": ", tool.0.name));
                    format!("{head} {} \"}}\"", lark.json(&arguments_schema(tool)))
                });
                self.list(&LIST, &object, lark)
            }
            Syntax::Named(named) => self.alternatives(lark, |tool, lark| {
                let index = if named.numbered { "/:[0-9]{1,4}/" } else { "" };
                let name = lark.texts(&format!("{}{}", named.prefix, tool.0.name));
                let space = lark.literal(named.space);
                let separator = lark.texts(&named.separator);
                format!("{name} {index} {space} {separator} {space} {}", lark.json(&arguments_schema(tool)))
            }),
            Syntax::Parameters(syntax) => {
                self.rules(lark, |tool, lark| grammar_values::parameters(self.bodies.format, syntax, tool, lark))?
            }
            Syntax::Python { lines } => {
                let call = self.rules(lark, |tool, lark| grammar_values::python(self.bodies.format, tool, lark))?;
                self.list(if *lines { &["", "\n", ""] } else { &LIST }, &call, lark)
            }
            Syntax::Loose { quote } => {
                self.rules(lark, |tool, lark| grammar_values::loose(self.bodies.format, quote, tool, lark))?
            }
        })
    }

    /// One item, or more, with these texts before, between and behind them.
    fn list(&self, texts: &[&str; 3], item: &str, lark: &Lark) -> String {
        let [open, between, close] = texts.map(|text| lark.literal(text));
        let more = if self.one { String::new() } else { format!("({between} {item})*") };
        format!("{open} {item} {more} {close}")
    }

    fn rules(
        &self,
        lark: &mut Lark,
        mut each: impl FnMut(&(&ToolSchema, Hold), &mut Lark) -> Result<String, FormatError>,
    ) -> Result<String, FormatError> {
        let all: Result<Vec<_>, _> = self.bodies.tools.iter().map(|tool| each(tool, lark)).collect();
        Ok(lark.rule("", &all?.join(" | ")))
    }

    fn alternatives(&self, lark: &mut Lark, mut each: impl FnMut(&(&ToolSchema, Hold), &mut Lark) -> String) -> String {
        let all: Vec<_> = self.bodies.tools.iter().map(|tool| each(tool, lark)).collect();
        lark.rule("", &all.join(" | "))
    }
}

fn lark_escape(c: char) -> String {
    format!("\\{c}")
}
