//! Reading one input: its tensor from JSON, from the binary tail, or from shared memory.

use bytes::Bytes;
use serving::{ClientMemory, DataType, InferError, Limit, Limits, Tensor};

use super::parameters::{optional_u64, read_region};
use crate::api::triton::http::json::{self, Value, in_field};
use crate::api::triton::shared_memory::SharedMemory;

/// The context of the inputs of a request.
pub(super) struct InputContext<'a> {
    pub model: &'a str,
    /// Length of the JSON head in bytes, which bounds the number of elements.
    pub head_len: usize,
    pub memory: &'a SharedMemory,
    pub limits: &'a Limits,
}

pub(super) fn read_input(
    input: &Value<'_>,
    context: &InputContext<'_>,
    tail: &mut Bytes,
    client_memory: &mut ClientMemory,
) -> Result<Tensor, InferError> {
    let &InputContext { model, head_len, memory, limits } = context;
    let parameters = input.member("parameters");
    let has = |key: &str| parameters.is_some_and(|parameters| parameters.member(key).is_some());
    let sources = [input.member("data").is_some(), has("binary_data_size"), has("shared_memory_region")];
    if sources.into_iter().filter(|is_set| *is_set).count() != 1 {
        return Err(not_one_source(sources));
    }
    let text = |field: &str| input.required(field)?.as_str().map_err(|error| in_field(field, error));
    let name = text("name")?.to_owned();
    limits.check(Limit::NameBytes, name.len())?;
    let datatype = DataType::from_name(text("datatype")?)
        .ok_or_else(|| InferError::invalid(format!("invalid datatype for input {name}")))?;
    let shape = read_shape(input.required("shape")?, limits)?;
    let binary_size = optional_u64(parameters, "binary_data_size")?;
    let region = read_region(parameters)?;
    let data = match (input.member("data"), binary_size, region) {
        (Some(data), ..) => json_data(data, &name, datatype, &shape, head_len)?,
        (_, Some(size), _) => take_tail(tail, size, &name, model)?,
        (.., Some(region)) => memory.input(&region, &name, datatype, client_memory)?,
        (None, None, None) => return Err(not_one_source(sources)),
    };
    Ok(Tensor { name: name.into(), datatype, shape: shape.into(), data })
}

/// `sources`: whether there is JSON data, a size of binary data, and a region.
fn not_one_source(sources: [bool; 3]) -> InferError {
    let named = sources.into_iter().zip(["'data'", "'binary_data_size'", "'shared_memory_region'"]);
    let set: Vec<&str> = named.filter(|(is_set, _)| *is_set).map(|(_, name)| name).collect();
    let found = if set.is_empty() { "no field is set".to_owned() } else { format!("set {}", set.join(" ")) };
    InferError::invalid(format!(
        "Input must set only one of the following fields: 'data', 'binary_data_size' in 'parameters', \
         'shared_memory_region' in 'parameters'. But {found}"
    ))
}

fn read_shape(shape: &Value<'_>, limits: &Limits) -> Result<Vec<i64>, InferError> {
    let mut sizes = Vec::new();
    let read = shape.as_array().and_then(|shape| {
        shape.for_each(|size| {
            limits.check(Limit::Dimensions, sizes.len() + 1)?;
            let too_large = || InferError::invalid("a size does not fit in 64 bits");
            let size = size.as_u64().map_err(|error| if size.is_whole() { too_large() } else { error })?;
            sizes.push(i64::try_from(size).map_err(|_| InferError::invalid(format!("{size} is too large")))?);
            Ok(())
        })
    });
    read.map_err(|error| in_field("shape", error))?;
    Ok(sizes)
}

/// Shapes with up to this many elements are not compared with the length of the head.
const MANY_ELEMENTS: usize = 1 << 26;

/// Converts the elements of `data`. A head of `head_len` bytes cannot contain more elements than that.
fn json_data(
    data: &Value<'_>,
    name: &str,
    datatype: DataType,
    shape: &[i64],
    head_len: usize,
) -> Result<Bytes, InferError> {
    let expected =
        shape.iter().try_fold(1usize, |product, &size| product.checked_mul(size as usize)).ok_or_else(|| {
            InferError::invalid(format!("shape {shape:?} of input '{name}' has more elements than can be counted"))
        })?;
    // The data of a shape without elements is ignored. A shape without dimensions is checked against the configuration.
    if expected == 0 || shape.is_empty() {
        return Ok(Bytes::new());
    }
    if matches!(datatype, DataType::Fp16 | DataType::Bf16) {
        return Err(InferError::invalid(format!(
            "receiving {} data via JSON is not supported. Please use the binary data format for input {name}",
            datatype.name()
        )));
    }
    let array = data.as_array().map_err(|error| in_field("data", error))?;
    let mut bytes = Vec::new();
    if expected > head_len.max(MANY_ELEMENTS) {
        return Err(InferError::invalid(format!(
            "Unable to parse 'data': shape {shape:?} of input '{name}' has {expected} elements, more than the request can hold"
        )));
    }
    // The number of strings is checked with the request against the model.
    if array.flatten(datatype, expected, &mut bytes)? < expected && datatype != DataType::Bytes {
        return Err(json::shape_mismatch());
    }
    Ok(bytes.into())
}

fn take_tail(tail: &mut Bytes, size: u64, name: &str, model: &str) -> Result<Bytes, InferError> {
    let missing = size.saturating_sub(tail.len() as u64);
    if missing > 0 {
        return Err(InferError::invalid(format!(
            "unexpected size for input '{name}', expecting {missing} additional bytes for model '{model}'"
        )));
    }
    Ok(tail.split_to(size as usize))
}
