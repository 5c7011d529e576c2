//! Encodes and decodes requests and responses between the server and a model process.

use std::collections::BTreeMap;

use bytes::Bytes;
use serving::{
    ClientSlice, CorrelationId, DataType, ErrorKind, InferError, InferRequest, InferResponse, Name, Parameter, Tensor,
};

use super::memory::Block;
use super::wire::{Value, WireError, Writer};

/// Kinds of messages to the process, as its first value.
#[derive(Debug, Clone, Copy)]
pub(super) enum ToProcess {
    Load,
    Execute,
    Reply,
    Cancel,
    Finalize,
    Map,
    OpenFile,
    CloseFile,
    Probe,
}

/// Kinds of messages from the process.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum FromProcess {
    Loaded,
    Done,
    Response,
    Call,
    Log,
    Metric,
    Mapped,
    Drop,
    Finalized,
    Started,
    Probed,
}

impl FromProcess {
    pub fn from_number(number: usize) -> Option<Self> {
        use FromProcess::*;
        [Loaded, Done, Response, Call, Log, Metric, Mapped, Drop, Finalized, Started, Probed].get(number).copied()
    }
}

/// Tensors up to this size are part of a message, which is cheaper than a block of shared memory.
const INLINE_BYTES: usize = 4096;

/// Whether a tensor is sent through shared memory.
pub(super) fn is_large(data: &[u8]) -> bool {
    data.len() > INLINE_BYTES
}

const START: u8 = 1;
const END: u8 = 2;

/// The number of a type in `model_config.proto`.
fn code(datatype: DataType) -> u8 {
    match datatype {
        DataType::Bool => 1,
        DataType::Uint8 => 2,
        DataType::Uint16 => 3,
        DataType::Uint32 => 4,
        DataType::Uint64 => 5,
        DataType::Int8 => 6,
        DataType::Int16 => 7,
        DataType::Int32 => 8,
        DataType::Int64 => 9,
        DataType::Fp16 => 10,
        DataType::Fp32 => 11,
        DataType::Fp64 => 12,
        DataType::Bytes => 13,
        DataType::Bf16 => 14,
    }
}

fn datatype(code: u8) -> Option<DataType> {
    DataType::ALL.into_iter().find(|&datatype| self::code(datatype) == code)
}

/// Stores tensors that are not part of a message.
pub(super) trait Places {
    /// Copies the bytes of a large tensor into shared memory.
    fn place(&mut self, bytes: &[u8]) -> Result<Block, InferError>;

    /// The number of a client's object of shared memory in the process.
    fn file(&mut self, slice: &ClientSlice) -> u64;
}

/// Writes a tensor. `place` copies a large one into shared memory.
fn write_tensor(
    writer: &mut Writer,
    tensor: &Tensor,
    place: &mut impl FnMut(&[u8]) -> Result<Block, InferError>,
) -> Result<(), InferError> {
    let block = if is_large(&tensor.data) { Some(place(&tensor.data)?) } else { None };
    write_head(writer, tensor);
    match block {
        None => writer.bytes(&tensor.data),
        Some(block) => {
            writer.tuple(3);
            for number in [block.region, block.offset, block.len] {
                writer.int(number as u64);
            }
        }
    }
    Ok(())
}

/// Writes a tensor without its data, which must follow.
fn write_head(writer: &mut Writer, tensor: &Tensor) {
    writer.tuple(4);
    writer.text(&tensor.name);
    writer.int(code(tensor.datatype));
    writer.tuple(tensor.shape.len());
    tensor.shape.iter().for_each(|&size| writer.int(size));
}

fn write_parameters<'a>(writer: &mut Writer, parameters: impl Iterator<Item = (&'a str, &'a Parameter)>) {
    writer.begin_dict();
    for (name, value) in parameters {
        writer.text(name);
        match value {
            Parameter::Bool(value) => writer.bool(*value),
            Parameter::Int(value) => writer.int(*value),
            Parameter::Double(value) => writer.float(*value),
            Parameter::String(value) => writer.text(value),
        }
    }
    writer.end_dict();
}

