//! Encodes infer responses as protobuf directly from the responses of models.
//!
//! The generated types would first copy all names and shapes into maps and vectors, for each token.
//! Wire layout: `proto/grpc_service.proto`, `ModelInferResponse` and `ModelStreamInferResponse`.

use std::ops::Range;
use std::sync::Arc;

use bytes::{Buf, BufMut, Bytes};
use prost::encoding::{DecodeContext, WireType, encode_key, encode_varint, encoded_len_varint, key_len, skip_field};
use prost::{DecodeError, Message};
use serving::{InferResponse, OutputDelta, Parameter, Tensor};
use smallvec::SmallVec;
use tonic::Status;

use crate::transport::content_coding::Coding;
use crate::transport::large_work::block_in_place_if_large;

/// The parameter that marks the final response of a request in a stream.
const FINAL_RESPONSE: &str = "triton_final_response";

/// Field of `ModelInferResponse`: `raw_output_contents`.
const CONTENTS: u32 = 6;

/// `ModelInferResponse`. Every output has one entry in `raw_output_contents`.
#[derive(Debug, Default)]
pub struct InferReply {
    /// The response of the model.
    pub response: InferResponse,
    /// Parameter `triton_final_response`, in streams only.
    pub final_response: Option<bool>,
}

impl InferReply {
    /// The encoded message after the prefix of an uncompressed gRPC message. The parts share the elements of the outputs.
    pub fn parts(&self) -> Vec<Bytes> {
        let Self { response, final_response } = self;
        let mut head = vec![0];
        // A larger message is refused when it is sent.
        head.extend_from_slice(&(self.encoded_len() as u32).to_be_bytes());
        put_head(response, *final_response, &mut head);
        let mut parts = vec![head.into()];
        for output in &response.outputs {
            parts.push(Bytes::copy_from_slice(Header::new(CONTENTS, output.data.len()).bytes()));
            parts.push(output.data.clone());
        }
        parts
    }
}

/// An encoded `ModelStreamInferResponse` after the prefix of an uncompressed gRPC message.
#[derive(Debug, Default, Clone)]
pub struct StreamReply(Bytes);

/// Length of the prefix of a message.
const PREFIX_BYTES: usize = 5;

impl StreamReply {
    /// Encodes a response, or an error message with the fields that an error repeats.
    pub fn new(error_message: &str, reply: &InferReply) -> Self {
        let head = encode_head(&reply.response, reply.final_response);
        Self::of_outputs(error_message, &head, &reply.response.outputs)
    }

    /// Encodes a response from its encoded head and its outputs.
    fn of_outputs(error_message: &str, head: &[u8], outputs: &[Tensor]) -> Self {
        Self::encode(error_message, head, contents_len(outputs), |buffer| {
            outputs.iter().for_each(|output| put_content(&output.data, buffer));
        })
    }

    fn encode(error_message: &str, head: &[u8], contents_len: usize, put_contents: impl FnOnce(&mut Vec<u8>)) -> Self {
        let response_len = head.len() + contents_len;
        let len = string_len(1, error_message) + delimited_len(2, response_len);
        let mut buffer = Vec::with_capacity(PREFIX_BYTES + len);
        buffer.push(0);
        // A larger message is refused in `framed`.
        buffer.extend_from_slice(&(len as u32).to_be_bytes());
        put_string(1, error_message, &mut buffer);
        put_header(2, response_len, &mut buffer);
        buffer.extend_from_slice(head);
        put_contents(&mut buffer);
        Self(buffer.into())
    }

    /// The message with its prefix, not compressed.
    pub fn bytes(&self) -> &Bytes {
        &self.0
    }

    /// The message with its prefix, compressed with `coding`.
    ///
    /// # Errors
    /// When the message exceeds the maximum length of gRPC.
    pub fn framed(self, coding: Option<Coding>) -> Result<Bytes, Status> {
        let too_long = |_| Status::resource_exhausted("a response is longer than 4 GiB; request fewer outputs");
        u32::try_from(self.0.len().saturating_sub(PREFIX_BYTES)).map_err(too_long)?;
        let Some(coding) = coding else { return Ok(self.0) };
        let message = self.0.get(PREFIX_BYTES..).unwrap_or_default();
        let packed = block_in_place_if_large(message.len(), || coding.encode(message));
        let packed = packed.map_err(|error| Status::internal(format!("cannot compress a response: {error}")))?;
        let len = u32::try_from(packed.len()).map_err(too_long)?;
        Ok([&[1][..], &len.to_be_bytes(), &packed].concat().into())
    }
}

/// Encodes the replies of one request. Most replies differ in elements only, so the head is encoded once.
#[derive(Debug, Default)]
pub struct ReplyTemplate {
    /// The response of `head`, without elements.
    response: InferResponse,
    final_response: Option<bool>,
    head: Bytes,
    contents: Contents,
}

