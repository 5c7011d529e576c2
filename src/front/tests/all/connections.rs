//! Idle and slow connections: their effect on other clients, and their timeouts.

use std::path::Path;
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use crate::support::{TestFront, eventually, http, http_to};
use front::{Config, Tls};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::time::{sleep, timeout};
use tokio_rustls::TlsConnector;
use tokio_rustls::client::TlsStream;
use tokio_rustls::rustls::pki_types::pem::PemObject;
use tokio_rustls::rustls::pki_types::{CertificateDer, ServerName};
use tokio_rustls::rustls::{ClientConfig, RootCertStore};

const LONG: Duration = Duration::from_secs(60);
const PREFACE: &[u8] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";
const SETTINGS: &[u8] = &[0, 0, 0, 4, 0, 0, 0, 0, 0];

fn grpc_address(front: &TestFront) -> std::net::SocketAddr {
    front.running.as_ref().unwrap().addresses().grpc.unwrap()
}

fn few_connections(config: &mut Config) {
    config.max_connections = 20;
}

/// Opens `count` connections and sends `bytes` on each.
async fn silent(address: std::net::SocketAddr, count: usize, bytes: &[u8]) -> Vec<TcpStream> {
    let mut all = Vec::new();
    for _ in 0..count {
        let mut socket = TcpStream::connect(address).await.unwrap();
        let _ = socket.write_all(bytes).await; // The server may have closed the connection.
        all.push(socket);
    }
    all
}

/// Resolves when the server has closed the connection.
async fn ended(socket: &mut (impl AsyncReadExt + Unpin)) {
    let mut heard = [0; 1024];
    while !matches!(socket.read(&mut heard).await, Ok(0) | Err(_)) {}
}

#[tokio::test]
async fn idle_connections_at_the_limit_are_evicted_for_a_new_client() {
    let front = TestFront::start_with(few_connections).await;
    let (http_port, grpc_port) = (front.http_address(), grpc_address(&front));
    let answered = b"GET /v2/health/live HTTP/1.1\r\nHost: x\r\n\r\n".as_slice();
    for bytes in [b"".as_slice(), b"GET / HT", answered] {
        let _held = silent(http_port, 100, bytes).await;
        let answer =
            timeout(LONG, http(&front, "GET", "/v2/health/ready", b"")).await.expect("no connection was evicted");
        assert_eq!(answer.status, 200);
    }
    for bytes in [b"".to_vec(), PREFACE[..12].to_vec(), PREFACE.to_vec(), [PREFACE, SETTINGS].concat()] {
        let _held = silent(grpc_port, 100, &bytes).await;
        timeout(LONG, front.grpc()).await.expect("no connection was evicted");
    }
}

#[tokio::test]
async fn connections_with_a_request_are_not_evicted() {
    let front = TestFront::start_with(few_connections).await;
    let address = front.http_address();
    let slow = br#"{"inputs":[{"name":"sleep_ms","datatype":"INT32","shape":[1,1],"data":[2000]}]}"#;
    let waiting = tokio::spawn(http_to(address, "POST", "/v2/models/slow/infer", "", slow.to_vec()));
    let stream = br#"{"text_input":"a","n":20,"delay_ms":100}"#;
    let streaming = tokio::spawn(http_to(address, "POST", "/v2/models/stream_text/generate_stream", "", stream.into()));
    eventually("the stream runs", || front.streams.active.load(Ordering::SeqCst) == 1).await;
    let mut held = Vec::new();
    while !waiting.is_finished() || !streaming.is_finished() {
        held.extend(silent(address, 20, b"").await);
        sleep(Duration::from_millis(50)).await;
    }
    assert_eq!(waiting.await.unwrap().status, 200);
    assert!(streaming.await.unwrap().text().contains("a#19"));
}

#[tokio::test]
async fn an_address_at_its_limit_gets_no_further_connection() {
    let front = TestFront::start_with(|config| config.max_connections_per_address = 2).await;
    let begun = b"POST /v2/models/slow/infer HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{";
    let mut held = silent(front.http_address(), 2, begun).await;
    sleep(Duration::from_millis(300)).await; // Until both requests have started.
    let mut third = TcpStream::connect(front.http_address()).await.unwrap();
    timeout(LONG, ended(&mut third)).await.expect("the third connection was not closed");
    held.pop();
    let deadline = Instant::now() + LONG;
    let answered = b"GET /v2/health/live HTTP/1.1\r\nHost: x\r\n\r\n";
    loop {
        let mut again = TcpStream::connect(front.http_address()).await.unwrap();
        let _ = again.write_all(answered).await;
        if matches!(again.read(&mut [0; 64]).await, Ok(1..)) {
            break;
        }
        assert!(Instant::now() < deadline, "no connection is accepted after one was closed");
        sleep(Duration::from_millis(50)).await;
    }
}

