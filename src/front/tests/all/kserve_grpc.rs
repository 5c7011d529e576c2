//! The gRPC protocol over real sockets.

use std::sync::atomic::Ordering;

use crate::support::{TestFront, eventually};
use bytes::BytesMut;
use client::ClientError;
use client::grpc::{Replies, frame};
use client::proto::infer_parameter::ParameterChoice;
use client::proto::model_infer_request::InferInputTensor;
use client::proto::{
    InferParameter, ModelConfigRequest, ModelConfigResponse, ModelInferRequest, ModelInferResponse,
    ModelMetadataRequest, ModelMetadataResponse, ModelReadyRequest, ModelReadyResponse, ModelStatisticsRequest,
    ModelStatisticsResponse, ModelStreamInferResponse, RepositoryIndexRequest, RepositoryIndexResponse,
};
use prost::Message as _;

pub fn add_input(request: &mut ModelInferRequest, name: &str, datatype: &str, shape: &[i64], data: &[u8]) {
    let (name, datatype, shape) = (name.to_owned(), datatype.to_owned(), shape.to_vec());
    request.inputs.push(InferInputTensor { name, datatype, shape, ..Default::default() });
    request.raw_input_contents.push(data.to_vec().into());
}

pub fn stream_text(id: &str, count: i32, delay_ms: i32) -> ModelInferRequest {
    let mut request = ModelInferRequest { model_name: "stream_text".into(), id: id.into(), ..Default::default() };
    add_input(&mut request, "text_input", "BYTES", &[1], b"\x03\0\0\0tok");
    add_input(&mut request, "n", "INT32", &[1], &count.to_le_bytes());
    add_input(&mut request, "delay_ms", "INT32", &[1], &delay_ms.to_le_bytes());
    request
}

fn with_empty_final(mut request: ModelInferRequest) -> ModelInferRequest {
    let wanted = InferParameter { parameter_choice: Some(ParameterChoice::BoolParam(true)) };
    request.parameters.insert("triton_enable_empty_final_response".into(), wanted);
    request
}

fn is_final(response: &ModelInferResponse) -> bool {
    response.parameters["triton_final_response"].parameter_choice == Some(ParameterChoice::BoolParam(true))
}

async fn stream(front: &TestFront, requests: &[ModelInferRequest]) -> Replies {
    let mut frames = BytesMut::new();
    requests.iter().for_each(|request| frames.extend_from_slice(&frame(request)));
    front.grpc().await.call("ModelStreamInfer", frames.freeze()).await.unwrap()
}

async fn collect(mut replies: Replies) -> Vec<ModelStreamInferResponse> {
    let mut all = Vec::new();
    while let Some(reply) = replies.next().await.unwrap() {
        all.push(reply);
    }
    all
}

#[tokio::test]
async fn a_decoupled_model_streams_and_ends_with_the_requested_empty_final_response() {
    let front = TestFront::start().await;
    let replies = collect(stream(&front, &[with_empty_final(stream_text("r", 3, 0))]).await).await;
    let responses: Vec<_> = replies.into_iter().map(|reply| reply.infer_response.unwrap()).collect();
    assert_eq!(responses.len(), 4);
    assert_eq!(responses[2].raw_output_contents[0], b"\x05\0\0\0tok#2".as_slice());
    assert!(responses[..3].iter().all(|response| !is_final(response) && response.id == "r"));
    assert!(is_final(&responses[3]) && responses[3].outputs.is_empty());
}

#[tokio::test]
async fn an_empty_final_response_is_sent_on_request_only() {
    let front = TestFront::start().await;
    assert_eq!(collect(stream(&front, &[stream_text("r", 2, 0)]).await).await.len(), 2);
}

#[tokio::test]
async fn an_error_in_a_stream_is_a_message_and_other_requests_continue() {
    let front = TestFront::start().await;
    let unknown = ModelInferRequest { model_name: "nosuch".into(), id: "u".into(), ..Default::default() };
    let mut failing = stream_text("f", 3, 0);
    add_input(&mut failing, "fail_at", "INT32", &[1], &1i32.to_le_bytes());
    let replies = collect(stream(&front, &[unknown, failing, stream_text("g", 2, 0)]).await).await;
    let of = |id: &str| {
        let replies = replies.iter().filter(|reply| reply.infer_response.as_ref().unwrap().id == id);
        replies.map(|reply| reply.error_message.as_str()).collect::<Vec<_>>()
    };
    assert_eq!(of("u"), ["Request for unknown model: 'nosuch' is not found"]);
    assert_eq!(of("f"), ["", "piece 1 failed"]);
    assert_eq!(of("g"), ["", ""]);
}

