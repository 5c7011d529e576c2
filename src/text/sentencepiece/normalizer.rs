use super::charsmap::Charsmap;
use super::proto::{NormalizerSpec, TrainerSpec};
use crate::trie::Trie;

/// Represents a space in a piece.
pub(crate) const SPACE: char = '\u{2581}';

/// Normalizes a text into the characters of the vocabulary.
#[derive(Debug)]
pub(super) struct Normalizer {
    charsmap: Charsmap,
    pub(super) add_dummy_prefix: bool,
    pub(super) remove_extra_whitespaces: bool,
    escape_whitespaces: bool,
    space_is_suffix: bool,
}

impl Normalizer {
    /// `None` if the character map is damaged.
    pub(super) fn new(spec: &NormalizerSpec, trainer: &TrainerSpec) -> Option<Self> {
        Some(Self {
            charsmap: Charsmap::read(spec.precompiled_charsmap())?,
            add_dummy_prefix: spec.add_dummy_prefix(),
            remove_extra_whitespaces: spec.remove_extra_whitespaces(),
            escape_whitespaces: spec.escape_whitespaces(),
            space_is_suffix: trainer.treat_whitespace_as_suffix(),
        })
    }

    /// Whether normalization never shortens a text.
    pub(super) fn keeps_all(&self) -> bool {
        self.charsmap.is_empty() && !self.remove_extra_whitespaces
    }

    /// The normal form of `text`; user-defined pieces (`kept`) are not changed. `with_prefix` unset is for a later part of a text:
    /// no space is added before it, and its leading spaces are kept.
    pub(super) fn normalize(&self, mut text: &str, kept: &Trie, with_prefix: bool) -> String {
        let space = if self.escape_whitespaces { SPACE } else { ' ' };
        let mut out = String::with_capacity(text.len() + text.len() / 2);
        let at_start = with_prefix && self.remove_extra_whitespaces;
        while at_start && !text.is_empty() {
            let (len, part) = self.next(text, kept);
            if part != " " {
                break;
            }
            text = &text[len..];
        }
        if text.is_empty() {
            return out;
        }
        let adds_space = self.add_dummy_prefix && with_prefix;
        if adds_space && !self.space_is_suffix {
            out.push(space);
        }
        let mut after_space = at_start;
        while !text.is_empty() {
            let (len, part) = self.next(text, kept);
            let part = if after_space { part.trim_start_matches(' ') } else { part };
            out.extend(part.chars().map(|c| if c == ' ' { space } else { c }));
            if !part.is_empty() {
                after_space = self.remove_extra_whitespaces && part.ends_with(' ');
            }
            text = &text[len..];
        }
        if self.remove_extra_whitespaces {
            out.truncate(out.trim_end_matches(space).len());
        }
        if adds_space && self.space_is_suffix {
            out.push(space);
        }
        out
    }

    /// The number of bytes to consume at the start of a text, and their replacement.
    fn next<'a>(&'a self, text: &'a str, kept: &Trie) -> (usize, &'a str) {
        if let Some((len, _)) = kept.longest(text.as_bytes()) {
            return (len, &text[..len]);
        }
        let len = text.chars().next().map_or(0, char::len_utf8);
        match self.charsmap.longest(text.as_bytes()) {
            // A damaged map might split a character.
            Some((len, replacement)) if text.is_char_boundary(len) => (len, replacement),
            _ => (len, &text[..len]),
        }
    }
}
