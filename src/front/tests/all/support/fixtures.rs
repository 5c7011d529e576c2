//! Fixture models for tests of the protocols.

use std::collections::HashMap;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use futures::FutureExt;
use futures::future::BoxFuture;
use repository::ModelConfig;
use serving::{
    Backend, BackendFactory, CorrelationId, ErrorKind, InferError, InferRequest, InferResponse, LoadRequest, Parameter,
    ResponseSender, ResponseStream, Tensor,
};
use tokio::sync::mpsc;

/// Counts the active and the cancelled requests of `stream_text`.
#[derive(Debug, Default)]
pub struct Streams {
    pub active: AtomicUsize,
    pub cancelled: AtomicUsize,
}

/// Creates a fixture model by its name. Other models return `INPUT…` as `OUTPUT…`.
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
        let requested = request.requested_outputs;
        let outputs = outputs.filter(|output| requested.is_empty() || requested.contains(&output.name));
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

/// Sends `n` responses "<text>#<i>", then an empty final response.
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

/// A request of a model with steps: each step returns one token per row.
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
    let (sender, mut receiver) = mpsc::channel::<Row>(4096);
    tokio::spawn(async move {
        let mut rows: Vec<Row> = Vec::new();
        let mut ticks = tokio::time::interval(STEP);
        loop {
            ticks.tick().await;
            while let Ok(row) = receiver.try_recv() {
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
    sender
}

/// Returns the text with the other inputs and parameters in the format of Python's `json.dumps`.
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
        format!("requested for {code}")
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
