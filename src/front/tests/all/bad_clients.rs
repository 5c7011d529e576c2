//! Limits of the memory and time that one client can use, over real sockets, while other clients are served.

use std::io::Write as _;
use std::time::{Duration, Instant};

use crate::support::{HttpAnswer, TestFront, http, http_with};
use bytes::{BufMut as _, Bytes, BytesMut};
use client::ClientError;
use client::grpc::frame;
use client::proto::model_infer_request::InferInputTensor;
use client::proto::{
    ModelInferRequest, ModelInferResponse, ModelReadyRequest, ModelReadyResponse, TraceSettingRequest,
};
use h2::client::ResponseFuture;
use h2::{RecvStream, SendStream};
use http::HeaderMap;
use prost::Message as _;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};

const INFER: &str = "/inference.GRPCInferenceService/ModelInfer";
const STREAM: &str = "/inference.GRPCInferenceService/ModelStreamInfer";
const HEALTH: &str = "/grpc.health.v1.Health/Check";
const JSON_INFER: &str = r#"{"inputs":[{"name":"INPUT0","datatype":"FP32","shape":[1,2],"data":[0.5,2]}]}"#;
/// Timeout of each response, also on slow machines.
const SOON: Duration = Duration::from_secs(20);

/// An HTTP/2 client that sends any frames.
#[derive(Clone)]
struct RawClient(h2::client::SendRequest<Bytes>);

impl RawClient {
    async fn connect(front: &TestFront) -> Self {
        let address = front.running.as_ref().unwrap().addresses().grpc.unwrap();
        let socket = tokio::net::TcpStream::connect(address).await.unwrap();
        let (requests, driver) = h2::client::handshake(socket).await.unwrap();
        tokio::spawn(driver);
        Self(requests)
    }

    async fn open(&self, path: &str, coding: &str) -> (ResponseFuture, SendStream<Bytes>) {
        let call = http::Request::post(format!("http://test{path}")).header("te", "trailers");
        let call = call.header("content-type", "application/grpc").header("grpc-encoding", coding).body(()).unwrap();
        self.0.clone().ready().await.unwrap().send_request(call, false).unwrap()
    }

    /// Starts a call that has sent `bytes` and is still open.
    async fn begin(&self, path: &str, bytes: &[u8]) -> (ResponseFuture, SendStream<Bytes>) {
        let (answer, mut sending) = self.open(path, "identity").await;
        sending.send_data(Bytes::copy_from_slice(bytes), false).unwrap();
        (answer, sending)
    }
}

/// The status code and message of a call.
async fn ending(answer: ResponseFuture) -> (u16, String) {
    let response = tokio::time::timeout(SOON, answer).await.expect("no answer").unwrap();
    let status_of = |headers: &HeaderMap| {
        let code = headers.get("grpc-status")?.to_str().ok()?.parse().ok()?;
        let words = headers.get("grpc-message").map_or("", |words| words.to_str().unwrap());
        Some((code, words.replace("%20", " ").replace("%2C", ",")))
    };
    if let Some(status) = status_of(response.headers()) {
        return status;
    }
    let mut body: RecvStream = response.into_body();
    while let Some(data) = body.data().await {
        let _ = body.flow_control().release_capacity(data.unwrap().len());
    }
    status_of(&body.trailers().await.unwrap().unwrap()).unwrap()
}

fn prefix(len: u32) -> Vec<u8> {
    let mut prefix = vec![0];
    prefix.put_u32(len);
    prefix
}

fn memory_bytes(field: &str) -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find(|line| line.starts_with(field)).unwrap();
    line.split_whitespace().nth(1).unwrap().parse::<u64>().unwrap() << 10
}

fn identity(inputs: Vec<InferInputTensor>, raw: &[u8]) -> ModelInferRequest {
    ModelInferRequest {
        model_name: "identity_fp32".into(),
        inputs,
        raw_input_contents: vec![Bytes::copy_from_slice(raw)],
        ..Default::default()
    }
}

