use std::collections::HashMap;

use crate::{ConstraintError, Mask, StartAfter, Token, Vocabulary};

/// The longest marker, in bytes or tokens.
const MAX_MARKER: usize = 256;

/// Looks for the marker after which a constraint starts, in tokens as they come.
#[derive(Clone)]
pub(crate) struct Start {
    pattern: Pattern,
    /// How much of the marker the text ends with.
    matched: usize,
    /// The tokens that are not allowed at a state of a text marker: they end beyond the marker.
    overshoots: HashMap<usize, Vec<u32>>,
}

#[derive(Clone)]
enum Pattern {
    Tokens(Matcher<u32>),
    Text(Matcher<u8>),
}

impl Start {
    pub(crate) fn new(after: &StartAfter) -> Result<Self, ConstraintError> {
        let (pattern, len) = match after {
            StartAfter::Tokens(ids) => (Pattern::Tokens(Matcher::new(ids)), ids.len()),
            StartAfter::Text(text) => (Pattern::Text(Matcher::new(text.as_bytes())), text.len()),
        };
        if !(1..=MAX_MARKER).contains(&len) {
            let reason = format!("the marker has {len} tokens or bytes, expected 1 to {MAX_MARKER}");
            return Err(ConstraintError::Invalid { what: "the start of the constraint", reason });
        }
        Ok(Self { pattern, matched: 0, overshoots: HashMap::new() })
    }

    /// Takes a token; whether the marker is now complete.
    pub(crate) fn accept(&mut self, token: u32, vocabulary: &Vocabulary) -> bool {
        self.matched = match &self.pattern {
            Pattern::Tokens(matcher) => matcher.next(self.matched, token),
            Pattern::Text(matcher) => matcher.walk(self.matched, bytes_of(vocabulary, token)).0,
        };
        self.matched == self.len()
    }

    pub(crate) fn reset(&mut self) {
        self.matched = 0;
    }

    /// All tokens but those that end the text, and those whose bytes go on behind the marker.
    pub(crate) fn mask(&mut self, vocabulary: &Vocabulary, mask: &mut Mask) {
        mask.assign(&vocabulary.present, vocabulary.size());
        if let Pattern::Text(matcher) = &self.pattern {
            let matched = self.matched;
            let overshoots = self.overshoots.entry(matched).or_insert_with(|| {
                let beyond = |id: &u32| matcher.walk(matched, bytes_of(vocabulary, *id)).1;
                (0..vocabulary.size() as u32).filter(beyond).collect()
            });
            overshoots.iter().for_each(|&token| mask.forbid(token));
        }
    }

    /// Whether a token may come next.
    pub(crate) fn allows(&self, token: u32, vocabulary: &Vocabulary) -> bool {
        if matches!(vocabulary.tokens.get(token as usize), None | Some(Token::Absent)) {
            return false;
        }
        match &self.pattern {
            Pattern::Tokens(_) => true,
            Pattern::Text(matcher) => !matcher.walk(self.matched, bytes_of(vocabulary, token)).1,
        }
    }

    fn len(&self) -> usize {
        match &self.pattern {
            Pattern::Tokens(matcher) => matcher.pattern.len(),
            Pattern::Text(matcher) => matcher.pattern.len(),
        }
    }
}

fn bytes_of(vocabulary: &Vocabulary, token: u32) -> &[u8] {
    match vocabulary.tokens.get(token as usize) {
        Some(Token::Text(bytes)) => bytes,
        Some(Token::Special(name)) => name.as_bytes(),
        Some(Token::Absent) | None => &[],
    }
}

/// The search of Knuth, Morris and Pratt.
#[derive(Clone)]
struct Matcher<T> {
    pattern: Vec<T>,
    /// For each prefix, the length of its longest proper border.
    border: Vec<usize>,
}

impl<T: Copy + PartialEq> Matcher<T> {
    fn new(pattern: &[T]) -> Self {
        let mut matcher = Self { pattern: pattern.to_vec(), border: vec![0] };
        let mut longest = 0;
        for &item in pattern.iter().skip(1) {
            longest = matcher.next(longest, item);
            matcher.border.push(longest);
        }
        matcher
    }

    /// How much of the pattern is matched after `item`, if `matched` of it was before.
    fn next(&self, mut matched: usize, item: T) -> usize {
        loop {
            if self.pattern.get(matched) == Some(&item) {
                return matched + 1;
            }
            match matched {
                0 => return 0,
                _ => matched = self.border[matched - 1],
            }
        }
    }

    /// The state after all `items`, and whether the pattern was complete before the last of them.
    fn walk(&self, mut matched: usize, items: &[T]) -> (usize, bool) {
        for (index, &item) in items.iter().enumerate() {
            matched = self.next(matched, item);
            if matched == self.pattern.len() {
                return (matched, index + 1 < items.len());
            }
        }
        (matched, false)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_marker_is_found_at_the_first_place_where_it_ends() {
        let matcher = Matcher::new(b"abab");
        for text in ["abab", "ababab", "aabab", "abacabab", "abaabab", "xyz"] {
            let found = text.find("abab").map(|start| start + 4);
            let mut matched = 0;
            let walked = text.bytes().position(|byte| {
                matched = matcher.next(matched, byte);
                matched == 4
            });
            assert_eq!(walked.map(|last| last + 1), found, "{text}");
            assert_eq!(matcher.walk(0, text.as_bytes()).1, found.is_some_and(|end| end < text.len()), "{text}");
        }
    }
}
