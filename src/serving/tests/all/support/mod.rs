//! A repository in a temporary directory, served by scripted backends.

mod deltas;
mod scripted;

use std::collections::HashMap;
use std::fs;
use std::path::PathBuf;
use std::sync::Arc;

use serving::{
    BackendFactory, ControlMode, InferError, InferRequest, InferResponse, ResponseStream, Server, ServerConfig, Tensor,
};
use tempfile::TempDir;

use scripted::{ExclusiveFactory, Script, ScriptedFactory};

pub const ECHO: &str = r#"backend: "echo"
input [ { name: "INPUT0" data_type: TYPE_FP32 dims: [ -1 ] } ]
output [ { name: "OUTPUT0" data_type: TYPE_FP32 dims: [ -1 ] } ]
"#;

/// Sends "<text>#<i>" for each i below n. With the parameter `final` the last one is the final response, otherwise an empty
/// response follows. The first response also has the output `note` where it is configured.
pub const PIECES: &str = r#"backend: "pieces"
model_transaction_policy { decoupled: true }
input [ { name: "text" data_type: TYPE_STRING dims: [ 1 ] },
        { name: "n" data_type: TYPE_INT32 dims: [ 1 ] optional: true } ]
output [ { name: "piece" data_type: TYPE_STRING dims: [ 1 ] } ]
"#;

impl Default for TestRepository {
    fn default() -> Self {
        Self::new(&[])
    }
}

pub struct TestRepository {
    pub root: TempDir,
    pub script: Arc<Script>,
}

impl TestRepository {
    /// A repository of models, each with version 1.
    pub fn new(models: &[(&str, &str)]) -> Self {
        let repository = Self { root: tempfile::tempdir().unwrap(), script: Script::new() };
        models.iter().for_each(|(name, config)| repository.add(name, config, &["1"]));
        repository
    }

    pub fn add(&self, name: &str, config: &str, versions: &[&str]) {
        let dir = self.root.path().join(name);
        fs::create_dir_all(&dir).unwrap();
        versions.iter().for_each(|version| fs::create_dir_all(dir.join(version)).unwrap());
        fs::write(dir.join("config.pbtxt"), config).unwrap();
    }

    pub fn server(&self, control_mode: ControlMode) -> Arc<Server> {
        let factory: Arc<dyn BackendFactory> = Arc::new(ScriptedFactory(self.script.clone()));
        let names = ["echo", "pieces", "deltas", "decode", "gate", "join", "call", "rows", "sum"];
        let mut factories: HashMap<_, _> = names.map(|name| (name.to_owned(), factory.clone())).into();
        let exclusive = ExclusiveFactory(ScriptedFactory(self.script.clone()));
        factories.insert("exclusive".to_owned(), Arc::new(exclusive));
        let repositories = vec![PathBuf::from(self.root.path())];
        let response_cache_bytes = 1 << 20;
        let config = ServerConfig { repositories, control_mode, response_cache_bytes, ..ServerConfig::default() };
        Server::new(config, factories).unwrap()
    }

    pub async fn started(&self) -> Arc<Server> {
        let server = self.server(ControlMode::None);
        server.load_all().await.unwrap();
        server
    }

    pub async fn explicit(&self, load: &[&str]) -> Arc<Server> {
        let load = load.iter().map(|name| (*name).to_owned()).collect();
        let server = self.server(ControlMode::Explicit { load });
        server.load_all().await.unwrap();
        server
    }
}

pub fn text_of(tensor: &Tensor) -> String {
    String::from_utf8(tensor.to_byte_strings().unwrap()[0].to_vec()).unwrap()
}

pub fn request(model: &str, inputs: Vec<Tensor>) -> InferRequest {
    InferRequest { model_name: model.into(), inputs, ..InferRequest::default() }
}

pub fn floats(name: &str, values: &[f32]) -> Tensor {
    Tensor::from_f32(name, &[i64::try_from(values.len()).unwrap()], values)
}

pub fn text(name: &str, value: &str) -> Tensor {
    Tensor::from_byte_strings(name, &[1], &[value])
}

pub async fn responses(stream: ResponseStream) -> Vec<Result<InferResponse, InferError>> {
    use futures::StreamExt as _;
    stream.collect().await
}

/// The only response.
pub async fn one(stream: ResponseStream) -> InferResponse {
    let mut responses = responses(stream).await;
    assert_eq!(responses.len(), 1);
    responses.remove(0).unwrap()
}

/// Waits until `done` returns true; fails after two seconds.
pub async fn eventually(what: &str, done: impl Fn() -> bool) {
    for _ in 0..400 {
        if done() {
            return;
        }
        tokio::time::sleep(std::time::Duration::from_millis(5)).await;
    }
    panic!("not within two seconds: {what}");
}

/// `config` with a parameter that a scripted backend reads.
pub fn with(config: &str, parameter: &str) -> String {
    format!("{config} parameters {{ key: \"{parameter}\" value {{ string_value: \"1\" }} }}")
}

/// The repository index, a line for each version.
pub fn index(server: &Server) -> Vec<String> {
    let line = |entry: serving::ModelIndexEntry| {
        format!("{} {} {} {}", entry.name, entry.version, entry.state.name(), entry.reason)
    };
    server.repository_index(false).into_iter().map(|entry| line(entry).trim_end().to_owned()).collect()
}
