//! The HTTP protocol over real sockets.

use std::io::Write;
use std::sync::atomic::Ordering;
use std::time::Duration;

use crate::support::{HttpAnswer, TestFront, eventually, http, http_to, http_with};
use tokio::io::{AsyncReadExt, AsyncWriteExt};

const INFER: &str = r#"{"id":"7","inputs":[{"name":"INPUT0","datatype":"FP32","shape":[1,2],"data":[0.5,2]}]}"#;
const ANSWER: &str = concat!(
    r#"{"id":"7","model_name":"identity_fp32","model_version":"1","#,
    r#""outputs":[{"name":"OUTPUT0","datatype":"FP32","shape":[1,2],"data":[0.5,2.0]}]}"#
);

#[tokio::test]
async fn probes_and_unknown_paths_have_their_status() {
    let front = TestFront::start().await;
    for (path, status) in [
        ("/v2/health/live", 200),
        ("/v2/health/ready", 200),
        ("/v2/models/identity_fp32/ready", 200),
        ("/v2/models/nosuch/ready", 400),
        ("/v2/models/nosuch", 404),
        ("/v2/foo", 404),
        ("/v2/models/identity_fp32/infer", 405),
    ] {
        assert_eq!(http(&front, "GET", path, b"").await.status, status, "{path}");
    }
}

#[tokio::test]
async fn head_requests_have_the_head_of_their_get_request() {
    let front = TestFront::start().await;
    for path in [
        "/v2",
        "/v2/health/live",
        "/v2/health/ready",
        "/v2/models/identity_fp32",
        "/v2/models/identity_fp32/config",
        "/v2/models/identity_fp32/ready",
        "/v2/models/stats",
        "/v2/logging",
        "/v2/nosuch",
        "/v2/models/identity_fp32/infer",
        "/v1/models",
        "/version",
        "/health",
    ] {
        let (get, head) = (http(&front, "GET", path, b"").await, http(&front, "HEAD", path, b"").await);
        assert_eq!((head.status, head.text().as_str()), (get.status, ""), "{path}");
        let name = |answer: &HttpAnswer, name: &str| answer.header(name).map(str::to_owned);
        assert_eq!(name(&head, "content-type"), name(&get, "content-type"), "{path}");
        assert_eq!(name(&head, "content-length"), Some(get.body.len().to_string()), "{path}");
    }
}

