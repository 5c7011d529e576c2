//! Shared code of the fuzz targets: an allocator that counts memory, and a server with models that echo.

mod allocator;
mod expand;

use std::collections::HashMap;
use std::path::PathBuf;
use std::sync::Arc;

use bytes::Bytes;
use front::fuzz::Front;
use futures::FutureExt;
use futures::future::BoxFuture;
use repository::ModelConfig;
use serving::{
    Backend, BackendFactory, ControlMode, InferError, InferRequest, InferResponse, LoadOverrides, LoadRequest,
    ResponseStream, Server, ServerConfig,
};
use tokio::runtime::Runtime;

pub use allocator::within;
pub use expand::expand;

const TYPES: [&str; 14] = [
    "BOOL", "UINT8", "UINT16", "UINT32", "UINT64", "INT8", "INT16", "INT32", "INT64", "FP16", "BF16", "FP32", "FP64",
    "STRING",
];

/// Maximum length of the text model's output.
const MAX_TEXT_BYTES: usize = 256;

/// Creates a folder for this process in memory.
pub fn scratch(name: &str) -> PathBuf {
    let folder = PathBuf::from(format!("/dev/shm/trireme_fuzz_{}/{name}", std::process::id()));
    std::fs::create_dir_all(&folder).expect("/dev/shm can be written");
    folder
}

struct Echo(Arc<ModelConfig>);

impl Backend for Echo {
    fn infer(&self, request: InferRequest) -> Result<ResponseStream, InferError> {
        let mut response = InferResponse { id: request.id, is_final: true, ..InferResponse::default() };
        response.parameters = request.parameters.into_iter().map(|(name, value)| (name.into(), value)).collect();
        for mut tensor in request.inputs {
            let index = self.0.input.iter().position(|input| input.name == tensor.name).expect("inputs are checked");
            let Some(output) = self.0.output.get(index) else { continue };
            tensor.name = output.name.as_str().into();
            if output.name == "text_output" {
                tensor.data = truncated(&tensor.data);
            }
            response.outputs.push(tensor);
        }
        Ok(ResponseStream::ready(response))
    }

    fn drain(&self) -> BoxFuture<'_, ()> {
        std::future::ready(()).boxed()
    }
}

/// Truncates a tensor of one string. Outputs as long as the prompts would hide the memory that prompts take.
fn truncated(element: &[u8]) -> Bytes {
    let text = element.get(4..).unwrap_or_default();
    let text = &text[..text.len().min(MAX_TEXT_BYTES)];
    [&(text.len() as u32).to_le_bytes(), text].concat().into()
}

struct EchoFactory;

impl BackendFactory for EchoFactory {
    fn load(&self, model: LoadRequest) -> BoxFuture<'static, Result<Arc<dyn Backend>, InferError>> {
        std::future::ready(Ok(Arc::new(Echo(model.config)) as Arc<dyn Backend>)).boxed()
    }
}

/// A server of two models: `m` has an optional input of each type and of any length, `I0` to `I13`; `text` returns the start of its
/// input. Clients may load other models.
pub struct Target {
    server: Arc<Server>,
    runtime: Runtime,
    front: Front,
    /// The configuration of `m`.
    pub config: Arc<ModelConfig>,
}

impl Default for Target {
    fn default() -> Self {
        let repository = scratch("echo");
        for (name, config) in [("m", echo_config()), ("text", TEXT.to_owned())] {
            std::fs::create_dir_all(repository.join(name).join("1")).expect("/dev/shm can be written");
            std::fs::write(repository.join(name).join("config.pbtxt"), config).expect("/dev/shm can be written");
        }
        let factories: HashMap<String, Arc<dyn BackendFactory>> =
            HashMap::from([("echo".into(), Arc::new(EchoFactory) as _)]);
        let control_mode = ControlMode::Explicit { load: vec!["*".into()] };
        let config = ServerConfig { repositories: vec![repository], control_mode, ..ServerConfig::default() };
        let server = Server::new(config, factories).expect("the repository is there");
        let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build().expect("a runtime starts");
        runtime.block_on(server.load_all()).expect("the models load");
        let config = server.model_config("m", "").expect("the model serves");
        let front = Front::new(server.clone());
        Self { server, runtime, front, config }
    }
}

impl Target {
    /// Serves a request, and encodes its response in every format.
    pub fn infer(&self, request: Result<InferRequest, InferError>) {
        let Ok(mut request) = request else { return };
        request.model_name = "m".into();
        request.model_version = Default::default();
        let Ok(mut responses) = self.server.infer(request) else { return };
        if let Some(Ok(response)) = self.runtime.block_on(responses.next_response()) {
            front::fuzz::write(response);
        }
    }

    /// Status and body of the response to a `POST` over HTTP/1.1.
    pub fn post(&self, path: &str, body: &[u8]) -> (u16, Vec<u8>) {
        let mut response = self.runtime.block_on(self.front.post(path, body));
        let end = response.windows(4).position(|bytes| bytes == b"\r\n\r\n").expect("a response has a head");
        let body = response.split_off(end + 4);
        let status = std::str::from_utf8(&response).ok().and_then(|head| head.split(' ').nth(1)?.parse().ok());
        (status.expect("a response has a status"), body)
    }

    /// Loads and unloads a model, as over gRPC, where the name may be any string.
    pub fn load(&self, name: &str, overrides: LoadOverrides) {
        self.runtime.block_on(async {
            if self.server.load_model(name, overrides).await.is_ok() {
                self.server.unload_model(name, false).await.expect("a loaded model can be unloaded");
            }
        });
    }

    /// The bytes that the gRPC port sends to a client that sends `frames`.
    pub fn grpc(&self, frames: &[u8]) -> Vec<u8> {
        self.runtime.block_on(self.front.grpc(frames))
    }
}

const TEXT: &str = r#"
backend: "echo"
input [ { name: "text_input" data_type: TYPE_STRING dims: [ 1 ] optional: true } ]
output [ { name: "text_output" data_type: TYPE_STRING dims: [ -1 ] } ]
input [
  { name: "max_tokens" data_type: TYPE_INT32 dims: [ 1 ] optional: true },
  { name: "stream" data_type: TYPE_BOOL dims: [ 1 ] optional: true },
  { name: "temperature" data_type: TYPE_FP32 dims: [ 1 ] optional: true },
  { name: "top_k" data_type: TYPE_INT32 dims: [ 1 ] optional: true },
  { name: "top_p" data_type: TYPE_FP32 dims: [ 1 ] optional: true },
  { name: "seed" data_type: TYPE_UINT64 dims: [ 1 ] optional: true },
  { name: "min_length" data_type: TYPE_INT32 dims: [ 1 ] optional: true },
  { name: "repetition_penalty" data_type: TYPE_FP32 dims: [ 1 ] optional: true },
  { name: "presence_penalty" data_type: TYPE_FP32 dims: [ 1 ] optional: true },
  { name: "frequency_penalty" data_type: TYPE_FP32 dims: [ 1 ] optional: true },
  { name: "stop_words" data_type: TYPE_STRING dims: [ -1 ] optional: true }
]
"#;

fn echo_config() -> String {
    let mut text = "backend: \"echo\"\n".to_owned();
    for (index, datatype) in TYPES.into_iter().enumerate() {
        text += &format!("input [ {{ name: \"I{index}\" data_type: TYPE_{datatype} dims: [ -1 ] optional: true }} ]\n");
        text += &format!("output [ {{ name: \"O{index}\" data_type: TYPE_{datatype} dims: [ -1 ] }} ]\n");
    }
    text
}
