//! Values of a text model's request, and the text of its answer.

use serving::{InferError, InferRequest, InferResponse, Shape, Tensor};
use text::Detokenizer;

use super::text_names::PROMPT;

/// The prompts of a request.
///
/// # Errors
/// When there is none, or one is no text.
pub(super) fn prompts(request: &InferRequest) -> Result<Vec<String>, InferError> {
    let missing = || InferError::invalid("the prompt is missing: send it as the model's text input");
    let tensor = find(request, &PROMPT).ok_or_else(missing)?;
    let texts = tensor.to_byte_strings().ok_or_else(missing)?;
    if texts.is_empty() {
        return Err(missing());
    }
    let text = |text: &bytes::Bytes| {
        let words = |error: std::str::Utf8Error| {
            let at = error.valid_up_to();
            InferError::invalid(format!("input `{}` is not UTF-8: byte {at} is wrong; send UTF-8 text", tensor.name))
        };
        std::str::from_utf8(text).map(str::to_owned).map_err(words)
    };
    texts.iter().map(text).collect()
}

/// The first input that is there.
pub(super) fn find<'a>(request: &'a InferRequest, names: &[&str]) -> Option<&'a Tensor> {
    names.iter().find_map(|name| request.input(name))
}

/// The first value of a BOOL input; one that is no BOOL is someone else's.
pub(super) fn flag(request: &InferRequest, names: &[&str]) -> Result<Option<bool>, InferError> {
    let Some(tensor) = find(request, names) else { return Ok(None) };
    let wrong = || InferError::invalid(format!("input `{}` is {}, expected BOOL", tensor.name, tensor.datatype.name()));
    Ok(tensor.to_bool().ok_or_else(wrong)?.first().copied())
}

/// One row of a request whose numbers may be one for all, or one for each.
#[derive(Clone, Copy)]
pub(super) struct Row {
    pub index: usize,
    pub count: usize,
}

impl Row {
    /// This row's number of `tensor`, under the engine's name for it.
    pub fn of(self, tensor: &Tensor, name: &str) -> Result<Tensor, InferError> {
        let size = tensor.datatype.size().unwrap_or(1);
        let count = tensor.data.len() / size;
        if count != 1 && count != self.count {
            let words =
                format!("input `{}` has {count} values for {} prompts; send one, or one each", tensor.name, self.count);
            return Err(InferError::invalid(words));
        }
        let at = if count == 1 { 0 } else { self.index } * size;
        Ok(Tensor {
            name: name.into(),
            shape: Shape::from_slice(&[1, 1]),
            data: tensor.data.slice(at..at + size),
            ..tensor.clone()
        })
    }
}

/// A text in the making.
pub(super) struct RunningText {
    pub detokenizer: Detokenizer,
    /// Text that was not taken yet; at first what stands before the generated text.
    pub piece: String,
    /// Natural logarithms of tokens that were not taken yet, where they are asked for.
    pub log_probs: Vec<f32>,
    /// The sum of all of them.
    pub cumulative: f32,
    pub num_tokens: usize,
    pub max_tokens: usize,
}

/// A text, or the next piece of one.
pub(super) struct Answer {
    pub text: String,
    pub log_probs: Vec<f32>,
    /// Their sum, those of pieces before among them.
    pub cumulative: f32,
    /// Why it ended, if it did.
    pub finish_reason: &'static str,
}

impl RunningText {
    /// Adds what the engine's response brings.
    pub fn push(&mut self, response: &InferResponse) {
        let output = |name: &str| response.outputs.iter().find(|tensor| tensor.name == name);
        for id in output("output_ids").and_then(Tensor::to_i32).unwrap_or_default() {
            self.num_tokens += 1;
            self.detokenizer.push_into(id.cast_unsigned(), &mut self.piece);
        }
        let log_probs = output("output_log_probs").and_then(Tensor::to_f32).unwrap_or_default();
        self.cumulative += log_probs.iter().sum::<f32>();
        self.log_probs.extend(log_probs);
        if response.is_final {
            self.detokenizer.finish_into(&mut self.piece);
        }
    }

    /// What came since it was last taken.
    pub fn take(&mut self) -> Answer {
        let finish_reason = if self.num_tokens >= self.max_tokens { "length" } else { "stop" };
        let (text, log_probs) = (std::mem::take(&mut self.piece), std::mem::take(&mut self.log_probs));
        Answer { text, log_probs, cumulative: self.cumulative, finish_reason }
    }
}
