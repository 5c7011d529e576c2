//! The engine's input (requests) and output (token events).

use std::sync::Arc;

use smallvec::SmallVec;

use crate::constraint::RequestConstraint;
use crate::{Adapter, SampledToken, SamplingParams, SequenceId, TokenId};

/// A generation request: token ids and settings, no text.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Request {
    /// The prompt; must not be empty.
    pub prompt: Vec<TokenId>,
    /// Maximum number of tokens to generate, at least 1.
    pub max_tokens: u32,
    /// How tokens are chosen, and which tokens end the sequence.
    pub sampling: SamplingParams,
    /// Token sequences that end the output. A stop word is never part of the output; its tokens are held back until
    /// they cannot complete it.
    pub stop_words: Vec<Vec<TokenId>>,
    /// Requests with higher values are admitted first; 0 is the default. Equal priorities are served in order of
    /// arrival. Of 17 requests that begin, one is the oldest that waits, so that no priority starves.
    pub priority: u32,
    /// Set for a beam search. The sampling settings that draw at random are ignored then.
    pub beams: Option<BeamParams>,
    /// Maximum number of draft tokens to guess and verify in one step; 0 turns drafts off. Only greedy sequences
    /// without penalties, bias or bans use drafts.
    pub max_drafts: u32,
    /// Sequences share cached blocks only with sequences of the same salt.
    pub cache_salt: Option<u64>,
    /// Which tokens may be generated; not with a beam search.
    pub constraint: Option<RequestConstraint>,
    /// The adapter whose low-rank products are added to the linear layers; `None` for the model itself.
    pub adapter: Option<Arc<Adapter>>,
}

/// Settings of a beam search.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct BeamParams {
    /// Number of beams kept, and number of outputs; at least 2.
    pub width: u32,
    /// The log-probability of a finished beam is divided by `length ^ len_penalty` before beams are compared: positive
    /// values favour long outputs, 0 turns the penalty off.
    pub len_penalty: f32,
    /// Ends the search as soon as `width` beams have finished, even if an unfinished one could still score better.
    pub early_stopping: bool,
    /// `i * diversity_rate` is added to the score of each continuation of beam `i` when continuations are ranked; 0
    /// turns it off.
    pub diversity_rate: f32,
}

/// One result of a beam search.
#[derive(Debug, Clone, PartialEq)]
pub struct BeamOutput {
    /// Tokens with their log-probabilities after penalties and bans. An end id or stop word at the end is not included.
    pub tokens: Vec<(TokenId, f32)>,
    /// Sum of the log-probabilities of all tokens, including an end id or stop word.
    pub cum_log_prob: f32,
}

/// Why a sequence ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FinishReason {
    /// This end id was chosen. `None` for a beam search, each of whose beams has its own.
    EndId(Option<TokenId>),
    /// A stop word was completed.
    StopWord,
    /// `max_tokens` were generated, or the context is full.
    Length,
    /// The client disconnected or cancelled the request.
    Cancelled,
    /// The constraint of the request is satisfied, and no token may follow.
    Complete,
    /// The constraint of the request allows no token; [`TokenEvent::error`] says why.
    Constraint,
}

/// New tokens of one sequence, its end, or both.
#[derive(Debug, Clone, PartialEq)]
pub struct TokenEvent {
    /// The sequence that this event belongs to.
    pub sequence: SequenceId,
    /// Tokens released by this event, in order; nearly always one. End ids and stop words are not included.
    pub tokens: SmallVec<[SampledToken; 1]>,
    /// Set on the last event of a sequence, and only there.
    pub finished: Option<FinishReason>,
    /// KV blocks that this sequence has used so far.
    pub blocks: BlockUsage,
    /// Draft tokens guessed for this sequence so far.
    pub drafts: DraftUsage,
    /// The outputs of a beam search, best first, in its last event. `tokens` is empty for a beam search.
    pub beams: Vec<BeamOutput>,
    /// Why a sequence ended with [`FinishReason::Constraint`].
    pub error: Option<Box<str>>,
}

/// How many draft tokens of a sequence were guessed and accepted.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct DraftUsage {
    /// Tokens guessed.
    pub num_drafted: u32,
    /// Guessed tokens that were correct.
    pub num_accepted: u32,
}

/// Where the KV blocks of a sequence came from.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct BlockUsage {
    /// Blocks of the prompt that were found in the prefix cache when the sequence was first admitted.
    pub num_reused: u32,
    /// Blocks allocated, counted again after each preemption or restart of the workers.
    pub num_allocated: u32,
}

/// Why a request was refused. A refused request leaves no state in the engine.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[allow(missing_docs)] // Fields are named in the messages.
pub enum Refused {
    /// The prompt has no token to continue.
    #[error("prompt is empty; it must hold at least 1 token")]
    EmptyPrompt,
    /// The prompt leaves no room for an output token.
    #[error("prompt has {len} tokens; this model takes at most {max}")]
    PromptTooLong { len: usize, max: usize },
    /// There is no token to generate.
    #[error("max_tokens is 0; it must be at least 1")]
    MaxTokensZero,
    /// An empty stop word would end every output at once.
    #[error("stop word {index} is empty; it must hold at least 1 token")]
    EmptyStopWord { index: usize },
    /// Stop words are stored for each sequence, so their length is bounded.
    #[error("stop words have {len} tokens; at most {max} are taken")]
    StopWordsTooLong { len: usize, max: usize },
    /// The lists would not fit into a step plan.
    #[error("end ids, bad words and logit bias have {len} entries (2 for a biased token); at most {max} are taken")]
    ListsTooLong { len: usize, max: usize },
    /// Devices have buffers for at most `max` log-probabilities.
    #[error("log-probabilities of the {found} likeliest tokens are requested; at most {max} are reported")]
    TooManyLogprobs { found: u32, max: u32 },
    /// The sequence would need more KV blocks than exist.
    #[error("{needed} KV blocks are needed for prompt and output but there are {num_blocks}; lower max_tokens")]
    NeverFits { needed: usize, num_blocks: usize },
    /// A beam search takes one row for each beam.
    #[error("beam width is {width}; it must be 2 to {max}")]
    BeamWidth { width: u32, max: usize },
    /// Devices report at most `max` continuations of a beam.
    #[error(
        "{found} continuations of each beam are needed (beam width, end ids and stop words); at most {max} are taken"
    )]
    TooManyCandidates { found: usize, max: usize },
    /// The beams of a search would need masks before their tokens are ranked.
    #[error("a constraint cannot be combined with a beam search; use one of them")]
    ConstrainedBeams,
    /// Beams would need copies of recurrent states.
    #[error("this model has recurrent layers, which do not support beam search; sample several outputs instead")]
    RecurrentBeams,
    /// Workers have no slots for adapters.
    #[error("this model takes no adapters; load it with `max_loras` above 0")]
    NoAdapters,
    /// Too many requests are waiting.
    #[error("queue is full: {max} requests wait; try again later")]
    QueueFull { max: usize },
    /// Too many requests of this priority are waiting.
    #[error("queue is full: {max} requests of this priority wait; try again later")]
    LevelFull { max: usize },
}
