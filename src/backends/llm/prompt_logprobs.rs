//! Log-probabilities of a prompt's tokens.

use engine::TokenId;
use generation::{Logits, LogitsPosition, PromptLogprob};

/// Computes the log-probabilities of a prompt from its logits. It stores one row of logits at a time.
pub(crate) struct PromptLogprobs {
    prompt: Vec<TokenId>,
    num_top: usize,
    vocab_size: usize,
    /// The row of logits that is being received.
    row: Vec<f32>,
    /// Log-probabilities by position. The first token has none. A position that is computed again replaces its entry.
    found: Vec<Option<PromptLogprob>>,
}

impl PromptLogprobs {
    /// Log-probabilities of the tokens of `prompt`, with the `num_top` likeliest tokens at each position.
    pub(crate) fn new(prompt: Vec<TokenId>, num_top: usize, vocab_size: usize) -> Self {
        let found = vec![None; prompt.len()];
        Self { prompt, num_top, vocab_size, row: Vec::with_capacity(vocab_size), found }
    }

    /// Adds a part of a row of logits.
    pub(crate) fn push(&mut self, part: &Logits) {
        let LogitsPosition::Prompt(position) = part.position else { return };
        if part.first_token == 0 {
            self.row.clear();
        }
        self.row.extend_from_slice(&part.values);
        // The logits at a position are those of the token after it.
        let next = position as usize + 1;
        if self.row.len() == self.vocab_size
            && let Some(&token) = self.prompt.get(next)
        {
            self.found[next] = Some(logprob_of(&self.row, token, self.num_top));
        }
    }

    /// The log-probabilities of all tokens except the first; `None` if one is missing.
    pub(crate) fn complete(&mut self) -> Option<Vec<PromptLogprob>> {
        self.found.drain(..).skip(1).collect()
    }
}

/// The log-probability of `token` under the softmax of `logits`, and the likeliest tokens. Tokens with equal logits are ordered by id.
/// All is computed in f64, as CPUs do for the tokens that they generate, so that a token has one log-probability in both places.
fn logprob_of(logits: &[f32], token: TokenId, num_top: usize) -> PromptLogprob {
    let max = f64::from(logits.iter().copied().fold(f32::NEG_INFINITY, f32::max));
    let sum: f64 = logits.iter().map(|&logit| (f64::from(logit) - max).exp()).sum();
    let log_sum = max + sum.ln();
    let logprob = |id: u32| (f64::from(logits[id as usize]) - log_sum) as f32;
    let mut top: Vec<u32> = Vec::with_capacity(num_top + 1);
    for id in 0..logits.len() as u32 {
        let is_likelier = |&other: &u32| logits[id as usize] > logits[other as usize];
        if top.len() < num_top || top.last().is_some_and(is_likelier) {
            let place = top.iter().position(is_likelier).unwrap_or(top.len());
            top.insert(place, id);
            top.truncate(num_top);
        }
    }
    let rank = 1 + logits.iter().filter(|&&logit| logit > logits[token.0 as usize]).count() as u32;
    PromptLogprob {
        logprob: logprob(token.0),
        rank,
        top: top.into_iter().map(|id| (TokenId(id), logprob(id))).collect(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn part(position: u32, first_token: u32, values: &[f32]) -> Logits {
        Logits { index: 0, position: LogitsPosition::Prompt(position), first_token, values: values.to_vec() }
    }

    #[test]
    fn log_probabilities_are_those_of_the_softmax_whatever_the_parts() {
        let mut found = PromptLogprobs::new([0, 2, 1].map(TokenId).to_vec(), 2, 4);
        found.push(&part(0, 0, &[0.0, 9.0]));
        found.push(&part(0, 0, &[0.0, 1.0])); // Computed again.
        found.push(&part(0, 2, &[2.0, 1.0]));
        found.push(&part(1, 0, &[1000.0, 1001.0, -1000.0, 1001.0]));
        found.push(&part(2, 0, &[0.0; 4]));
        let found = found.complete().unwrap();
        let sum: f64 = [0.0f64, 1.0, 2.0, 1.0].iter().map(|logit| logit.exp()).sum();
        assert!((f64::from(found[0].logprob) - (2.0 - sum.ln())).abs() < 1e-6);
        assert_eq!(found[0].top.iter().map(|(token, _)| token.0).collect::<Vec<_>>(), [2, 1]);
        assert_eq!(found[1].top.iter().map(|(token, _)| token.0).collect::<Vec<_>>(), [1, 3]);
        assert_eq!(found[1].logprob, found[1].top[0].1);
        assert_eq!(found.iter().map(|found| found.rank).collect::<Vec<_>>(), [1, 1]);
        assert_eq!(found.len(), 2);
    }

    #[test]
    fn differences_of_logits_are_not_rounded_to_f32() {
        let mut state = 1u32;
        let mut next = || {
            state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            (state >> 8) as f32 / (1 << 20) as f32
        };
        for _ in 0..5000 {
            let logits: Vec<f32> = (0..64).map(|_| 0.3 * next() - 2.0).collect();
            let max = logits.iter().copied().map(f64::from).fold(f64::NEG_INFINITY, f64::max);
            let total = max + logits.iter().map(|&logit| (f64::from(logit) - max).exp()).sum::<f64>().ln();
            for (token, found) in logprob_of(&logits, TokenId(0), logits.len()).top {
                let expected = (f64::from(logits[token.0 as usize]) - total) as f32;
                assert_eq!(found.to_bits(), expected.to_bits(), "{found} and {expected}");
            }
        }
    }

    #[test]
    fn a_missing_position_is_noticed() {
        let mut found = PromptLogprobs::new([0, 2, 1].map(TokenId).to_vec(), 0, 4);
        found.push(&part(0, 0, &[0.0; 4]));
        assert_eq!(found.complete(), None);
        assert_eq!(PromptLogprobs::new(vec![TokenId(3)], 5, 4).complete(), Some(Vec::new()));
    }
}
