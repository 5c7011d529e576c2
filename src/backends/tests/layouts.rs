//! Models of published layouts, served natively around an engine that returns its prompt.

use std::fs;
use std::path::PathBuf;
use std::sync::Arc;
use std::task::{Context, Poll};

use backends::layouts::{Layout, Layouts, recognise};
use engine::{FinishReason, RowId, SampledToken};
use futures::future::{BoxFuture, FutureExt as _};
use generation::{Delta, GenerateEvent, RequestBounds, Timestamp};
use serving::{
    Backend, BackendFactory, GenerateCall, InferError, InferRequest, InferResponse, LoadRequest, OutputDelta,
    ResponseSource, ResponseStream, Server, ServerConfig, StreamEvent, StreamItem, Tensor,
};
use tempfile::TempDir;
use text::Tokenizer;

const TOKENIZER: &str = r#"{"version":"1.0","added_tokens":[],
    "model":{"type":"WordLevel","vocab":{"hello":0,"world":1},"unk_token":"hello"},"pre_tokenizer":{"type":"Whitespace"}}"#;

const LMDEPLOY: &str = r#"backend: "python" max_batch_size: 0 model_transaction_policy { decoupled: True }
input [ { name: "prompt" data_type: TYPE_STRING dims: [ -1 ] }, { name: "max_tokens" data_type: TYPE_INT32 dims: [ 1 ] },
        { name: "ignore_eos" data_type: TYPE_BOOL dims: [ 1 ] }, { name: "stream" data_type: TYPE_BOOL dims: [ 1 ] },
        { name: "temperature" data_type: TYPE_FP64 dims: [ 1 ] optional: true } ]
output [ { name: "response" data_type: TYPE_STRING dims: [ -1 ] } ]
parameters { key: "tp" value: { string_value: "1" } }
"#;

const INTERACTIVE: &str = r#"backend: "turbomind" max_batch_size: 1 model_transaction_policy { decoupled: True }
input [ { name: "input_ids" data_type: TYPE_UINT32 dims: [ -1 ] },
        { name: "request_output_len" data_type: TYPE_UINT32 dims: [ -1 ] },
        { name: "START" data_type: TYPE_INT32 dims: [ 1 ] reshape: { shape: [ ] } optional: true },
        { name: "END" data_type: TYPE_INT32 dims: [ 1 ] reshape: { shape: [ ] } optional: true },
        { name: "CORRID" data_type: TYPE_UINT64 dims: [ 1 ] reshape: { shape: [ ] } optional: true } ]
output [ { name: "output_ids" data_type: TYPE_UINT32 dims: [ -1, -1 ] },
         { name: "sequence_length" data_type: TYPE_UINT32 dims: [ -1 ] } ]
"#;

/// An engine that returns its prompt as the output of each sequence.
#[derive(Default)]
struct EchoEngine {
    /// The tokenizer of its checkpoint.
    tokenizer: Option<Arc<Tokenizer>>,
}

impl Backend for EchoEngine {
    fn infer(&self, _: InferRequest) -> Result<ResponseStream, InferError> {
        Err(InferError::internal("layouts of text and of sessions send typed requests"))
    }

    fn request_bounds(&self) -> Option<RequestBounds> {
        Some(RequestBounds { vocab_size: 8, max_rows: 4, ..RequestBounds::default() })
    }

    fn generate(&self, call: GenerateCall) -> Result<ResponseStream, InferError> {
        let (request, tokenizer) = (call.request, self.tokenizer.as_ref().expect("there is a checkpoint"));
        assert_eq!(request.num_sequences, 1, "a response has one sequence");
        let ids: Vec<u32> = request.sequence.prompt.iter().map(|id| id.0).collect();
        let text = request.text.map_or_else(String::new, |text| tokenizer.decode(&ids, text.skip_special_tokens));
        let sampled = |&token| SampledToken { row: RowId(0), token, logprob: None, top: Vec::new() };
        let (tokens, finished) = (request.sequence.prompt.iter().map(sampled).collect(), Some(FinishReason::Length));
        let delta = Delta { tokens, text, finished, ..Delta::new(0, Timestamp::now()) };
        Ok(ResponseStream::from_source(|_| Box::new(OneDelta(Some(delta)))))
    }

