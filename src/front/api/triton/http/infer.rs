//! Infer over HTTP: JSON and the binary-tensor extension.

use std::collections::HashSet;

use bytes::Bytes;
use repository::ModelConfig;
use serving::{
    ClientMemory, CorrelationId, DataType, InferError, InferRequest, InferResponse, Limit, Limits, Name, Parameter,
    Tensor,
};

use crate::api::triton::http::json::{self, Value, in_field};
use crate::api::triton::http::json_writer::JsonWriter;
use crate::api::triton::output_request::{OutputRequest, RegionSlice};
use crate::api::triton::shapes::fit_shape;
use crate::api::triton::shared_memory::SharedMemory;
use crate::transport::body::ReplyBody;

/// A request and how its client wants the answer.
#[derive(Debug, Default)]
pub struct ParsedRequest {
    /// What the model sees.
    pub request: InferRequest,
    /// Outputs that come back in a special way.
    pub outputs: Vec<OutputRequest>,
    /// Whether outputs that say nothing come raw.
    pub is_binary: bool,
}

/// Reads the JSON head and the tensors of `body`; the head ends at `head_len`, or takes it all.
///
/// # Errors
/// When it is not JSON, misses a field, has one of another type, contains more than `limits` allow, or tensor data does not fit.
pub fn read(
    model: &str,
    body: Bytes,
    head_len: Option<usize>,
    memory: &SharedMemory,
    limits: &Limits,
) -> Result<ParsedRequest, InferError> {
    let head_len = head_len.unwrap_or(body.len());
    if head_len > body.len() {
        return Err(not_in_body(head_len, body.len()));
    }
    let head = json::parse(&body[..head_len], limits)?;
    let mut asked = ParsedRequest::default();
    if let Some(id) = head.member("id") {
        asked.request.id = id.as_str().map_err(|error| in_field("id", error))?.into();
        limits.check(Limit::IdBytes, asked.request.id.len())?;
    }
    if let Some(parameters) = head.member("parameters") {
        let not_object =
            |_| InferError::internal("failed to get request params.: attempt to get members for non-object");
        check_parameters(Some(parameters), limits)?;
        for (key, value) in parameters.as_object().map_err(not_object)? {
            read_parameter(&mut asked, key, value)?;
        }
    }
    let mut tail = body.slice(head_len..);
    let inputs = head.required("inputs")?.as_array().map_err(|error| in_field("inputs", error))?;
    inputs.for_each(|input| {
        limits.check(Limit::Inputs, asked.request.inputs.len() + 1)?;
        check_parameters(input.member("parameters"), limits)?;
        let source = Source { model, room: head_len, memory, limits };
        let tensor = read_input(&input, &source, &mut tail, &mut asked.request.client_memory)?;
        asked.request.inputs.push(tensor);
        Ok(())
    })?;
    if !tail.is_empty() {
        let extra = tail.len();
        return Err(InferError::invalid(format!(
            "unexpected additional input data for model '{model}': {extra} bytes after the last input"
        )));
    }
    if let Some(outputs) = head.member("outputs") {
        let outputs = outputs.as_array().map_err(|error| in_field("outputs", error))?;
        let mut seen = HashSet::new();
        outputs.for_each(|output| {
            limits.check(Limit::Outputs, asked.request.requested_outputs.len() + 1)?;
            check_parameters(output.member("parameters"), limits)?;
            read_output(&output, &mut asked, &mut seen, memory, limits)
        })?;
        if !asked.request.requested_outputs.is_empty() {
            asked.is_binary = false; // Outputs that are asked for by name say it themselves.
        }
    }
    memory.place_outputs(&asked.outputs, &mut asked.request)?;
    Ok(asked)
}

/// The JSON head is longer than the body, or shorter than nothing.
pub fn not_in_body(head_len: impl std::fmt::Display, body_len: usize) -> InferError {
    InferError::invalid(format!("inference header size should be in range (0, {body_len}), got: {head_len}"))
}

