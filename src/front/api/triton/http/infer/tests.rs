use bytes::Bytes;
use serving::{CorrelationId, ErrorKind, InferError, InferResponse, Limits, Parameter, Tensor};

use super::*;
use crate::api::triton::output_request::OutputRequest;
use crate::api::triton::shared_memory::SharedMemory;
use crate::transport::body::ReplyBody;

fn read_text(text: &str, head_len: Option<usize>) -> Result<ParsedRequest, InferError> {
    let memory = SharedMemory::new(true, Default::default());
    read("m", Bytes::copy_from_slice(text.as_bytes()), head_len, &memory, &Limits::default())
}

fn with_input(fields: &str) -> Result<ParsedRequest, InferError> {
    read_text(&format!(r#"{{"inputs":[{{"name":"IN",{fields}}}]}}"#), None)
}

#[test]
fn tensors_are_read_from_json_and_from_the_binary_tail() {
    let head = r#"{"id":"7","inputs":[{"name":"A","datatype":"INT32","shape":[1,2],"data":[[1,2]]},{"name":"B","datatype":"UINT8","shape":[3],"parameters":{"binary_data_size":3}}]}"#;
    let parsed = read_text(&format!("{head}xyz"), Some(head.len())).unwrap();
    assert_eq!(parsed.request.id, "7");
    assert_eq!(parsed.request.inputs[0].to_i32().unwrap(), [1, 2]);
    assert_eq!(parsed.request.inputs[1].data, "xyz");
    assert!(read_text(&format!("{head}xy"), Some(head.len())).unwrap_err().message.contains("expecting 1 additional"));
    assert!(read_text(&format!("{head}xyz!"), Some(head.len())).unwrap_err().message.contains("additional input data"));
    assert!(read_text(head, Some(head.len() + 1)).is_err());
}

#[test]
fn shapes_larger_than_the_data_are_refused_before_allocation() {
    for shape in ["[1,1000000000]", "[1,1000000000000]", "[4,4611686018427387904]", "[1,1180591620717411303424]"] {
        let error = with_input(&format!(r#""datatype":"FP32","shape":{shape},"data":[1,2,3,4]"#)).unwrap_err();
        assert_eq!(error.kind, ErrorKind::InvalidArgument, "{shape}");
    }
    let error = with_input(r#""datatype":"FP32","shape":[4],"data":[1,2,3,4,5]"#).unwrap_err();
    assert_eq!(error.message, "Unable to parse 'data': Shape does not match true shape of 'data' field");
}

#[test]
fn lists_and_names_have_limits() {
    let input = r#"{"name":"A","datatype":"INT32","shape":[1],"data":[1]}"#;
    let list = |item: &str, count: usize| format!("[{}]", vec![item; count].join(","));
    let parameters = |count: usize| {
        let members: Vec<String> = (0..count).map(|index| format!("\"p{index}\":1")).collect();
        format!("{{{}}}", members.join(","))
    };
    let long = "n".repeat(5000);
    for (text, words) in [
        (format!(r#"{{"inputs":{}}}"#, list(input, 1025)), "has 1025 inputs"),
        (format!(r#"{{"inputs":[],"outputs":{}}}"#, list(r#"{"name":"A"}"#, 100_000)), "has 1025 outputs"),
        (format!(r#"{{"inputs":[],"parameters":{}}}"#, parameters(1025)), "has 1025 parameters"),
        (format!(r#"{{"inputs":[{{"name":"A","parameters":{}}}]}}"#, parameters(1025)), "has 1025 parameters"),
        (format!(r#"{{"inputs":[],"outputs":[{{"name":"A","parameters":{}}}]}}"#, parameters(1025)), "1025 parameters"),
        (format!(r#"{{"inputs":[],"outputs":[{{"name":"{long}"}}]}}"#), "5000 bytes of name"),
        (format!(r#"{{"inputs":[],"parameters":{{"{long}":1}}}}"#), "5000 bytes of name"),
        (format!(r#"{{"inputs":[],"id":"{}"}}"#, "i".repeat(70_000)), "70000 bytes of request id"),
        (format!(r#"{{"inputs":[{}]}}"#, input.replace("[1],", &(list("1", 65) + ","))), "65 dimensions"),
    ] {
        let error = read_text(&text, None).unwrap_err();
        assert!(error.message.contains(words), "{words}: {}", error.message);
        assert_eq!(error.kind, ErrorKind::InvalidArgument);
    }
    let text = format!(r#"{{"inputs":{},"outputs":{}}}"#, list(input, 1024), list(r#"{"name":"A"}"#, 1024));
    assert_eq!(read_text(&text, None).unwrap().request.inputs.len(), 1024);
}

#[test]
fn parameters_set_fields_of_the_request_or_are_passed_on() {
    let text = r#"{"parameters":{"sequence_id":9,"sequence_start":true,"priority":2,"timeout":5,"x":0.5,"binary_data_output":true},"inputs":[]}"#;
    let parsed = read_text(text, None).unwrap();
    assert_eq!(parsed.request.correlation_id, CorrelationId::Number(9));
    assert!(parsed.request.sequence_start && parsed.is_binary);
    assert_eq!((parsed.request.priority, parsed.request.timeout_us), (2, 5));
    assert_eq!(parsed.request.parameters["x"], Parameter::Double(0.5));
    assert!(read_text(r#"{"parameters":{"triton_x":1},"inputs":[]}"#, None).is_err());
}

#[test]
fn a_response_is_json_followed_by_binary_tensors() {
    let response = InferResponse {
        model_name: "m".into(),
        model_version: "1".into(),
        outputs: vec![Tensor::from_i32("A", &[2], &[-1, 2]), Tensor::from_f32("B", &[1], &[0.5])],
        ..InferResponse::default()
    };
    let raw_b = OutputRequest { name: "B".into(), is_binary: Some(true), ..OutputRequest::default() };
    let answer = write(response, &[raw_b], false).unwrap();
    let ReplyBody::Parts(parts) = answer.body else { panic!("the response has parts") };
    let head = r#"{"model_name":"m","model_version":"1","outputs":[{"name":"A","datatype":"INT32","shape":[2],"data":[-1,2]},{"name":"B","datatype":"FP32","shape":[1],"parameters":{"binary_data_size":4}}]}"#;
    assert_eq!(answer.head_len, Some(head.len()));
    assert_eq!(parts[0], [head.as_bytes(), &0.5f32.to_le_bytes()].concat());
}