    fn drain(&self) -> BoxFuture<'_, ()> {
        std::future::ready(()).boxed()
    }
}

/// The only event of a request.
struct OneDelta(Option<Delta>);

impl ResponseSource for OneDelta {
    fn poll_next(
        &mut self,
        _: bool,
        _: &mut OutputDelta,
        _: &mut Context<'_>,
    ) -> Poll<Option<Result<StreamItem, InferError>>> {
        let event = |delta| StreamEvent { event: GenerateEvent::Delta(delta), is_last: true };
        Poll::Ready(self.0.take().map(|delta| Ok(StreamItem::Event(Box::new(event(delta))))))
    }
}

impl BackendFactory for EchoEngine {
    fn load(&self, load: LoadRequest) -> BoxFuture<'static, Result<Arc<dyn Backend>, InferError>> {
        let dir = load.config.parameter("gpt_model_path").map(PathBuf::from);
        let tokenizer = dir.and_then(|dir| generation::tokenizer(&dir).ok());
        std::future::ready(Ok(Arc::new(EchoEngine { tokenizer }) as Arc<dyn Backend>)).boxed()
    }
}

/// A repository of one model, and the server over it.
struct World {
    _root: TempDir,
    server: Arc<Server>,
    loaded: Result<(), Vec<serving::LoadFailure>>,
}

async fn world(name: &str, config: &str, checkpoint_files: &[(&str, &str)]) -> World {
    let root = tempfile::tempdir().unwrap();
    let dir = root.path().join(name);
    fs::create_dir_all(dir.join("1/weights")).unwrap();
    fs::write(dir.join("config.pbtxt"), config).unwrap();
    for (file, text) in checkpoint_files {
        fs::write(dir.join("1/weights").join(file), text).unwrap();
    }
    let layouts = Layouts::new(Arc::new(EchoEngine::default()), Arc::new(EchoEngine::default()));
    let settings = ServerConfig { repositories: vec![root.path().to_owned()], ..ServerConfig::default() };
    let server = Server::new(settings, layouts.factories()).unwrap();
    layouts.attach(&server);
    let loaded = server.load_all().await;
    World { _root: root, server, loaded }
}

const CHECKPOINT: [(&str, &str); 2] = [("config.json", "{}"), ("tokenizer.json", TOKENIZER)];

async fn infer(world: &World, model: &str, inputs: Vec<Tensor>) -> Result<InferResponse, InferError> {
    let request = InferRequest { model_name: model.into(), inputs, ..InferRequest::default() };
    world.server.infer(request)?.next_response().await.expect("a response")
}

#[tokio::test]
async fn lmdeploys_python_model_returns_text_for_text() {
    let world = world("lmdeploy_model", LMDEPLOY, &CHECKPOINT).await;
    assert_eq!(world.loaded, Ok(()));
    let inputs = vec![
        Tensor::from_byte_strings("prompt", &[1], &["hello world"]),
        Tensor::from_i32("max_tokens", &[1], &[4]),
        Tensor::from_bool("ignore_eos", &[1], &[false]),
        Tensor::from_bool("stream", &[1], &[true]),
        Tensor::from_f64("temperature", &[1], &[1.0]),
    ];
    let response = infer(&world, "lmdeploy_model", inputs).await.unwrap();
    assert_eq!(response.outputs[0].name, "response");
    assert_eq!(response.outputs[0].to_byte_strings().unwrap(), ["hello world"]);
}

#[tokio::test]
async fn the_text_of_a_beam_search_is_that_of_the_best_beam() {
    let config = r#"backend: "lmdeploy"
        input [ { name: "text_input" data_type: TYPE_STRING dims: [ 1 ] },
                { name: "beam_width" data_type: TYPE_INT32 dims: [ 1 ] optional: true } ]
        output [ { name: "text_output" data_type: TYPE_STRING dims: [ 1 ] } ]"#;
    let world = world("llm", config, &CHECKPOINT).await;
    assert_eq!(world.loaded, Ok(()));
    let prompt = Tensor::from_byte_strings("text_input", &[1], &["hello world"]);
    let response = infer(&world, "llm", vec![prompt, Tensor::from_i32("beam_width", &[1], &[3])]).await.unwrap();
    assert_eq!(response.outputs[0].to_byte_strings().unwrap(), ["hello world"]);
}