#[tokio::test]
async fn probes_say_in_json_what_they_found_where_the_client_reads_json() {
    let front = TestFront::start().await;
    for (path, body) in [
        ("/v2/health/live", r#"{"live":true}"#),
        ("/v2/health/ready", r#"{"ready":true}"#),
        ("/v2/models/identity_fp32/ready", r#"{"ready":true}"#),
    ] {
        for kinds in ["application/json", "*/*", "text/html, application/json;q=0.9"] {
            let answer = http_with(&front, "GET", path, &format!("Accept: {kinds}\r\n"), b"").await;
            let kind = answer.header("content-type").map(str::to_owned);
            assert_eq!((answer.text().as_str(), kind.as_deref()), (body, Some("application/json")), "{path} {kinds}");
        }
        for headers in ["", "Accept: text/plain\r\n"] {
            let answer = http_with(&front, "GET", path, headers, b"").await;
            assert_eq!((answer.status, answer.text().as_str()), (200, ""), "{path} {headers}");
        }
    }
}

#[tokio::test]
async fn infer_with_json_tensors_returns_json() {
    let front = TestFront::start().await;
    let answer = http(&front, "POST", "/v2/models/identity_fp32/infer", INFER.as_bytes()).await;
    assert_eq!((answer.status, answer.text().as_str()), (200, ANSWER));
}

#[tokio::test]
async fn binary_tensors_follow_the_json_head() {
    let front = TestFront::start().await;
    let head = r#"{"inputs":[{"name":"INPUT0","datatype":"FP32","shape":[1,2],"parameters":{"binary_data_size":8}}],"parameters":{"binary_data_output":true}}"#;
    let body = [head.as_bytes(), b"abcdefgh"].concat();
    let headers = format!("Inference-Header-Content-Length: {}\r\n", head.len());
    let answer = http_with(&front, "POST", "/v2/models/identity_fp32/infer", &headers, &body).await;
    assert_eq!(answer.status, 200);
    let head_len: usize = answer.header("inference-header-content-length").unwrap().parse().unwrap();
    assert_eq!(&answer.body[head_len..], b"abcdefgh");
}

#[tokio::test]
async fn request_and_response_bodies_may_be_compressed() {
    let front = TestFront::start().await;
    let mut encoder = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
    encoder.write_all(INFER.as_bytes()).unwrap();
    let headers = "Content-Encoding: gzip\r\nAccept-Encoding: deflate\r\n";
    let body = encoder.finish().unwrap();
    let answer = http_with(&front, "POST", "/v2/models/identity_fp32/infer", headers, &body).await;
    assert_eq!(answer.header("content-encoding"), Some("deflate"));
    let mut text = String::new();
    std::io::Read::read_to_string(&mut flate2::read::ZlibDecoder::new(&answer.body[..]), &mut text).unwrap();
    assert_eq!(text, ANSWER);
}

#[tokio::test]
async fn a_body_over_the_limit_is_refused() {
    let front = TestFront::start_with(|config| config.max_http_body_bytes = 64).await;
    let answer = http(&front, "POST", "/v2/models/identity_fp32/infer", INFER.as_bytes()).await;
    assert_eq!(answer.status, 400);
    assert!(answer.text().contains("larger than the limit of 64 bytes"));
}

#[tokio::test]
async fn invalid_requests_get_one_clear_error_and_the_server_continues() {
    let front = TestFront::start().await;
    let deep = format!("{{\"inputs\":{}1{}}}", "[".repeat(100_000), "]".repeat(100_000));
    let huge = INFER.replace("[1,2]", "[4,4611686018427387904]");
    for (body, message) in [
        (deep.as_str(), "nested deeper than"),
        (huge.as_str(), "more elements than can be counted"),
        ("", "the request has no body"),
        ("{", "Missing a name for object member"),
        (r#"{"inputs":[{"name":"INPUT0","datatype":"FP32","shape":[1],"data":["\ud800"]}]}"#, "surrogate"),
    ] {
        let answer = http(&front, "POST", "/v2/models/identity_fp32/infer", body.as_bytes()).await;
        assert!(answer.status >= 400 && answer.text().contains(message), "{message}: {}", answer.text());
    }
    assert_eq!(http(&front, "POST", "/v2/models/identity_fp32/infer", INFER.as_bytes()).await.status, 200);
}

#[tokio::test]
async fn generate_answers_flat_json() {
    let front = TestFront::start().await;
    let body = br#"{"text_input":"tok","n":1,"id":"9"}"#;
    let answer = http(&front, "POST", "/v2/models/stream_text/generate", body).await;
    let expected = r#"{"id":"9","index":0,"model_name":"stream_text","model_version":"1","text_output":"tok#0"}"#;
    assert_eq!((answer.status, answer.text().as_str()), (200, expected));
    let answer = http(&front, "POST", "/v2/models/stream_text/generate", br#"{"text_input":"tok","n":2}"#).await;
    assert!(answer.text().contains("exactly 1 response"));
}

#[tokio::test]
async fn generate_stream_sends_an_event_for_each_response() {
    let front = TestFront::start().await;
    let answer = http(&front, "POST", "/v2/models/stream_text/generate_stream", br#"{"text_input":"t","n":3}"#).await;
    assert_eq!(answer.header("content-type"), Some("text/event-stream; charset=utf-8"));
    let text = answer.text();
    let events: Vec<&str> = text.split_terminator("\n\n").collect();
    assert_eq!(events.len(), 3, "{text}");
    assert!(events.iter().all(|event| event.starts_with("data: {")) && events[2].contains("t#2"));
}

#[tokio::test]
async fn a_disconnect_from_an_event_stream_cancels_its_request() {
    let front = TestFront::start().await;
    let mut socket = tokio::net::TcpStream::connect(front.http_address()).await.unwrap();
    let body = r#"{"text_input":"t","n":1000000,"delay_ms":600000}"#;
    let head = format!(
        "POST /v2/models/stream_text/generate_stream HTTP/1.1\r\nHost: t\r\nContent-Length: {}\r\n\r\n",
        body.len()
    );
    socket.write_all(format!("{head}{body}").as_bytes()).await.unwrap();
    socket.read_u8().await.unwrap();
    drop(socket);
    eventually("the request is cancelled", || front.streams.cancelled.load(Ordering::SeqCst) == 1).await;
}

#[tokio::test]
async fn pipelined_requests_are_answered_in_order() {
    let front = TestFront::start().await;
    let mut socket = tokio::net::TcpStream::connect(front.http_address()).await.unwrap();
    socket.write_all(b"GET /v2/health/live HTTP/1.1\r\nHost: t\r\n\r\nGET /v2/foo HTTP/1.1\r\nHost: t\r\nConnection: close\r\n\r\n").await.unwrap();
    let mut text = String::new();
    socket.read_to_string(&mut text).await.unwrap();
    let found = (text.find("200 OK").unwrap(), text.find("404 Not Found").unwrap());
    assert!(found.0 < found.1);
}

#[tokio::test]
async fn metrics_count_answered_requests() {
    let front = TestFront::start().await;
    http(&front, "POST", "/v2/models/identity_fp32/infer", INFER.as_bytes()).await;
    let answer: HttpAnswer = front.metrics().await;
    let text = answer.text();
    assert!(text.contains("nv_inference_request_success{model=\"identity_fp32\",version=\"1\"} 1\n"), "{text}");
    assert!(text.contains("# TYPE nv_inference_request_failure counter"));
}

#[tokio::test]
async fn a_shutdown_finishes_requests_in_flight_and_refuses_new_ones() {
    let mut front = TestFront::start().await;
    let address = front.http_address();
    let slow = br#"{"inputs":[{"name":"sleep_ms","datatype":"INT32","shape":[1,1],"data":[3000]}]}"#;
    let in_flight = tokio::spawn(http_to(address, "POST", "/v2/models/slow/infer", "", slow.to_vec()));
    tokio::time::sleep(Duration::from_millis(500)).await;
    let shutdown = tokio::spawn(front.running.take().unwrap().shutdown(Duration::from_secs(10)));
    while http(&front, "GET", "/v2/health/ready", b"").await.status != 503 {
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    assert_eq!(http(&front, "POST", "/v2/models/identity_fp32/infer", INFER.as_bytes()).await.status, 503);
    // A model that is not found may be unloaded already.
    assert_eq!(http(&front, "POST", "/v1/completions", br#"{"model":"unloaded","prompt":""}"#).await.status, 503);
    let answer = in_flight.await.unwrap();
    assert_eq!(answer.status, 200, "{}", answer.text());
    assert_eq!(shutdown.await.unwrap(), 0);
    assert!(tokio::net::TcpStream::connect(address).await.is_err(), "the port is closed");
}

#[tokio::test]
async fn the_error_of_a_port_in_use_names_it() {
    let front = TestFront::start().await;
    let taken = front.http_address();
    let error = front.start_another(taken.port()).await.err().unwrap();
    assert_eq!(
        error.to_string(),
        format!("failed to start HTTP service: Socket '127.0.0.1:{}' already in use", taken.port())
    );
}

#[tokio::test]
async fn the_memory_of_requests_in_flight_is_limited() {
    let front = TestFront::start_with(|config| config.max_bytes_in_flight = 20_000).await;
    let path = "/v2/models/identity_fp32/infer";
    let mut half = tokio::net::TcpStream::connect(front.http_address()).await.unwrap();
    let head = format!("POST {path} HTTP/1.1\r\nHost: x\r\nContent-Length: 16000\r\n\r\n");
    half.write_all(&[head.as_bytes(), &[b' '; 15_000]].concat()).await.unwrap();
    let large = [INFER.as_bytes(), &[b' '; 10_000]].concat();
    let until = async |status: u16| loop {
        let answer = http(&front, "POST", path, &large).await;
        if answer.status == status {
            return answer;
        }
        tokio::time::sleep(Duration::from_millis(10)).await;
    };
    let limit = Duration::from_secs(60);
    let refused = tokio::time::timeout(limit, until(503)).await.expect("an incomplete body is charged");
    assert!(refused.text().contains("all together may hold 20000; try again later"), "{}", refused.text());
    assert_eq!(http(&front, "POST", path, INFER.as_bytes()).await.status, 200, "small requests are within the budget");
    drop(half);
    tokio::time::timeout(limit, until(200)).await.expect("a disconnect releases the memory");
}
