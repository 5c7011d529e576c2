//! Parameters of requests, inputs and outputs.

use serving::{CorrelationId, InferError, InferRequest, Limit, Limits, Parameter};

use crate::api::triton::http::json::{Value, in_field};
use crate::api::triton::output_request::RegionSlice;

/// Sets a field of the request for a reserved parameter, or adds a parameter for the model.
///
/// # Errors
/// When the value has an invalid type, or the name is reserved.
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

/// Converts a value to a parameter for the model.
///
/// # Errors
/// When the value is not a number, a boolean or a string.
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

/// Checks the number of parameters and the lengths of their names.
pub(super) fn check_parameters(parameters: Option<&Value<'_>>, limits: &Limits) -> Result<(), InferError> {
    let Some(Value::Object(members)) = parameters else { return Ok(()) };
    limits.check(Limit::Parameters, members.len())?;
    members.iter().try_for_each(|(key, _)| limits.check(Limit::NameBytes, key.len()))
}

pub(super) fn optional_u64(parameters: Option<&Value<'_>>, key: &str) -> Result<Option<u64>, InferError> {
    let value = parameters.and_then(|parameters| parameters.member(key));
    value.map(|value| value.as_u64().map_err(|error| in_field(key, error))).transpose()
}

pub(super) fn read_region(parameters: Option<&Value<'_>>) -> Result<Option<RegionSlice>, InferError> {
    const REGION: &str = "shared_memory_region";
    let Some(region) = parameters.and_then(|parameters| parameters.member(REGION)) else { return Ok(None) };
    let region = region.as_str().map_err(|error| in_field(REGION, error))?.to_owned();
    let offset = optional_u64(parameters, "shared_memory_offset")?.unwrap_or(0);
    let byte_size = optional_u64(parameters, "shared_memory_byte_size")?.unwrap_or(0);
    Ok(Some(RegionSlice { region, offset, byte_size }))
}
