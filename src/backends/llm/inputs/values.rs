//! Values of input tensors.

use engine::TokenId;
use serving::{DataType, InferError, InferRequest, Tensor};

use super::super::config::LlmConfig;

/// The string of an input; `None` without the input.
pub(super) fn text(request: &InferRequest, name: &str) -> Result<Option<String>, InferError> {
    let Some(tensor) = request.input(name) else { return Ok(None) };
    let strings = tensor.to_byte_strings().ok_or_else(|| wrong_type(tensor, "BYTES"))?;
    match strings.as_slice() {
        [text] => match std::str::from_utf8(text) {
            Ok(text) => Ok(Some(text.to_owned())),
            Err(_) => Err(InferError::invalid(format!("`{name}` is not UTF-8"))),
        },
        found => Err(InferError::invalid(format!("`{name}` has {} values, expected 1", found.len()))),
    }
}

/// A token id.
///
/// # Errors
/// When it is outside of the vocabulary.
pub(super) fn token(config: &LlmConfig, name: &str, id: i64) -> Result<TokenId, InferError> {
    let known = u32::try_from(id).ok().filter(|&id| (id as usize) < config.vocab_size);
    known.map(TokenId).ok_or_else(|| {
        InferError::invalid(format!("`{name}` holds token {id}, but the vocabulary is 0..{}", config.vocab_size))
    })
}

pub(super) fn at_least_zero(name: &str, value: Option<i64>) -> Result<Option<u32>, InferError> {
    let convert = |value: i64| {
        u32::try_from(value).map_err(|_| InferError::invalid(format!("`{name}` is {value}, expected at least 0")))
    };
    value.map(convert).transpose()
}

/// The value of the first of `names` that the request has.
///
/// # Errors
/// When it is outside of `range`.
pub(super) fn float(
    request: &InferRequest,
    names: &[&str],
    range: std::ops::RangeInclusive<f32>,
) -> Result<Option<f32>, InferError> {
    let value = scalar::<f32>(request, names)?;
    match value.filter(|value| !range.contains(value)) {
        Some(value) => {
            let words = format!("`{}` is {value}, expected {} to {}", names[0], range.start(), range.end());
            Err(InferError::invalid(words))
        }
        None => Ok(value),
    }
}

/// A type of values, with the tensor data types from which it is converted.
pub(super) trait Element: Sized {
    const EXPECTED: &'static str;
    fn all(tensor: &Tensor) -> Option<Vec<Self>>;
}

impl Element for i64 {
    const EXPECTED: &'static str = "INT32 or another integer type";

    fn all(tensor: &Tensor) -> Option<Vec<Self>> {
        match tensor.datatype {
            DataType::Int32 => Some(tensor.to_i32()?.into_iter().map(i64::from).collect()),
            DataType::Uint32 => Some(tensor.to_u32()?.into_iter().map(i64::from).collect()),
            DataType::Int64 => tensor.to_i64(),
            DataType::Uint64 => {
                Some(tensor.to_u64()?.into_iter().map(|value| value.try_into().unwrap_or(i64::MAX)).collect())
            }
            _ => None,
        }
    }
}

impl Element for u64 {
    const EXPECTED: &'static str = "UINT64 or another integer type";

    fn all(tensor: &Tensor) -> Option<Vec<Self>> {
        match tensor.datatype {
            DataType::Uint64 => tensor.to_u64(),
            _ => Some(i64::all(tensor)?.into_iter().map(|value| value as u64).collect()),
        }
    }
}

impl Element for f32 {
    const EXPECTED: &'static str = "FP32 or FP64";

    fn all(tensor: &Tensor) -> Option<Vec<Self>> {
        match tensor.datatype {
            DataType::Fp32 => tensor.to_f32(),
            DataType::Fp64 => Some(tensor.to_f64()?.into_iter().map(|value| value as f32).collect()),
            _ => None,
        }
    }
}

impl Element for bool {
    const EXPECTED: &'static str = "BOOL";

    fn all(tensor: &Tensor) -> Option<Vec<Self>> {
        tensor.to_bool()
    }
}

/// The value of the first of `names` that the request has.
///
/// # Errors
/// When the tensor has another type, or not exactly one value.
pub(super) fn scalar<T: Element>(request: &InferRequest, names: &[&str]) -> Result<Option<T>, InferError> {
    let Some(tensor) = names.iter().find_map(|name| request.input(name)) else {
        return Ok(None);
    };
    let mut values = T::all(tensor).ok_or_else(|| wrong_type(tensor, T::EXPECTED))?;
    match values.len() {
        1 => Ok(values.pop()),
        found => Err(InferError::invalid(format!("`{}` has {found} values, expected 1", tensor.name))),
    }
}

pub(super) fn integers(tensor: &Tensor) -> Result<Vec<i64>, InferError> {
    i64::all(tensor).ok_or_else(|| wrong_type(tensor, i64::EXPECTED))
}

pub(super) fn wrong_type(tensor: &Tensor, expected: &str) -> InferError {
    InferError::invalid(format!("`{}` is {}, expected {expected}", tensor.name, tensor.datatype.name()))
}
