//! Calls as parameters between markers, as Qwen3-Coder and GLM-4.5 write them.

use std::sync::Arc;

use crate::ToolSchema;
use crate::calls::{Body, Deltas, find};
use crate::escape::{push_escaped, quoted};
use crate::format::Parameters;
use crate::json::Step;
use crate::marker::MarkerScan;
use crate::schema::{self, Types};

/// The longest name of a tool or a parameter, in bytes.
const MAX_NAME: usize = 256;

/// The longest value that waits to be read as JSON, in bytes. A longer one is a string.
const MAX_VALUE: usize = 256 << 10;

/// Reads a name and parameters, and gives the arguments as JSON by the types of the tool's schema.
pub(crate) struct ParametersBody {
    syntax: Arc<Parameters>,
    at: At,
    scan: MarkerScan,
    /// The marker that ends the whole call, where it also ends the parameters.
    close: Option<String>,
    tool: usize,
    num_given: usize,
}

enum At {
    /// The marker before the name.
    Open,
    Name(String),
    /// A parameter or the end.
    Next,
    Key(String),
    /// The marker between the name of a parameter and its value.
    Between {
        key: String,
    },
    Value(ParameterValue),
    End,
}

/// A value on its way.
struct ParameterValue {
    types: Types,
    /// A string whose begin was given.
    streams: bool,
    /// Whether no character has come.
    first: bool,
    /// A line break that is the value's only if more follows.
    line: bool,
    text: String,
}

impl ParametersBody {
    /// Reads behind the marker `opening`, which may be the one before the name.
    pub(crate) fn new(syntax: Parameters, close: Option<String>, opening: &str) -> Self {
        let at = if syntax.name.0.is_empty() || syntax.name.0 == opening { At::Name(String::new()) } else { At::Open };
        Self { syntax: Arc::new(syntax), at, scan: MarkerScan::default(), close, tool: 0, num_given: 0 }
    }

    /// White space up to one of the markers; the index of the marker.
    fn skip(&mut self, c: char, markers: &[&str]) -> Result<Option<usize>, Step> {
        let mut text = String::new();
        let found = self.scan.push(c, markers, &mut text);
        if text.chars().all(char::is_whitespace) { Ok(found) } else { Err(Step::Broken) }
    }

    fn name(&mut self, c: char, tools: &[ToolSchema], deltas: &mut Deltas) -> Step {
        let (end, key) = (self.syntax.name.1.clone(), self.syntax.key.0.clone());
        let At::Name(name) = &mut self.at else { return Step::Broken };
        // Without a marker behind it, the name ends with the line, or where the parameters or the call do.
        let close = self.close.clone().unwrap_or_default();
        let markers: Vec<&str> = match end.is_empty() {
            true => ["\n", key.as_str(), close.as_str()].into_iter().filter(|marker| !marker.is_empty()).collect(),
            false => vec![end.as_str()],
        };
        let found = self.scan.push(c, &markers, name);
        if end.is_empty() && name.trim().is_empty() && found == Some(0) {
            return Step::More;
        }
        let Some(found) = found else {
            return if name.len() > MAX_NAME { Step::Broken } else { Step::More };
        };
        let name = std::mem::take(name).trim().to_owned();
        let Some(tool) = find(tools, &name) else { return Step::Broken };
        self.tool = tools.iter().position(|other| std::ptr::eq(other, tool)).unwrap_or_default();
        deltas.start(None, name);
        deltas.arguments("{");
        if !end.is_empty() || found == 0 {
            self.at = At::Next;
        } else if markers[found] == key {
            self.at = At::Key(String::new());
        } else {
            return self.finish(deltas);
        }
        Step::More
    }

    fn finish(&mut self, deltas: &mut Deltas) -> Step {
        deltas.arguments("}");
        self.at = At::End;
        Step::Done
    }

    fn value(&mut self, c: char, deltas: &mut Deltas) -> Step {
        let syntax = Arc::clone(&self.syntax);
        let At::Value(value) = &mut self.at else { return Step::Broken };
        let mut text = String::new();
        let found = self.scan.push(c, &[syntax.value.1.as_str()], &mut text);
        text.chars().for_each(|c| value.push(c, syntax.lines, deltas));
        if found.is_some() {
            value.end(deltas);
            self.at = At::Next;
        }
        Step::More
    }
}

