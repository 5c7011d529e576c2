//! `python`: models written in Python (`model.py`), each instance in a process of its own.
//!
//! [`PythonFactory`] loads models. A model process is the user's interpreter running the module in `python/`, which is
//! embedded here. Messages are sent over a socket, large tensors through shared memory. A process that ends or hangs is
//! replaced, and its requests in flight get an error.

mod calls;
mod config;
mod connection;
mod files;
#[cfg(feature = "fuzzing")]
pub(crate) mod fuzz;
mod host;
mod instance;
mod instances;
mod memory;
mod message;
mod metrics;
mod model;
mod mpi;
mod process;
mod running;
mod settings;
mod spawner;
mod wire;

use std::sync::Arc;

use futures::FutureExt as _;
use futures::future::BoxFuture;
use repository::ModelConfig;
use serving::{Backend, BackendFactory, InferError, LoadRequest, Server};

pub use config::PythonConfig;
pub(crate) use settings::file_name;

use crate::llm::CheckedModel;
use host::Host;
use model::Model;

/// Loads `backend: "python"`.
pub struct PythonFactory {
    host: Arc<Host>,
}

/// Checks the files of Python models instead of starting them.
pub struct CheckPythonFactory;

impl BackendFactory for CheckPythonFactory {
    fn load(&self, load: LoadRequest) -> BoxFuture<'static, Result<Arc<dyn Backend>, InferError>> {
        let checked = settings::code(&load).map(|_| Arc::new(CheckedModel) as Arc<dyn Backend>);
        async move { checked }.boxed()
    }
}

impl PythonFactory {
    /// A factory for models with this configuration.
    ///
    /// # Errors
    /// When no thread can be started.
    pub fn new(config: PythonConfig) -> std::io::Result<Self> {
        Ok(Self { host: Arc::new(Host::new(config)?) })
    }

    /// Lets models send requests to other models of `server`.
    pub fn attach(&self, server: &Arc<Server>) {
        let _ = self.host.server.set(Arc::downgrade(server));
    }

    /// The metrics of models, in Prometheus' text format.
    pub fn metrics_text(&self) -> String {
        self.host.metrics.text()
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
