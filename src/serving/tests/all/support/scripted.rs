//! Backends whose behaviour a test chooses by the configuration and by the request.

use std::fs;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use futures::future::{BoxFuture, FutureExt as _};
use generation::TextDecoder;
use repository::ModelConfig;
use serving::{
    Backend, BackendFactory, BatchedRequest, DataType, DetokenizerModel, ErrorKind, InferError, InferRequest,
    InferResponse, LoadRequest, NewWeights, ResponseStream, Tensor, TextModel, TextOutputs, Weights,
};
use text::Tokenizer;
use tokio::sync::Semaphore;

use super::deltas::Deltas;
use super::text_of;

/// Lets a test observe and control the scripted backends.
pub struct Script {
    pub loads: Mutex<Vec<String>>,
    pub dropped: AtomicUsize,
    pub cancelled: AtomicUsize,
    pub unready: AtomicBool,
    /// Requests of the `gate` backend and executions of the `rows` backend wait here.
    pub gate: Arc<Semaphore>,
    /// Number of requests that `echo` has answered.
    pub echoes: AtomicUsize,
    /// Batches of the `rows` and `sum` backends: the instance, and the requests' ids with their control inputs.
    pub batches: Mutex<Vec<String>>,
}

impl Script {
    pub fn new() -> Arc<Self> {
        Arc::new(Self {
            loads: Mutex::default(),
            dropped: AtomicUsize::new(0),
            cancelled: AtomicUsize::new(0),
            unready: AtomicBool::new(false),
            gate: Arc::new(Semaphore::new(0)),
            echoes: AtomicUsize::new(0),
            batches: Mutex::default(),
        })
    }
}

pub struct ScriptedFactory(pub Arc<Script>);

impl BackendFactory for ScriptedFactory {
    fn load(&self, model: LoadRequest) -> BoxFuture<'static, Result<Arc<dyn Backend>, InferError>> {
        let script = self.0.clone();
        async move {
            script.loads.lock().unwrap().push(format!("{}/{}", model.config.name, model.version));
            if model.config.parameter("panic").is_some() {
                panic!("on purpose");
            }
            if model.config.parameter("broken").is_some() {
                return Err(InferError::internal("broken on purpose"));
            }
            Ok(Arc::new(Scripted { script, kind: model.config.backend.clone(), model }) as Arc<dyn Backend>)
        }
        .boxed()
    }
}

/// Loads `echo`, of which the old load is unloaded before the new one.
pub struct ExclusiveFactory(pub ScriptedFactory);

impl BackendFactory for ExclusiveFactory {
    fn is_exclusive(&self) -> bool {
        true
    }

    fn check(&self, model: LoadRequest) -> BoxFuture<'static, Result<(), InferError>> {
        let is_wrong = model.config.parameter("wrong").is_some();
        std::future::ready(if is_wrong { Err(InferError::invalid("wrong on purpose")) } else { Ok(()) }).boxed()
    }

    fn load(&self, model: LoadRequest) -> BoxFuture<'static, Result<Arc<dyn Backend>, InferError>> {
        let mut config = ModelConfig::clone(&model.config);
        config.backend = "echo".to_owned();
        self.0.load(LoadRequest { config: Arc::new(config), ..model })
    }
}

/// Weights that any others replace.
struct FirstWeights;

impl Weights for FirstWeights {
    fn version(&self) -> String {
        "1".to_owned()
    }

    fn replace(&self, new: NewWeights) -> BoxFuture<'static, Result<String, InferError>> {
        std::future::ready(Ok(new.version.unwrap_or_default())).boxed()
    }
}

struct Scripted {
    script: Arc<Script>,
    kind: String,
    model: LoadRequest,
}

impl Drop for Scripted {
    fn drop(&mut self) {
        self.script.dropped.fetch_add(1, Ordering::SeqCst);
    }
}

impl Backend for Scripted {
    fn infer(&self, request: InferRequest) -> Result<ResponseStream, InferError> {
        match self.kind.as_str() {
            "echo" => {
                self.script.echoes.fetch_add(1, Ordering::SeqCst);
                Ok(ResponseStream::ready(InferResponse { outputs: echoed(&request), ..InferResponse::default() }))
            }
            "pieces" => Ok(self.pieces(&request)),
            "deltas" => Ok(ResponseStream::from_source(|_| Box::new(Deltas { next: 0, outputs: None }))),
            "gate" => Ok(self.gated(request)),
            "join" => self.join(&request).map(ResponseStream::ready),
            "decode" => Ok(ResponseStream::ready(decoded(&request))),
            kind => Err(InferError::new(ErrorKind::Unsupported, format!("no `{kind}`"))),
        }
    }

