//! Draft tokens: guesses at a sequence's next tokens, which are verified in one step.

use crate::TokenId;

/// Guesses the next tokens of a sequence. A wrong guess costs time but changes no token.
///
/// [`PromptLookup`] needs only the sequence itself; a draft model would implement this trait, too.
pub trait Drafter: std::fmt::Debug + Send {
    /// Appends at most `max` guesses at what follows `tokens` (prompt and output so far) to `drafts`.
    fn draft(&mut self, tokens: &[TokenId], max: usize, drafts: &mut Vec<TokenId>);
}

/// Guesses the tokens that followed an earlier occurrence of the last tokens (prompt look-up decoding, Saxena 2023).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PromptLookup {
    /// Maximum length of the n-gram to search for, at least 1. The longest match is used, and the latest of equally
    /// long ones.
    pub max_ngram: usize,
}

impl Drafter for PromptLookup {
    fn draft(&mut self, tokens: &[TokenId], max: usize, drafts: &mut Vec<TokenId>) {
        let (mut longest, mut next) = (0, tokens.len());
        for end in (1..tokens.len()).rev() {
            let both = tokens[..end].iter().rev().zip(tokens.iter().rev());
            let len = both.take(self.max_ngram).take_while(|(earlier, last)| earlier == last).count();
            if len > longest {
                (longest, next) = (len, end);
            }
            if longest == self.max_ngram {
                break;
            }
        }
        drafts.extend(tokens[next..].iter().take(max));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn draft(max_ngram: usize, tokens: &[u32], max: usize) -> Vec<u32> {
        let tokens: Vec<TokenId> = tokens.iter().map(|&token| TokenId(token)).collect();
        let mut drafts = Vec::new();
        PromptLookup { max_ngram }.draft(&tokens, max, &mut drafts);
        drafts.into_iter().map(|token| token.0).collect()
    }

    #[test]
    fn the_longest_match_wins_and_of_equals_the_latest() {
        assert_eq!(draft(3, &[1, 2, 3, 9, 2, 3, 8, 3, 7, 1, 2, 3], 2), [9, 2]);
        assert_eq!(draft(2, &[1, 2, 3, 9, 2, 3, 8, 3, 7, 1, 2, 3], 2), [8, 3]);
        assert_eq!(draft(1, &[1, 2, 3, 9, 2, 3, 8, 3, 7, 1, 2, 3], 1), [7]);
    }

    #[test]
    fn a_run_is_its_own_continuation_and_what_was_never_seen_has_none() {
        assert_eq!(draft(3, &[5, 5, 5, 5], 4), [5]);
        assert_eq!(draft(3, &[1, 2, 3, 4], 4), [] as [u32; 0]);
        assert_eq!(draft(3, &[1], 4), [] as [u32; 0]);
        assert_eq!(draft(3, &[4, 4], 0), [] as [u32; 0]);
    }
}
