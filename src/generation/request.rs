use engine::{Refused, Request};

use crate::Guide;

/// A request to generate text, independent of its protocol.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct GenerateRequest {
    /// The prompt's tokens, and how the next ones are chosen. Sequence `i` has `sampling.seed + i`.
    pub sequence: Request,
    /// Number of sequences to return, at least 1: the best ones of a beam search, otherwise each is drawn independently.
    pub num_sequences: usize,
    /// Texts that end a sequence.
    pub stop: StopTexts,
    /// How the tokens are decoded; `None` where the reader needs tokens only.
    pub text: Option<TextOptions>,
    /// Whether the text of a sequence begins with that of the prompt.
    pub includes_prompt: bool,
    /// The name of the adapter (LoRA) to use; `None` for the model itself.
    pub adapter: Option<String>,
    /// Constraints of the text.
    pub guide: Guide,
    /// `Some(n)` reports the log-probability of each token of the prompt, and the `n` likeliest tokens at its position.
    pub prompt_logprobs: Option<u32>,
    /// Priority as the client sends it; the model's configuration maps it to a priority of the engine.
    pub priority: u64,
    /// Moves the request among those of equal `priority`: lower values are served first.
    pub priority_offset: i32,
    /// Timeout for the first step in microseconds; 0 for the model's default.
    pub timeout_us: u64,
}

/// Texts that end a sequence, at any token boundary.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct StopTexts {
    /// The texts; empty ones are ignored.
    pub texts: Vec<String>,
    /// Whether the text that was found is part of the output.
    pub is_included: bool,
}

/// How the tokens of a sequence are decoded.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TextOptions {
    /// Whether special tokens, such as `</s>`, are excluded.
    pub skip_special_tokens: bool,
}

impl GenerateRequest {
    /// The engine's requests, one for each sequence; one for all beams. Logits of the prompt are the same for all sequences,
    /// so only the first one returns them.
    pub fn into_sequences(self) -> Vec<Request> {
        let of_index = |index: u64| {
            let mut request = self.sequence.clone();
            request.sampling.seed = request.sampling.seed.wrapping_add(index);
            request.sampling.context_logits = false;
            request
        };
        let num_requests = if self.sequence.beams.is_some() { 1 } else { self.num_sequences };
        let others: Vec<Request> = (1..num_requests as u64).map(of_index).collect();
        std::iter::once(self.sequence).chain(others).collect()
    }

    /// Checks what the engine does not: the number of sequences, and token ids against the vocabulary.
    ///
    /// # Errors
    /// The message has the field, its value and the allowed values.
    pub fn check(&self, max_sequences: usize, vocab_size: usize) -> Result<(), InvalidRequest> {
        let max = self.sequence.beams.map_or(max_sequences, |beams| beams.width as usize);
        if !(1..=max).contains(&self.num_sequences) {
            return Err(InvalidRequest::NumSequences { found: self.num_sequences, max });
        }
        let sampling = &self.sequence.sampling;
        let lists = [
            ("prompt", self.sequence.prompt.iter().max()),
            ("stop token ids", sampling.end_ids.iter().max()),
            ("logit bias", sampling.logit_bias.iter().map(|(token, _)| token).max()),
            ("bad words", sampling.bad_words.iter().flatten().max()),
            ("allowed tokens", self.guide.allowed_tokens.iter().max()),
        ];
        for (field, largest) in lists {
            if let Some(token) = largest.filter(|token| token.0 as usize >= vocab_size) {
                return Err(InvalidRequest::Token { field, token: token.0, vocab_size });
            }
        }
        Ok(())
    }
}

/// Why a request cannot be served.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
#[allow(missing_docs)] // Fields are named in the messages.
pub enum InvalidRequest {
    /// More sequences than the model runs at once, or none.
    #[error("{found} sequences are requested; expected 1 to {max}")]
    NumSequences { found: usize, max: usize },
    /// A token id that the model does not have.
    #[error("{field}: token id {token} is outside of the vocabulary 0..{vocab_size}")]
    Token { field: &'static str, token: u32, vocab_size: usize },
    /// The engine refuses it.
    #[error(transparent)]
    Engine(#[from] Refused),
}

#[cfg(test)]
mod tests {
    use super::*;
    use engine::{BeamParams, SamplingParams, TokenId};

    fn request(num_sequences: usize) -> GenerateRequest {
        let sampling = SamplingParams { seed: 7, context_logits: true, ..SamplingParams::default() };
        let sequence = Request { prompt: vec![TokenId(3)], sampling, ..Request::default() };
        GenerateRequest { sequence, num_sequences, ..GenerateRequest::default() }
    }

    #[test]
    fn each_sequence_has_its_own_seed_and_beams_are_one_request() {
        let sequences = request(3).into_sequences();
        assert_eq!(sequences.iter().map(|sequence| sequence.sampling.seed).collect::<Vec<_>>(), [7, 8, 9]);
        let with_logits: Vec<bool> = sequences.iter().map(|sequence| sequence.sampling.context_logits).collect();
        assert_eq!(with_logits, [true, false, false]);
        let mut beams = request(2);
        beams.sequence.beams =
            Some(BeamParams { width: 4, len_penalty: 0.0, early_stopping: true, diversity_rate: 0.0 });
        assert_eq!(beams.check(1, 4), Ok(()));
        assert_eq!(beams.into_sequences().len(), 1);
    }

    #[test]
    fn counts_and_token_ids_have_bounds() {
        assert_eq!(request(0).check(4, 4), Err(InvalidRequest::NumSequences { found: 0, max: 4 }));
        assert_eq!(request(5).check(4, 4), Err(InvalidRequest::NumSequences { found: 5, max: 4 }));
        let found = request(1).check(4, 3).unwrap_err().to_string();
        assert_eq!(found, "prompt: token id 3 is outside of the vocabulary 0..3");
        let mut biased = request(1);
        biased.sequence.sampling.logit_bias = vec![(TokenId(9), 1.0)];
        assert!(biased.check(4, 9).unwrap_err().to_string().starts_with("logit bias: token id 9"));
    }
}