/// The encoded elements of the outputs of a response that allows a delta.
#[derive(Debug, Default)]
struct Contents {
    bytes: Vec<u8>,
    /// The range of each output including its header, and the length of the header.
    ranges: SmallVec<[(Range<usize>, usize); 4]>,
}

impl Contents {
    fn set(&mut self, outputs: &[Tensor]) {
        let Self { bytes, ranges } = self;
        bytes.clear();
        ranges.clear();
        bytes.reserve(contents_len(outputs));
        for output in outputs {
            let begin = bytes.len();
            put_content(&output.data, bytes);
            ranges.push((begin..bytes.len(), bytes.len() - begin - output.data.len()));
        }
    }

    /// Replaces the elements of an output.
    fn replace(&mut self, output: usize, data: &[u8]) {
        let Self { bytes, ranges } = self;
        let Some((range, header_len)) = ranges.get_mut(output) else { return };
        let (begin, end) = (range.start, range.end);
        if range.len() - *header_len == data.len() {
            bytes[begin + *header_len..end].copy_from_slice(data);
            return;
        }
        let header = Header::new(CONTENTS, data.len());
        let header = header.bytes();
        let (tail, new_end) = (bytes.len() - end, begin + header.len() + data.len());
        bytes.resize(bytes.len().max(new_end + tail), 0);
        bytes.copy_within(end..end + tail, new_end);
        bytes.truncate(new_end + tail);
        bytes[begin..begin + header.len()].copy_from_slice(header);
        bytes[begin + header.len()..new_end].copy_from_slice(data);
        (*range, *header_len) = (begin..new_end, header.len());
        for (range, _) in &mut ranges[output + 1..] {
            *range = range.start - end + new_end..range.end - end + new_end;
        }
    }
}

impl ReplyTemplate {
    /// Encodes the reply for a response.
    pub fn reply(&mut self, response: InferResponse, final_response: Option<bool>) -> StreamReply {
        if self.head.is_empty() || !self.fits(&response, final_response) {
            self.head = encode_head(&response, final_response);
            self.final_response = final_response;
            let without_data = |tensor: &Tensor| Tensor { data: Bytes::new(), ..tensor.clone() };
            let outputs = response.outputs.iter().map(without_data).collect();
            self.response = InferResponse { outputs, ..response.clone() };
        }
        if !response.allows_delta {
            return StreamReply::of_outputs("", &self.head, &response.outputs);
        }
        self.contents.set(&response.outputs);
        self.filled()
    }

    /// The last reply with the elements of `delta` replaced.
    pub fn delta(&mut self, delta: &OutputDelta) -> StreamReply {
        delta.iter().for_each(|(output, elements)| self.contents.replace(output, elements));
        self.filled()
    }

    fn filled(&self) -> StreamReply {
        let contents = &self.contents.bytes;
        StreamReply::encode("", &self.head, contents.len(), |buffer| buffer.extend_from_slice(contents))
    }

    fn fits(&self, response: &InferResponse, final_response: Option<bool>) -> bool {
        let is_alike = |(known, new): (&Tensor, &Tensor)| {
            known.name == new.name && known.datatype == new.datatype && known.shape == new.shape
        };
        let known = &self.response;
        self.final_response == final_response
            && known.model_name == response.model_name
            && known.model_version == response.model_version
            && known.id == response.id
            && (Arc::ptr_eq(&known.parameters, &response.parameters) || known.parameters == response.parameters)
            && known.outputs.len() == response.outputs.len()
            && known.outputs.iter().zip(&response.outputs).all(is_alike)
    }
}

/// The fields of a `ModelInferResponse` before `raw_output_contents`.
fn encode_head(response: &InferResponse, final_response: Option<bool>) -> Bytes {
    let mut head = Vec::with_capacity(head_len(response, final_response));
    put_head(response, final_response, &mut head);
    head.into()
}

fn put_head(response: &InferResponse, final_response: Option<bool>, buffer: &mut impl BufMut) {
    put_string(1, &response.model_name, buffer);
    put_string(2, &response.model_version, buffer);
    put_string(3, &response.id, buffer);
    for (key, value) in response.parameters.iter() {
        put_parameter(4, key, value, buffer);
    }
    if let Some(is_final) = final_response {
        put_parameter(4, FINAL_RESPONSE, &Parameter::Bool(is_final), buffer);
    }
    for output in &response.outputs {
        put_header(5, output_len(output), buffer);
        put_string(1, &output.name, buffer);
        put_string(2, output.datatype.name(), buffer);
        put_shape(3, &output.shape, buffer);
    }
}

