//! Calls as Python or Gemma 4 write them: a name and values that are not JSON.

use crate::ToolSchema;
use crate::calls::{Body, Deltas, find};
use crate::escape::quoted;
use crate::json::Step;
use crate::literal::Literal;

/// The longest name, in bytes.
const MAX_NAME: usize = 256;

/// Reads `[f(a=1, b="x"), g()]`, or calls in lines of their own.
pub(crate) struct PythonBody {
    lines: bool,
    at: At,
    num_given: usize,
}

enum At {
    Begin,
    Name(String),
    /// The name of an argument, or the end of the call.
    Key(String),
    Value(Literal),
    AfterValue,
    AfterCall,
    End,
}

impl PythonBody {
    pub(crate) fn new(lines: bool) -> Self {
        let at = if lines { At::Name(String::new()) } else { At::Begin };
        Self { lines, at, num_given: 0 }
    }

    fn end_call(&mut self, deltas: &mut Deltas) -> Step {
        deltas.arguments("}");
        self.at = At::AfterCall;
        self.num_given = 0;
        Step::More
    }

    fn value(&mut self, c: char, deltas: &mut Deltas) -> Step {
        let At::Value(literal) = &mut self.at else { return Step::Broken };
        let mut text = String::new();
        let step = literal.push(c, &mut text);
        deltas.arguments(&text);
        deltas.committed = literal.is_certain();
        match step {
            Step::Done | Step::Before => self.at = At::AfterValue,
            Step::More | Step::Broken => return step,
        }
        if step == Step::Before { self.after_value(c, deltas) } else { Step::More }
    }

    fn after_value(&mut self, c: char, deltas: &mut Deltas) -> Step {
        match c {
            ',' => self.at = At::Key(String::new()),
            ')' => return self.end_call(deltas),
            _ if c.is_whitespace() => {}
            _ => return Step::Broken,
        }
        Step::More
    }
}

impl Body for PythonBody {
    fn push(&mut self, c: char, tools: &[ToolSchema], deltas: &mut Deltas) -> Step {
        match &mut self.at {
            At::Begin if c == '[' => self.at = At::Name(String::new()),
            At::Name(name) => match c {
                '(' => {
                    let name = name.trim().to_owned();
                    if find(tools, &name).is_none() {
                        return Step::Broken;
                    }
                    deltas.start(None, name);
                    deltas.arguments("{");
                    self.at = At::Key(String::new());
                }
                _ if name.len() <= MAX_NAME
                    && (c.is_whitespace() || c.is_ascii_alphanumeric() || "_.-".contains(c)) =>
                {
                    name.push(c);
                }
                _ => return Step::Broken,
            },
            At::Key(key) => match c {
                ')' if key.trim().is_empty() => {
                    deltas.committed = true;
                    return self.end_call(deltas);
                }
                '=' if !key.trim().is_empty() => {
                    let comma = if self.num_given > 0 { ", " } else { "" };
                    deltas.arguments(&format!("{comma}{}: ", quoted(key.trim())));
                    deltas.committed = true;
                    self.num_given += 1;
                    self.at = At::Value(Literal::new(None));
                }
                _ if key.len() <= MAX_NAME && (c.is_whitespace() || c.is_alphanumeric() || "_-.$".contains(c)) => {
                    key.push(c)
                }
                _ => return Step::Broken,
            },
            At::Value(_) => return self.value(c, deltas),
            At::AfterValue => {
                deltas.committed = true;
                return self.after_value(c, deltas);
            }
            At::AfterCall => match c {
                ',' if !self.lines => {
                    deltas.committed = true;
                    self.at = At::Name(String::new());
                }
                ']' if !self.lines => {
                    deltas.committed = true;
                    self.at = At::End;
                    return Step::Done;
                }
                _ if c.is_whitespace() => {}
                _ if self.lines && (c.is_ascii_alphabetic() || c == '_') => {
                    deltas.committed = true;
                    self.at = At::Name(c.to_string());
                }
                _ if self.lines => {
                    deltas.committed = true;
                    self.at = At::End;
                    return Step::Before;
                }
                _ => return Step::Broken,
            },
            At::Begin => return Step::Broken,
            At::End => return Step::Before,
        }
        Step::More
    }

    fn close(&mut self, deltas: &mut Deltas) {
        match std::mem::replace(&mut self.at, At::End) {
            At::Key(_) | At::AfterValue => deltas.arguments("}"),
            At::Value(mut literal) => {
                let mut text = String::new();
                literal.close(&mut text);
                deltas.arguments(&(text + "}"));
            }
            At::Begin | At::Name(_) | At::AfterCall | At::End => {}
        }
    }
}

/// Reads `call:name{key:value}`.
pub(crate) struct LooseBody {
    name: String,
    value: Literal,
    started: bool,
}

impl LooseBody {
    pub(crate) fn new(quote: String) -> Self {
        Self { name: String::new(), value: Literal::new(Some(quote)), started: false }
    }
}

impl Body for LooseBody {
    fn push(&mut self, c: char, tools: &[ToolSchema], deltas: &mut Deltas) -> Step {
        if !self.started && c != '{' {
            self.name.push(c);
            let begin = self.name.trim_start();
            let called = begin.starts_with("call:") || "call:".starts_with(begin);
            return if called && self.name.len() <= MAX_NAME { Step::More } else { Step::Broken };
        }
        if !self.started {
            let name = self.name.trim().strip_prefix("call:").unwrap_or_default().trim();
            if find(tools, name).is_none() {
                return Step::Broken;
            }
            deltas.start(None, name.to_owned());
            self.started = true;
        }
        let mut text = String::new();
        let step = self.value.push(c, &mut text);
        deltas.arguments(&text);
        deltas.committed |= step != Step::Broken && self.value.is_certain();
        step
    }

    fn close(&mut self, deltas: &mut Deltas) {
        if self.started {
            let mut text = String::new();
            self.value.close(&mut text);
            deltas.arguments(&text);
        }
    }
}
