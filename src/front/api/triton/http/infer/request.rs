//! Reading a request: its JSON head, and the tensors behind it.

use std::collections::HashSet;

use bytes::Bytes;
use serving::{InferError, InferRequest, Limit, Limits, Name};

use super::input::{InputContext, read_input};
use super::parameters::{check_parameters, read_region, set_parameter};
use crate::api::triton::http::json::{self, Value, in_field};
use crate::api::triton::output_request::OutputRequest;
use crate::api::triton::shared_memory::SharedMemory;

/// A request and the requested form of its response.
#[derive(Debug, Default)]
pub struct ParsedRequest {
    /// The request for the model.
    pub request: InferRequest,
    /// Outputs with a requested form.
    pub outputs: Vec<OutputRequest>,
    /// Whether outputs are binary by default.
    pub is_binary: bool,
}

/// Reads the JSON head and the tensors of `body`. The head ends at `head_len`, or is the whole body.
///
/// # Errors
/// When the head is not valid JSON, a field is absent or has an invalid type, a limit is exceeded, or tensor data has the wrong size.
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
    let mut parsed = ParsedRequest::default();
    if let Some(id) = head.member("id") {
        parsed.request.id = id.as_str().map_err(|error| in_field("id", error))?.into();
        limits.check(Limit::IdBytes, parsed.request.id.len())?;
    }
    if let Some(parameters) = head.member("parameters") {
        let not_object =
            |_| InferError::internal("failed to get request params.: attempt to get members for non-object");
        check_parameters(Some(parameters), limits)?;
        for (key, value) in parameters.as_object().map_err(not_object)? {
            read_parameter(&mut parsed, key, value)?;
        }
    }
    let mut tail = body.slice(head_len..);
    let inputs = head.required("inputs")?.as_array().map_err(|error| in_field("inputs", error))?;
    inputs.for_each(|input| {
        limits.check(Limit::Inputs, parsed.request.inputs.len() + 1)?;
        check_parameters(input.member("parameters"), limits)?;
        let context = InputContext { model, head_len, memory, limits };
        let tensor = read_input(&input, &context, &mut tail, &mut parsed.request.client_memory)?;
        parsed.request.inputs.push(tensor);
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
            limits.check(Limit::Outputs, parsed.request.requested_outputs.len() + 1)?;
            check_parameters(output.member("parameters"), limits)?;
            read_output(&output, &mut parsed, &mut seen, memory, limits)
        })?;
        if !parsed.request.requested_outputs.is_empty() {
            parsed.is_binary = false; // Requested outputs have their own setting.
        }
    }
    memory.set_output_destinations(&parsed.outputs, &mut parsed.request)?;
    Ok(parsed)
}

/// The error of a head that is longer than the body or has a negative length.
pub fn not_in_body(head_len: impl std::fmt::Display, body_len: usize) -> InferError {
    InferError::invalid(format!("inference header size should be in range (0, {body_len}), got: {head_len}"))
}

fn read_parameter(parsed: &mut ParsedRequest, key: &str, value: &Value<'_>) -> Result<(), InferError> {
    if key == "binary_data_output" {
        parsed.is_binary = value.as_bool().map_err(|error| in_field(key, error))?;
        return Ok(());
    }
    set_parameter(&mut parsed.request, key, value)
}

/// `seen`: the names of the outputs before this one.
fn read_output(
    output: &Value<'_>,
    parsed: &mut ParsedRequest,
    seen: &mut HashSet<Name>,
    memory: &SharedMemory,
    limits: &Limits,
) -> Result<(), InferError> {
    let name = output.required("name")?.as_str().map_err(|error| in_field("name", error))?.to_owned();
    limits.check(Limit::NameBytes, name.len())?;
    parsed.request.requested_outputs.push(Name::from(&name));
    let is_duplicate = !seen.insert(Name::from(&name));
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
    // Of several entries for one output, the first one applies.
    if !is_duplicate && (num_classes > 0 || region.is_some() || is_binary.is_some()) {
        parsed.outputs.push(OutputRequest { name, num_classes, region, is_binary });
    }
    Ok(())
}
