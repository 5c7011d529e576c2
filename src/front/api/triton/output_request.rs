//! The requested form of outputs, and the reserved parameters of requests.

use serving::{CorrelationId, InferRequest, Parameter};

/// The requested form of one output.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct OutputRequest {
    /// The output's name.
    pub name: String,
    /// The number of top classes to return instead of values; 0 for values.
    pub num_classes: usize,
    /// The shared memory to write the data to; `None` for the response.
    pub region: Option<RegionSlice>,
    /// HTTP: whether the data follows the JSON in binary form; `None` for the default of the request.
    pub is_binary: Option<bool>,
}

/// A part of a registered shared-memory region.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct RegionSlice {
    /// The name of the region.
    pub region: String,
    /// Offset from the start of the region in bytes.
    pub offset: u64,
    /// Length in bytes.
    pub byte_size: u64,
}

/// The parameter that enables the empty final response of a stream.
pub const EMPTY_FINAL: &str = "triton_enable_empty_final_response";

/// Why the value of a reserved parameter is invalid.
pub enum Refusal {
    /// The value does not have this type.
    Expected(&'static str),
    /// The value is less than 0.
    Negative,
    /// The name is reserved by the protocol.
    Reserved,
}

/// The refusal of a parameter without a value, or with a value of an unsupported type.
pub fn unsupported_type(key: &str) -> Refusal {
    match key {
        "sequence_id" => Refusal::Expected("int64_param or string_param."),
        "sequence_start" | "sequence_end" => Refusal::Expected("bool_param."),
        "priority" => Refusal::Expected("int64_param or uint64_param."),
        "timeout" => Refusal::Expected("int64_param."),
        key if key.starts_with("triton_") => Refusal::Reserved,
        _ => Refusal::Expected("int64_param, bool_param, or string_param."),
    }
}

/// Sets a field of the request for a reserved parameter, or adds a parameter for the model.
///
/// # Errors
/// When a reserved parameter has an invalid value.
pub fn set_parameter(request: &mut InferRequest, key: &str, value: Parameter) -> Result<(), Refusal> {
    match (key, value) {
        ("sequence_id", Parameter::Int(id)) => request.correlation_id = CorrelationId::Number(id as u64),
        ("sequence_id", Parameter::String(id)) => request.correlation_id = CorrelationId::Text(id),
        ("sequence_start", Parameter::Bool(is_start)) => request.sequence_start = is_start,
        ("sequence_end", Parameter::Bool(is_end)) => request.sequence_end = is_end,
        ("priority", Parameter::Int(level)) if level >= 0 => request.priority = level as u64,
        ("priority", Parameter::Int(_)) => return Err(Refusal::Negative),
        ("timeout", Parameter::Int(timeout)) => request.timeout_us = timeout.max(0) as u64,
        ("sequence_id" | "sequence_start" | "sequence_end" | "priority" | "timeout", _) => {
            return Err(unsupported_type(key));
        }
        (key, _) if key.starts_with("triton_") => return Err(Refusal::Reserved),
        (key, value) => drop(request.parameters.insert(key.to_owned(), value)),
    }
    Ok(())
}
