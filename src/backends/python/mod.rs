//! `python`: users' own `model.py`, each instance in a process of its own.
//!
//! [`PythonFactory`] loads models. A model process is the user's interpreter running the module in `python/`, which is
//! embedded here. Messages travel over a socket, large tensors through shared memory. A process that ends or hangs is
//! replaced; what it had in flight gets one error.

mod calls;
mod config;
mod connection;
mod files;
#[cfg(feature = "fuzzing")]
pub(crate) mod fuzz;
mod instance;
mod memory;
mod message;
mod metrics;
mod model;
mod mpi;
mod process;
mod running;
mod settings;
mod wire;

use std::path::PathBuf;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock, Weak};

use futures::FutureExt as _;
use futures::future::BoxFuture;
use ipc::IpcError;
use repository::ModelConfig;
use serving::{Backend, BackendFactory, InferError, LoadRequest, Server};

pub use config::PythonConfig;
pub(crate) use settings::file_name;

use crate::llm::Sound;
use files::Files;
use memory::Shared;
use metrics::Registry;
use model::Model;
use process::Spawner;

/// Loads `backend: "python"`.
pub struct PythonFactory {
    host: Arc<Host>,
}

/// In the place of [`PythonFactory`]: looks whether there is something to run, and starts nothing.
pub struct CheckPythonFactory;

impl BackendFactory for CheckPythonFactory {
    fn load(&self, load: LoadRequest) -> BoxFuture<'static, Result<Arc<dyn Backend>, InferError>> {
        let checked = settings::code(&load).map(|_| Arc::new(Sound) as Arc<dyn Backend>);
        async move { checked }.boxed()
    }
}

/// What all model processes of a server share.
struct Host {
    config: PythonConfig,
    spawner: Spawner,
    files: Files,
    metrics: Arc<Registry>,
    server: OnceLock<Weak<Server>>,
    num_regions: AtomicU64,
    num_worlds: AtomicU64,
}

impl PythonFactory {
    /// A factory whose models run as `config` says.
    ///
    /// # Errors
    /// When no thread can be started.
    pub fn new(config: PythonConfig) -> std::io::Result<Self> {
        let (files, metrics, server, num_regions, num_worlds) = Default::default();
        let spawner = Spawner::start()?;
        let host = Host { config, spawner, files, metrics, server, num_regions, num_worlds };
        Ok(Self { host: Arc::new(host) })
    }

    /// Lets models send requests to other models of `server`. Before that, only they themselves serve.
    pub fn attach(&self, server: &Arc<Server>) {
        let _ = self.host.server.set(Arc::downgrade(server));
    }

    /// The metrics that models have made, in Prometheus' text format.
    pub fn metrics_text(&self) -> String {
        self.host.metrics.text()
    }
}

impl Host {
    /// The name of a directory for a model's processes on all ranks.
    fn new_scratch(&self) -> Result<PathBuf, InferError> {
        Ok(self.files.dir()?.join(format!("w{}", self.num_worlds.fetch_add(1, Ordering::Relaxed))))
    }

    /// A region for at least `bytes`, when a process has `held` bytes in regions already.
    fn new_region(&self, bytes: usize, held: usize) -> Result<Shared, IpcError> {
        // As much again as there is, so that few regions are ever made.
        let grown = if held == 0 { self.config.shm_default_bytes } else { self.config.shm_growth_bytes.max(held) };
        let number = self.num_regions.fetch_add(1, Ordering::Relaxed);
        let prefix = &self.config.prefix;
        let full = |error: &IpcError| matches!(error, IpcError::Full { .. });
        match Shared::create(prefix, &format!("python{number}"), bytes.max(grown)) {
            Err(error) if full(&error) && grown > bytes => Shared::create(prefix, &format!("python{number}"), bytes),
            made => made,
        }
    }
}

impl BackendFactory for PythonFactory {
    fn auto_complete(&self, load: LoadRequest) -> BoxFuture<'static, Result<Option<ModelConfig>, InferError>> {
        let host = self.host.clone();
        async move { if host.config.auto_complete { Model::complete(host, &load).await } else { Ok(None) } }.boxed()
    }

    fn load(&self, load: LoadRequest) -> BoxFuture<'static, Result<Arc<dyn Backend>, InferError>> {
        let host = self.host.clone();
        async move { Ok(Arc::new(Model::load(host, &load).await?) as Arc<dyn Backend>) }.boxed()
    }
}
