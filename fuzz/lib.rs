//! What the fuzz targets share: a server over a model that echoes every type of tensor.

use std::collections::HashMap;
use std::path::PathBuf;
use std::sync::Arc;

use futures::FutureExt;
use futures::future::BoxFuture;
use repository::ModelConfig;
use serving::{
    Backend, BackendFactory, InferError, InferRequest, InferResponse, LoadRequest, ResponseStream, Server, ServerConfig,
};
use tokio::runtime::Runtime;

const TYPES: [&str; 14] = [
    "BOOL", "UINT8", "UINT16", "UINT32", "UINT64", "INT8", "INT16", "INT32", "INT64", "FP16", "BF16", "FP32", "FP64",
    "STRING",
];

/// A folder of this process's own, in memory.
pub fn scratch(name: &str) -> PathBuf {
    let folder = PathBuf::from(format!("/dev/shm/trireme_fuzz_{}_{name}", std::process::id()));
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
            tensor.name = self.0.output[index].name.as_str().into();
            response.outputs.push(tensor);
        }
        Ok(ResponseStream::ready(response))
    }

    fn drain(&self) -> BoxFuture<'_, ()> {
        std::future::ready(()).boxed()
    }
}

struct EchoFactory;

impl BackendFactory for EchoFactory {
    fn load(&self, model: LoadRequest) -> BoxFuture<'static, Result<Arc<dyn Backend>, InferError>> {
        std::future::ready(Ok(Arc::new(Echo(model.config)) as Arc<dyn Backend>)).boxed()
    }
}

/// A server of model `m`, whose optional inputs `I0` to `I13` are of every type and any length.
pub struct Target {
    server: Arc<Server>,
    runtime: Runtime,
    /// The model's configuration.
    pub config: Arc<ModelConfig>,
}

impl Default for Target {
    fn default() -> Self {
        let repository = scratch("echo");
        std::fs::create_dir_all(repository.join("m/1")).expect("/dev/shm can be written");
        std::fs::write(repository.join("m/config.pbtxt"), echo_config()).expect("/dev/shm can be written");
        let factories: HashMap<String, Arc<dyn BackendFactory>> =
            HashMap::from([("echo".into(), Arc::new(EchoFactory) as _)]);
        let config = ServerConfig { repositories: vec![repository], ..ServerConfig::default() };
        let server = Server::new(config, factories).expect("the repository is there");
        let runtime = tokio::runtime::Builder::new_current_thread().build().expect("a runtime starts");
        runtime.block_on(server.load_all()).expect("the model loads");
        let config = server.model_config("m", "").expect("the model serves");
        Self { server, runtime, config }
    }
}

impl Target {
    /// Serves a request, and writes its answer in every form.
    pub fn answer(&self, request: Result<InferRequest, InferError>) {
        let Ok(mut request) = request else { return };
        request.model_name = "m".into();
        request.model_version = Default::default();
        let Ok(mut responses) = self.server.infer(request) else { return };
        if let Some(Ok(response)) = self.runtime.block_on(responses.next_response()) {
            front::fuzz::write(response);
        }
    }
}

fn echo_config() -> String {
    let mut text = "backend: \"echo\"\n".to_owned();
    for (index, datatype) in TYPES.into_iter().enumerate() {
        text += &format!("input [ {{ name: \"I{index}\" data_type: TYPE_{datatype} dims: [ -1 ] optional: true }} ]\n");
        text += &format!("output [ {{ name: \"O{index}\" data_type: TYPE_{datatype} dims: [ -1 ] }} ]\n");
    }
    text
}
