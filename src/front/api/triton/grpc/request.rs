//! Converts a `ModelInferRequest` to the request for models.

use bytes::Bytes;
use serving::{ClientMemory, DataType, InferError, InferRequest, Name, Parameter, Shape, Tensor};

use crate::api::triton::grpc::proto::infer_parameter::ParameterChoice;
use crate::api::triton::grpc::proto::model_infer_request::{InferInputTensor, InferRequestedOutputTensor};
use crate::api::triton::grpc::proto::{InferParameter, InferTensorContents, ModelInferRequest};
use crate::api::triton::output_request::{
    EMPTY_FINAL, OutputRequest, Refusal, RegionSlice, set_parameter, unsupported_type,
};
use crate::api::triton::shared_memory::SharedMemory;

type Parameters = std::collections::BTreeMap<String, InferParameter>;

/// A request and the requested form of its response.
#[derive(Debug, Default)]
pub struct ParsedRequest {
    /// The request for the model.
    pub request: InferRequest,
    /// Outputs with a requested form.
    pub outputs: Vec<OutputRequest>,
    /// Whether the client requested an empty final response.
    pub wants_empty_final: bool,
}

/// Returns the type that a model, given by name and version, declares for an input.
pub type Declared<'a> = &'a dyn Fn(&str, &str, &str) -> Option<DataType>;

/// Converts a request. `declared` is needed for the error of an input with an unknown datatype.
///
/// # Errors
/// When a parameter or the contents of a tensor are invalid.
pub fn read(
    message: ModelInferRequest,
    memory: &SharedMemory,
    declared: Declared<'_>,
) -> Result<ParsedRequest, InferError> {
    let mut parsed = ParsedRequest {
        request: InferRequest {
            model_name: message.model_name.into(),
            model_version: message.model_version.into(),
            id: message.id.into(),
            ..InferRequest::default()
        },
        ..ParsedRequest::default()
    };
    read_parameters(message.parameters, &mut parsed)?;
    let InferRequest { model_name, model_version, client_memory, .. } = &mut parsed.request;
    let declared = |input: &str| declared(model_name, model_version, input);
    parsed.request.inputs =
        read_inputs(model_name, message.inputs, message.raw_input_contents, memory, client_memory, &declared)?;
    for output in message.outputs {
        read_output(output, &mut parsed, memory)?;
    }
    memory.set_output_destinations(&parsed.outputs, &mut parsed.request)?;
    Ok(parsed)
}

fn read_parameters(parameters: Parameters, parsed: &mut ParsedRequest) -> Result<(), InferError> {
    for (key, parameter) in parameters {
        if key == EMPTY_FINAL {
            let Some(ParameterChoice::BoolParam(wanted)) = parameter.parameter_choice else {
                return Err(wrong_type(&key, "bool_param."));
            };
            parsed.wants_empty_final = wanted;
            continue;
        }
        let value = match parameter.parameter_choice {
            Some(ParameterChoice::BoolParam(value)) => Parameter::Bool(value),
            Some(ParameterChoice::Int64Param(value)) => Parameter::Int(value),
            Some(ParameterChoice::StringParam(value)) => Parameter::String(value),
            Some(ParameterChoice::DoubleParam(value)) => Parameter::Double(value),
            Some(ParameterChoice::Uint64Param(value)) if key == "priority" => {
                Parameter::Int(i64::try_from(value).unwrap_or(i64::MAX))
            }
            _ => return Err(refused(&key, unsupported_type(&key))),
        };
        set_parameter(&mut parsed.request, &key, value).map_err(|refusal| refused(&key, refusal))?;
    }
    Ok(())
}

fn refused(key: &str, refusal: Refusal) -> InferError {
    match refusal {
        Refusal::Expected(expected) => wrong_type(key, expected),
        Refusal::Negative => InferError::invalid(format!("invalid value for '{key}', expected value >= 0.")),
        Refusal::Reserved => InferError::invalid(format!(
            "parameter keys starting with 'triton_' are reserved for Triton usage. \
             Only the following keys starting with 'triton_' are allowed: {EMPTY_FINAL}"
        )),
    }
}

fn wrong_type(key: &str, expected: &str) -> InferError {
    InferError::invalid(format!("invalid value type for '{key}' parameter, expected {expected}"))
}

