//! The models of a text ensemble in a temporary repository.

use std::collections::HashMap;
use std::fs;
use std::sync::Arc;

use futures::StreamExt as _;
use futures::future::{BoxFuture, FutureExt as _};
use serving::{
    Backend, BackendFactory, ControlMode, InferError, InferRequest, InferResponse, LoadRequest, ResponseStream, Server,
    ServerConfig, Tensor,
};
use tempfile::TempDir;

pub const PREPROCESSING: &str = r#"backend: "tokenize" max_batch_size: 4
input [ { name: "QUERY" data_type: TYPE_STRING dims: [ 1 ] },
        { name: "REQUEST_OUTPUT_LEN" data_type: TYPE_INT32 dims: [ 1 ] },
        { name: "STOP_WORDS_DICT" data_type: TYPE_STRING dims: [ -1 ] optional: true },
        { name: "EMBEDDING_BIAS_WORDS" data_type: TYPE_STRING dims: [ -1 ] optional: true },
        { name: "EMBEDDING_BIAS_WEIGHTS" data_type: TYPE_FP32 dims: [ -1 ] optional: true },
        { name: "IMAGE_URL" data_type: TYPE_STRING dims: [ 1 ] optional: true },
        { name: "END_ID" data_type: TYPE_INT32 dims: [ 1 ] optional: true },
        { name: "PAD_ID" data_type: TYPE_INT32 dims: [ 1 ] optional: true } ]
output [ { name: "INPUT_ID" data_type: TYPE_INT32 dims: [ -1 ] },
         { name: "REQUEST_INPUT_LEN" data_type: TYPE_INT32 dims: [ 1 ] },
         { name: "STOP_WORDS_IDS" data_type: TYPE_INT32 dims: [ 2, -1 ] },
         { name: "EMBEDDING_BIAS" data_type: TYPE_FP32 dims: [ -1 ] },
         { name: "REQUEST_OUTPUT_LEN" data_type: TYPE_INT32 dims: [ -1 ] },
         { name: "OUT_END_ID" data_type: TYPE_INT32 dims: [ 1 ] },
         { name: "OUT_PAD_ID" data_type: TYPE_INT32 dims: [ 1 ] } ]
parameters { key: "tokenizer_dir" value { string_value: "${tokenizer_dir}" } }
"#;

pub const POSTPROCESSING: &str = r#"backend: "detokenize" max_batch_size: 4
input [ { name: "TOKENS_BATCH" data_type: TYPE_INT32 dims: [ -1, -1 ] },
        { name: "SEQUENCE_LENGTH" data_type: TYPE_INT32 dims: [ -1 ] },
        { name: "SEQUENCE_INDEX" data_type: TYPE_INT32 dims: [ 1 ] optional: true },
        { name: "SEQUENCE_END" data_type: TYPE_BOOL dims: [ 1 ] optional: true } ]
output [ { name: "OUTPUT" data_type: TYPE_STRING dims: [ -1 ] } ]
"#;

/// Streams its prompt back, one token per response.
pub const ECHO: &str = r#"backend: "echo" max_batch_size: 4
model_transaction_policy { decoupled: true }
input [ { name: "input_ids" data_type: TYPE_INT32 dims: [ -1 ] } ]
output [ { name: "output_ids" data_type: TYPE_INT32 dims: [ -1, -1 ] },
         { name: "sequence_length" data_type: TYPE_INT32 dims: [ -1 ] } ]
"#;

pub const ENSEMBLE: &str = r#"platform: "ensemble" max_batch_size: 4
input [ { name: "text_input" data_type: TYPE_STRING dims: [ 1 ] },
        { name: "max_tokens" data_type: TYPE_INT32 dims: [ 1 ] } ]
output [ { name: "text_output" data_type: TYPE_STRING dims: [ -1 ] } ]
ensemble_scheduling { step [
  { model_name: "preprocessing" model_version: -1
    input_map { key: "QUERY" value: "text_input" } input_map { key: "REQUEST_OUTPUT_LEN" value: "max_tokens" }
    output_map { key: "INPUT_ID" value: "ids" } },
  { model_name: "tensorrt_llm" model_version: -1
    input_map { key: "input_ids" value: "ids" }
    output_map { key: "output_ids" value: "tokens" } output_map { key: "sequence_length" value: "length" } },
  { model_name: "postprocessing" model_version: -1
    input_map { key: "TOKENS_BATCH" value: "tokens" } input_map { key: "SEQUENCE_LENGTH" value: "length" }
    output_map { key: "OUTPUT" value: "text_output" } }
] }
"#;

