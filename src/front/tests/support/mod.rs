//! Models that answer as fixtures of the protocol do, and a server over them.
#![allow(dead_code)] // Each test takes what it needs.

use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use futures::FutureExt;
use futures::future::BoxFuture;
use repository::ModelConfig;
use serving::{
    Backend, BackendFactory, ControlMode, CorrelationId, ErrorKind, InferError, InferRequest, InferResponse,
    LoadRequest, Parameter, ResponseSender, ResponseStream, Server, ServerConfig, Tensor,
};
use tokio::sync::mpsc;

/// Requests of `stream_text` that are being answered, and those that saw their client leave.
#[derive(Debug, Default)]
pub struct Streams {
    pub active: AtomicUsize,
    pub cancelled: AtomicUsize,
}

/// Makes a fixture model by its name; any other echoes `INPUT…` as `OUTPUT…`.
pub struct Fixtures {
    pub streams: Arc<Streams>,
}

impl BackendFactory for Fixtures {
    fn load(&self, model: LoadRequest) -> BoxFuture<'static, Result<Arc<dyn Backend>, InferError>> {
        let streams = self.streams.clone();
        async move {
            if model.config.name == "broken" {
                return Err(InferError::internal("RuntimeError: broken on purpose"));
            }
            let kind = match model.config.name.as_str() {
                "stream_text" => Kind::StreamText(streams),
                "single_text" => Kind::SingleText,
                "fails" => Kind::Fails,
                "tensorrt_llm" | "ensemble" => Kind::Steps(start_steps()),
                "slow" => Kind::Slow,
                "seq_sum" => Kind::SequenceSum(Mutex::default()),
                _ => Kind::Echo,
            };
            Ok(Arc::new(Fixture { config: model.config, kind }) as Arc<dyn Backend>)
        }
        .boxed()
    }
}

struct Fixture {
    config: Arc<ModelConfig>,
    kind: Kind,
}

enum Kind {
    Echo,
    StreamText(Arc<Streams>),
    SingleText,
    Fails,
    Slow,
    Steps(mpsc::Sender<Row>),
    SequenceSum(Mutex<HashMap<CorrelationId, i32>>),
}

impl Backend for Fixture {
    fn infer(&self, request: InferRequest) -> Result<ResponseStream, InferError> {
        match &self.kind {
            Kind::Echo => Ok(ResponseStream::ready(self.echo(request))),
            Kind::StreamText(streams) => Ok(stream_text(request, streams.clone())),
            Kind::SingleText => Ok(ResponseStream::ready(single_text(&request))),
            Kind::Fails => fails(&request),
            Kind::Steps(rows) => join_steps(&request, rows),
            Kind::Slow => Ok(slow(request)),
            Kind::SequenceSum(sums) => sequence_sum(&request, &mut sums.lock().unwrap()),
        }
    }

    fn drain(&self) -> BoxFuture<'_, ()> {
        async {}.boxed()
    }
}

impl Fixture {
    fn echo(&self, request: InferRequest) -> InferResponse {
        let outputs = request
            .inputs
            .into_iter()
            .map(|input| Tensor { name: input.name.replace("INPUT", "OUTPUT").into(), ..input });
        let asked = request.requested_outputs;
        let outputs = outputs.filter(|output| asked.is_empty() || asked.contains(&output.name));
        InferResponse { outputs: outputs.collect(), ..InferResponse::default() }
    }
}

fn number(request: &InferRequest, name: &str, default: i32) -> i32 {
    request.input(name).and_then(Tensor::to_i32).and_then(|values| values.first().copied()).unwrap_or(default)
}

fn text(request: &InferRequest, name: &str) -> String {
    let strings = request.input(name).and_then(Tensor::to_byte_strings).unwrap_or_default();
    strings.first().map(|text| String::from_utf8_lossy(text).into_owned()).unwrap_or_default()
}