fn row(count: usize) -> ModelInferRequest {
    let (name, datatype, shape) = ("INPUT0".to_owned(), "FP32".to_owned(), vec![1, count as i64]);
    let input = InferInputTensor { name, datatype, shape, ..Default::default() };
    identity(vec![input], &vec![0; 4 * count])
}

/// Checks that another client is served.
async fn is_served(front: &TestFront) {
    let answer =
        tokio::time::timeout(SOON, http(front, "POST", "/v2/models/identity_fp32/infer", JSON_INFER.as_bytes()));
    assert_eq!(answer.await.expect("another client waits").status, 200);
}

#[tokio::test]
async fn memory_is_allocated_for_received_bytes_and_not_for_the_announced_length() {
    let front = TestFront::start().await;
    let client = RawClient::connect(&front).await;
    let before = memory_bytes("VmSize");
    let mut calls = Vec::new();
    for _ in 0..64 {
        for path in [INFER, STREAM] {
            calls.push(client.begin(path, &prefix(255 << 20)).await);
        }
    }
    is_served(&front).await;
    tokio::time::sleep(Duration::from_millis(200)).await;
    // The announced lengths are 32 GiB in total. Other tests of this process need some hundred MiB.
    assert!(memory_bytes("VmSize").saturating_sub(before) < 8 << 30, "the announced length was allocated");
    drop(calls);
    for path in [INFER, STREAM, HEALTH, "/inference.GRPCInferenceService/ServerLive"] {
        let (answer, _sending) = client.begin(path, &prefix(0x7fff_ffff)).await;
        let (code, words) = ending(answer).await;
        assert_eq!(code, 11, "{path}: {words}");
        assert!(words.contains("decoded message length too large"), "{path}: {words}");
    }
    is_served(&front).await;
}

#[tokio::test]
async fn a_message_with_too_many_fields_is_refused_before_it_is_decoded() {
    let front = TestFront::start().await;
    let connection = front.grpc().await;
    let names = |index: usize| InferInputTensor { name: format!("n{index}"), ..Default::default() };
    let many = identity((0..120_000).map(names).collect(), &[]);
    let mut empty = identity(Vec::new(), &[]).encode_to_vec();
    (0..4_000_000).for_each(|_| empty.extend([0x2a, 0]));
    let mut framed = BytesMut::from(&prefix(empty.len() as u32)[..]);
    framed.extend(empty);
    let begun = Instant::now();
    for message in [frame(&many), framed.freeze()] {
        for method in ["ModelInfer", "ModelStreamInfer"] {
            let mut replies = connection.call(method, message.clone()).await.unwrap();
            let error = loop {
                match replies.next_bytes().await {
                    Ok(Some(_)) => {}
                    Ok(None) => panic!("{method} accepted the message"),
                    Err(error) => break error,
                }
            };
            assert!(matches!(error, ClientError::Refused { code: "INVALID_ARGUMENT", .. }), "{error}");
            assert!(
                error.to_string().contains("1025 inputs, at most 1024 are allowed (--max-request-inputs)"),
                "{error}"
            );
        }
    }
    assert!(begun.elapsed() < SOON, "{:?}", begun.elapsed());
    let settings = (0..30_000).map(|index| (format!("s{index}"), Default::default())).collect();
    let settings = TraceSettingRequest { settings, model_name: String::new() };
    let error = connection.unary::<ModelReadyResponse>("TraceSetting", &settings).await.unwrap_err();
    assert!(error.to_string().contains("the limit is: 65536 bytes"), "{error}");
    let ask = ModelReadyRequest { name: "identity_fp32".into(), version: String::new() };
    assert!(connection.unary::<ModelReadyResponse>("ModelReady", &ask).await.unwrap().ready);
    let text = front.metrics().await.text();
    assert!(text.contains("trireme_refused_requests_total{limit=\"max-request-inputs\"}"), "{text}");
    assert!(text.contains("trireme_refused_requests_total{limit=\"body-progress\"}"), "{text}");
}