/// Takes the whole body as the model's only input.
///
/// # Errors
/// When the model has several inputs, or one that a body cannot stand for.
pub fn read_raw(body: Bytes, config: &ModelConfig) -> Result<ParsedRequest, InferError> {
    let [input] = config.input.as_slice() else {
        return Err(InferError::invalid(format!(
            "[request id: <id_unknown>] Raw request must only have 1 input (found 1) to be deduced but got {} inputs in \
             '{}' model configuration",
            config.input.len(),
            config.name
        )));
    };
    if input.dims.iter().filter(|&&size| size < 0).count() > 1 {
        return Err(InferError::invalid(format!(
            "[request id: <id_unknown>] The shape of the raw input '{}' can not be deduced because there are more than one \
             variable-sized dimension",
            input.name
        )));
    }
    let datatype = DataType::from_config(input.data_type());
    let is_batched = config.max_batch_size > 0;
    let (data, count) = match datatype.and_then(DataType::size) {
        Some(size) => (body.clone(), body.len() / size),
        None if input.dims != [1] => {
            return Err(InferError::invalid(format!(
                "[request id: <id_unknown>] For BYTE datatype raw input '{}', the model must have input shape [1]",
                input.name
            )));
        }
        None => (Tensor::from_byte_strings("", &[], &[&body]).data, 1),
    };
    let tensor = Tensor {
        name: Name::from(&input.name),
        datatype: datatype.unwrap_or(DataType::Bytes),
        shape: is_batched.then_some(1).into_iter().chain(fit_shape(&input.dims, false, count)).collect(),
        data,
    };
    let expected = tensor.num_elements().zip(tensor.datatype.size()).and_then(|(count, size)| count.checked_mul(size));
    if let Some(expected) = expected.filter(|&expected| expected != body.len()) {
        // The input has its name only once its bytes fit.
        return Err(InferError::invalid(format!(
            "[request id: <id_unknown>] input byte size mismatch for input 'raw_input' for model '{}'. Expected {expected}, got {}",
            config.name,
            body.len()
        )));
    }
    if body.is_empty() && (tensor.datatype == DataType::Bytes || tensor.num_elements() == Some(0)) {
        return Err(InferError::invalid("the request has no body, expected a JSON infer request"));
    }
    let request = InferRequest { inputs: vec![tensor], ..InferRequest::default() };
    Ok(ParsedRequest { request, outputs: Vec::new(), is_binary: true })
}

fn read_parameter(asked: &mut ParsedRequest, key: &str, value: &Value<'_>) -> Result<(), InferError> {
    if key == "binary_data_output" {
        asked.is_binary = value.as_bool().map_err(|error| in_field(key, error))?;
        return Ok(());
    }
    set_parameter(&mut asked.request, key, value)
}

/// Puts a parameter where it belongs: a field of the request, or a parameter that models see.
///
/// # Errors
/// When it has a type that it cannot have, or a name that the protocol keeps to itself.
pub fn set_parameter(request: &mut InferRequest, key: &str, value: &Value<'_>) -> Result<(), InferError> {
    let named = |error| in_field(key, error);
    match (key, value) {
        ("sequence_id", Value::String(id)) => request.correlation_id = CorrelationId::Text(id.to_string()),
        ("sequence_id", _) => {
            let number =
                value.as_u64().map_err(|_| InferError::internal("attempt to access JSON non-string as string"));
            request.correlation_id = CorrelationId::Number(number.map_err(named)?);
        }
        ("sequence_start", _) => request.sequence_start = value.as_bool().map_err(named)?,
        ("sequence_end", _) => request.sequence_end = value.as_bool().map_err(named)?,
        ("priority", _) => request.priority = value.as_u64().map_err(named)?,
        ("timeout", _) => request.timeout_us = value.as_u64().map_err(named)?,
        _ if key.starts_with("triton_") => {
            return Err(InferError::invalid(
                "parameter keys starting with 'triton_' are reserved for Triton usage and should not be specified.",
            ));
        }
        _ => {
            let value = model_parameter(key, value)?;
            request.parameters.insert(key.to_owned(), value);
        }
    }
    Ok(())
}