fn read_inputs(
    model: &str,
    inputs: Vec<InferInputTensor>,
    raw: Vec<Bytes>,
    memory: &SharedMemory,
    client_memory: &mut ClientMemory,
    declared: &dyn Fn(&str) -> Option<DataType>,
) -> Result<Vec<Tensor>, InferError> {
    let is_raw = !raw.is_empty();
    let mut raw = raw.into_iter();
    let mut tensors = Vec::with_capacity(inputs.len());
    for mut input in inputs {
        let contents = input.contents.take();
        let unable_to_find = || {
            InferError::invalid(format!(
                "unable to find data for input tensor '{}' for model '{model}' in request.",
                input.name
            ))
        };
        let datatype = DataType::from_name(&input.datatype).ok_or_else(|| {
            no_datatype(model, &input.name, is_raw, contents.as_ref(), declared).unwrap_or_else(unable_to_find)
        })?;
        let data = if let Some(slice) = read_region(&input.name, &input.parameters)? {
            if contents.is_some() {
                return Err(InferError::invalid(format!(
                    "unexpected 'content' provided when using shared memory for input tensor '{}' for model '{model}'",
                    input.name
                )));
            }
            memory.input(&slice, &input.name, datatype, client_memory)?
        } else if is_raw {
            if contents.is_some_and(|contents| contents != InferTensorContents::default()) {
                return Err(InferError::invalid(format!(
                    "contents field must not be specified when using raw_input_contents for '{}' for model '{model}'",
                    input.name
                )));
            }
            raw.next().ok_or_else(unable_to_find)?
        } else {
            explicit_data(model, &input.name, datatype, contents.ok_or_else(unable_to_find)?)?
        };
        tensors.push(Tensor { name: input.name.into(), datatype, shape: Shape::from_slice(&input.shape), data });
    }
    Ok(tensors)
}

/// The error of an input with an unknown datatype; `None` if it also has no data.
fn no_datatype(
    model: &str,
    name: &str,
    is_raw: bool,
    contents: Option<&InferTensorContents>,
    declared: &dyn Fn(&str) -> Option<DataType>,
) -> Option<InferError> {
    if let Some(found) = contents.and_then(|contents| content_types(contents).into_iter().flatten().next()) {
        return Some(unexpected_contents(model, name, found, "<invalid>"));
    }
    let words = || match declared(name) {
        Some(expected) => format!(
            "[request id: <id_unknown>] inference input '{name}' data-type is '<invalid>', but model '{model}' expects '{}'",
            expected.name()
        ),
        None => format!("unexpected inference input '{name}' for model '{model}'"),
    };
    is_raw.then(|| InferError::invalid(words()))
}

fn unexpected_contents(model: &str, name: &str, found: DataType, expected: &str) -> InferError {
    InferError::invalid(format!(
        "unexpected explicit tensor data for input tensor '{name}' for model '{model}' of type '{}', expected datatype \
         '{expected}'",
        found.name()
    ))
}

/// Converts the typed contents of an input to raw data.
fn explicit_data(
    model: &str,
    name: &str,
    datatype: DataType,
    contents: InferTensorContents,
) -> Result<Bytes, InferError> {
    let mut found = content_types(&contents).into_iter().flatten();
    if let Some(other) = found.next().filter(|found| *found != field_type(datatype)) {
        return Err(unexpected_contents(model, name, other, datatype.name()));
    }
    if found.next().is_some() {
        return Err(InferError::invalid(format!(
            "unexpected explicit tensor data for input tensor '{name}' for model '{model}', binary data was already supplied."
        )));
    }
    let out_of_range = || {
        InferError::invalid(format!(
            "input '{name}' for model '{model}' has a value that does not fit in {}",
            datatype.name()
        ))
    };
    let mut data = Vec::new();
    match datatype {
        DataType::Bool => data.extend(contents.bool_contents.iter().map(|&value| u8::from(value))),
        DataType::Uint8 => narrow(&contents.uint_contents, &mut data, u8::to_le_bytes).ok_or_else(out_of_range)?,
        DataType::Uint16 => narrow(&contents.uint_contents, &mut data, u16::to_le_bytes).ok_or_else(out_of_range)?,
        DataType::Uint32 => narrow(&contents.uint_contents, &mut data, u32::to_le_bytes).ok_or_else(out_of_range)?,
        DataType::Uint64 => narrow(&contents.uint64_contents, &mut data, u64::to_le_bytes).ok_or_else(out_of_range)?,
        DataType::Int8 => narrow(&contents.int_contents, &mut data, i8::to_le_bytes).ok_or_else(out_of_range)?,
        DataType::Int16 => narrow(&contents.int_contents, &mut data, i16::to_le_bytes).ok_or_else(out_of_range)?,
        DataType::Int32 => narrow(&contents.int_contents, &mut data, i32::to_le_bytes).ok_or_else(out_of_range)?,
        DataType::Int64 => narrow(&contents.int64_contents, &mut data, i64::to_le_bytes).ok_or_else(out_of_range)?,
        DataType::Fp32 => data.extend(contents.fp32_contents.iter().flat_map(|value| value.to_le_bytes())),
        DataType::Fp64 => data.extend(contents.fp64_contents.iter().flat_map(|value| value.to_le_bytes())),
        DataType::Bytes => return Ok(Tensor::from_byte_strings(name, &[], &contents.bytes_contents).data),
        DataType::Fp16 | DataType::Bf16 => {}
    }
    Ok(data.into())
}