#[tokio::test]
async fn requests_beyond_the_bound_of_a_stream_wait_and_are_answered() {
    let front = TestFront::start_with(|config| config.max_requests_per_stream = 2).await;
    let requests: Vec<_> = (0..50).map(|id| stream_text(&id.to_string(), 3, 1)).collect();
    let replies = stream(&front, &requests).await;
    let watched = tokio::spawn({
        let streams = front.streams.clone();
        async move {
            let mut most = 0;
            for _ in 0..30 {
                most = most.max(streams.active.load(Ordering::SeqCst));
                tokio::time::sleep(std::time::Duration::from_millis(1)).await;
            }
            most
        }
    });
    assert_eq!(collect(replies).await.len(), 150);
    assert!(watched.await.unwrap() <= 3, "two in flight, and one whose last response is being sent");
}

#[tokio::test]
async fn a_disconnect_cancels_all_requests_of_a_stream() {
    let front = TestFront::start().await;
    let requests: Vec<_> = (0..10).map(|id| stream_text(&id.to_string(), 1_000_000, 50)).collect();
    let mut replies = stream(&front, &requests).await;
    replies.next::<ModelStreamInferResponse>().await.unwrap().unwrap();
    eventually("all ten run", || front.streams.active.load(Ordering::SeqCst) == 10).await;
    drop(replies);
    eventually("all ten are cancelled", || front.streams.cancelled.load(Ordering::SeqCst) == 10).await;
}

/// The response body of a call with a small flow-control window.
async fn stream_with_small_window(front: &TestFront, request: &ModelInferRequest) -> h2::RecvStream {
    let socket =
        tokio::net::TcpStream::connect(front.running.as_ref().unwrap().addresses().grpc.unwrap()).await.unwrap();
    let client = h2::client::Builder::new().initial_window_size(3_000).handshake::<_, bytes::Bytes>(socket);
    let (requests, driver) = client.await.unwrap();
    tokio::spawn(driver);
    let call = http::Request::post("http://test/inference.GRPCInferenceService/ModelStreamInfer");
    let call = call.header("content-type", "application/grpc").header("te", "trailers").body(()).unwrap();
    let (answer, mut sending) = requests.ready().await.unwrap().send_request(call, false).unwrap();
    sending.send_data(frame(request), true).unwrap();
    answer.await.unwrap().into_body()
}

#[tokio::test]
async fn a_slow_reader_receives_all_responses_in_order() {
    let front = TestFront::start().await;
    let mut body = stream_with_small_window(&front, &stream_text("", 1000, 0)).await;
    let mut all = Vec::new();
    while let Some(data) = body.data().await {
        let data = data.unwrap();
        tokio::time::sleep(std::time::Duration::from_micros(100)).await;
        body.flow_control().release_capacity(data.len()).unwrap();
        all.extend(data);
    }
    let (mut rest, mut texts) = (&all[..], Vec::new());
    while let Some((prefix, tail)) = rest.split_first_chunk::<5>() {
        let len = u32::from_be_bytes(prefix[1..].try_into().unwrap()) as usize;
        let reply = ModelStreamInferResponse::decode(&tail[..len]).unwrap();
        texts.push(reply.infer_response.unwrap().raw_output_contents[1].clone());
        rest = &tail[len..];
    }
    assert_eq!(texts, (0..1000i32).map(|index| index.to_le_bytes().to_vec()).collect::<Vec<_>>());
    assert_eq!(body.trailers().await.unwrap().unwrap()["grpc-status"], "0");
}

#[tokio::test]
async fn a_stream_whose_client_does_not_read_is_paused_while_others_are_served() {
    let front = TestFront::start().await;
    let body = stream_with_small_window(&front, &stream_text("", 1_000_000, 0)).await;
    let other = stream(&front, &[stream_text("", 2000, 0)]).await;
    assert_eq!(collect(other).await.len(), 2000);
    // All responses would be a hundred megabytes.
    tokio::time::sleep(std::time::Duration::from_millis(100)).await;
    assert_eq!(front.streams.active.load(Ordering::SeqCst), 1, "its responses were buffered");
    drop(body);
    eventually("the request is cancelled", || front.streams.cancelled.load(Ordering::SeqCst) == 1).await;
}

