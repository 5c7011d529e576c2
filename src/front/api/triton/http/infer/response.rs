//! Writing a response.

use bytes::Bytes;
use serving::{InferError, InferResponse};

use crate::api::triton::http::json_writer::JsonWriter;
use crate::api::triton::output_request::OutputRequest;
use crate::transport::body::ReplyBody;

/// An encoded response: the body, and the length of its JSON head if binary tensors follow.
pub struct EncodedResponse {
    /// The body.
    pub body: ReplyBody,
    /// `Inference-Header-Content-Length`.
    pub head_len: Option<usize>,
}

/// Binary tensors of less than this in total are copied behind the head, for a single write.
const COPY_BELOW: usize = 16 << 10;

/// Writes a response.
///
/// # Errors
/// When an output has no JSON form.
pub fn write(
    response: InferResponse,
    outputs: &[OutputRequest],
    is_binary: bool,
) -> Result<EncodedResponse, InferError> {
    let mut writer = JsonWriter::with_capacity(256);
    writer.begin_object();
    write_head(&mut writer, &response);
    writer.key("outputs");
    writer.begin_array();
    let mut raw = Vec::new();
    for output in response.outputs {
        let form = outputs.iter().find(|form| form.name == output.name);
        // Classes are JSON unless the output itself is requested as binary.
        let is_classes = form.is_some_and(|form| form.num_classes > 0);
        let is_raw = form.and_then(|form| form.is_binary).unwrap_or(is_binary && !is_classes);
        let is_in_region = form.is_some_and(|form| form.region.is_some());
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
        return Ok(EncodedResponse { body: head.into(), head_len: None });
    }
    let head_len = Some(head.len());
    if raw.iter().map(Bytes::len).sum::<usize>() < COPY_BELOW {
        raw.iter().for_each(|tensor| head.extend_from_slice(tensor));
        return Ok(EncodedResponse { body: head.into(), head_len });
    }
    let parts = std::iter::once(head.into()).chain(raw).filter(|part: &Bytes| !part.is_empty());
    Ok(EncodedResponse { body: ReplyBody::Parts(parts.collect()), head_len })
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