/// The fields of `contents` that are not empty, by the type that errors name.
fn content_types(contents: &InferTensorContents) -> [Option<DataType>; 8] {
    [
        (!contents.bool_contents.is_empty()).then_some(DataType::Bool),
        (!contents.int_contents.is_empty()).then_some(DataType::Int32),
        (!contents.int64_contents.is_empty()).then_some(DataType::Int64),
        (!contents.uint_contents.is_empty()).then_some(DataType::Uint32),
        (!contents.uint64_contents.is_empty()).then_some(DataType::Uint64),
        (!contents.fp32_contents.is_empty()).then_some(DataType::Fp32),
        (!contents.fp64_contents.is_empty()).then_some(DataType::Fp64),
        (!contents.bytes_contents.is_empty()).then_some(DataType::Bytes),
    ]
}

/// The type of the field for elements of `datatype`. FP16 and BF16 have none.
fn field_type(datatype: DataType) -> DataType {
    match datatype {
        DataType::Int8 | DataType::Int16 => DataType::Int32,
        DataType::Uint8 | DataType::Uint16 => DataType::Uint32,
        other => other,
    }
}

/// Appends `values` as `Narrow`; `None` if a value does not fit.
fn narrow<Wide: Copy, Narrow: TryFrom<Wide>, const SIZE: usize>(
    values: &[Wide],
    data: &mut Vec<u8>,
    to_bytes: impl Fn(Narrow) -> [u8; SIZE],
) -> Option<()> {
    data.reserve(values.len() * SIZE);
    for &value in values {
        data.extend(to_bytes(Narrow::try_from(value).ok()?));
    }
    Some(())
}

fn read_output(
    output: InferRequestedOutputTensor,
    parsed: &mut ParsedRequest,
    memory: &SharedMemory,
) -> Result<(), InferError> {
    let num_classes = match output.parameters.get("classification").map(|parameter| &parameter.parameter_choice) {
        None => 0,
        Some(Some(ParameterChoice::Int64Param(count))) if *count > 0 => *count as usize,
        Some(Some(ParameterChoice::Int64Param(_))) => {
            return Err(InferError::invalid("invalid value for 'classification' parameter, expected >= 0"));
        }
        Some(_) => return Err(wrong_type("classification", "int64_param")),
    };
    let region = read_region(&output.name, &output.parameters)?;
    if num_classes > 0 && region.is_some() {
        return Err(InferError::invalid("output can't set both 'shared_memory_region' and 'classification'"));
    }
    region.iter().try_for_each(|region| memory.check(region))?;
    parsed.request.requested_outputs.push(Name::from(&output.name));
    if num_classes > 0 || region.is_some() {
        parsed.outputs.push(OutputRequest { name: output.name, num_classes, region, is_binary: None });
    }
    Ok(())
}

fn read_region(tensor: &str, parameters: &Parameters) -> Result<Option<RegionSlice>, InferError> {
    const REGION: &str = "shared_memory_region";
    if parameters.is_empty() {
        return Ok(None);
    }
    let choice = |key: &str| parameters.get(key).map(|parameter| &parameter.parameter_choice);
    let wrong = |key: &str, expected: &str| {
        InferError::invalid(format!(
            "invalid value type for '{key}' parameter for tensor '{tensor}', expected {expected}."
        ))
    };
    // A negative number is outside of every region, like the largest number.
    let number = |key: &str| match choice(key) {
        None => Ok(None),
        Some(Some(ParameterChoice::Int64Param(value))) => Ok(Some(u64::try_from(*value).unwrap_or(u64::MAX))),
        Some(_) => Err(wrong(key, "int64_param")),
    };
    let (offset, byte_size) = (number("shared_memory_offset")?, number("shared_memory_byte_size")?);
    let region = match choice(REGION) {
        None => {
            let named = [("shared_memory_offset", offset), ("shared_memory_byte_size", byte_size)];
            return match named.into_iter().find(|(_, value)| value.is_some()) {
                None => Ok(None),
                Some((key, _)) => Err(InferError::invalid(format!(
                    "'{key}' can not be specified without '{REGION}' parameter for tensor '{tensor}'"
                ))),
            };
        }
        Some(Some(ParameterChoice::StringParam(region))) => region.clone(),
        Some(_) => return Err(wrong(REGION, "string_param")),
    };
    let byte_size = byte_size.ok_or_else(|| {
        InferError::invalid(format!(
            "'shared_memory_byte_size' must be specified along with '{REGION}' parameter for tensor '{tensor}'"
        ))
    })?;
    Ok(Some(RegionSlice { region, offset: offset.unwrap_or(0), byte_size }))
}