/// A self-signed certificate for `localhost`.
fn certificate(folder: &Path, port: &'static str) -> Tls {
    let key = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-keyout", "key.pem"];
    let certificate = [
        "-x509",
        "-days",
        "2",
        "-subj",
        "/CN=localhost",
        "-addext",
        "subjectAltName=DNS:localhost",
        "-addext",
        "basicConstraints=critical,CA:FALSE",
    ];
    let mut openssl = Command::new("openssl");
    openssl.arg("req").args(certificate).args(key).args(["-out", "cert.pem"]).current_dir(folder);
    let made = openssl.output().expect("openssl is installed");
    assert!(made.status.success(), "{}", String::from_utf8_lossy(&made.stderr));
    Tls { port, certificate: folder.join("cert.pem"), key: folder.join("key.pem"), client_roots: None }
}

async fn tls_client(address: std::net::SocketAddr, tls: &Tls, protocol: &[u8]) -> TlsStream<TcpStream> {
    let mut roots = RootCertStore::empty();
    roots.add(CertificateDer::from_pem_file(&tls.certificate).unwrap()).unwrap();
    let provider = Arc::new(tokio_rustls::rustls::crypto::ring::default_provider());
    let config = ClientConfig::builder_with_provider(provider).with_safe_default_protocol_versions().unwrap();
    let mut config = config.with_root_certificates(roots).with_no_client_auth();
    config.alpn_protocols = vec![protocol.to_vec()];
    let name = ServerName::try_from("localhost").unwrap();
    let socket = TcpStream::connect(address).await.unwrap();
    TlsConnector::from(Arc::new(config)).connect(name, socket).await.unwrap()
}

#[tokio::test]
async fn connections_without_a_handshake_are_closed_with_and_without_tls() {
    let folder = tempfile::tempdir().unwrap();
    let tls = certificate(folder.path(), "grpc");
    let with_timeout = |config: &mut Config| config.http_header_timeout = Duration::from_millis(500);
    let within = TestFront::start_with(|config| (with_timeout(config), config.grpc_tls = Some(tls.clone())).1).await;
    for bytes in [b"".as_slice(), &PREFACE[..12]] {
        let mut client = tls_client(grpc_address(&within), &tls, b"h2").await;
        client.write_all(bytes).await.unwrap();
        timeout(LONG, ended(&mut client)).await.expect("the connection was not closed");
    }
    let mut silent_in_handshake = TcpStream::connect(grpc_address(&within)).await.unwrap();
    timeout(LONG, ended(&mut silent_in_handshake)).await.expect("the handshake has no timeout");
    let without = TestFront::start_with(with_timeout).await;
    for bytes in [b"".as_slice(), &PREFACE[..12]] {
        let mut client = silent(grpc_address(&without), 1, bytes).await.remove(0);
        timeout(LONG, ended(&mut client)).await.expect("the connection was not closed");
    }
    // A client that completes its handshake is served.
    let client = tls_client(grpc_address(&within), &tls, b"h2").await;
    let (requests, driver) = h2::client::handshake(client).await.unwrap();
    tokio::spawn(driver);
    let call = http::Request::post("https://localhost/inference.GRPCInferenceService/ServerLive");
    let call = call.header("content-type", "application/grpc").body(()).unwrap();
    let (answer, mut sending) = requests.ready().await.unwrap().send_request(call, false).unwrap();
    sending.send_data(bytes::Bytes::from_static(&[0; 5]), true).unwrap();
    assert_eq!(answer.await.unwrap().status(), 200);
}

#[tokio::test]
async fn http_and_metrics_serve_within_tls() {
    let folder = tempfile::tempdir().unwrap();
    let tls = certificate(folder.path(), "http");
    let with_tls = |config: &mut Config| {
        config.http_tls = Some(tls.clone());
        config.metrics_tls = Some(tls.clone());
    };
    let front = TestFront::start_with(with_tls).await;
    let metrics = front.running.as_ref().unwrap().addresses().metrics.unwrap();
    for (address, path) in [(front.http_address(), "/v2/health/ready"), (metrics, "/metrics")] {
        let mut client = tls_client(address, &tls, b"http/1.1").await;
        assert_eq!(client.get_ref().1.alpn_protocol(), Some(b"http/1.1".as_slice()));
        let request = format!("GET {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n");
        client.write_all(request.as_bytes()).await.unwrap();
        let mut answer = String::new();
        client.read_to_string(&mut answer).await.unwrap();
        assert!(answer.starts_with("HTTP/1.1 200"), "{answer}");
        let mut plain = TcpStream::connect(address).await.unwrap();
        plain.write_all(request.as_bytes()).await.unwrap();
        let mut answer = Vec::new();
        let _ = plain.read_to_end(&mut answer).await;
        assert!(!answer.starts_with(b"HTTP"), "served without TLS");
    }
}

