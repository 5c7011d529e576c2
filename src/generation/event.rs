use engine::{BlockUsage, DraftUsage, FinishReason, SampledToken, TokenId};
use smallvec::SmallVec;

use crate::Timestamp;

/// Tokens of one delta: nearly always one.
pub type Tokens = SmallVec<[SampledToken; 1]>;

/// One event of a request. The events of a sequence end with a [`Delta`] that has a finish reason. A request ends when all of its
/// sequences have ended, or with an error.
#[derive(Debug, Clone)]
pub enum GenerateEvent {
    /// A sequence is scheduled: for the first time, or again after a preemption or the loss of a worker.
    Scheduled {
        /// Index of the sequence in the request, from 0.
        index: usize,
        /// The time.
        at: Timestamp,
    },
    /// Raw logits, before the tokens that are chosen from them.
    Logits(Logits),
    /// Log-probabilities of the prompt's tokens, before the first delta.
    PromptLogprobs(Vec<PromptLogprob>),
    /// New tokens of a sequence, or its end.
    Delta(Delta),
}

/// Log-probability of one token of the prompt. The first token of a prompt has none.
#[derive(Debug, Clone, PartialEq)]
pub struct PromptLogprob {
    /// Natural log-probability of the token, given the ones before it.
    pub logprob: f32,
    /// Number of likelier tokens, plus 1.
    pub rank: u32,
    /// The likeliest tokens at its position with their log-probabilities, best first.
    pub top: Vec<(TokenId, f32)>,
}

/// New tokens of one sequence.
#[derive(Debug, Clone)]
pub struct Delta {
    /// Index of the sequence in the request, from 0.
    pub index: usize,
    /// The tokens; none where a sequence ends without one.
    pub tokens: Tokens,
    /// The text that the sequence gained; empty where the request has no [`crate::TextOptions`].
    pub text: String,
    /// The stop text that ended the sequence, by its place in [`crate::StopTexts`].
    pub stop: Option<usize>,
    /// When the step that chose them was settled.
    pub at: Timestamp,
    /// When `text` was complete, and how many nanoseconds decoding it took; `None` where the request has no text options.
    pub decoded: Option<(Timestamp, u64)>,
    /// Set on the last delta of the sequence.
    pub finished: Option<FinishReason>,
    /// KV blocks of the sequence so far.
    pub blocks: BlockUsage,
    /// Drafted tokens of the sequence so far.
    pub drafts: DraftUsage,
    /// For a beam: the sum over its tokens and its end token, which is not among them.
    pub cum_log_prob: Option<f32>,
    /// No event follows now, and the reader's waker is registered.
    pub is_drained: bool,
}

impl Delta {
    /// A delta of a sequence without tokens, of a step that was settled at `at`.
    pub fn new(index: usize, at: Timestamp) -> Self {
        Self {
            index,
            tokens: Tokens::new(),
            text: String::new(),
            stop: None,
            at,
            decoded: None,
            finished: None,
            blocks: BlockUsage::default(),
            drafts: DraftUsage::default(),
            cum_log_prob: None,
            is_drained: false,
        }
    }
}

/// Part of the raw logits `[V]` at one position of a sequence. A position that is computed again, after a preemption or a
/// wrong draft, is sent again; the last values count.
#[derive(Debug, Clone)]
pub struct Logits {
    /// Index of the sequence in the request, from 0.
    pub index: usize,
    /// The position.
    pub position: LogitsPosition,
    /// The token whose logit is `values[0]`. The parts of a row come in order, from 0.
    pub first_token: u32,
    /// The values.
    pub values: Vec<f32>,
}

/// Which position logits belong to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LogitsPosition {
    /// This token of the prompt.
    Prompt(u32),
    /// The choice of this token of the output.
    Output(u32),
}