    fn text_model(&self) -> Option<TextModel> {
        match self.kind.as_str() {
            "deltas" => Some(TextModel::Generator),
            "decode" => Some(TextModel::Detokenizer(DetokenizerModel {
                decoder: TextDecoder { tokenizer: tokenizer(), skip_special_tokens: true },
                is_nested: false,
                passthrough: Arc::new([("CUM_LOG_PROBS".into(), "OUT_CUM_LOG_PROBS".into())]),
            })),
            _ => None,
        }
    }

    fn infer_text(&self, _: InferRequest, outputs: TextOutputs) -> Result<ResponseStream, InferError> {
        Ok(ResponseStream::from_source(|_| Box::new(Deltas { next: 0, outputs: Some(outputs) })))
    }

    fn weights(&self) -> Option<Arc<dyn Weights>> {
        self.model.config.parameter("weights").map(|_| Arc::new(FirstWeights) as Arc<dyn Weights>)
    }

    fn num_instances(&self) -> usize {
        if ["rows", "sum"].contains(&self.kind.as_str()) { self.model.config.num_instances() } else { 0 }
    }

    fn execute(&self, instance: usize, batch: Vec<BatchedRequest>) -> BoxFuture<'_, ()> {
        let shown: Vec<String> = batch.iter().map(|item| shown(&item.request)).collect();
        self.script.batches.lock().unwrap().push(format!("{instance}: {}", shown.join(" ")));
        if self.kind == "sum" {
            return async move {
                for BatchedRequest { request, responses } in batch {
                    let mut response = summed(&request);
                    let has_more = request.id.ends_with("to three") && response.outputs[0].to_f32().unwrap()[0] < 3.0;
                    if has_more && request.id.starts_with("last") {
                        response.outputs.remove(0);
                    }
                    responses.send(Ok(InferResponse { is_final: !has_more, ..response })).await;
                    if has_more {
                        assert!(responses.reschedule(request).is_ok(), "the queue takes it back");
                    }
                }
            }
            .boxed();
        }
        async move {
            self.script.gate.acquire().await.unwrap().forget();
            for BatchedRequest { request, responses } in batch {
                if request.id == "panic" {
                    panic!("on purpose");
                }
                if request.id == "timed" {
                    let started = Instant::now();
                    tokio::time::sleep(Duration::from_millis(3)).await;
                    responses.add_input_time(started.elapsed());
                    let computed = Instant::now();
                    tokio::time::sleep(Duration::from_millis(2)).await;
                    responses.set_computed_at(computed);
                }
                if request.id == "again" && request.sequence_start {
                    assert!(responses.reschedule(request).is_ok(), "the queue takes it back");
                    continue;
                }
                let outputs = echoed(&request);
                responses.send(Ok(InferResponse { outputs, is_final: true, ..InferResponse::default() })).await;
            }
        }
        .boxed()
    }

    fn is_ready(&self) -> bool {
        !self.script.unready.load(Ordering::SeqCst)
    }

    fn drain(&self) -> BoxFuture<'_, ()> {
        std::future::ready(()).boxed()
    }
}

impl Scripted {
    fn join(&self, request: &InferRequest) -> Result<InferResponse, InferError> {
        match self.model.config.parameter("fail_on") {
            Some(text) if text_of(&request.inputs[0]) == text => Err(InferError::internal(format!("no {text}"))),
            _ => Ok(joined(request)),
        }
    }

    fn pieces(&self, request: &InferRequest) -> ResponseStream {
        let text = text_of(request.input("text").unwrap());
        let n = request.input("n").map_or(3, |tensor| tensor.to_i32().unwrap()[0]);
        let data_is_final = self.model.config.parameter("final").is_some();
        let has_note = self.model.config.output.iter().any(|output| output.name == "note");
        let fail_at = self.model.config.parameter("fail_at").map(|at| at.parse::<i32>().unwrap());
        let error_at = self.model.config.parameter("error_at").map(|at| at.parse::<i32>().unwrap());
        let (sender, stream) = ResponseStream::channel(1);
        let script = self.script.clone();
        tokio::spawn(async move {
            for i in 0..n {
                if error_at == Some(i) {
                    sender.send(Err(InferError::internal(format!("piece {i} failed")))).await;
                    continue;
                }
                if fail_at == Some(i) {
                    sender.send(Err(InferError::unavailable(format!("piece {i} failed")))).await;
                    return;
                }
                let mut outputs = vec![Tensor::from_byte_strings("piece", &[1], &[format!("{text}#{i}")])];
                if has_note && i == 0 {
                    outputs.push(Tensor::from_byte_strings("note", &[1], &["once"]));
                }
                let is_final = data_is_final && i == n - 1;
                let response = InferResponse { outputs, is_final, ..InferResponse::default() };
                if !sender.send(Ok(response)).await {
                    script.cancelled.fetch_add(1, Ordering::SeqCst);
                    return;
                }
            }
            if !data_is_final {
                sender.send(Ok(InferResponse { is_final: true, ..InferResponse::default() })).await;
            }
        });
        stream
    }

