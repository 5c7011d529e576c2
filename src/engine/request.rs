//! What a client asks of the engine, and what it hears back.

use smallvec::SmallVec;

use crate::{SampledToken, SamplingParams, SequenceId, TokenId};

/// A request as the engine sees it: integers in.
#[derive(Debug, Clone, PartialEq, Default)]
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
    /// Searches several continuations at once; the sampling settings that draw are of no use then.
    pub beams: Option<BeamParams>,
    /// Most tokens to guess and verify in one step, for greedy sequences whose logits are used as they are; 0 is off.
    pub max_drafts: u32,
}

/// How continuations are searched.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct BeamParams {
    /// Continuations kept, and outputs; at least 2.
    pub width: u32,
    /// Log-probabilities of ended continuations are divided by `length ^ len_penalty` before they are compared:
    /// positive values favour long ones, 0 is off.
    pub len_penalty: f32,
    /// Ends the search as soon as `width` continuations have ended, even if an open one could still be better.
    pub early_stopping: bool,
    /// Added to the continuations of beam `i`, `i` times, where they are ranked; 0 is off.
    pub diversity_rate: f32,
}

/// One result of a beam search.
#[derive(Debug, Clone, PartialEq)]
pub struct BeamOutput {
    /// Tokens with their log-probabilities after penalties and bans; end id or stop word are not among them.
    pub tokens: Vec<(TokenId, f32)>,
    /// Sum of the log-probabilities of all tokens, that of an end id or stop word included.
    pub cum_log_prob: f32,
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
    /// Tokens released by this event, in order; end ids and stop words are not among them. Nearly always one.
    pub tokens: SmallVec<[SampledToken; 1]>,
    /// Set on the last event of a sequence.
    pub finished: Option<FinishReason>,
    /// KV blocks that this sequence took so far.
    pub blocks: BlockUsage,
    /// Guesses made for it so far.
    pub drafts: DraftUsage,
    /// The outputs of a beam search, best first, in its last event; `tokens` stays empty then.
    pub beams: Vec<BeamOutput>,
}

/// How a sequence's guessed tokens fared.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct DraftUsage {
    /// Tokens guessed.
    pub num_drafted: u32,
    /// Of these, guessed right.
    pub num_accepted: u32,
}

/// How a sequence came by its KV blocks.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct BlockUsage {
    /// Blocks of the prompt that were found computed when the sequence was first admitted.
    pub num_reused: u32,
    /// Blocks allocated, again after each preemption or restart.
    pub num_allocated: u32,
}

/// Why a request was not taken. It leaves nothing behind.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[allow(missing_docs)] // Fields are named by their messages.
pub enum Refused {
    /// Nothing to continue.
    #[error("prompt is empty; it must hold at least 1 token")]
    EmptyPrompt,
    /// No room for an output token.
    #[error("prompt has {len} tokens; this model takes at most {max}")]
    PromptTooLong { len: usize, max: usize },
    /// Nothing to generate.
    #[error("max_tokens is 0; it must be at least 1")]
    MaxTokensZero,
    /// It would end every output at once.
    #[error("stop word {index} is empty; it must hold at least 1 token")]
    EmptyStopWord { index: usize },
    /// Each sequence keeps them.
    #[error("stop words have {len} tokens; at most {max} are taken")]
    StopWordsTooLong { len: usize, max: usize },
    /// A plan could not carry them.
    #[error("end ids, bad words and logit bias have {len} entries (2 for a biased token); at most {max} are taken")]
    ListsTooLong { len: usize, max: usize },
    /// Devices keep no room for them.
    #[error("log-probabilities of the {found} likeliest tokens are asked for; at most {max} are reported")]
    TooManyLogprobs { found: u32, max: u32 },
    /// More KV blocks than there are.
    #[error("{needed} KV blocks are needed for prompt and output but there are {num_blocks}; lower max_tokens")]
    NeverFits { needed: usize, num_blocks: usize },
    /// Every beam takes a row.
    #[error("beam width is {width}; it must be 2 to {max}")]
    BeamWidth { width: u32, max: usize },
    /// Devices report no more.
    #[error(
        "{found} continuations of each beam are needed (beam width, end ids and stop words); at most {max} are taken"
    )]
    TooManyCandidates { found: usize, max: usize },
    /// Too many requests wait already.
    #[error("queue is full: {max} requests wait; try again later")]
    QueueFull { max: usize },
    /// Too many requests of its priority wait already.
    #[error("queue is full: {max} requests of this priority wait; try again later")]
    LevelFull { max: usize },
}
