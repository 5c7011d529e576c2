//! Values of a request's tensors.

use bytes::Bytes;
use serving::{DataType, InferError, InferRequest, Tensor};

/// The string of an input; `None` without the input.
pub(crate) fn text(request: &InferRequest, name: &str) -> Result<Option<String>, InferError> {
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

/// `value` as an unsigned number.
///
/// # Errors
/// When it is negative or too large.
pub(crate) fn at_least_zero(name: &str, value: Option<i64>) -> Result<Option<u32>, InferError> {
    let convert = |value: i64| {
        u32::try_from(value).map_err(|_| InferError::invalid(format!("`{name}` is {value}, expected at least 0")))
    };
    value.map(convert).transpose()
}

/// The value of the first of `names` that the request has.
///
/// # Errors
/// When it is outside of `range`.
pub(crate) fn float(
    request: &InferRequest,
    names: &[&str],
    range: std::ops::RangeInclusive<f32>,
) -> Result<Option<f32>, InferError> {
    let value = scalar::<f32>(request, names)?;
    match value.filter(|value| !range.contains(value)) {
        Some(value) => {
            let message = format!("`{}` is {value}, expected {} to {}", names[0], range.start(), range.end());
            Err(InferError::invalid(message))
        }
        None => Ok(value),
    }
}

/// A type of values, with the tensor data types from which it is converted.
pub(crate) trait Element: Sized {
    /// The expected types, for error messages.
    const EXPECTED: &'static str;

    /// All values of a tensor; `None` for another type.
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

/// The first of the named inputs that the request has.
pub(crate) fn find<'a>(request: &'a InferRequest, names: &[&str]) -> Option<&'a Tensor> {
    names.iter().find_map(|name| request.input(name))
}

/// The first value of the first of `names` that the request has; `None` for an empty tensor, too.
///
/// # Errors
/// When the tensor has another type.
pub(crate) fn first<T: Element>(request: &InferRequest, names: &[&str]) -> Result<Option<T>, InferError> {
    let Some(tensor) = find(request, names) else { return Ok(None) };
    Ok(values(tensor)?.into_iter().next())
}

/// The value of the first of `names` that the request has.
///
/// # Errors
/// When the tensor has another type, or not exactly one value.
pub(crate) fn scalar<T: Element>(request: &InferRequest, names: &[&str]) -> Result<Option<T>, InferError> {
    let Some(tensor) = find(request, names) else { return Ok(None) };
    let mut values = values(tensor)?;
    match values.len() {
        1 => Ok(values.pop()),
        found => Err(InferError::invalid(format!("`{}` has {found} values, expected 1", tensor.name))),
    }
}

/// All values of a tensor.
///
/// # Errors
/// When it has another type.
pub(crate) fn values<T: Element>(tensor: &Tensor) -> Result<Vec<T>, InferError> {
    T::all(tensor).ok_or_else(|| wrong_type(tensor, T::EXPECTED))
}

/// The error for a tensor of another type.
pub(crate) fn wrong_type(tensor: &Tensor, expected: &str) -> InferError {
    InferError::invalid(format!("`{}` is {}, expected {expected}", tensor.name, tensor.datatype.name()))
}

/// The elements of a tensor of strings.
///
/// # Errors
/// When it has another type or is malformed.
pub(crate) fn strings(tensor: &Tensor) -> Result<Vec<Bytes>, InferError> {
    let name = &tensor.name;
    tensor.to_byte_strings().ok_or_else(|| InferError::invalid(format!("input `{name}` holds no well-formed strings")))
}

/// A string of input `name` as text.
///
/// # Errors
/// When it is not UTF-8. The message has the position.
pub(crate) fn utf8<'a>(name: &str, bytes: &'a [u8]) -> Result<&'a str, InferError> {
    std::str::from_utf8(bytes).map_err(|error| {
        let at = error.valid_up_to();
        InferError::invalid(format!("input `{name}` is not UTF-8: byte {at} is wrong; send UTF-8 text"))
    })
}
