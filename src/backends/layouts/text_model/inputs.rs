//! The texts of a request.

use serving::{InferError, InferRequest};

use crate::tensor_values::{find, utf8};
use generation::input_names::PROMPT;

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

/// A list of words; none without the input.
pub(super) fn words(request: &InferRequest, names: &[&str]) -> Vec<String> {
    let tensor = names.iter().filter_map(|name| request.input(name)).find_map(|tensor| tensor.to_byte_strings());
    tensor.unwrap_or_default().iter().map(|word| String::from_utf8_lossy(word).into_owned()).collect()
}
