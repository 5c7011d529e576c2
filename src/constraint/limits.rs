//! Limits of the cost of a constraint.

use std::time::Duration;

use crate::ConstraintError;

/// Limits of the cost of a constraint.
#[derive(Debug, Clone)]
pub struct Limits {
    /// Bytes of a description: a schema as JSON text, a grammar, a regular expression.
    pub max_bytes: usize,
    /// Levels of arrays and objects in a schema.
    pub max_nesting: usize,
    /// Symbols in the rules of a grammar.
    pub max_grammar_size: usize,
    /// States of the lexer of one sequence, of 1 to 2 KiB each.
    pub max_lexer_states: usize,
    /// Steps of the lexer for one mask, some 14 a microsecond.
    pub mask_lexer_steps: u64,
    /// Items of the parser for one mask, some 20 a microsecond.
    pub mask_parser_items: usize,
    /// Time to compute one mask, or to add one token.
    pub mask_time: Duration,
    /// Time of all computations for one sequence.
    pub total_time: Duration,
    /// Time to compile a description.
    pub compile_time: Duration,
    /// Descriptions that are compiled at the same time. One that ran out of time counts until it has in fact ended.
    pub max_compiling: usize,
    /// Bytes of the cache of compiled grammars, by estimate.
    pub cache_bytes: usize,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            max_bytes: 256 << 10,
            max_nesting: 64,
            max_grammar_size: 200_000,
            max_lexer_states: 50_000,
            mask_lexer_steps: 200_000,
            mask_parser_items: 50_000,
            mask_time: Duration::from_secs(1),
            total_time: Duration::from_secs(60),
            compile_time: Duration::from_secs(2),
            max_compiling: 8,
            cache_bytes: 256 << 20,
        }
    }
}

impl Limits {
    /// # Errors
    /// When a description has more bytes than [`Limits::max_bytes`].
    pub(crate) fn check_bytes(&self, what: &'static str, got: usize) -> Result<(), ConstraintError> {
        match got > self.max_bytes {
            true => Err(ConstraintError::TooLarge { what, got, max: self.max_bytes, unit: "bytes" }),
            false => Ok(()),
        }
    }
}