/// A parameter that models see.
///
/// # Errors
/// When it is neither a number, a boolean nor a string.
pub fn model_parameter(key: &str, value: &Value<'_>) -> Result<Parameter, InferError> {
    match value {
        Value::Bool(value) => Ok(Parameter::Bool(*value)),
        Value::String(value) => Ok(Parameter::String(value.to_string())),
        Value::Number(text) => {
            Ok(text.parse().map(Parameter::Int).or_else(|_| value.as_f64().map(Parameter::Double))?)
        }
        Value::Null | Value::Array(_) | Value::Object(_) => Err(InferError::invalid(format!(
            "parameter '{key}' has invalid type. It should be either 'int', 'bool', or 'string'."
        ))),
    }
}

/// How many there are, and how long their names.
fn check_parameters(parameters: Option<&Value<'_>>, limits: &Limits) -> Result<(), InferError> {
    let Some(Value::Object(members)) = parameters else { return Ok(()) };
    limits.check(Limit::Parameters, members.len())?;
    members.iter().try_for_each(|(key, _)| limits.check(Limit::NameBytes, key.len()))
}

/// What the inputs of a request have in common.
struct Source<'a> {
    model: &'a str,
    /// Bytes of text that hold all elements.
    room: usize,
    memory: &'a SharedMemory,
    limits: &'a Limits,
}

fn read_input(
    input: &Value<'_>,
    source: &Source<'_>,
    tail: &mut Bytes,
    places: &mut ClientMemory,
) -> Result<Tensor, InferError> {
    let &Source { model, room, memory, limits } = source;
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
        (Some(data), ..) => json_data(data, &name, datatype, &shape, room)?,
        (_, Some(size), _) => take_tail(tail, size, &name, model)?,
        (.., Some(region)) => memory.input(&region, &name, datatype, places)?,
        (None, None, None) => return Err(not_one_source(sources)),
    };
    Ok(Tensor { name: name.into(), datatype, shape: shape.into(), data })
}

/// `sources`: whether there are data, a size in the tail, and a region.
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

/// A shape of more elements than these and bytes of text lies.
const MANY_ELEMENTS: usize = 1 << 26;

