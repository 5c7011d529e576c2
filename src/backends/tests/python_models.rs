//! Python models behind a server: what they answer, and what happens when they fail, hang or are killed.
//!
//! The models are those of `tests/python_backend/models`. They need an interpreter with NumPy: `TRIREME_TEST_PYTHON`, or
//! `python3`.

use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;

use backends::python::{PythonConfig, PythonFactory};
use serving::{BackendFactory, InferRequest, InferResponse, Server, ServerConfig, Tensor};

fn interpreter() -> Option<PathBuf> {
    let program = std::env::var_os("TRIREME_TEST_PYTHON").map_or_else(|| "python3".into(), PathBuf::from);
    let works =
        Command::new(&program).args(["-c", "import numpy"]).output().is_ok_and(|output| output.status.success());
    if !works {
        println!("skipped: {} has no NumPy; set TRIREME_TEST_PYTHON", program.display());
    }
    works.then_some(program)
}

struct World {
    server: Arc<Server>,
    factory: Arc<PythonFactory>,
    prefix: String,
    _repository: tempfile::TempDir,
}

impl World {
    /// A server of some of the models; `None` where they cannot run.
    async fn start(name: &str, models: &[&str]) -> Option<Self> {
        let interpreter = interpreter()?;
        let repository = tempfile::tempdir().unwrap();
        let fixtures = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/python_backend/models");
        for model in models {
            std::os::unix::fs::symlink(fixtures.join(model), repository.path().join(model)).unwrap();
        }
        let prefix = format!("pytest{}_{name}_", std::process::id());
        let config = PythonConfig { interpreter, ..PythonConfig::new(prefix.parse().unwrap()) };
        let factory = Arc::new(PythonFactory::new(config).unwrap());
        let factories = HashMap::from([("python".to_owned(), Arc::clone(&factory) as Arc<dyn BackendFactory>)]);
        let config = ServerConfig { repositories: vec![repository.path().to_owned()], ..ServerConfig::default() };
        let server = Server::new(config, factories).unwrap();
        factory.attach(&server);
        server.load_all().await.unwrap();
        Some(Self { server, factory, prefix, _repository: repository })
    }

    async fn ask(&self, model: &str, inputs: Vec<Tensor>) -> InferResponse {
        let request = InferRequest { model_name: model.into(), inputs, ..InferRequest::default() };
        self.server.infer(request).unwrap().next_response().await.unwrap().unwrap()
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_model_answers_small_and_large_tensors() {
    let Some(world) = World::start("sizes", &["add_sub"]).await else { return };
    for width in [1, 16, 1 << 10, 1 << 20] {
        let left: Vec<f32> = (0..width).map(|value| value as f32).collect();
        let right = vec![0.5; width as usize];
        let inputs =
            vec![Tensor::from_f32("INPUT0", &[1, width], &left), Tensor::from_f32("INPUT1", &[1, width], &right)];
        let response = world.ask("add_sub", inputs).await;
        assert!(response.is_final);
        assert_eq!(response.outputs[0].to_f32().unwrap(), left.iter().map(|value| value + 0.5).collect::<Vec<_>>());
        assert_eq!(response.outputs[1].to_f32().unwrap(), left.iter().map(|value| value - 0.5).collect::<Vec<_>>());
    }
    assert_eq!(world.factory.metrics_text(), "");
    assert_eq!(left_in_shared_memory(&world.prefix), Vec::<String>::new());
}

fn left_in_shared_memory(prefix: &str) -> Vec<String> {
    let names = std::fs::read_dir("/dev/shm").unwrap().flatten().map(|entry| entry.file_name());
    names.filter_map(|name| name.into_string().ok()).filter(|name| name.starts_with(prefix)).collect()
}