/// Writes the location of a tensor in a client's shared memory.
fn write_slice(writer: &mut Writer, slice: &ClientSlice, file: u64) {
    writer.tuple(4);
    for number in [file, slice.offset, slice.byte_size] {
        writer.int(number);
    }
    writer.text(&slice.region);
}

/// Writes one request of a batch.
pub(super) fn write_request(
    writer: &mut Writer,
    number: u64,
    request: &InferRequest,
    places: &mut impl Places,
) -> Result<(), InferError> {
    writer.tuple(10);
    writer.int(number);
    writer.text(&request.id);
    match &request.correlation_id {
        CorrelationId::Number(number) => writer.int(*number),
        CorrelationId::Text(text) => writer.text(text),
    }
    writer.int((START * u8::from(request.sequence_start)) | (END * u8::from(request.sequence_end)));
    writer.int(request.priority);
    writer.int(request.timeout_us);
    write_parameters(writer, request.parameters.iter().map(|(name, value)| (name.as_str(), value)));
    writer.tuple(request.requested_outputs.len());
    request.requested_outputs.iter().for_each(|name| writer.text(name));
    writer.tuple(request.inputs.len());
    for tensor in &request.inputs {
        let Some(slice) = request.client_memory.input(&tensor.name) else {
            write_tensor(writer, tensor, &mut |bytes| places.place(bytes))?;
            continue;
        };
        write_head(writer, tensor);
        write_slice(writer, slice, places.file(slice));
    }
    writer.tuple(request.client_memory.outputs.len());
    for (name, slice) in &request.client_memory.outputs {
        writer.tuple(2);
        writer.text(name);
        write_slice(writer, slice, places.file(slice));
    }
    Ok(())
}

/// The reply to the call `call`: another model's response.
pub(super) fn response_reply(
    call: i64,
    result: &Result<InferResponse, InferError>,
    place: &mut impl FnMut(&[u8]) -> Result<Block, InferError>,
) -> Vec<u8> {
    let response = match result {
        Ok(response) => response,
        Err(error) => return refusal(call, error),
    };
    let mut writer = reply(call);
    writer.tuple(4);
    writer.none();
    writer.tuple(response.outputs.len());
    if let Err(error) = response.outputs.iter().try_for_each(|tensor| write_tensor(&mut writer, tensor, place)) {
        return refusal(call, &error);
    }
    write_parameters(&mut writer, response.parameters.iter().map(|(name, value)| (name.as_str(), value)));
    writer.bool(response.is_final);
    writer.finish()
}

/// Writes the head of the reply to a call. The value must follow.
pub(super) fn reply(call: i64) -> Writer {
    let mut writer = Writer::begin(4);
    writer.int(ToProcess::Reply as u8);
    writer.int(call);
    writer.none();
    writer
}

/// The reply to a call that failed.
pub(super) fn refusal(call: i64, error: &InferError) -> Vec<u8> {
    let mut writer = Writer::begin(4);
    writer.int(ToProcess::Reply as u8);
    writer.int(call);
    writer.tuple(2);
    writer.int(error.kind as u8);
    writer.text(&error.message);
    writer.none();
    writer.finish()
}