/// One token per byte, and `<s>` (256) in front: every character outside ASCII is several tokens.
pub fn tokenizer_json() -> String {
    let printable = |byte: u32| matches!(byte, 33..=126 | 161..=172 | 174..=255);
    let mut next = 255;
    let mut spelled = |byte: u32| {
        next += u32::from(!printable(byte));
        char::from_u32(if printable(byte) { byte } else { next }).unwrap().to_string()
    };
    let mut vocab: serde_json::Map<String, serde_json::Value> =
        (0..256).map(|byte| (spelled(byte), serde_json::json!(byte))).collect();
    vocab.insert("<s>".to_owned(), serde_json::json!(256));
    let byte_level = serde_json::json!({ "type": "ByteLevel", "add_prefix_space": false, "trim_offsets": false, "use_regex": false });
    serde_json::json!({
        "version": "1.0",
        "added_tokens": [{ "id": 256, "content": "<s>", "special": true, "single_word": false, "lstrip": false,
                           "rstrip": false, "normalized": false }],
        "pre_tokenizer": byte_level,
        "decoder": byte_level,
        "post_processor": {
            "type": "TemplateProcessing",
            "single": [{ "SpecialToken": { "id": "<s>", "type_id": 0 } }, { "Sequence": { "id": "A", "type_id": 0 } }],
            "pair": [],
            "special_tokens": { "<s>": { "id": "<s>", "ids": [256], "tokens": ["<s>"] } },
        },
        "model": { "type": "BPE", "vocab": vocab, "merges": [] },
    })
    .to_string()
}

pub struct World {
    pub root: TempDir,
}

impl World {
    pub fn new(models: &[(&str, &str)]) -> Self {
        let root = tempfile::tempdir().unwrap();
        for (name, config) in models {
            fs::create_dir_all(root.path().join(name).join("1")).unwrap();
            fs::write(root.path().join(name).join("config.pbtxt"), config).unwrap();
        }
        Self { root }
    }

    /// The four models of an LLM, the tokenizer beside the LLM's weights.
    pub fn llm() -> Self {
        let models = [
            ("preprocessing", PREPROCESSING),
            ("tensorrt_llm", ECHO),
            ("postprocessing", POSTPROCESSING),
            ("ensemble", ENSEMBLE),
        ];
        let world = Self::new(&models);
        world.put("tensorrt_llm/1/tokenizer.json", &tokenizer_json());
        world
    }

    pub fn put(&self, path: &str, contents: &str) {
        let path = self.root.path().join(path);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, contents).unwrap();
    }

    pub fn server(&self) -> Arc<Server> {
        let mut factories: HashMap<_, _> = backends::builtin();
        factories.insert("echo".to_owned(), Arc::new(EchoModel) as Arc<dyn BackendFactory>);
        let repositories = vec![self.root.path().to_owned()];
        let config = ServerConfig { repositories, control_mode: ControlMode::None, ..ServerConfig::default() };
        Server::new(config, factories).unwrap()
    }

    pub async fn started(&self) -> Arc<Server> {
        let server = self.server();
        server.load_all().await.unwrap();
        server
    }
}

pub struct EchoModel;

impl BackendFactory for EchoModel {
    fn load(&self, _model: LoadRequest) -> BoxFuture<'static, Result<Arc<dyn Backend>, InferError>> {
        std::future::ready(Ok(Arc::new(EchoModel) as Arc<dyn Backend>)).boxed()
    }
}

impl Backend for EchoModel {
    fn infer(&self, request: InferRequest) -> Result<ResponseStream, InferError> {
        let ids = request.input("input_ids").unwrap().to_i32().unwrap();
        Ok(ResponseStream::from_future(async move |sender| {
            for (i, &id) in ids.iter().enumerate() {
                let tokens = Tensor::from_i32("output_ids", &[1, 1, 1], &[id]);
                let outputs = vec![tokens, Tensor::from_i32("sequence_length", &[1, 1], &[1])];
                let is_final = i == ids.len() - 1;
                sender.send(Ok(InferResponse { outputs, is_final, ..InferResponse::default() })).await;
            }
        }))
    }

    fn drain(&self) -> BoxFuture<'_, ()> {
        std::future::ready(()).boxed()
    }
}

pub fn request(model: &str, inputs: Vec<Tensor>) -> InferRequest {
    InferRequest { model_name: model.into(), inputs, ..InferRequest::default() }
}

pub fn query(texts: &[&str]) -> Vec<Tensor> {
    let rows = texts.len() as i64;
    vec![
        Tensor::from_byte_strings("QUERY", &[rows, 1], texts),
        Tensor::from_i32("REQUEST_OUTPUT_LEN", &[rows, 1], &vec![9; texts.len()]),
    ]
}

/// A prompt as clients of the ensemble send it.
pub fn text_input(prompt: &str) -> Vec<Tensor> {
    vec![Tensor::from_byte_strings("text_input", &[1, 1], &[prompt]), Tensor::from_i32("max_tokens", &[1, 1], &[9])]
}

pub async fn all(stream: ResponseStream) -> Vec<InferResponse> {
    stream.map(Result::unwrap).collect().await
}

pub fn ids(text: &str) -> Vec<i32> {
    text.bytes().map(i32::from).collect()
}

pub fn output<'a>(response: &'a InferResponse, name: &str) -> &'a Tensor {
    response.outputs.iter().find(|tensor| tensor.name == name).unwrap_or_else(|| panic!("no output {name}"))
}

pub fn text(tensor: &Tensor) -> String {
    String::from_utf8(tensor.to_byte_strings().unwrap()[0].to_vec()).expect("each piece is UTF-8 by itself")
}