/// `n` pieces "<text>#<i>", then an empty final response.
fn stream_text(request: InferRequest, streams: Arc<Streams>) -> ResponseStream {
    let (sender, stream) = ResponseStream::channel(8);
    let text = text(&request, "text_input");
    let (count, fail_at) = (number(&request, "n", 3), number(&request, "fail_at", -1));
    let delay = Duration::from_millis(number(&request, "delay_ms", 0) as u64);
    streams.active.fetch_add(1, Ordering::SeqCst);
    tokio::spawn(async move {
        for index in 0..count {
            let response = if index == fail_at {
                Err(InferError::internal(format!("piece {index} failed")))
            } else {
                let piece = Tensor::from_byte_strings("text_output", &[1], &[format!("{text}#{index}")]);
                let outputs = vec![piece, Tensor::from_i32("index", &[1], &[index])];
                Ok(InferResponse { outputs, ..InferResponse::default() })
            };
            let is_error = response.is_err();
            if !sender.send(response).await || is_error {
                break;
            }
            if !delay.is_zero() {
                tokio::select! {
                    () = tokio::time::sleep(delay) => {}
                    () = sender.cancelled() => break,
                }
            }
        }
        if sender.is_cancelled() {
            streams.cancelled.fetch_add(1, Ordering::SeqCst);
        } else {
            sender.send(Ok(InferResponse { is_final: true, ..InferResponse::default() })).await;
        }
        streams.active.fetch_sub(1, Ordering::SeqCst);
    });
    stream
}

/// A request of a model that steps: one token for each row in every step, as an engine has it.
struct Row {
    sender: ResponseSender,
    tokens_left: i32,
    output: Tensor,
}

const STEP: Duration = Duration::from_millis(10);

fn join_steps(request: &InferRequest, rows: &mpsc::Sender<Row>) -> Result<ResponseStream, InferError> {
    let (sender, stream) = ResponseStream::channel(64);
    let is_text = request.input("text_input").is_some();
    let tokens_left = number(request, if is_text { "max_tokens" } else { "request_output_len" }, 1);
    let output = if is_text {
        Tensor::from_byte_strings("text_output", &[1], &["word "])
    } else {
        Tensor::from_i32("output_ids", &[1, 1, 1], &[7])
    };
    let row = Row { sender, tokens_left, output };
    rows.try_send(row).map_err(|_| InferError::unavailable("too many rows"))?;
    Ok(stream)
}

fn start_steps() -> mpsc::Sender<Row> {
    let (joining, mut joined) = mpsc::channel::<Row>(4096);
    tokio::spawn(async move {
        let mut rows: Vec<Row> = Vec::new();
        let mut ticks = tokio::time::interval(STEP);
        loop {
            ticks.tick().await;
            while let Ok(row) = joined.try_recv() {
                rows.push(row);
            }
            for row in &mut rows {
                row.tokens_left -= 1;
                let outputs = vec![row.output.clone()];
                let is_final = row.tokens_left <= 0;
                row.sender.send(Ok(InferResponse { outputs, is_final, ..InferResponse::default() })).await;
            }
            rows.retain(|row| row.tokens_left > 0 && !row.sender.is_cancelled());
        }
    });
    joining
}

