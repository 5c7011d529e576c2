use serde_json::Value;

/// What a text must be.
#[derive(Debug, Clone, PartialEq)]
pub enum ConstraintSpec {
    /// Any JSON object.
    JsonObject,
    /// A JSON value that a JSON Schema accepts: an object, a boolean, or a string that holds one of them as JSON text.
    JsonSchema(Value),
    /// A text that a regular expression matches as a whole, in the syntax of Rust's `regex` without look-around and back-references.
    Regex(String),
    /// One of these texts.
    Choice(Vec<String>),
    /// A grammar in Lark's syntax, or in that of llama.cpp (GBNF: rules with `::=`, which begin at `root`).
    Grammar(String),
    /// A grammar in llguidance's variant of Lark, which the server has made itself: it may have options that a client's
    /// [`ConstraintSpec::Grammar`] may not have.
    Lark(String),
    /// A structural tag: free text with tagged parts, each of which follows a schema or another format.
    StructuralTag(Value),
}

impl ConstraintSpec {
    /// What the specification is, for a message: "the JSON schema".
    pub(crate) fn what(&self) -> &'static str {
        match self {
            Self::JsonObject | Self::JsonSchema(_) => "the JSON schema",
            Self::Regex(_) => "the regular expression",
            Self::Choice(_) => "the list of choices",
            Self::Grammar(_) | Self::Lark(_) => "the grammar",
            Self::StructuralTag(_) => "the structural tag",
        }
    }
}

/// After which part of a generated text a constraint starts, such as the end of the reasoning. Text before it is free, except
/// that it cannot end.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum StartAfter {
    /// After these token ids in a row.
    Tokens(Vec<u32>),
    /// After this text. The token that completes it adds no text behind it.
    Text(String),
}