#[tokio::test]
async fn infer_refuses_decoupled_models() {
    let front = TestFront::start().await;
    let connection = front.grpc().await;
    let mut request = ModelInferRequest { model_name: "identity_fp32".into(), id: "7".into(), ..Default::default() };
    add_input(&mut request, "INPUT0", "FP32", &[1, 2], &[1, 2, 3, 4, 5, 6, 7, 8]);
    let response: ModelInferResponse = connection.unary("ModelInfer", &request).await.unwrap();
    assert_eq!(response.raw_output_contents[0], [1, 2, 3, 4, 5, 6, 7, 8].as_slice());
    assert_eq!((response.id.as_str(), response.model_version.as_str()), ("7", "1"));
    let refusal = |request| {
        let connection = connection.clone();
        async move { connection.unary::<ModelInferResponse>("ModelInfer", &request).await.unwrap_err() }
    };
    let decoupled = refusal(stream_text("", 1, 0)).await;
    assert!(matches!(decoupled, ClientError::Refused { code: "UNIMPLEMENTED", .. }), "{decoupled}");
    let unknown = refusal(ModelInferRequest { model_name: "nosuch".into(), ..Default::default() }).await;
    assert!(matches!(unknown, ClientError::Refused { code: "NOT_FOUND", .. }), "{unknown}");
    request.raw_input_contents.clear();
    let missing = refusal(request).await;
    assert!(matches!(missing, ClientError::Refused { code: "INVALID_ARGUMENT", .. }), "{missing}");
}

#[tokio::test]
async fn malformed_bytes_are_refused_and_the_server_continues() {
    let front = TestFront::start().await;
    let connection = front.grpc().await;
    let garbage = bytes::Bytes::from_static(b"\0\0\0\0\x05\xff\xff\xff\xff\xff");
    let mut replies = connection.call("ModelInfer", garbage).await.unwrap();
    let error = replies.next_bytes().await.unwrap_err();
    assert!(matches!(error, ClientError::Refused { code: "INTERNAL", .. }), "{error}");
    assert_eq!(collect(stream(&front, &[stream_text("r", 1, 0)]).await).await.len(), 1);
}

#[tokio::test]
async fn metadata_configuration_statistics_and_index_of_models_are_returned() {
    let front = TestFront::start().await;
    let connection = front.grpc().await;
    let (name, version) = ("identity_fp32".to_owned(), String::new());
    let ask = ModelReadyRequest { name: name.clone(), version: "9".into() };
    assert!(!connection.unary::<ModelReadyResponse>("ModelReady", &ask).await.unwrap().ready);
    let ask = ModelMetadataRequest { name: name.clone(), version: version.clone() };
    let metadata: ModelMetadataResponse = connection.unary("ModelMetadata", &ask).await.unwrap();
    assert_eq!(metadata.inputs[0].shape, [-1, -1]);
    let ask = ModelConfigRequest { name: name.clone(), version: version.clone() };
    let config: ModelConfigResponse = connection.unary("ModelConfig", &ask).await.unwrap();
    assert_eq!(config.config.unwrap().max_batch_size, 4);
    let ask = ModelStatisticsRequest { name, version };
    let statistics: ModelStatisticsResponse = connection.unary("ModelStatistics", &ask).await.unwrap();
    assert_eq!(statistics.model_stats[0].inference_count, 0);
    let ask = RepositoryIndexRequest { ready: true, ..Default::default() };
    let index: RepositoryIndexResponse = connection.unary("RepositoryIndex", &ask).await.unwrap();
    assert!(index.models.iter().all(|model| model.state == "READY"));
}

#[tokio::test]
async fn an_answered_request_releases_its_memory() {
    let front = TestFront::start_with(|config| config.max_bytes_in_flight = 20_000).await;
    let connection = front.grpc().await;
    let ask = async |count: usize| {
        let mut request = ModelInferRequest { model_name: "identity_fp32".into(), ..Default::default() };
        add_input(&mut request, "INPUT0", "FP32", &[1, count as i64], &vec![0; 4 * count]);
        connection.unary::<ModelInferResponse>("ModelInfer", &request).await
    };
    for _ in 0..5 {
        ask(4000).await.unwrap();
    }
    let refused = ask(6000).await.unwrap_err().to_string();
    assert!(refused.contains("all together may hold 20000; try again later"), "{refused}");
    let mut replies = stream(&front, &(0..20).map(|_| stream_text("s", 1, 0)).collect::<Vec<_>>()).await;
    for _ in 0..20 {
        assert_eq!(replies.next::<ModelStreamInferResponse>().await.unwrap().unwrap().error_message, "");
    }
    ask(4000).await.unwrap();
}
