//! Draft tokens: guesses at a sequence's next tokens, which are verified in one step.

use crate::{SampledToken, TokenId};

/// Guesses the next tokens of a sequence. A wrong guess costs time but changes no token.
///
/// [`PromptLookup`] needs only the sequence itself. What needs the model's hidden states guesses on the devices instead
/// ([`crate::EngineConfig::guesses_on_device`]); its guesses are verified in the same way.
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

/// How many drafts of a step are accepted on average when a benchmark forces it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ForcedAcceptance {
    /// Thousandths of a draft.
    per_step: u32,
}

impl ForcedAcceptance {
    /// The rate at which steps with drafts give `tokens` tokens of a sequence on average, at least 1: that many less one are drafts.
    pub fn of_tokens_per_step(tokens: f64) -> Self {
        Self { per_step: ((tokens - 1.0) * 1000.0).round() as u32 }
    }
}

/// Draft tokens in flight, and the tokens of their step settled so far.
#[derive(Debug)]
pub(crate) struct InStep {
    pub(crate) drafts: Vec<TokenId>,
    pub(crate) verified: Vec<SampledToken>,
}

/// Weight of the newest draft in [`Acceptance::rate`].
const NEWEST: f64 = 1.0 / 8.0;

/// Weight of a sequence's rate in that of all sequences, each time it changes.
const NEWEST_SEQUENCE: f64 = 1.0 / 64.0;

/// How often the drafts of a sequence were right of late. It determines how many are worth their time.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Acceptance {
    /// Estimated probability that a draft is right if those before it are.
    rate: f64,
    /// Thousandths of a draft by which fewer were accepted than a benchmark forces.
    owed: u32,
}

impl Default for Acceptance {
    fn default() -> Self {
        Self { rate: 0.8, owed: 0 }
    }
}

impl Acceptance {
    /// Number of drafts that are worth their time, at most `most`. `price` is the share by which a step takes longer with a
    /// further draft. Draft `n` is right, and gives a further token, with the probability `rate ^ n`.
    pub(crate) fn num_worth(&self, most: usize, price: f64) -> usize {
        let mut probability = self.rate;
        let mut count = 0;
        while count < most && probability > price {
            count += 1;
            probability *= self.rate;
        }
        count
    }

    /// What each of the first, second and further drafts gives beyond its price, in tokens.
    pub(crate) fn gains(&self, price: f64) -> impl Iterator<Item = f64> {
        std::iter::successors(Some(self.rate), |probability| Some(probability * self.rate)).map(move |it| it - price)
    }

    /// Follows the rate of a sequence. New sequences begin with this one.
    pub(crate) fn follow(&mut self, sequence: &Self) {
        self.rate += NEWEST_SEQUENCE * (sequence.rate - self.rate);
    }

    /// Number of drafts of a step that count as right, of `num_drafts`. The mean over the steps is the forced one, and steps differ by
    /// one draft at most where all have enough.
    pub(crate) fn forced(&mut self, forced: ForcedAcceptance, num_drafts: usize) -> usize {
        let owed = self.owed + forced.per_step;
        let num_accepted = (owed as usize / 1000).min(num_drafts);
        // What a step without enough drafts could not accept is not made up for, but for a part of a draft.
        self.owed = owed % 1000;
        num_accepted
    }

    /// Counts a step in which `num_accepted` of `num_drafts` were right, up to the first wrong one.
    pub(crate) fn learn(&mut self, num_accepted: usize, num_drafts: usize) {
        for _ in 0..num_accepted {
            self.rate += NEWEST * (1.0 - self.rate);
        }
        if num_accepted < num_drafts {
            self.rate -= NEWEST * self.rate;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_number_of_drafts_follows_their_acceptance_and_their_price() {
        let mut acceptance = Acceptance::default();
        assert_eq!([0.0, 0.5, 0.7, 0.9].map(|price| acceptance.num_worth(4, price)), [4, 3, 1, 0]);
        assert!(acceptance.gains(0.5).zip([0.3, 0.14]).all(|(gain, expected)| (gain - expected).abs() < 1e-9));
        (0..40).for_each(|_| acceptance.learn(2, 2));
        assert_eq!([0.5, 0.9, 1.0].map(|price| acceptance.num_worth(4, price)), [4, 4, 0]);
        (0..40).for_each(|_| acceptance.learn(0, 2));
        assert_eq!([0.0, 0.02].map(|price| acceptance.num_worth(4, price)), [4, 0]);
    }

    #[test]
    fn new_sequences_begin_with_the_rate_of_others() {
        let (mut sequence, mut usual) = (Acceptance::default(), Acceptance::default());
        for _ in 0..300 {
            sequence.learn(0, 1);
            usual.follow(&sequence);
        }
        assert_eq!(usual.num_worth(4, 0.1), 0);
    }

    #[test]
    fn forced_steps_have_the_mean_that_was_asked_for() {
        let counts = |tokens: f64, num_drafts: usize| {
            let mut acceptance = Acceptance::default();
            let forced = ForcedAcceptance::of_tokens_per_step(tokens);
            (0..8).map(|_| acceptance.forced(forced, num_drafts)).collect::<Vec<_>>()
        };
        assert_eq!(counts(2.5, 3), [1, 2, 1, 2, 1, 2, 1, 2]);
        assert_eq!(counts(1.25, 3), [0, 0, 0, 1, 0, 0, 0, 1]);
        assert_eq!(counts(1.0, 3), [0; 8]);
        assert_eq!(counts(4.0, 3), [3; 8]);
        assert_eq!(counts(2.5, 1), [1; 8]);
    }

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
