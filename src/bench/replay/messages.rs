//! Requests and replies over gRPC.

use std::collections::BTreeMap;

use bytes::{Buf as _, Bytes};
use client::proto::infer_parameter::ParameterChoice;
use client::proto::model_infer_request::InferInputTensor;
use client::proto::{ModelInferRequest, ModelInferResponse, ModelStreamInferResponse};
use client::tensor::texts;

use super::answer::{Answer, TOKENS};

/// The name of the call with a stream.
const STREAM: &str = "ModelStreamInfer";
/// Bytes before a message: compression flag and length.
const PREFIX_BYTES: usize = 5;
/// Parts of the names of outputs that differ between equal answers.
const IGNORED: [&str; 3] = ["log_prob", "logits", "kv_cache"];
/// The output with the number of tokens of a response.
const NUM_TOKENS: &str = "num_output_tokens";

/// The name of the call at a path.
pub(super) fn method(path: &str) -> &str {
    path.rsplit('/').next().unwrap_or_default()
}

/// The answer in the messages of a reply, or in the text of an error.
pub(super) fn answer(path: &str, reply: &[u8]) -> Answer {
    let mut answer = Answer::default();
    let added = messages(reply).and_then(|messages| {
        messages.into_iter().try_for_each(|message| add_message(&mut answer, method(path), message))
    });
    added.map_or_else(|| Answer::raw(reply), |()| answer)
}

/// The messages in `reply`; `None` if it does not consist of uncompressed messages.
fn messages(reply: &[u8]) -> Option<Vec<Bytes>> {
    let (mut rest, mut found) = (Bytes::copy_from_slice(reply), Vec::new());
    while !rest.is_empty() {
        let [0, length @ ..] = *rest.first_chunk::<PREFIX_BYTES>()? else { return None };
        let length = u32::from_be_bytes(length) as usize;
        rest.advance(PREFIX_BYTES);
        if rest.len() < length {
            return None;
        }
        found.push(rest.split_to(length));
    }
    Some(found)
}

/// `None` if the message cannot be decoded.
fn add_message(answer: &mut Answer, method: &str, message: Bytes) -> Option<()> {
    let response = if method == STREAM {
        let reply: ModelStreamInferResponse = client::grpc::decode(message).ok()?;
        if !reply.error_message.is_empty() {
            answer.set("error", reply.error_message);
        }
        reply.infer_response.unwrap_or_default()
    } else {
        client::grpc::decode::<ModelInferResponse>(message).ok()?
    };
    for (output, data) in response.outputs.iter().zip(&response.raw_output_contents) {
        add_output(answer, &output.name, &output.datatype, data);
    }
    Some(())
}

/// Adds the elements of an output. Texts and tokens of a stream come in pieces.
fn add_output(answer: &mut Answer, name: &str, datatype: &str, data: &[u8]) {
    let place = format!("outputs.{name}");
    if IGNORED.iter().any(|part| name.contains(part)) {
        return;
    }
    if datatype == "BYTES" {
        for (position, text) in texts(data).enumerate() {
            answer.append(&format!("{place}.{position}"), &String::from_utf8_lossy(text));
        }
        return;
    }
    let values = numbers(datatype, data);
    if name == NUM_TOKENS {
        answer.count(&place, values.first().map_or(0, |count| *count as u64));
    } else if TOKENS.contains(&name) {
        answer.append(&place, &values.iter().map(|token| format!("{token} ")).collect::<String>());
    } else if values.is_empty() {
        answer.set(&place, format!("{data:?}"));
    } else {
        answer.set(&place, format!("{values:?}"));
    }
}

/// The elements of a tensor; none for types without an equal type here.
fn numbers(datatype: &str, data: &[u8]) -> Vec<f64> {
    fn read<const SIZE: usize>(data: &[u8], convert: impl Fn([u8; SIZE]) -> f64) -> Vec<f64> {
        data.as_chunks().0.iter().copied().map(convert).collect()
    }
    match datatype {
        "BOOL" | "UINT8" => read(data, |[byte]| f64::from(byte)),
        "INT8" => read(data, |bytes| f64::from(i8::from_le_bytes(bytes))),
        "INT16" => read(data, |bytes| f64::from(i16::from_le_bytes(bytes))),
        "INT32" => read(data, |bytes| f64::from(i32::from_le_bytes(bytes))),
        "INT64" => read(data, |bytes| i64::from_le_bytes(bytes) as f64),
        "UINT16" => read(data, |bytes| f64::from(u16::from_le_bytes(bytes))),
        "UINT32" => read(data, |bytes| f64::from(u32::from_le_bytes(bytes))),
        "UINT64" => read(data, |bytes| u64::from_le_bytes(bytes) as f64),
        "FP32" => read(data, |bytes| f64::from(f32::from_le_bytes(bytes))),
        "FP64" => read(data, f64::from_le_bytes),
        _ => Vec::new(),
    }
}