    fn gated(&self, request: InferRequest) -> ResponseStream {
        let (sender, stream) = ResponseStream::channel(1);
        let script = self.script.clone();
        tokio::spawn(async move {
            tokio::select! {
                permit = script.gate.acquire() => {
                    permit.unwrap().forget();
                    let outputs = echoed(&request);
                    sender.send(Ok(InferResponse { outputs, is_final: true, ..InferResponse::default() })).await;
                }
                () = sender.cancelled() => { script.cancelled.fetch_add(1, Ordering::SeqCst); }
            }
        });
        stream
    }
}

fn echoed(request: &InferRequest) -> Vec<Tensor> {
    let rename = |tensor: &Tensor| Tensor { name: tensor.name.replace("INPUT", "OUTPUT").into(), ..tensor.clone() };
    request.inputs.iter().map(rename).collect()
}

/// Joins all inputs with the number of the request in its ensemble run: "a+b:2". The last request gets a "!".
fn joined(request: &InferRequest) -> InferResponse {
    let texts: Vec<String> = request.inputs.iter().map(text_of).collect();
    let step = request.step.clone().unwrap_or_default();
    let count = step.with_state(
        || 0,
        |count| {
            *count += 1;
            *count
        },
    );
    let end = if step.is_last { "!" } else { "" };
    let text = format!("{}:{count}{end}", texts.join("+"));
    let outputs = vec![Tensor::from_byte_strings("joined", &[1], &[text])];
    InferResponse { outputs, ..InferResponse::default() }
}

/// Detokenizes a generator's piece, for the general interpreter of ensembles.
fn decoded(request: &InferRequest) -> InferResponse {
    let mut outputs = vec![Tensor { name: "OUTPUT".into(), ..request.input("TOKENS_BATCH").unwrap().clone() }];
    let passed_on = request.input("CUM_LOG_PROBS").cloned();
    outputs.extend(passed_on.map(|tensor| Tensor { name: "OUT_CUM_LOG_PROBS".into(), ..tensor }));
    InferResponse { outputs, ..InferResponse::default() }
}

fn tokenizer() -> Arc<Tokenizer> {
    let dir = tempfile::tempdir().unwrap();
    let json = r#"{"version": "1.0", "added_tokens": [], "model": {"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "a"}}"#;
    fs::write(dir.path().join("tokenizer.json"), json).unwrap();
    Arc::new(Tokenizer::from_dir(dir.path()).unwrap())
}

/// Adds the input to the sequence's state, and returns the sum as output and as state.
fn summed(request: &InferRequest) -> InferResponse {
    let value = |name: &str| request.input(name).unwrap().to_f32().unwrap()[0];
    let sum = value("INPUT0") + value("INPUT_SUM");
    let outputs = ["OUTPUT0", "OUTPUT_SUM"].map(|name| Tensor::from_f32(name, &[1, 1], &[sum]));
    InferResponse { outputs: outputs.to_vec(), ..InferResponse::default() }
}

/// "id" or, with control inputs, "id[START=1 CORRID=7]".
fn shown(request: &InferRequest) -> String {
    let number = |tensor: &Tensor| match tensor.datatype {
        DataType::Fp32 => tensor.to_f32().unwrap()[0].to_string(),
        DataType::Int32 => tensor.to_i32().unwrap()[0].to_string(),
        DataType::Uint64 => tensor.to_u64().unwrap()[0].to_string(),
        DataType::Bool => tensor.to_bool().unwrap()[0].to_string(),
        _ => text_of(tensor),
    };
    let extra = request.inputs.iter().filter(|tensor| tensor.name != "INPUT0");
    let extra: Vec<String> = extra.map(|tensor| format!("{}={}", tensor.name, number(tensor))).collect();
    if extra.is_empty() { request.id.to_string() } else { format!("{}[{}]", request.id, extra.join(" ")) }
}
