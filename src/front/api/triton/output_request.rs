//! What a client asks beyond the request that models see: how each output shall come back.

use serving::{CorrelationId, InferRequest, Parameter};

/// How one requested output comes back.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct OutputRequest {
    /// The output's name.
    pub name: String,
    /// As the `n` top classes instead of values; 0 for values.
    pub num_classes: usize,
    /// Into shared memory instead of the response.
    pub region: Option<RegionSlice>,
    /// HTTP: raw after the JSON, or in it.
    pub is_binary: Option<bool>,
}

/// A part of a registered shared-memory region.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct RegionSlice {
    /// The name it was registered under.
    pub region: String,
    /// Where the part begins.
    pub offset: u64,
    /// Its length.
    pub byte_size: u64,
}

/// The parameter that asks a stream for its last, empty response.
pub const EMPTY_FINAL: &str = "triton_enable_empty_final_response";

/// Why a value of a reserved parameter cannot be.
pub enum Refusal {
    /// It has another type than this.
    Expected(&'static str),
    /// It is less than 0.
    Negative,
    /// The protocol keeps the name to itself.
    Reserved,
}

/// What is said of a parameter without a value, or with one that is unsigned.
pub fn no_such_choice(key: &str) -> Refusal {
    match key {
        "sequence_id" => Refusal::Expected("int64_param or string_param."),
        "sequence_start" | "sequence_end" => Refusal::Expected("bool_param."),
        "priority" => Refusal::Expected("int64_param or uint64_param."),
        "timeout" => Refusal::Expected("int64_param."),
        key if key.starts_with("triton_") => Refusal::Reserved,
        _ => Refusal::Expected("int64_param, bool_param, or string_param."),
    }
}

/// Puts a parameter where it belongs: a field of the request, or a parameter that models see.
///
/// # Errors
/// When a reserved parameter has a value of another type.
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
            return Err(no_such_choice(key));
        }
        (key, _) if key.starts_with("triton_") => return Err(Refusal::Reserved),
        (key, value) => drop(request.parameters.insert(key.to_owned(), value)),
    }
    Ok(())
}