/// Reads tensors. `take` copies data out of shared memory.
fn read_tensors(
    tensors: Value,
    take: &mut impl FnMut(Block) -> Result<Bytes, WireError>,
) -> Result<Vec<Tensor>, WireError> {
    let wrong = |expected, found: String| WireError::Shape { expected, found };
    let read = |tensor: Value| {
        let [name, code, shape, data] = tensor.parts()?;
        let (name, code) = (name.text()?, code.int()?);
        let datatype = datatype(code).ok_or_else(|| wrong("a tensor's type", code.to_string()))?;
        let shape = shape.tuple()?.into_iter().map(Value::int).collect::<Result<Vec<i64>, _>>()?;
        let (data, len) = match data {
            // The process has written it to the client's memory.
            Value::Int(len) => (Bytes::new(), Value::Int(len).int()?),
            // A slice would keep the whole receive buffer alive.
            Value::Bytes(bytes) => (Bytes::copy_from_slice(&bytes), bytes.len()),
            block => {
                let [region, offset, len] = block.parts()?;
                let block = Block { region: region.int()?, offset: offset.int()?, len: len.int()? };
                (take(block)?, block.len)
            }
        };
        let tensor = Tensor { name: name.into(), datatype, shape: shape.into(), data };
        let expected = tensor.num_elements().zip(datatype.size()).map(|(count, size)| count.saturating_mul(size));
        match expected {
            Some(expected) if expected != len => Err(wrong("as many bytes as a tensor's shape says", len.to_string())),
            _ => Ok(tensor),
        }
    };
    tensors.tuple()?.into_iter().map(read).collect()
}

fn read_parameters(parameters: Value) -> Result<Vec<(String, Parameter)>, WireError> {
    let read = |(name, value): (Value, Value)| {
        let value = match value {
            Value::Bool(value) => Parameter::Bool(value),
            Value::Float(value) => Parameter::Double(value),
            Value::Text(value) => Parameter::String(value),
            other => Parameter::Int(other.int()?),
        };
        Ok((name.text()?, value))
    };
    parameters.dict()?.into_iter().map(read).collect()
}

/// Reads an error: its code and message.
pub(super) fn read_error(error: Value) -> Result<InferError, WireError> {
    let [code, message] = error.parts()?;
    Ok(InferError::new(kind(code.int()?), message.text()?))
}

fn kind(code: u8) -> ErrorKind {
    use ErrorKind::*;
    let kinds = [Unknown, Internal, NotFound, InvalidArgument, Unavailable, Unsupported, AlreadyExists, Cancelled];
    kinds.get(usize::from(code)).copied().unwrap_or(Internal)
}

/// Reads a response of the model.
pub(super) fn read_response(
    response: Value,
    take: &mut impl FnMut(Block) -> Result<Bytes, WireError>,
) -> Result<Result<InferResponse, InferError>, WireError> {
    let [error, outputs, parameters] = response.parts()?;
    if let Some(error) = error.optional() {
        return read_error(error).map(Err);
    }
    let outputs = read_tensors(outputs, take)?;
    let parameters = read_parameters(parameters)?.into_iter().map(|(name, value)| (name.into(), value)).collect();
    Ok(Ok(InferResponse { outputs, parameters, ..InferResponse::default() }))
}

/// Reads a request to another model, and whether the model may be decoupled.
pub(super) fn read_request(
    request: Value,
    take: &mut impl FnMut(Block) -> Result<Bytes, WireError>,
) -> Result<(InferRequest, bool), WireError> {
    let [model, version, id, correlation, flags, priority, timeout, parameters, outputs, inputs, decoupled] =
        request.parts()?;
    let version: i64 = version.int()?;
    let flags: u8 = flags.int()?;
    let request = InferRequest {
        model_name: model.text()?.into(),
        model_version: if version < 0 { Name::default() } else { version.to_string().into() },
        id: id.text()?.into(),
        parameters: read_parameters(parameters)?.into_iter().collect::<BTreeMap<_, _>>(),
        inputs: read_tensors(inputs, take)?,
        requested_outputs: outputs
            .tuple()?
            .into_iter()
            .map(|name| name.text().map(Name::from))
            .collect::<Result<_, _>>()?,
        priority: priority.int()?,
        timeout_us: timeout.int()?,
        correlation_id: match correlation {
            Value::Text(text) => CorrelationId::Text(text),
            number => CorrelationId::Number(number.int()?),
        },
        sequence_start: flags & START != 0,
        sequence_end: flags & END != 0,
        ..InferRequest::default()
    };
    Ok((request, decoupled.bool()?))
}