#[tokio::test]
async fn messages_may_be_split_into_any_frames() {
    let front = TestFront::start().await;
    let client = RawClient::connect(&front).await;
    let message = frame(&row(1000));
    for piece in [1, 3, 5, 7, 1000] {
        let (answer, mut sending) = client.open(INFER, "identity").await;
        for part in message.chunks(piece) {
            sending.send_data(Bytes::copy_from_slice(part), false).unwrap();
        }
        sending.send_data(Bytes::new(), true).unwrap();
        assert_eq!(ending(answer).await, (0, String::new()), "{piece}");
        // Two messages on a stream, with any boundary between frames.
        let (answer, mut sending) = client.open(STREAM, "identity").await;
        for part in [&message[..], &message[..]].concat().chunks(piece) {
            sending.send_data(Bytes::copy_from_slice(part), false).unwrap();
        }
        sending.send_data(Bytes::new(), true).unwrap();
        assert_eq!(ending(answer).await, (0, String::new()), "{piece}");
    }
    for path in [INFER, STREAM] {
        let (answer, mut sending) = client.begin(path, &message[..100]).await;
        sending.send_data(Bytes::new(), true).unwrap();
        assert_eq!(ending(answer).await, (13, "Unexpected EOF decoding stream.".to_owned()));
    }
}

fn compressed(message: &[u8]) -> Bytes {
    let mut encoder = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
    encoder.write_all(message).unwrap();
    let compressed = encoder.finish().unwrap();
    [&[1][..], &(compressed.len() as u32).to_be_bytes(), &compressed].concat().into()
}

#[tokio::test]
async fn compressed_messages_are_limited_by_their_decompressed_size() {
    let front = TestFront::start_with(|config| {
        config.max_http_body_bytes = 1 << 20;
        config.max_bytes_in_flight = 400_000;
    });
    let front = front.await;
    let client = RawClient::connect(&front).await;
    let ask = async |path: &str, count: usize| {
        let (answer, mut sending) = client.open(path, "gzip").await;
        sending.send_data(compressed(&row(count).encode_to_vec()), true).unwrap();
        ending(answer).await
    };
    for path in [INFER, STREAM] {
        assert_eq!(ask(path, 10_000).await, (0, String::new()));
        let (code, words) = ask(path, 120_000).await;
        assert_eq!(code, 14, "{words}: the decompressed size is charged");
    }
    let front = TestFront::start_with(|config| config.max_http_body_bytes = 1 << 20).await;
    let client = RawClient::connect(&front).await;
    let (answer, mut sending) = client.open(INFER, "gzip").await;
    sending.send_data(compressed(&row(1_000_000).encode_to_vec()), true).unwrap();
    let (code, words) = ending(answer).await;
    assert!(code == 8 && words.contains("size limit, of 1048576 bytes"), "{code}: {words}");
}

#[tokio::test]
async fn a_stalled_message_ends_its_call_and_releases_its_memory() {
    let front = TestFront::start_with(|config| {
        config.max_bytes_in_flight = 60_000;
        config.http_body_timeout = Duration::from_secs(1);
    });
    let front = front.await;
    let client = RawClient::connect(&front).await;
    for path in [INFER, STREAM] {
        let (answer, _sending) = client.begin(path, &[prefix(1 << 20), vec![0; 55_000]].concat()).await;
        let (code, words) = ending(answer).await;
        assert!(code == 3 && words.contains("request body stopped for 1s before its end"), "{code}: {words}");
        let connection = front.grpc().await;
        connection.unary::<ModelInferResponse>("ModelInfer", &row(10_000)).await.expect("the memory was released");
    }
    // A call without a message times out, except for a stream.
    let (idle, _idle_sending) = client.begin(STREAM, &[]).await;
    let (answer, _sending) = client.begin(HEALTH, &[]).await;
    assert_eq!(ending(answer).await.0, 3);
    assert!(
        tokio::time::timeout(Duration::from_secs(2), ending_of_stream(idle)).await.is_err(),
        "the idle stream was ended"
    );
}

