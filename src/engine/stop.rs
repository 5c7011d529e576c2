//! Finds stop words in a stream of tokens, and computes how many of its last tokens may still become one.

use crate::TokenId;

/// The stop words of one sequence with the matched length of each (Knuth, Morris and Pratt 1977).
#[derive(Debug, Clone, Default)]
pub(crate) struct StopWords(Vec<StopWord>);

#[derive(Debug, Clone)]
struct StopWord {
    tokens: Vec<TokenId>,
    /// `borders[n]` is the length of the longest proper prefix of `tokens[..=n]` that is also its suffix.
    borders: Vec<usize>,
    /// Length of the longest prefix of `tokens` that is a suffix of the stream.
    matched: usize,
}

/// State of the stream's tail after one more token.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Tail {
    /// The last tokens, this many, may still become a stop word.
    Open(usize),
    /// The last tokens, this many, are a stop word: the longest of those completed.
    Stop(usize),
}

impl StopWords {
    /// Creates the search. No word may be empty.
    pub(crate) fn new(words: Vec<Vec<TokenId>>) -> Self {
        Self(words.into_iter().map(StopWord::new).collect())
    }

    pub(crate) fn len(&self) -> usize {
        self.0.len()
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Adds the next token of the stream.
    pub(crate) fn push(&mut self, token: TokenId) -> Tail {
        let (mut open, mut stop) = (0, 0);
        for word in &mut self.0 {
            word.push(token);
            open = open.max(word.matched);
            if word.matched == word.tokens.len() {
                stop = stop.max(word.matched);
            }
        }
        if stop > 0 { Tail::Stop(stop) } else { Tail::Open(open) }
    }
}

impl StopWord {
    fn new(tokens: Vec<TokenId>) -> Self {
        let mut borders = vec![0; tokens.len()];
        for n in 1..tokens.len() {
            let mut border = borders[n - 1];
            while border > 0 && tokens[border] != tokens[n] {
                border = borders[border - 1];
            }
            borders[n] = border + usize::from(tokens[border] == tokens[n]);
        }
        Self { tokens, borders, matched: 0 }
    }

    fn push(&mut self, token: TokenId) {
        while self.matched > 0 && self.tokens.get(self.matched) != Some(&token) {
            self.matched = self.borders[self.matched - 1];
        }
        self.matched += usize::from(self.tokens[self.matched] == token);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn stop_words(words: &[&[u32]]) -> StopWords {
        StopWords::new(words.iter().map(|word| word.iter().map(|&t| TokenId(t)).collect()).collect())
    }

    fn tails(words: &[&[u32]], stream: &[u32]) -> Vec<Tail> {
        let mut stop_words = stop_words(words);
        stream.iter().map(|&token| stop_words.push(TokenId(token))).collect()
    }

    #[test]
    fn a_partial_match_stays_open_until_it_cannot_match() {
        use Tail::{Open, Stop};
        assert_eq!(tails(&[&[1, 2, 3]], &[1, 2, 9]), [Open(1), Open(2), Open(0)]);
        assert_eq!(tails(&[&[1, 1, 2]], &[1, 1, 1, 2]), [Open(1), Open(2), Open(2), Stop(3)]);
    }

    #[test]
    fn a_word_inside_another_stops_first_and_ties_go_to_the_longest() {
        use Tail::{Open, Stop};
        assert_eq!(tails(&[&[1, 2, 3, 4], &[2, 3]], &[1, 2, 3]), [Open(1), Open(2), Stop(2)]);
        assert_eq!(tails(&[&[3], &[1, 2, 3]], &[1, 2, 3]), [Open(1), Open(2), Stop(3)]);
    }

    proptest::proptest! {
        #![proptest_config(proptest::prelude::ProptestConfig { failure_persistence: None, ..Default::default() })]

        #[test]
        fn tails_are_what_a_search_from_every_start_finds(
            words in proptest::collection::vec(proptest::collection::vec(0u32..3, 1..5), 1..4),
            stream in proptest::collection::vec(0u32..3, 0..24),
        ) {
            let slices: Vec<&[u32]> = words.iter().map(Vec::as_slice).collect();
            let mut stop_words = stop_words(&slices);
            for end in 1..=stream.len() {
                let suffix_of = |len: usize| &stream[end - len..end];
                let longest = |matches: &dyn Fn(&[u32], &[u32]) -> bool| {
                    (1..=end).rev().find(|&len| words.iter().any(|word| matches(word, suffix_of(len)))).unwrap_or(0)
                };
                let stop = longest(&|word, suffix| word == suffix);
                let open = longest(&|word, suffix| word.starts_with(suffix));
                let expected = if stop > 0 { Tail::Stop(stop) } else { Tail::Open(open) };
                proptest::prop_assert_eq!(stop_words.push(TokenId(stream[end - 1])), expected);
                if stop > 0 {
                    break;
                }
            }
        }
    }
}
