//! Reading a request: its JSON head, and the tensors behind it.

use std::collections::HashSet;

use bytes::Bytes;
use serving::{InferError, InferRequest, Limit, Limits, Name};

use super::input::{Source, read_input};
use super::parameters::{check_parameters, read_region, set_parameter};
use crate::api::triton::http::json::{self, Value, in_field};
use crate::api::triton::output_request::OutputRequest;
use crate::api::triton::shared_memory::SharedMemory;

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

fn read_parameter(asked: &mut ParsedRequest, key: &str, value: &Value<'_>) -> Result<(), InferError> {
    if key == "binary_data_output" {
        asked.is_binary = value.as_bool().map_err(|error| in_field(key, error))?;
        return Ok(());
    }
    set_parameter(&mut asked.request, key, value)
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
