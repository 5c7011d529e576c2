//! The rules of a grammar, and how their parts are written in Lark.

use crate::ConstraintError;

pub(super) const WHAT: &str = "the GBNF grammar";

/// A part of a rule.
#[derive(Debug, Clone, PartialEq)]
pub(super) enum Node {
    Literal(String),
    /// Ranges of characters, both ends included.
    Class {
        ranges: Vec<(char, char)>,
        is_negated: bool,
    },
    /// Any character, a line break too.
    Any,
    /// A rule by its number.
    Rule(usize),
    Sequence(Vec<Node>),
    Choice(Vec<Node>),
    Repeat {
        inner: Box<Node>,
        min: u32,
        max: Option<u32>,
    },
}

/// The rules of a grammar, by number.
#[derive(Debug)]
pub(super) struct Rules {
    pub(super) bodies: Vec<Node>,
    pub(super) root: usize,
}

pub(super) fn repeated(inner: &str, min: u32, max: Option<u32>) -> String {
    match (min, max) {
        (0, None) => format!("({inner})*"),
        (1, None) => format!("({inner})+"),
        (0, Some(1)) => format!("({inner})?"),
        (min, None) => format!("({inner}){{{min},}}"),
        (min, Some(max)) => format!("({inner}){{{min},{max}}}"),
    }
}

/// A class of a regular expression between slashes. Escapes leave nothing that either syntax could read otherwise.
pub(super) fn class(ranges: &[(char, char)], is_negated: bool) -> String {
    let range = |(first, last): &(char, char)| format!(r"\u{{{:x}}}-\u{{{:x}}}", *first as u32, *last as u32);
    let ranges: String = ranges.iter().map(range).collect();
    format!("/[{}{ranges}]/", if is_negated { "^" } else { "" })
}

pub(super) fn invalid(line: usize, reason: &str) -> ConstraintError {
    ConstraintError::Invalid { what: WHAT, reason: format!("{reason}, in line {line}") }
}