fn head_len(response: &InferResponse, final_response: Option<bool>) -> usize {
    let parameters = response.parameters.iter().map(|(key, value)| delimited_len(4, entry_len(key, value)));
    let is_final =
        final_response.map_or(0, |is_final| delimited_len(4, entry_len(FINAL_RESPONSE, &Parameter::Bool(is_final))));
    let outputs = response.outputs.iter().map(|output| delimited_len(5, output_len(output)));
    string_len(1, &response.model_name)
        + string_len(2, &response.model_version)
        + string_len(3, &response.id)
        + parameters.sum::<usize>()
        + is_final
        + outputs.sum::<usize>()
}

fn put_content(data: &Bytes, buffer: &mut impl BufMut) {
    put_header(CONTENTS, data.len(), buffer);
    buffer.put_slice(data);
}

fn contents_len(outputs: &[Tensor]) -> usize {
    outputs.iter().map(|output| delimited_len(CONTENTS, output.data.len())).sum()
}

impl Message for InferReply {
    fn encode_raw(&self, buffer: &mut impl BufMut) {
        put_head(&self.response, self.final_response, buffer);
        self.response.outputs.iter().for_each(|output| put_content(&output.data, buffer));
    }

    fn encoded_len(&self) -> usize {
        head_len(&self.response, self.final_response) + contents_len(&self.response.outputs)
    }

    fn merge_field(
        &mut self,
        tag: u32,
        wire_type: WireType,
        buffer: &mut impl Buf,
        context: DecodeContext,
    ) -> Result<(), DecodeError> {
        skip_field(wire_type, tag, buffer, context) // Servers do not decode responses.
    }

    fn clear(&mut self) {
        *self = Self::default();
    }
}

/// Key and length of a length-delimited field.
struct Header {
    all: [u8; 16],
    len: usize,
}

impl Header {
    /// Encodes on the stack, because each call of `put_slice` on the buffer is expensive.
    fn new(tag: u32, length: usize) -> Self {
        let mut all = [0; 16];
        let mut rest = &mut all[..];
        encode_key(tag, WireType::LengthDelimited, &mut rest);
        encode_varint(length as u64, &mut rest);
        let len = 16 - rest.len();
        Self { all, len }
    }

    fn bytes(&self) -> &[u8] {
        &self.all[..self.len]
    }
}

fn put_header(tag: u32, length: usize, buffer: &mut impl BufMut) {
    buffer.put_slice(Header::new(tag, length).bytes());
}

fn delimited_len(tag: u32, length: usize) -> usize {
    key_len(tag) + encoded_len_varint(length as u64) + length
}

/// An empty string is absent in proto3.
fn put_string(tag: u32, value: &str, buffer: &mut impl BufMut) {
    if !value.is_empty() {
        put_header(tag, value.len(), buffer);
        buffer.put_slice(value.as_bytes());
    }
}

fn string_len(tag: u32, value: &str) -> usize {
    if value.is_empty() { 0 } else { delimited_len(tag, value.len()) }
}

fn put_shape(tag: u32, shape: &[i64], buffer: &mut impl BufMut) {
    if !shape.is_empty() {
        put_header(tag, packed_len(shape), buffer);
        shape.iter().for_each(|&size| encode_varint(size as u64, buffer));
    }
}

fn packed_len(shape: &[i64]) -> usize {
    shape.iter().map(|&size| encoded_len_varint(size as u64)).sum()
}

fn output_len(output: &Tensor) -> usize {
    let shape = if output.shape.is_empty() { 0 } else { delimited_len(3, packed_len(&output.shape)) };
    string_len(1, &output.name) + string_len(2, output.datatype.name()) + shape
}

/// One entry of `map<string, InferParameter>`. A set member of a oneof is written even if it is zero.
fn put_parameter(tag: u32, key: &str, value: &Parameter, buffer: &mut impl BufMut) {
    put_header(tag, entry_len(key, value), buffer);
    put_string(1, key, buffer);
    put_header(2, parameter_len(value), buffer);
    match value {
        Parameter::Bool(value) => {
            encode_key(1, WireType::Varint, buffer);
            encode_varint(u64::from(*value), buffer);
        }
        Parameter::Int(value) => {
            encode_key(2, WireType::Varint, buffer);
            encode_varint(*value as u64, buffer);
        }
        Parameter::String(value) => {
            put_header(3, value.len(), buffer);
            buffer.put_slice(value.as_bytes());
        }
        Parameter::Double(value) => {
            encode_key(4, WireType::SixtyFourBit, buffer);
            buffer.put_f64_le(*value);
        }
    }
}

fn entry_len(key: &str, value: &Parameter) -> usize {
    string_len(1, key) + delimited_len(2, parameter_len(value))
}

fn parameter_len(value: &Parameter) -> usize {
    match value {
        Parameter::Bool(_) => key_len(1) + 1,
        Parameter::Int(value) => key_len(2) + encoded_len_varint(*value as u64),
        Parameter::String(value) => delimited_len(3, value.len()),
        Parameter::Double(_) => key_len(4) + 8,
    }
}

#[cfg(test)]
mod tests;
