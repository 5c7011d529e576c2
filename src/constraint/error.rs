use thiserror::Error;

/// The longest message of `llguidance` that is passed on, in characters.
const MAX_MESSAGE: usize = 500;

/// Why a constraint cannot be compiled, or cannot go on.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum ConstraintError {
    /// The vocabulary cannot be used.
    #[error("the vocabulary cannot be constrained: {0}")]
    Vocabulary(String),
    /// A part of the description is larger than its limit.
    #[error("{what} has {got} {unit}, over the limit of {max}: make it smaller")]
    TooLarge {
        /// What was measured, such as "the JSON schema".
        what: &'static str,
        /// Its size.
        got: usize,
        /// The largest size that is accepted.
        max: usize,
        /// The unit of both sizes.
        unit: &'static str,
    },
    /// A schema nests deeper than its limit.
    #[error("the JSON schema nests deeper than {max} levels at `{place}`: flatten it, or move parts to `$defs`")]
    TooDeep {
        /// JSON pointer into the schema, cut to a readable length.
        place: String,
        /// The deepest nesting that is accepted.
        max: usize,
    },
    /// A feature that is not implemented.
    #[error("`{feature}` at `{place}` is not supported in a constraint: remove it and check the answer yourself")]
    Unsupported {
        /// The keyword or the name of the format.
        feature: String,
        /// JSON pointer, or the kind of the constraint.
        place: String,
    },
    /// The description is not valid.
    #[error("{what} is not valid: {reason}")]
    Invalid {
        /// What is not valid, such as "the regular expression".
        what: &'static str,
        /// The reason, with the place where it is known.
        reason: String,
    },
    /// The description needs more time to compile than its limit.
    #[error("{what} takes more than {limit_ms} ms to compile: simplify it")]
    TooSlow {
        /// What was compiled.
        what: &'static str,
        /// The limit in milliseconds.
        limit_ms: u64,
    },
    /// Too many descriptions are being compiled.
    #[error("{running} constraints are being compiled: try again later")]
    Busy {
        /// How many.
        running: usize,
    },
    /// A token was accepted that the constraint forbids.
    #[error("token {token} at position {position} is not allowed by the constraint")]
    Forbidden {
        /// The token.
        token: u32,
        /// How many tokens the constraint had accepted before it.
        position: usize,
    },
    /// More tokens were to be taken back than were accepted.
    #[error("{count} tokens cannot be taken back: the constraint accepted {accepted}")]
    Rollback {
        /// How many were to be taken back.
        count: usize,
        /// How many were accepted.
        accepted: usize,
    },
    /// The grammar exceeded a limit while a text was generated, or no token can continue it.
    #[error("the constraint cannot go on: {0}")]
    Stuck(String),
}

/// A message of `llguidance` on one line, without the dump of its state, cut to a readable length.
pub(crate) fn readable(message: &str) -> String {
    let message = message.split("\n<").next().unwrap_or_default();
    let message = message.split_whitespace().collect::<Vec<_>>().join(" ");
    match message.char_indices().nth(MAX_MESSAGE) {
        Some((end, _)) => format!("{}…", &message[..end]),
        None => message,
    }
}
