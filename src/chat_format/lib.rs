//! How models write reasoning, content and tool calls.
//!
//! A [`ChatFormat`] describes one family of models. From the one description come a stream parser ([`TurnParser`]),
//! which splits the text of a turn into deltas, and a grammar ([`ToolGrammar`]), which constrains tool calls while
//! tokens are sampled.
//!
//! The deltas of a turn do not depend on how its text was split into chunks. Arguments are JSON text in every family.
//! Nothing is lost but markers and white space beside them:
//! - text that looks like a call and is not one, or that calls a tool which was not given, is content as it stands;
//! - a call that breaks is closed so that its arguments are JSON, and the text from there on is content;
//! - where the turn was cut at its maximum length ([`TurnParser::cut`]), the arguments stay as they came.
#![forbid(unsafe_code)]

mod arguments;
mod arguments_schema;
mod calls;
mod escape;
mod families;
mod format;
mod grammar;
mod grammar_harmony;
mod grammar_values;
mod harmony;
mod json;
mod lark;
mod literal;
mod marker;
mod markers;
mod named;
mod object;
mod parameters;
mod parser;
mod pattern;
mod python;
mod response_template;
mod schema;
mod section;

pub use format::ChatFormat;
pub use parser::TurnParser;

/// A tool that the model may call.
#[derive(Clone, Debug, PartialEq)]
pub struct ToolSchema {
    /// The name that the model writes.
    pub name: String,
    /// The JSON Schema of the arguments, an object.
    pub parameters: serde_json::Value,
    /// A grammar holds the arguments to the schema; otherwise to JSON alone.
    pub strict: bool,
}

/// Which tools the model must call.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Choice {
    /// Any or none.
    Auto,
    /// At least one.
    Required,
    /// This one.
    Named(String),
}

/// Where in a turn the text of the model begins.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TurnStart {
    /// At its begin: the model may open reasoning.
    Fresh,
    /// In reasoning, which the prompt opened.
    Thinking,
    /// In content: there is no reasoning, or the prompt closed it.
    Content,
}

/// A grammar that constrains the calls of a turn.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ToolGrammar {
    /// The grammar in llguidance's variant of Lark.
    pub lark: String,
    /// The grammar holds only behind this marker: the end of the reasoning that the prompt opened.
    pub starts_after: Option<String>,
    /// Special tokens that Lark cannot name, such as `[TOOL_CALLS]`. See [`ToolGrammar::with_ids`].
    pub unnamed: Vec<String>,
}

impl ToolGrammar {
    /// Puts the ids of the tokens in `unnamed` into the grammar, without which it does not compile.
    ///
    /// `None` when `id` knows one of them not.
    pub fn with_ids(mut self, id: &dyn Fn(&str) -> Option<u32>) -> Option<ToolGrammar> {
        let mut lines: Vec<String> = self.lark.lines().map(str::to_owned).collect();
        for (index, token) in self.unnamed.drain(..).enumerate() {
            let (rule, id) = (Self::unnamed_rule(index), id(&token)?);
            let resolved = format!("special-{index}: <[{id}]>");
            lines.iter_mut().filter(|line| **line == rule).for_each(|line| line.clone_from(&resolved));
        }
        self.lark = lines.join("\n");
        Some(self)
    }

    /// The line that stands for a special token without a name.
    pub(crate) fn unnamed_rule(index: usize) -> String {
        format!("special-{index}: <[{index}]> # id to be filled in")
    }
}

/// A part of a turn.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ChatDelta {
    /// More reasoning.
    Reasoning(String),
    /// More content.
    Content(String),
    /// A call begins.
    ToolCallStart {
        /// The place of the call among the calls of the turn, from 0.
        index: usize,
        /// The id that the model gave.
        id: Option<String>,
        /// The tool, one of those that were given.
        name: String,
    },
    /// More of the arguments of a call. All of them joined are the text of a JSON object.
    ToolCallArguments {
        /// The place of the call among the calls of the turn, from 0.
        index: usize,
        /// The text.
        json: String,
    },
}

/// Why a format or a grammar could not be made.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[allow(missing_docs)] // Fields are named by their messages.
pub enum FormatError {
    #[error("`{tool}` is not among the tools; name one of {known}")]
    UnknownTool { tool: String, known: String },
    #[error(
        "the parameters of the tool `{tool}` cannot be held to their schema in the format `{format}`: {reason}; leave out `strict`"
    )]
    Schema { tool: String, format: String, reason: String },
    #[error(
        "the name `{name}` of a tool is empty or has characters other than letters, digits, `_`, `-` and `.`; rename the tool"
    )]
    Name { name: String },
    #[error("the format `{format}` has no tool calls; choose a format that has, or leave out `tools`")]
    NoCalls { format: String },
    #[error("`response_template`: `{field}` {reason}; choose a format by name")]
    Template { field: String, reason: String },
}
