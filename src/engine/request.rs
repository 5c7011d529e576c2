//! What a client asks of the engine, and what it hears back.

use crate::{SampledToken, SamplingParams, SequenceId, TokenId};

/// A request as the engine sees it: integers in.
#[derive(Debug, Clone, PartialEq)]
pub struct Request {
    /// The prompt, not empty.
    pub prompt: Vec<TokenId>,
    /// Most tokens to generate, at least 1.
    pub max_tokens: u32,
    /// How tokens are chosen, and which end the sequence.
    pub sampling: SamplingParams,
    /// Token sequences that end the output; held back, never part of it.
    pub stop_words: Vec<Vec<TokenId>>,
    /// Higher is admitted earlier; 0 is the default. Ties go by arrival.
    pub priority: u32,
}

/// Why a sequence ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FinishReason {
    /// An end id was chosen.
    EndId,
    /// A stop word was completed.
    StopWord,
    /// `max_tokens` were generated, or the context is full.
    Length,
    /// The client left or asked to stop.
    Cancelled,
}

/// News of one sequence.
#[derive(Debug, Clone, PartialEq)]
pub struct TokenEvent {
    /// Whose news.
    pub sequence: SequenceId,
    /// Tokens released by this event, in order; end ids and stop words are not among them.
    pub tokens: Vec<SampledToken>,
    /// Set on the last event of a sequence.
    pub finished: Option<FinishReason>,
}