/// The text and a dump of the other inputs and parameters, as Python's `json.dumps` writes it.
fn single_text(request: &InferRequest) -> InferResponse {
    let mut extra = Vec::new();
    if request.input("max_tokens").is_some() {
        extra.push(format!("\"max_tokens\": {}", number(request, "max_tokens", 0)));
    }
    let parameters = request.parameters.iter().map(|(key, value)| match value {
        Parameter::Bool(value) => format!("\"{key}\": {value}"),
        Parameter::Int(value) => format!("\"{key}\": {value}"),
        Parameter::Double(value) => format!("\"{key}\": {value:?}"),
        Parameter::String(value) => format!("\"{key}\": \"{value}\""),
    });
    extra.push(format!("\"params\": {{{}}}", parameters.collect::<Vec<_>>().join(", ")));
    if let Some(stream) = request.input("stream").and_then(Tensor::to_bool) {
        extra.push(format!("\"stream\": {}", stream[0]));
    }
    if let Some(temperature) = request.input("temperature").and_then(Tensor::to_f32) {
        extra.push(format!("\"temperature\": {:?}", temperature[0]));
    }
    let texts = request.input("text_input").and_then(Tensor::to_byte_strings).unwrap_or_default();
    let tail = extra.join(", ");
    let rows: Vec<String> = texts.iter().map(|text| format!("{}|{{{tail}}}", String::from_utf8_lossy(text))).collect();
    let output = Tensor::from_byte_strings("text_output", &[rows.len() as i64, 1], &rows);
    InferResponse { outputs: vec![output], ..InferResponse::default() }
}

fn fails(request: &InferRequest) -> Result<ResponseStream, InferError> {
    let code = text(request, "code");
    let kind = match code.as_str() {
        "UNKNOWN" => ErrorKind::Unknown,
        "NOT_FOUND" => ErrorKind::NotFound,
        "INVALID_ARG" => ErrorKind::InvalidArgument,
        "UNAVAILABLE" => ErrorKind::Unavailable,
        "UNSUPPORTED" => ErrorKind::Unsupported,
        "ALREADY_EXISTS" => ErrorKind::AlreadyExists,
        "CANCELLED" => ErrorKind::Cancelled,
        "nothing" => return Ok(ResponseStream::ready(InferResponse::default())),
        _ => ErrorKind::Internal,
    };
    let message = if code == "raise" {
        "Failed to process the request(s) for model 'fails_0_0', message: ValueError: boom".to_owned()
    } else {
        format!("asked for {code}")
    };
    Err(InferError::new(kind, message))
}

fn slow(request: InferRequest) -> ResponseStream {
    let (sender, stream) = ResponseStream::channel(1);
    let sleep_ms = number(&request, "sleep_ms", 0);
    tokio::spawn(async move {
        tokio::time::sleep(Duration::from_millis(sleep_ms as u64)).await;
        let outputs = vec![Tensor::from_i32("done", &[1, 1], &[sleep_ms])];
        sender.send(Ok(InferResponse { outputs, is_final: true, ..InferResponse::default() })).await;
    });
    stream
}

fn sequence_sum(request: &InferRequest, sums: &mut HashMap<CorrelationId, i32>) -> Result<ResponseStream, InferError> {
    let id = &request.correlation_id;
    let shown = match id {
        CorrelationId::Number(number) => number.to_string(),
        CorrelationId::Text(text) => text.clone(),
    };
    if shown == "0" || shown.is_empty() {
        return Err(InferError::invalid(
            "inference request to model 'seq_sum' must specify a non-zero or non-empty correlation ID",
        ));
    }
    if request.sequence_start {
        sums.insert(id.clone(), 0);
    }
    let Some(sum) = sums.get_mut(id) else {
        return Err(InferError::invalid(format!(
            "inference request for sequence {shown} to model 'seq_sum' must specify the START flag on the first \
             request of the sequence"
        )));
    };
    *sum += number(request, "INPUT0", 0);
    let output = Tensor::from_i32("OUTPUT0", &[1, 1], &[*sum]);
    if request.sequence_end {
        sums.remove(id);
    }
    Ok(ResponseStream::ready(InferResponse { outputs: vec![output], ..InferResponse::default() }))
}

/// A server over the fixtures in `repository`, its models loaded where they can be.
pub async fn serve(repository: &Path, control_mode: ControlMode) -> (Arc<Server>, Arc<Streams>) {
    let streams = Arc::new(Streams::default());
    let fixtures: Arc<dyn BackendFactory> = Arc::new(Fixtures { streams: streams.clone() });
    let factories = ["python", "identity"].map(|name| (name.to_owned(), fixtures.clone()));
    let config =
        ServerConfig { repositories: vec![PathBuf::from(repository)], control_mode, ..ServerConfig::default() };
    let server = Server::new(config, factories.into()).expect("the repository is a directory");
    if let Err(failures) = server.load_all().await {
        failures.iter().for_each(|failure| eprintln!("{}: {}", failure.model, failure.reason));
    }
    (server, streams)
}