/// Inputs and parameters of a request with one number each, by name.
pub(super) fn settings(message: Bytes) -> BTreeMap<String, f64> {
    let Ok(request) = client::grpc::decode::<ModelInferRequest>(message) else { return BTreeMap::new() };
    let parameters = request.parameters.into_iter().filter_map(|(name, parameter)| {
        Some((
            name,
            match parameter.parameter_choice? {
                ParameterChoice::Int64Param(value) => value as f64,
                ParameterChoice::Uint64Param(value) => value as f64,
                ParameterChoice::DoubleParam(value) => value,
                ParameterChoice::BoolParam(_) | ParameterChoice::StringParam(_) => return None,
            },
        ))
    });
    let mut found: BTreeMap<String, f64> = parameters.collect();
    let mut raw = request.raw_input_contents.iter();
    for input in &request.inputs {
        let is_in_memory = input.parameters.contains_key("shared_memory_region");
        let data = if is_in_memory { None } else { raw.next() };
        let values = data.map_or_else(|| typed(input), |data| numbers(&input.datatype, data));
        if let [value] = values[..] {
            found.insert(input.name.clone(), value);
        }
    }
    found
}

/// The numbers in the typed contents of an input.
fn typed(input: &InferInputTensor) -> Vec<f64> {
    let Some(contents) = &input.contents else { return Vec::new() };
    let integers = contents.int_contents.iter().copied().map(f64::from);
    let long = contents.int64_contents.iter().map(|&value| value as f64);
    let unsigned = contents.uint_contents.iter().copied().map(f64::from);
    let long_unsigned = contents.uint64_contents.iter().map(|&value| value as f64);
    let floats = contents.fp32_contents.iter().copied().map(f64::from);
    let all = integers.chain(long).chain(unsigned).chain(long_unsigned).chain(floats);
    all.chain(contents.fp64_contents.iter().copied()).collect()
}

#[cfg(test)]
mod tests {
    use client::grpc::frame;
    use client::proto::model_infer_response::InferOutputTensor;

    use super::*;

    const STREAM_PATH: &str = "/inference.GRPCInferenceService/ModelStreamInfer";

    fn text(text: &str) -> Vec<u8> {
        [&(text.len() as u32).to_le_bytes()[..], text.as_bytes()].concat()
    }

    fn reply(id: &str, outputs: &[(&str, &str, Vec<u8>)]) -> Bytes {
        let tensor = |(name, datatype, _): &(&str, &str, Vec<u8>)| InferOutputTensor {
            name: (*name).to_owned(),
            datatype: (*datatype).to_owned(),
            ..Default::default()
        };
        let response = ModelInferResponse {
            id: id.to_owned(),
            outputs: outputs.iter().map(tensor).collect(),
            raw_output_contents: outputs.iter().map(|(_, _, data)| data.clone().into()).collect(),
            ..Default::default()
        };
        frame(&ModelStreamInferResponse { infer_response: Some(response), ..Default::default() })
    }

    fn piece(id: &str, piece: &str, tokens: &[i32]) -> Bytes {
        let bytes = |values: &[i32]| values.iter().flat_map(|value| value.to_le_bytes()).collect();
        let score = (id.len() as f32).to_le_bytes().to_vec();
        reply(
            id,
            &[
                ("text_output", "BYTES", text(piece)),
                ("output_ids", "INT32", bytes(tokens)),
                ("num_output_tokens", "INT32", bytes(&[tokens.len() as i32])),
                ("cum_log_probs", "FP32", score),
            ],
        )
    }

    #[test]
    fn equal_streams_in_other_pieces_are_equal_and_another_token_or_error_is_found() {
        let read = |pieces: &[Bytes]| answer(STREAM_PATH, &pieces.concat());
        let first = read(&[piece("1", "once ", &[5]), piece("1", "upon", &[6, 7])]);
        assert_eq!(first.difference(&read(&[piece("22", "once upon", &[5, 6, 7])])), None);
        assert_eq!(first.num_tokens(), Some(3));
        let other = first.difference(&read(&[piece("1", "once upon", &[5, 6, 8])])).unwrap();
        assert_eq!(other.0, "outputs.output_ids at 4");
        let failed = frame(&ModelStreamInferResponse { error_message: "no".to_owned(), ..Default::default() });
        assert!(first.difference(&read(&[piece("1", "once upon", &[5, 6, 7]), failed])).is_some());
        assert_eq!(answer(STREAM_PATH, b"no such model"), Answer::raw(b"no such model"));
        assert!(
            answer(STREAM_PATH, &piece("1", "a", &[1])[..9]).difference(&first).is_some(),
            "a reply that is cut off"
        );
    }

    #[test]
    fn settings_are_read_from_tensors_and_parameters() {
        let input = |name: &str, datatype: &str| InferInputTensor {
            name: name.to_owned(),
            datatype: datatype.to_owned(),
            shape: vec![1],
            ..Default::default()
        };
        let seed = client::proto::InferParameter { parameter_choice: Some(ParameterChoice::Int64Param(9)) };
        let request = ModelInferRequest {
            inputs: vec![input("text_input", "BYTES"), input("temperature", "FP32"), input("top_k", "INT32")],
            raw_input_contents: vec![
                text("a").into(),
                0.5f32.to_le_bytes().to_vec().into(),
                4i32.to_le_bytes().to_vec().into(),
            ],
            parameters: [("seed".to_owned(), seed)].into(),
            ..Default::default()
        };
        let bytes = frame(&request).slice(PREFIX_BYTES..);
        let expected = [("seed", 9.0), ("temperature", 0.5), ("top_k", 4.0)];
        assert_eq!(settings(bytes), expected.map(|(name, value)| (name.to_owned(), value)).into());
    }
}
