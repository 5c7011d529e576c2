use super::*;
use crate::transport::budget::Budget;
use crate::transport::budget::tests::NO_PROGRESS_LIMITS;
use prost_reflect::{DescriptorPool, DynamicMessage};

fn decode(message: &str, bytes: &[u8]) -> serde_json::Value {
    let pool = DescriptorPool::decode(crate::api::triton::grpc::proto::DESCRIPTORS).unwrap();
    let descriptor = pool.get_message_by_name(message).unwrap();
    serde_json::to_value(DynamicMessage::decode(descriptor, bytes).unwrap()).unwrap()
}

/// The message without its prefix.
fn message(reply: StreamReply) -> Bytes {
    reply.framed(None).unwrap().slice(PREFIX_BYTES..)
}

fn every_kind_of_parameter() -> Arc<[(serving::Name, Parameter)]> {
    Arc::new([
        ("b".into(), Parameter::Bool(false)),
        ("i".into(), Parameter::Int(-7)),
        ("d".into(), Parameter::Double(0.5)),
        ("s".into(), Parameter::String(String::new())),
    ])
}

#[test]
fn an_encoded_reply_decodes_with_the_descriptors() {
    let reply = StreamReply::new(
        "",
        &InferReply {
            response: InferResponse {
                model_name: "m".into(),
                model_version: "3".into(),
                id: "r".repeat(200).into(),
                parameters: every_kind_of_parameter(),
                outputs: vec![
                    Tensor::from_i32("OUT", &[1, 300], &[5; 300]),
                    Tensor::from_i32("EMPTY", &[0], &[]),
                    Tensor::from_i32("SCALAR", &[], &[1]),
                ],
                ..InferResponse::default()
            },
            final_response: Some(false),
        },
    );
    let packed = reply.clone().framed(Some(Coding::Gzip)).unwrap();
    assert_eq!(packed[..5], [&[1][..], &(packed.len() as u32 - 5).to_be_bytes()].concat());
    let bytes = message(reply);
    let charge = Budget::new(1 << 20, NO_PROGRESS_LIMITS).charge();
    assert_eq!(Coding::Gzip.decode(&packed[5..], 1 << 20, &charge).unwrap(), bytes);
    let read = decode("inference.ModelStreamInferResponse", &bytes);
    let infer = &read["inferResponse"];
    assert_eq!(infer["modelName"], "m");
    assert_eq!(infer["modelVersion"], "3");
    assert_eq!(infer["parameters"]["i"]["int64Param"], "-7");
    assert_eq!(infer["parameters"]["b"]["boolParam"], false);
    assert_eq!(infer["parameters"]["d"]["doubleParam"], 0.5);
    assert_eq!(infer["parameters"]["s"]["stringParam"], "");
    assert_eq!(infer["parameters"]["triton_final_response"]["boolParam"], false);
    assert_eq!(infer["outputs"][0]["shape"], serde_json::json!(["1", "300"]));
    assert_eq!(infer["outputs"].as_array().unwrap().len(), 3);
    assert_eq!(infer["rawOutputContents"].as_array().unwrap().len(), 3);
}

#[test]
fn a_template_encodes_replies_with_any_difference_from_the_last() {
    let response = |id: &str, output: Tensor| InferResponse {
        id: id.into(),
        parameters: every_kind_of_parameter(),
        outputs: vec![output],
        ..InferResponse::default()
    };
    let ids = |shape: &[i64], values: &[i32]| Tensor::from_i32("ids", shape, values);
    let all = [
        (response("a", ids(&[1], &[1])), Some(false)),
        (response("a", ids(&[1], &[2])), Some(false)),
        (response("a", ids(&[2], &[3, 4])), Some(false)),
        (response("a", Tensor::from_byte_strings("ids", &[2], &["x", "yz"])), Some(false)),
        (response("a", Tensor::from_byte_strings("text", &[2], &["x", "yz"])), Some(false)),
        (response("b", Tensor::from_byte_strings("text", &[2], &["x", "yz"])), Some(false)),
        (InferResponse { parameters: Arc::default(), ..response("b", ids(&[1], &[5])) }, Some(false)),
        (InferResponse { model_version: "2".into(), ..response("b", ids(&[1], &[5])) }, Some(false)),
        (InferResponse { outputs: Vec::new(), ..response("b", ids(&[1], &[5])) }, Some(false)),
        (InferResponse { outputs: Vec::new(), ..response("b", ids(&[1], &[5])) }, Some(true)),
        (InferResponse { outputs: Vec::new(), ..response("b", ids(&[1], &[5])) }, None),
    ];
    let mut last = ReplyTemplate::default();
    for (response, final_response) in all {
        let alone = StreamReply::new("", &InferReply { response: response.clone(), final_response });
        assert_eq!(message(last.reply(response, final_response)), message(alone));
    }
}

#[test]
fn a_delta_replaces_elements_of_the_last_reply() {
    let response = |text: &str, id: i32| InferResponse {
        outputs: vec![Tensor::from_byte_strings("text", &[1], &[text]), Tensor::from_i32("ids", &[1], &[id])],
        allows_delta: true,
        ..InferResponse::default()
    };
    let mut last = ReplyTemplate::default();
    let _ = last.reply(response("x", 1), Some(false));
    let longest = "long ".repeat(40);
    for (text, id, output) in
        [("longer", 1, 0), ("longer", 7, 1), (&longest, 7, 0), (&longest, 8, 1), ("", 8, 0), ("y", 8, 0), ("y", 9, 1)]
    {
        let data = response(text, id).outputs[output].data.clone();
        let mut changes = OutputDelta::default();
        changes.set(output, data);
        let again = last.delta(&changes);
        let reply = InferReply { response: response(text, id), final_response: Some(false) };
        let alone = StreamReply::new("", &reply);
        assert_eq!(message(again.clone()), message(alone));
        let framed = again.framed(None).unwrap();
        assert_eq!(framed[..5], [&[0][..], &(framed.len() as u32 - 5).to_be_bytes()].concat());
    }
}

#[test]
fn an_error_in_a_stream_repeats_the_id_of_the_request() {
    let response = InferResponse { id: "7".into(), ..Default::default() };
    let reply = StreamReply::new("no", &InferReply { response, final_response: None });
    let read = decode("inference.ModelStreamInferResponse", &message(reply));
    assert_eq!(read, serde_json::json!({"errorMessage": "no", "inferResponse": {"id": "7"}}));
}