#[tokio::test]
async fn the_error_of_an_unreadable_tls_file_names_its_flag() {
    let folder = tempfile::tempdir().unwrap();
    let tls = Tls { key: folder.path().join("none.pem"), ..certificate(folder.path(), "http") };
    let front = TestFront::start().await;
    let error = front.start_another_with(|config| config.http_tls = Some(tls)).await.err().unwrap().to_string();
    let expected = "failed to start HTTP service with TLS: --http-server-key: cannot read a private key from ";
    assert!(error.starts_with(expected) && error.contains("none.pem: "), "{error}");
}

/// A `generate_stream` request for `count` responses of `bytes` bytes.
fn generate_stream(bytes: usize, count: usize, delay_ms: usize) -> Vec<u8> {
    let body = format!(r#"{{"text_input":"{}","n":{count},"delay_ms":{delay_ms}}}"#, "a".repeat(bytes));
    let head =
        "POST /v2/models/stream_text/generate_stream HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: ";
    format!("{head}{}\r\n\r\n{body}", body.len()).into_bytes()
}

#[tokio::test]
async fn a_client_that_never_reads_its_response_is_disconnected() {
    let front = TestFront::start_with(|config| config.write_timeout = Some(Duration::from_millis(500))).await;
    let mut client = TcpStream::connect(front.http_address()).await.unwrap();
    client.write_all(&generate_stream(100_000, 10_000, 0)).await.unwrap();
    let streams = front.streams.clone();
    let is_cancelled = move || streams.cancelled.load(Ordering::SeqCst) == 1;
    let given_up = async {
        while !is_cancelled() {
            sleep(Duration::from_millis(10)).await;
        }
    };
    timeout(LONG, given_up).await.expect("its answer is kept for ever");
}

#[tokio::test]
async fn a_client_without_data_to_read_or_that_reads_slowly_is_not_disconnected() {
    let front = TestFront::start_with(|config| config.write_timeout = Some(Duration::from_millis(500))).await;
    let mut rare = TcpStream::connect(front.http_address()).await.unwrap();
    rare.write_all(&generate_stream(1, 3, 1200)).await.unwrap();
    let mut slow = TcpStream::connect(front.http_address()).await.unwrap();
    slow.write_all(&generate_stream(100_000, 100, 0)).await.unwrap();
    let (mut answer, mut piece) = (Vec::new(), vec![0; 400_000]);
    for _ in 0..20 {
        sleep(Duration::from_millis(100)).await;
        let count = slow.read(&mut piece).await.unwrap();
        answer.extend_from_slice(&piece[..count]);
    }
    slow.read_to_end(&mut answer).await.unwrap();
    assert!(String::from_utf8_lossy(&answer).contains("a#99"));
    let mut answer = String::new();
    rare.read_to_string(&mut answer).await.unwrap();
    assert!(answer.contains("a#2"), "{answer}");
}

#[tokio::test]
async fn a_grpc_stream_with_an_exhausted_window_is_reset_and_its_connection_continues() {
    use client::proto::model_infer_request::InferInputTensor;
    use client::proto::{ModelInferRequest, ServerLiveRequest};
    let front = TestFront::start_with(|config| config.write_timeout = Some(Duration::from_millis(500))).await;
    let socket = TcpStream::connect(grpc_address(&front)).await.unwrap();
    let builder = &mut h2::client::Builder::new();
    let (requests, driver) = builder.initial_window_size(3_000).handshake::<_, bytes::Bytes>(socket).await.unwrap();
    tokio::spawn(driver);
    let call = async |method: &str, message: bytes::Bytes| {
        let call = http::Request::post(format!("http://test/inference.GRPCInferenceService/{method}"));
        let call = call.header("content-type", "application/grpc").header("te", "trailers").body(()).unwrap();
        let (answer, mut sending) = requests.clone().ready().await.unwrap().send_request(call, false).unwrap();
        sending.send_data(message, true).unwrap();
        answer.await.unwrap().into_body()
    };
    let mut request = ModelInferRequest { model_name: "stream_text".into(), id: "1".into(), ..Default::default() };
    for (name, datatype, data) in
        [("text_input", "BYTES", b"\x01\0\0\0a".to_vec()), ("n", "INT32", 1_000_000_i32.to_le_bytes().into())]
    {
        let (name, datatype) = (name.to_owned(), datatype.to_owned());
        request.inputs.push(InferInputTensor { name, datatype, shape: vec![1], ..Default::default() });
        request.raw_input_contents.push(data.into());
    }
    let mut body = call("ModelStreamInfer", client::grpc::frame(&request)).await;
    let reset = async {
        while let Some(data) = body.data().await {
            if data.is_err() {
                return; // The flow-control capacity is never released.
            }
        }
    };
    timeout(LONG, reset).await.expect("its answer is kept for ever");
    eventually("it is cancelled", || front.streams.cancelled.load(Ordering::SeqCst) == 1).await;
    let mut live = call("ServerLive", client::grpc::frame(&ServerLiveRequest {})).await;
    assert!(live.data().await.unwrap().is_ok());
}