/// Writes a model's configuration into a repository.
pub fn add_model(repository: &Path, name: &str, config: &str) {
    let dir = repository.join(name);
    std::fs::create_dir_all(dir.join("1")).unwrap();
    std::fs::write(dir.join("config.pbtxt"), format!("name: \"{name}\"\n{config}")).unwrap();
}

/// A front on ports that the system chose, over fixture models.
pub struct TestFront {
    pub running: Option<front::Running>,
    pub streams: Arc<Streams>,
    server: Arc<Server>,
    addresses: front::Addresses,
    repository: tempfile::TempDir,
}

const STREAM_TEXT: &str = r#"
backend: "python" max_batch_size: 0 model_transaction_policy { decoupled: true }
input [ { name: "text_input" data_type: TYPE_STRING dims: [ 1 ] }, { name: "n" data_type: TYPE_INT32 dims: [ 1 ] optional: true },
        { name: "delay_ms" data_type: TYPE_INT32 dims: [ 1 ] optional: true }, { name: "fail_at" data_type: TYPE_INT32 dims: [ 1 ] optional: true } ]
output [ { name: "text_output" data_type: TYPE_STRING dims: [ -1 ] }, { name: "index" data_type: TYPE_INT32 dims: [ 1 ] } ]
"#;
const IDENTITY: &str = r#"
backend: "python" max_batch_size: 4
input [ { name: "INPUT0" data_type: TYPE_FP32 dims: [ -1 ] } ] output [ { name: "OUTPUT0" data_type: TYPE_FP32 dims: [ -1 ] } ]
"#;
const SLOW: &str = r#"
backend: "python" max_batch_size: 4
input [ { name: "sleep_ms" data_type: TYPE_INT32 dims: [ 1 ] } ] output [ { name: "done" data_type: TYPE_INT32 dims: [ 1 ] } ]
"#;

impl TestFront {
    /// With the usual settings.
    pub async fn start() -> Self {
        Self::start_with(|_| ()).await
    }

    /// With settings changed by `change`.
    pub async fn start_with(change: impl FnOnce(&mut front::Config)) -> Self {
        let repository = tempfile::tempdir().unwrap();
        for (name, config) in [("stream_text", STREAM_TEXT), ("identity_fp32", IDENTITY), ("slow", SLOW)] {
            add_model(repository.path(), name, config);
        }
        let (server, streams) = serve(repository.path(), ControlMode::None).await;
        let any = || Some(front::Address::new("127.0.0.1", 0));
        let mut config = front::Config { grpc: any(), http: any(), metrics: any(), ..Default::default() };
        change(&mut config);
        let running = front::start(config, server.clone(), Vec::new()).await.unwrap();
        Self { addresses: running.addresses(), running: Some(running), streams, server, repository }
    }

    /// A gRPC connection.
    pub async fn grpc(&self) -> client::grpc::Connection {
        client::grpc::Connection::open(&self.addresses.grpc.unwrap().to_string()).await.unwrap()
    }

    /// The HTTP port.
    pub fn http_address(&self) -> std::net::SocketAddr {
        self.addresses.http.unwrap()
    }

    /// What the metrics port answers.
    pub async fn metrics(&self) -> HttpAnswer {
        http_to(self.addresses.metrics.unwrap(), "GET", "/metrics", "", Vec::new()).await
    }

    /// Another front over the same models with its HTTP on `port`.
    pub async fn start_another(&self, port: u16) -> Result<front::Running, front::StartError> {
        self.start_another_with(|config| config.http = Some(front::Address::new("127.0.0.1", port))).await
    }

