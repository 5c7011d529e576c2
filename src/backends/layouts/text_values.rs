//! The prompts of a text model's request, and the text of its output.

use generation::input_names::PROMPT;
use serving::{InferError, InferRequest, InferResponse};
use text::Detokenizer;

use super::engine_request::EngineOutput;
use crate::tensor_values::{find, utf8};

/// The prompts of a request.
///
/// # Errors
/// When there is none, or one is not UTF-8.
pub(super) fn prompts(request: &InferRequest) -> Result<Vec<String>, InferError> {
    let missing = || InferError::invalid("the prompt is missing: send it as the model's text input");
    let tensor = find(request, &PROMPT).ok_or_else(missing)?;
    let texts = tensor.to_byte_strings().filter(|texts| !texts.is_empty()).ok_or_else(missing)?;
    texts.iter().map(|text| utf8(&tensor.name, text).map(str::to_owned)).collect()
}

/// The text of one sequence, which is detokenized as its tokens arrive.
pub(super) struct RunningText {
    detokenizer: Detokenizer,
    /// Text that [`RunningText::take`] has not returned yet.
    piece: String,
    /// Log-probabilities that [`RunningText::take`] has not returned yet, where they are requested.
    log_probs: Vec<f32>,
    cum_log_prob: f32,
    num_tokens: usize,
    max_tokens: usize,
}

/// The whole text of a sequence, or the next piece of it.
pub(super) struct TextPiece {
    pub text: String,
    /// Natural log-probabilities of its tokens.
    pub log_probs: Vec<f32>,
    /// The sum of all log-probabilities so far.
    pub cum_log_prob: f32,
    /// The reason for the end, of the last piece.
    pub finish_reason: &'static str,
}

impl RunningText {
    /// A text that begins with `leading`. Its finish reason is `length` from `max_tokens` tokens on.
    pub fn new(detokenizer: Detokenizer, leading: String, max_tokens: usize) -> Self {
        Self { detokenizer, piece: leading, log_probs: Vec::new(), cum_log_prob: 0.0, num_tokens: 0, max_tokens }
    }

    /// Whether [`RunningText::take`] would return no text.
    pub fn is_empty(&self) -> bool {
        self.piece.is_empty()
    }

    /// Adds the tokens of an engine's response.
    pub fn push(&mut self, response: &InferResponse) {
        let EngineOutput { tokens, log_probs } = EngineOutput::new(response);
        self.num_tokens += tokens.len();
        tokens.iter().for_each(|&token| self.detokenizer.push_into(token, &mut self.piece));
        self.cum_log_prob += log_probs.iter().sum::<f32>();
        self.log_probs.extend(log_probs);
        if response.is_final {
            self.detokenizer.finish_into(&mut self.piece);
        }
    }

    /// The text and log-probabilities since the last call.
    pub fn take(&mut self) -> TextPiece {
        let finish_reason = if self.num_tokens >= self.max_tokens { "length" } else { "stop" };
        let (text, log_probs) = (std::mem::take(&mut self.piece), std::mem::take(&mut self.log_probs));
        TextPiece { text, log_probs, cum_log_prob: self.cum_log_prob, finish_reason }
    }
}
