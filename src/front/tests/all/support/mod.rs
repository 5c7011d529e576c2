//! A front on free ports with fixture models.
#![allow(dead_code, unused_imports)] // Each test uses a part.

mod fixtures;
mod http;

use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use front::relay::RelayedPort;
use serving::{BackendFactory, ControlMode, Server, ServerConfig};
use tokio::runtime::Handle;

pub use fixtures::{Fixtures, Streams};
pub use http::{HttpAnswer, http, http_to, http_with};

/// A server with the fixture models in `repository`. Models that cannot be loaded are reported and skipped.
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

/// A front on free ports, with fixture models.
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
    /// Starts with default settings.
    pub async fn start() -> Self {
        Self::start_with(|_| ()).await
    }

    /// Starts with settings that `change` modifies.
    pub async fn start_with(change: impl FnOnce(&mut front::Config)) -> Self {
        Self::start_on(front::Listeners::default(), change).await
    }

    /// Starts behind a relay, with the sockets of `directory`.
    pub async fn start_behind_relay(directory: &Path) -> Self {
        let bind = |port: RelayedPort| UnixListener::bind(port.socket(directory)).unwrap();
        let [grpc, http, metrics] = [RelayedPort::Grpc, RelayedPort::Http, RelayedPort::Metrics].map(bind);
        let relay = Some(front::RelayListeners { grpc, http, metrics });
        let listeners = front::Listeners { relay, ..Default::default() };
        Self::start_on(listeners, |config| config.is_behind_relay = true).await
    }

    async fn start_on(listeners: front::Listeners, change: impl FnOnce(&mut front::Config)) -> Self {
        let repository = tempfile::tempdir().unwrap();
        for (name, config) in [("stream_text", STREAM_TEXT), ("identity_fp32", IDENTITY), ("slow", SLOW)] {
            add_model(repository.path(), name, config);
        }
        let (server, streams) = serve(repository.path(), ControlMode::None).await;
        let mut config = any_ports();
        change(&mut config);
        let running = front::start_on(listeners, &Handle::current(), config, server.clone(), Vec::new()).await.unwrap();
        Self { addresses: running.addresses(), running: Some(running), streams, server, repository }
    }

    /// Ends the server in order, as SIGTERM does: it takes no new requests.
    pub fn begin_drain(&self) {
        self.server.begin_drain();
    }

    /// A gRPC connection.
    pub async fn grpc(&self) -> client::grpc::Connection {
        client::grpc::Connection::open(&self.addresses.grpc.unwrap().to_string()).await.unwrap()
    }

    /// The HTTP port.
    pub fn http_address(&self) -> std::net::SocketAddr {
        self.addresses.http.unwrap()
    }

    /// The response of the metrics port.
    pub async fn metrics(&self) -> HttpAnswer {
        http_to(self.addresses.metrics.unwrap(), "GET", "/metrics", "", Vec::new()).await
    }

    /// Starts another front for the same models with HTTP on `port`.
    pub async fn start_another(&self, port: u16) -> Result<front::Running, front::StartError> {
        self.start_another_with(|config| config.http = Some(front::Address::new("127.0.0.1", port))).await
    }

    /// Starts another front for the same models with HTTP only and settings that `change` modifies.
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

/// Settings with every port free to choose.
pub fn any_ports() -> front::Config {
    let any = || Some(front::Address::new("127.0.0.1", 0));
    front::Config { grpc: any(), http: any(), metrics: any(), ..Default::default() }
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
