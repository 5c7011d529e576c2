//! How the next token of a sequence is chosen.

use serde::{Deserialize, Serialize};

use crate::TokenId;

/// Maximum number of likeliest tokens whose log-probabilities a request may ask for. Devices have buffers of this size.
pub const MAX_LOGPROBS: u32 = 32;

/// Maximum number of continuations of a beam that a device reports.
pub const MAX_BEAM_CANDIDATES: usize = 256;

/// Sampling settings of one sequence. They are sent to every worker when its row joins.
///
/// A device applies them in this order: repetition, presence and frequency penalty; logit bias; bad words; end ids
/// while fewer than `min_tokens` are generated; the mask of a constraint; temperature; top-k; top-p; min-p. Tokens whose probability equals that
/// of the last one kept by top-k or top-p are kept, too.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct SamplingParams {
    /// Divides the logits; 0 means greedy, whatever the other settings are.
    pub temperature: f32,
    /// Keeps the `top_k` most likely tokens; 0 keeps all, 1 means greedy.
    pub top_k: u32,
    /// Keeps the smallest set of most likely tokens whose probability reaches `top_p`, in (0, 1]; 1 keeps all.
    pub top_p: f32,
    /// After each token `top_p` is multiplied by this, in (0, 1]; 1 turns the decay off.
    pub top_p_decay: f32,
    /// Lower bound of the decayed `top_p`.
    pub top_p_min: f32,
    /// After this token `top_p` is reset to its initial value.
    pub top_p_reset: Option<TokenId>,
    /// Removes tokens less likely than `min_p` times the likeliest, in [0, 1); 0 keeps all.
    pub min_p: f32,
    /// Divides positive and multiplies negative logits of tokens in the prompt or the output; 1 turns it off.
    pub repetition_penalty: f32,
    /// Subtracted once from the logit of each token that was already generated; 0 turns it off.
    pub presence_penalty: f32,
    /// Subtracted from the logit of a token once for each time it was generated; 0 turns it off.
    pub frequency_penalty: f32,
    /// Seed of the random numbers. The token drawn at output position `n` depends only on the logits, `seed` and `n`.
    pub seed: u64,
    /// End ids are not chosen before this number of tokens is generated.
    pub min_tokens: u32,
    /// Tokens that end the sequence; empty when the end of sequence is ignored.
    pub end_ids: Vec<TokenId>,
    /// Values added to the logits of these tokens.
    pub logit_bias: Vec<(TokenId, f32)>,
    /// Token sequences that must not be completed in the output.
    pub bad_words: Vec<Vec<TokenId>>,
    /// `Some(n)` reports the log-probabilities of the chosen token and of the `n` likeliest, at most [`MAX_LOGPROBS`].
    pub num_logprobs: Option<u32>,
    /// Above 0, the row is a beam: no token is drawn or appended. The step's output has this number of likeliest tokens
    /// as `top`, with their log-probabilities after penalties, bias and bans.
    pub beam_candidates: u32,
    /// Whether each token is chosen among those of a [`SampleMask`](crate::SampleMask), which comes after the plan. The
    /// engine sets it.
    pub is_constrained: bool,
    /// Whether to return the raw logits of every position of the prompt.
    pub context_logits: bool,
    /// Whether to return the raw logits that each output token is chosen from.
    pub generation_logits: bool,
}

impl Default for SamplingParams {
    fn default() -> Self {
        Self {
            temperature: 0.0,
            top_k: 0,
            top_p: 1.0,
            top_p_decay: 1.0,
            top_p_min: 1e-6,
            top_p_reset: None,
            min_p: 0.0,
            repetition_penalty: 1.0,
            presence_penalty: 0.0,
            frequency_penalty: 0.0,
            seed: 0,
            min_tokens: 0,
            end_ids: Vec::new(),
            logit_bias: Vec::new(),
            bad_words: Vec::new(),
            num_logprobs: None,
            beam_candidates: 0,
            is_constrained: false,
            context_logits: false,
            generation_logits: false,
        }
    }
}

impl SamplingParams {
    /// Whether the likeliest token is always chosen.
    pub fn is_greedy(&self) -> bool {
        self.temperature == 0.0 || self.top_k == 1
    }

    /// Whether the choice of a token depends on earlier tokens of the output otherwise than through the logits.
    pub fn depends_on_output(&self) -> bool {
        !self.uses_raw_logits() || self.top_p_decay != 1.0 || self.top_p_reset.is_some()
    }

    /// Number of entries in its lists, for the bound on a plan's size: each takes at most 5 bytes.
    pub fn list_len(&self) -> usize {
        let bad_words: usize = self.bad_words.iter().map(|word| 1 + word.len()).sum();
        self.end_ids.len() + 2 * self.logit_bias.len() + bad_words
    }

    /// Whether logits are used without penalties, bias or bans, so that greedy sampling is a plain argmax.
    pub fn uses_raw_logits(&self) -> bool {
        self.repetition_penalty == 1.0
            && self.presence_penalty == 0.0
            && self.frequency_penalty == 0.0
            && self.min_tokens == 0
            && self.logit_bias.is_empty()
            && self.bad_words.is_empty()
    }
}