/// The elements of `data`. A text of `room` bytes cannot hold more elements than that.
fn json_data(
    data: &Value<'_>,
    name: &str,
    datatype: DataType,
    shape: &[i64],
    room: usize,
) -> Result<Bytes, InferError> {
    let expected =
        shape.iter().try_fold(1usize, |product, &size| product.checked_mul(size as usize)).ok_or_else(|| {
            InferError::invalid(format!("shape {shape:?} of input '{name}' has more elements than can be counted"))
        })?;
    // A shape without elements has none, whatever stands there; one without sizes is judged by the model's configuration.
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
    if expected > room.max(MANY_ELEMENTS) {
        return Err(InferError::invalid(format!(
            "Unable to parse 'data': shape {shape:?} of input '{name}' has {expected} elements, more than the request can hold"
        )));
    }
    // Strings are counted again where the request is checked against the model.
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

fn optional_u64(parameters: Option<&Value<'_>>, key: &str) -> Result<Option<u64>, InferError> {
    let value = parameters.and_then(|parameters| parameters.member(key));
    value.map(|value| value.as_u64().map_err(|error| in_field(key, error))).transpose()
}

fn read_region(parameters: Option<&Value<'_>>) -> Result<Option<RegionSlice>, InferError> {
    const REGION: &str = "shared_memory_region";
    let Some(region) = parameters.and_then(|parameters| parameters.member(REGION)) else { return Ok(None) };
    let region = region.as_str().map_err(|error| in_field(REGION, error))?.to_owned();
    let offset = optional_u64(parameters, "shared_memory_offset")?.unwrap_or(0);
    let byte_size = optional_u64(parameters, "shared_memory_byte_size")?.unwrap_or(0);
    Ok(Some(RegionSlice { region, offset, byte_size }))
}

/// `seen`: the outputs before this one.
fn read_output(
    output: &Value<'_>,
    asked: &mut ParsedRequest,
    seen: &mut HashSet<Name>,
    memory: &SharedMemory,
    limits: &Limits,
) -> Result<(), InferError> {
    let name = output.required("name")?.as_str().map_err(|error| in_field("name", error))?.to_owned();
    limits.check(Limit::NameBytes, name.len())?;
    asked.request.requested_outputs.push(Name::from(&name));
    let is_again = !seen.insert(Name::from(&name));
    let parameters = output.member("parameters");
    let is_binary = parameters
        .and_then(|parameters| parameters.member("binary_data"))
        .map(|value| value.as_bool().map_err(|error| in_field("binary_data", error)))
        .transpose()?;
    let num_classes = parameters.and_then(|parameters| parameters.member("classification")).map_or(Ok(0), |value| {
        let named = |error: InferError| {
            InferError::new(error.kind, format!("Unable to set 'classification': {}", error.message))
        };
        value.as_u64().map_err(named)
    })? as usize;
    let region = read_region(parameters)?;
    if let Some(region) = &region {
        if num_classes > 0 {
            return Err(InferError::invalid("Output can't set both 'shared_memory_region' and 'classification'"));
        }
        if is_binary == Some(true) {
            return Err(InferError::invalid("Output can't set both 'shared_memory_region' and 'binary_data'"));
        }
        memory.check(region)?;
    }
    // Of several entries for one output the first counts.
    if !is_again && (num_classes > 0 || region.is_some() || is_binary.is_some()) {
        asked.outputs.push(OutputRequest { name, num_classes, region, is_binary });
    }
    Ok(())
}

/// A response's body, and the length of its JSON head when raw tensors follow it.
pub struct Answer {
    /// The body.
    pub body: ReplyBody,
    /// `Inference-Header-Content-Length`.
    pub head_len: Option<usize>,
}

/// Raw tensors together smaller than this are copied behind the head, to be one write.
const COPY_BELOW: usize = 16 << 10;

/// Writes a response.
///
/// # Errors
/// When an output has no JSON form.
pub fn write(response: InferResponse, outputs: &[OutputRequest], is_binary: bool) -> Result<Answer, InferError> {
    let mut writer = JsonWriter::with_capacity(256);
    writer.begin_object();
    write_head(&mut writer, &response);
    writer.key("outputs");
    writer.begin_array();
    let mut raw = Vec::new();
    for output in response.outputs {
        let ask = outputs.iter().find(|ask| ask.name == output.name);
        // Classes are text unless asked for one by one.
        let is_classes = ask.is_some_and(|ask| ask.num_classes > 0);
        let is_raw = ask.and_then(|ask| ask.is_binary).unwrap_or(is_binary && !is_classes);
        let is_in_region = ask.is_some_and(|ask| ask.region.is_some());
        writer.begin_object();
        writer.member("name", output.name.as_bytes());
        writer.member("datatype", output.datatype.name().as_bytes());
        writer.key("shape");
        writer.integers(&output.shape);
        if is_raw && !is_in_region {
            writer.key("parameters");
            writer.begin_object();
            writer.key("binary_data_size");
            writer.integer(output.data.len());
            writer.end_object();
            raw.push(output.data);
        } else if !is_in_region {
            writer.key("data");
            writer.tensor(&output)?;
        }
        writer.end_object();
    }
    writer.end_array();
    writer.end_object();
    let mut head = writer.finish();
    if raw.is_empty() {
        return Ok(Answer { body: head.into(), head_len: None });
    }
    let head_len = Some(head.len());
    if raw.iter().map(Bytes::len).sum::<usize>() < COPY_BELOW {
        raw.iter().for_each(|tensor| head.extend_from_slice(tensor));
        return Ok(Answer { body: head.into(), head_len });
    }
    let parts = std::iter::once(head.into()).chain(raw).filter(|part: &Bytes| !part.is_empty());
    Ok(Answer { body: ReplyBody::Parts(parts.collect()), head_len })
}

fn write_head(writer: &mut JsonWriter, response: &InferResponse) {
    if !response.id.is_empty() {
        writer.member("id", response.id.as_bytes());
    }
    writer.member("model_name", response.model_name.as_bytes());
    writer.member("model_version", response.model_version.as_bytes());
    if !response.parameters.is_empty() {
        writer.key("parameters");
        writer.begin_object();
        response.parameters.iter().for_each(|(key, value)| writer.parameter(key, value));
        writer.end_object();
    }
}

#[cfg(test)]
mod tests;