#[tokio::test]
async fn a_session_keeps_its_tokens_until_it_ends() {
    let world = world("turbomind", INTERACTIVE, &CHECKPOINT).await;
    assert_eq!(world.loaded, Ok(()));
    let inputs = |ids: &[u32], start: i32, end: i32| {
        vec![
            Tensor::from_u32("input_ids", &[1, ids.len() as i64], ids),
            Tensor::from_u32("request_output_len", &[1, 1], &[2]),
            Tensor::from_i32("START", &[1, 1], &[start]),
            Tensor::from_i32("END", &[1, 1], &[end]),
            Tensor::from_u64("CORRID", &[1, 1], &[7]),
        ]
    };
    let ids = |response: InferResponse| response.outputs[0].to_u32().unwrap();
    let first = ids(infer(&world, "turbomind", inputs(&[5], 1, 0)).await.unwrap());
    assert_eq!(first, [5, 5], "the prompt and the output");
    let second = ids(infer(&world, "turbomind", inputs(&[6], 0, 1)).await.unwrap());
    assert_eq!(second, [5, 5, 6, 5, 5, 6]);
    let error = infer(&world, "turbomind", inputs(&[6], 0, 0)).await.unwrap_err();
    assert!(error.message.contains("session 7 is not known"), "{}", error.message);
}

#[tokio::test]
async fn a_tensorrt_engine_in_place_of_a_checkpoint_is_named_in_the_error() {
    let world =
        world("lmdeploy_model", LMDEPLOY, &[("rank0.engine", ""), ("config.json", r#"{"build_config": {}}"#)]).await;
    let failures = world.loaded.unwrap_err();
    assert!(failures[0].reason.contains("holds a TensorRT engine"), "{}", failures[0].reason);
}

#[test]
fn a_model_with_native_false_is_served_by_its_own_backend() {
    let dir = tempfile::tempdir().unwrap();
    let parse = |text: &str| {
        let model = dir.path().join("lmdeploy_model");
        fs::create_dir_all(model.join("1")).unwrap();
        fs::write(model.join("config.pbtxt"), text).unwrap();
        repository::Repository::open(&[dir.path().to_owned()]).unwrap().model("lmdeploy_model").unwrap().config
    };
    assert_eq!(recognise(&parse(LMDEPLOY), dir.path(), dir.path()), Some(Layout::Text));
    let own = format!("{LMDEPLOY} parameters {{ key: \"native\" value: {{ string_value: \"false\" }} }}");
    assert_eq!(recognise(&parse(&own), dir.path(), dir.path()), None);
}

#[test]
fn a_model_py_with_weights_in_its_own_format_is_run() {
    let dir = tempfile::tempdir().unwrap();
    let model = dir.path().join("gpt");
    fs::create_dir_all(model.join("1")).unwrap();
    let text = r#"backend: "python"
        input [ { name: "input_ids" data_type: TYPE_INT32 dims: [ -1 ] } ]
        output [ { name: "output_ids" data_type: TYPE_INT32 dims: [ -1 ] } ]"#;
    fs::write(model.join("config.pbtxt"), text).unwrap();
    let config = repository::Repository::open(&[dir.path().to_owned()]).unwrap().model("gpt").unwrap().config;
    assert_eq!(recognise(&config, &model, &model.join("1")), Some(Layout::Engine));
    fs::write(model.join("1/model.py"), "").unwrap();
    assert_eq!(recognise(&config, &model, &model.join("1")), None);
    fs::write(model.join("1/config.json"), "{}").unwrap();
    assert_eq!(recognise(&config, &model, &model.join("1")), Some(Layout::Engine));
}