impl ParameterValue {
    fn push(&mut self, c: char, lines: bool, deltas: &mut Deltas) {
        if lines {
            if std::mem::take(&mut self.first) && c == '\n' {
                return;
            }
            if std::mem::replace(&mut self.line, c == '\n') {
                self.take('\n', deltas);
            }
            if c == '\n' {
                return;
            }
        }
        self.take(c, deltas);
    }

    fn take(&mut self, c: char, deltas: &mut Deltas) {
        if !self.streams {
            self.text.push(c);
            if self.text.len() > MAX_VALUE {
                self.streams = true;
                let text = quoted(&std::mem::take(&mut self.text));
                deltas.arguments(&text[..text.len() - 1]);
            }
            return;
        }
        let mut text = String::new();
        push_escaped(c, &mut text);
        deltas.arguments(&text);
    }

    fn end(&mut self, deltas: &mut Deltas) {
        match self.streams {
            true => deltas.arguments("\""),
            false => deltas.arguments(&schema::coerced(&self.text, self.types)),
        }
    }
}

impl Body for ParametersBody {
    fn push(&mut self, c: char, tools: &[ToolSchema], deltas: &mut Deltas) -> Step {
        let syntax = Arc::clone(&self.syntax);
        let before = std::mem::discriminant(&self.at);
        let step = match &mut self.at {
            At::Open => match self.skip(c, &[syntax.name.0.as_str()]) {
                Ok(Some(_)) => {
                    self.at = At::Name(String::new());
                    Step::More
                }
                Ok(None) => Step::More,
                Err(step) => step,
            },
            At::Name(_) => self.name(c, tools, deltas),
            At::Next => {
                let close = self.close.clone().unwrap_or_default();
                let end = if syntax.end.is_empty() { close.as_str() } else { syntax.end.as_str() };
                let markers = [syntax.key.0.as_str(), end, close.as_str()];
                match self.skip(c, &markers) {
                    Ok(Some(0)) => {
                        self.at = At::Key(String::new());
                        Step::More
                    }
                    Ok(Some(_)) => self.finish(deltas),
                    Ok(None) => Step::More,
                    Err(step) => step,
                }
            }
            At::Key(key) => match self.scan.push(c, &[syntax.key.1.as_str()], key) {
                Some(_) => {
                    let key = std::mem::take(key).trim().to_owned();
                    self.at = At::Between { key };
                    if syntax.value.0.is_empty() { self.begin_value(tools, deltas) } else { Step::More }
                }
                None if key.len() > MAX_NAME => Step::Broken,
                None => Step::More,
            },
            At::Between { .. } => match self.skip(c, &[syntax.value.0.as_str()]) {
                Ok(Some(_)) => self.begin_value(tools, deltas),
                Ok(None) => Step::More,
                Err(step) => step,
            },
            At::Value(_) => self.value(c, deltas),
            At::End => Step::Before,
        };
        // Text before a marker that has not come may still be given back.
        let moved = std::mem::discriminant(&self.at) != before && !matches!(self.at, At::Name(_));
        deltas.committed |= moved || matches!(self.at, At::Value(_));
        step
    }

    fn close(&mut self, deltas: &mut Deltas) {
        match std::mem::replace(&mut self.at, At::End) {
            At::Open | At::Name(_) | At::End => {}
            At::Next | At::Key(_) | At::Between { .. } => deltas.arguments("}"),
            At::Value(mut value) => {
                if value.line {
                    value.take('\n', deltas);
                }
                for c in self.scan.take().chars() {
                    value.take(c, deltas);
                }
                value.end(deltas);
                deltas.arguments("}");
            }
        }
    }
}

impl ParametersBody {
    fn begin_value(&mut self, tools: &[ToolSchema], deltas: &mut Deltas) -> Step {
        let At::Between { key } = &self.at else { return Step::Broken };
        let types = tools.get(self.tool).map(|tool| schema::types(&tool.parameters, key)).unwrap_or_default();
        let streams = types.only_string();
        let comma = if self.num_given > 0 { ", " } else { "" };
        deltas.arguments(&format!("{comma}{}: {}", quoted(key), if streams { "\"" } else { "" }));
        self.num_given += 1;
        self.at = At::Value(ParameterValue { types, streams, first: true, line: false, text: String::new() });
        Step::More
    }
}