async fn ending_of_stream(answer: ResponseFuture) {
    let mut body = answer.await.unwrap().into_body();
    while body.data().await.is_some() {}
}

#[tokio::test]
async fn a_body_that_trickles_is_refused() {
    let front = TestFront::start_with(|config| {
        config.http_body_timeout = Duration::from_secs(1);
        config.min_body_rate = 1000;
    });
    let front = front.await;
    let mut socket = tokio::net::TcpStream::connect(front.http_address()).await.unwrap();
    let head = "POST /v2/models/identity_fp32/infer HTTP/1.1\r\nHost: t\r\nContent-Length: 60000000\r\n\r\n";
    socket.write_all(head.as_bytes()).await.unwrap();
    let (mut reading, mut writing) = socket.into_split();
    let trickle = tokio::spawn(async move {
        while writing.write_all(b" ").await.is_ok() {
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
    });
    let mut answer = vec![0; 2000];
    let count = tokio::time::timeout(SOON, reading.read(&mut answer)).await.expect("the body was not refused").unwrap();
    let answer = String::from_utf8_lossy(&answer[..count]);
    assert!(answer.contains("at least 1000 a second are expected (--min-body-rate)"), "{answer}");
    trickle.abort();
}

#[tokio::test]
async fn a_slow_body_is_dropped_if_other_requests_need_its_memory() {
    let front = TestFront::start_with(|config| {
        config.max_bytes_in_flight = 60_000;
        config.http_body_timeout = Duration::from_secs(1);
        config.min_body_rate = 1;
    });
    let front = front.await;
    let client = RawClient::connect(&front).await;
    let (answer, mut sending) = client.begin(STREAM, &[prefix(1 << 20), vec![0; 50_000]].concat()).await;
    let trickle = tokio::spawn(async move {
        while sending.send_data(Bytes::from_static(&[0; 10]), false).is_ok() {
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
    });
    let connection = front.grpc().await;
    let begun = Instant::now();
    while connection.unary::<ModelInferResponse>("ModelInfer", &row(10_000)).await.is_err() {
        assert!(begun.elapsed() < SOON, "the slow body was not dropped");
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    let (code, words) = ending(answer).await;
    assert!(code == 14 && words.contains("others wait for the memory"), "{code}: {words}");
    trickle.abort();
}

#[tokio::test]
async fn open_calls_are_limited_over_all_connections() {
    let front = TestFront::start_with(|config| config.max_grpc_streams = 8).await;
    let clients = [RawClient::connect(&front).await, RawClient::connect(&front).await];
    let mut calls = Vec::new();
    for index in 0..8 {
        let (answer, sending) = clients[index % 2].begin(STREAM, &[]).await;
        let response = tokio::time::timeout(SOON, answer).await.expect("the call started").unwrap();
        calls.push((response, sending));
    }
    let (answer, _sending) = clients[0].begin(HEALTH, &[0; 5]).await;
    let (code, words) = ending(answer).await;
    assert_eq!(
        (code, words.as_str()),
        (14, "8 gRPC calls are open, as many as may be (--grpc-max-streams); try again later")
    );
    calls.pop();
    let served = async {
        loop {
            let (answer, mut sending) = clients[0].begin(HEALTH, &[0; 5]).await;
            sending.send_data(Bytes::new(), true).unwrap();
            if ending(answer).await.0 == 0 {
                break;
            }
        }
    };
    tokio::time::timeout(SOON, served).await.expect("the permit of an ended call was released");
}

#[tokio::test]
async fn very_many_outputs_are_refused_at_once() {
    let front = TestFront::start().await;
    let names: Vec<String> = (0..100_000).map(|index| format!(r#"{{"name":"n{index}"}}"#)).collect();
    let body = JSON_INFER.replace("]}]}", &format!("]}}],\"outputs\":[{}]}}", names.join(",")));
    let answer = http(&front, "POST", "/v2/models/identity_fp32/infer", body.as_bytes());
    let answer = tokio::time::timeout(SOON, answer).await.expect("no answer");
    assert_eq!(answer.status, 400);
    assert!(answer.text().contains("1025 outputs, at most 1024 are allowed"), "{}", answer.text());
}

#[tokio::test]
async fn a_web_page_of_another_server_is_refused() {
    let front = TestFront::start_with(|config| config.http_origins = "http://good.example".parse().unwrap()).await;
    let infer = "/v2/models/identity_fp32/infer";
    let paths = ["/v2/repository/models/m/load", "/v2/logging", "/v2/trace/setting", infer, "/v1/completions"];
    for path in paths {
        let answer = http_with(&front, "POST", path, "Origin: http://evil.example\r\n", b"{}").await;
        assert_eq!(answer.status, 403, "{path}");
        assert!(answer.text().contains("'http://evil.example' may not send this request"), "{}", answer.text());
    }
    for headers in ["Origin: http://test\r\n", "Origin: http://good.example\r\nSec-Fetch-Site: cross-site\r\n", ""] {
        assert_eq!(http_with(&front, "POST", infer, headers, JSON_INFER.as_bytes()).await.status, 200, "{headers}");
    }
    let answer = http_with(&front, "POST", infer, "Sec-Fetch-Site: cross-site\r\n", JSON_INFER.as_bytes()).await;
    assert_eq!(answer.status, 403);
    let answer: HttpAnswer = http_with(&front, "GET", "/v2", "Origin: http://evil.example\r\n", b"").await;
    assert_eq!(answer.status, 200);
}

async fn complete(front: &TestFront, fields: &str) -> (u16, serde_json::Value) {
    let body = format!(r#"{{"model":"stream_text","max_tokens":4,{fields}}}"#);
    let answer = http(front, "POST", "/v1/completions", body.as_bytes());
    let answer = tokio::time::timeout(SOON, answer).await.expect("no answer");
    (answer.status, serde_json::from_slice(&answer.body).unwrap())
}

#[tokio::test]
async fn the_choices_of_a_prompt_share_it_and_are_limited() {
    let front = TestFront::start_with(|config| config.max_bytes_in_flight = 4 << 20).await;
    let (status, answer) = complete(&front, r#""prompt":["a","é\n"],"n":2,"echo":true"#).await;
    assert_eq!(status, 200, "{answer}");
    let texts: Vec<&str> =
        answer["choices"].as_array().unwrap().iter().map(|choice| choice["text"].as_str().unwrap()).collect();
    let second = "é\né\n#0é\n#1é\n#2";
    assert_eq!(texts, ["aa#0a#1a#2", "aa#0a#1a#2", second, second]);
    let (status, answer) = complete(&front, &format!(r#""prompt":[{}"a"],"n":128"#, r#""a","#.repeat(8))).await;
    assert_eq!((status, &answer["error"]["param"]), (400, &"n".into()));
    let words = answer["error"]["message"].as_str().unwrap();
    assert_eq!(words, "request has 1152 sequences, at most 1024 are allowed (--max-request-sequences)");
    let prompt = "ab ".repeat(100_000);
    let before = memory_bytes("VmRSS");
    let (status, answer) = complete(&front, &format!(r#""prompt":"{prompt}","n":128"#)).await;
    assert_eq!(status, 503, "{answer}");
    assert!(memory_bytes("VmRSS").saturating_sub(before) < 256 << 20, "each choice has a copy of the prompt");
    assert_eq!(complete(&front, &format!(r#""prompt":"{prompt}","n":2"#)).await.0, 200);
    let (status, answer) = complete(&front, &format!(r#""prompt":[{}1]"#, "1,".repeat(1 << 20))).await;
    assert_eq!(status, 400, "{answer}");
}
