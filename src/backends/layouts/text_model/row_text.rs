//! The output for one prompt.

use engine::FinishReason;
use generation::Delta;

/// The output for one prompt that no response has returned yet.
#[derive(Debug, Default)]
pub(super) struct RowText {
    pub(super) text: String,
    pub(super) returns_log_probs: bool,
    /// Natural log-probabilities of the tokens.
    pub(super) log_probs: Vec<f32>,
    /// The sum of all log-probabilities so far.
    pub(super) cum_log_prob: f32,
    pub(super) finished: Option<FinishReason>,
}

impl RowText {
    /// Adds new tokens with their text.
    pub(super) fn push(&mut self, delta: Delta) {
        self.text.push_str(&delta.text);
        self.finished = delta.finished;
        if self.returns_log_probs {
            let begin = self.log_probs.len();
            self.log_probs.extend(delta.tokens.iter().map(|token| token.logprob.unwrap_or(0.0)));
            self.cum_log_prob += self.log_probs[begin..].iter().sum::<f32>();
        }
    }

    /// Removes what a response has returned.
    pub(super) fn clear(&mut self) {
        self.text.clear();
        self.log_probs.clear();
    }

    /// `length` or `stop`, once the text is complete.
    pub(super) fn finish_reason(&self) -> &'static str {
        if self.finished == Some(FinishReason::Length) { "length" } else { "stop" }
    }
}
