//! Inference requests without their texts, for recordings.

use bytes::Bytes;
use prost::Message as _;
use record::{TOKEN, covered, is_token_list};
use serving::{DataType, Shape, Tensor, byte_strings};

use crate::api::triton::grpc::proto::infer_parameter::ParameterChoice;
use crate::api::triton::grpc::proto::model_infer_request::InferInputTensor;
use crate::api::triton::grpc::proto::{InferTensorContents, ModelInferRequest};

/// The encoded request with an `x` for every letter of its texts, and one token for all tokens; `None` if it cannot be read.
pub(crate) fn message(bytes: &[u8]) -> Option<Vec<u8>> {
    let mut message = ModelInferRequest::decode(bytes).ok()?;
    for parameter in message.parameters.values_mut() {
        if let Some(ParameterChoice::StringParam(text)) = &mut parameter.parameter_choice {
            *text = covered(text);
        }
    }
    let mut raw = message.raw_input_contents.iter_mut();
    for input in &mut message.inputs {
        if let Some(contents) = &mut input.contents {
            cover_contents(contents, is_token_list(&input.name));
        }
        let is_in_memory = input.parameters.contains_key("shared_memory_region");
        if let Some(data) = if is_in_memory { None } else { raw.next() } {
            *data = covered_data(input, data)?;
        }
    }
    raw.next().is_none().then(|| message.encode_to_vec())
}

fn cover_contents(contents: &mut InferTensorContents, are_tokens: bool) {
    contents.bytes_contents.iter_mut().for_each(|text| *text = covered_bytes(text));
    if are_tokens {
        contents.int_contents.fill(TOKEN as i32);
        contents.int64_contents.fill(TOKEN);
        contents.uint_contents.fill(TOKEN as u32);
        contents.uint64_contents.fill(TOKEN as u64);
    }
}

/// Raw data of an input.
fn covered_data(input: &InferInputTensor, data: &Bytes) -> Option<Bytes> {
    let datatype = DataType::from_name(&input.datatype)?;
    match datatype {
        DataType::Bytes => {
            let (name, shape) = (input.name.as_str().into(), Shape::from_slice(&input.shape));
            let texts = Tensor { name, datatype, shape, data: data.clone() }.to_byte_strings()?;
            Some(byte_strings(&texts.iter().map(covered_bytes).collect::<Vec<_>>()))
        }
        DataType::Fp16 | DataType::Bf16 | DataType::Fp32 | DataType::Fp64 | DataType::Bool => Some(data.clone()),
        integer if is_token_list(&input.name) => {
            let size = integer.size()?;
            Some(TOKEN.to_le_bytes()[..size].repeat(data.len() / size).into())
        }
        _ => Some(data.clone()),
    }
}

fn covered_bytes(text: &Bytes) -> Bytes {
    match std::str::from_utf8(text) {
        Ok(text) => covered(text).into(),
        Err(_) => vec![b'x'; text.len()].into(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::api::triton::grpc::proto::InferParameter;

    fn input(name: &str, datatype: &str, contents: Option<InferTensorContents>) -> InferInputTensor {
        InferInputTensor {
            name: name.to_owned(),
            datatype: datatype.to_owned(),
            shape: vec![1],
            contents,
            ..Default::default()
        }
    }

    #[test]
    fn texts_and_tokens_are_covered_and_numbers_stay() {
        let text = byte_strings(&["Héllo Bob", "\u{1F600}"]);
        let tokens: Vec<u8> = [7i32, 8].iter().flat_map(|token| token.to_le_bytes()).collect();
        let parameter = |choice| InferParameter { parameter_choice: Some(choice) };
        let given = ModelInferRequest {
            model_name: "m".to_owned(),
            parameters: [
                ("user".to_owned(), parameter(ParameterChoice::StringParam("Bob".to_owned()))),
                ("priority".to_owned(), parameter(ParameterChoice::Int64Param(3))),
            ]
            .into(),
            inputs: vec![
                input("text_input", "BYTES", None),
                input("input_ids", "INT32", None),
                input("max_tokens", "INT32", None),
            ],
            raw_input_contents: vec![text, tokens.into(), 5i32.to_le_bytes().to_vec().into()],
            ..Default::default()
        };
        let covered = ModelInferRequest::decode(&*message(&given.encode_to_vec()).unwrap()).unwrap();
        let token = [100, 0, 0, 0];
        let expected = ModelInferRequest {
            parameters: [
                ("user".to_owned(), parameter(ParameterChoice::StringParam("xxx".to_owned()))),
                ("priority".to_owned(), parameter(ParameterChoice::Int64Param(3))),
            ]
            .into(),
            raw_input_contents: vec![
                byte_strings(&["xxxxx xxx", "x"]),
                token.repeat(2).into(),
                5i32.to_le_bytes().to_vec().into(),
            ],
            ..given
        };
        assert_eq!(covered, expected);
    }

    #[test]
    fn typed_contents_are_covered_and_contents_that_do_not_fit_are_not_kept() {
        let texts =
            InferTensorContents { bytes_contents: vec!["Bob".into(), b"\xff".as_slice().into()], ..Default::default() };
        let tokens = InferTensorContents { int64_contents: vec![7, 8], ..Default::default() };
        let inputs = vec![input("text_input", "BYTES", Some(texts)), input("INPUT_IDS", "INT64", Some(tokens))];
        let given = ModelInferRequest { inputs, ..Default::default() };
        let covered = ModelInferRequest::decode(&*message(&given.encode_to_vec()).unwrap()).unwrap();
        let contents = |at: usize| covered.inputs[at].contents.clone().unwrap();
        assert_eq!(contents(0).bytes_contents, ["xxx", "x"]);
        assert_eq!(contents(1).int64_contents, [100, 100]);
        // Lengths that are wrong, and data of no input.
        for data in [vec![Bytes::from_static(b"\x05\0\0\0Bob")], vec![byte_strings(&["a"]), byte_strings(&["b"])]] {
            let inputs = vec![input("text_input", "BYTES", None)];
            let wrong = ModelInferRequest { inputs, raw_input_contents: data, ..Default::default() };
            assert_eq!(message(&wrong.encode_to_vec()), None);
        }
        assert_eq!(message(b"\xff"), None);
    }
}
