//! The output of one sequence so far.

use engine::{BlockUsage, DraftUsage};
use generation::Tokens;
use serving::Timestamp;

use super::super::logits::Logits;

/// What one sequence has come to.
#[derive(Debug, Clone, Default)]
pub(super) struct Output {
    /// Tokens that no response has returned yet.
    pub(super) pending: Tokens,
    /// Text that no response has returned yet.
    pub(super) text: String,
    pub(super) num_tokens: usize,
    pub(super) cumulative_log_prob: f64,
    pub(super) blocks: BlockUsage,
    pub(super) drafts: DraftUsage,
    pub(super) logits: Logits,
    pub(super) first_scheduled: Option<Timestamp>,
    pub(super) first_token: Option<Timestamp>,
    pub(super) last_token: Option<Timestamp>,
    pub(super) ended: bool,
}

impl Output {
    pub(super) fn take(&mut self, tokens: &mut Tokens, at: Timestamp, blocks: BlockUsage) {
        self.blocks = blocks;
        if tokens.is_empty() {
            return;
        }
        self.first_token.get_or_insert(at);
        self.last_token = Some(at);
        self.num_tokens += tokens.len();
        self.cumulative_log_prob += tokens.iter().filter_map(|token| token.logprob.map(f64::from)).sum::<f64>();
        if self.pending.is_empty() {
            self.pending = std::mem::take(tokens);
        } else {
            self.pending.append(tokens);
        }
    }

    pub(super) fn take_text(&mut self, text: &mut String) {
        if self.text.is_empty() {
            self.text = std::mem::take(text);
        } else {
            self.text.push_str(text);
        }
    }

    /// Removes the tokens and the text that a response has returned.
    pub(super) fn clear(&mut self) {
        self.pending.clear();
        self.text.clear();
    }
}

pub(super) fn longest(sequences: &[Output]) -> usize {
    sequences.iter().map(|output| output.pending.len()).max().unwrap_or(0)
}