    /// Another front over the same models, HTTP alone, with settings changed by `change`.
    pub async fn start_another_with(
        &self,
        change: impl FnOnce(&mut front::Config),
    ) -> Result<front::Running, front::StartError> {
        let http = Some(front::Address::new("127.0.0.1", 0));
        let mut config = front::Config { grpc: None, http, metrics: None, ..Default::default() };
        change(&mut config);
        front::start(config, self.server.clone(), Vec::new()).await
    }
}

/// An HTTP response.
pub struct HttpAnswer {
    pub status: u16,
    pub headers: Vec<(String, String)>,
    pub body: Vec<u8>,
}

impl HttpAnswer {
    /// The body as text.
    pub fn text(&self) -> String {
        String::from_utf8_lossy(&self.body).into_owned()
    }

    /// The header called `name`, in lower case.
    pub fn header(&self, name: &str) -> Option<&str> {
        self.headers.iter().find(|(key, _)| key == name).map(|(_, value)| value.as_str())
    }
}

/// Sends one request and reads the answer.
pub async fn http(front: &TestFront, method: &str, path: &str, body: &[u8]) -> HttpAnswer {
    http_with(front, method, path, "", body).await
}

/// The same with headers, each ended by a line break.
pub async fn http_with(front: &TestFront, method: &str, path: &str, headers: &str, body: &[u8]) -> HttpAnswer {
    http_to(front.http_address(), method, path, headers, body.to_vec()).await
}

/// The same to any address.
pub async fn http_to(
    address: std::net::SocketAddr,
    method: &str,
    path: &str,
    headers: &str,
    body: Vec<u8>,
) -> HttpAnswer {
    use tokio::io::{AsyncReadExt, AsyncWriteExt};
    let mut socket = tokio::net::TcpStream::connect(address).await.unwrap();
    let length = body.len();
    let head = format!(
        "{method} {path} HTTP/1.1\r\nHost: test\r\nConnection: close\r\nContent-Length: {length}\r\n{headers}\r\n"
    );
    let sent = [head.as_bytes(), &body].concat();
    let _ = socket.write_all(&sent).await; // A server that refuses early may not read it all.
    let mut bytes = Vec::new();
    socket.read_to_end(&mut bytes).await.unwrap();
    parse(&bytes)
}

fn parse(bytes: &[u8]) -> HttpAnswer {
    let end = bytes.windows(4).position(|window| window == b"\r\n\r\n").expect("an HTTP head");
    let head = std::str::from_utf8(&bytes[..end]).unwrap();
    let status = head.split(' ').nth(1).unwrap().parse().unwrap();
    let headers: Vec<(String, String)> = head
        .lines()
        .filter_map(|line| line.split_once(": "))
        .map(|(key, value)| (key.to_lowercase(), value.to_owned()))
        .collect();
    let is_chunked = headers.contains(&("transfer-encoding".to_owned(), "chunked".to_owned()));
    let body = if is_chunked { unchunk(&bytes[end + 4..]) } else { bytes[end + 4..].to_vec() };
    HttpAnswer { status, headers, body }
}

fn unchunk(mut bytes: &[u8]) -> Vec<u8> {
    let mut body = Vec::new();
    loop {
        let line = bytes.windows(2).position(|window| window == b"\r\n").expect("a chunk's length");
        let length = usize::from_str_radix(std::str::from_utf8(&bytes[..line]).unwrap(), 16).unwrap();
        if length == 0 {
            return body;
        }
        body.extend_from_slice(&bytes[line + 2..line + 2 + length]);
        bytes = &bytes[line + 4 + length..];
    }
}

/// Waits until `condition` holds, for five seconds at most.
pub async fn eventually(what: &str, condition: impl Fn() -> bool) {
    for _ in 0..500 {
        if condition() {
            return;
        }
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    panic!("not within five seconds: {what}");
}
