//! A loaded `model.py`, as the server calls it.

use std::sync::Arc;

use futures::FutureExt as _;
use futures::future::{BoxFuture, join_all};
use repository::ModelConfig;
use serving::{Backend, BatchedRequest, InferError, InferRequest, LoadRequest, ResponseStream};

use super::host::Host;
use super::instance::Instance;
use super::instances::Instances;

/// A loaded `model.py`. Dropping it ends its processes.
pub(super) struct Model {
    instances: Arc<Instances>,
}

impl Model {
    /// The configuration as completed by the model's `auto_complete_config`. `None` if the model has no such method and lists
    /// its inputs and outputs; no process is started then.
    pub async fn complete(host: Arc<Host>, load: &LoadRequest) -> Result<Option<ModelConfig>, InferError> {
        let instances = Arc::new(Instances::new(host, load).await?);
        let (config, settings) = (&load.config, &instances.settings);
        let source = tokio::fs::read(settings.version_dir.join(&settings.file)).await.unwrap_or_default();
        let name = b"auto_complete_config";
        let is_bare = config.input.is_empty() || config.output.is_empty();
        if !is_bare && !source.windows(name.len()).any(|part| part == name) {
            return Ok(None);
        }
        let completed = instances.connect(0, Some(settings.config_json.clone())).await?;
        let read = |json: String| repository::from_json(&config.name, &json);
        completed.map(read).transpose().map_err(|error| InferError::invalid(error.to_string()))
    }

    /// Starts every instance, and returns when all have loaded the model.
    pub async fn load(host: Arc<Host>, load: &LoadRequest) -> Result<Self, InferError> {
        let model = Self { instances: Arc::new(Instances::new(host, load).await?) };
        let instances = &model.instances;
        let starts = (0..instances.all.len()).map(|index| instances.connect(index, None));
        // If one fails, dropping `model` ends the processes of the others.
        join_all(starts).await.into_iter().collect::<Result<Vec<_>, _>>()?;
        Ok(model)
    }
}

impl Drop for Model {
    fn drop(&mut self) {
        self.instances.end();
    }
}

impl Backend for Model {
    fn infer(&self, _: InferRequest) -> Result<ResponseStream, InferError> {
        Err(InferError::internal("the Python backend takes batches only"))
    }

    fn num_instances(&self) -> usize {
        self.instances.all.len()
    }

    fn execute(&self, instance: usize, batch: Vec<BatchedRequest>) -> BoxFuture<'_, ()> {
        self.instances.execute(instance, batch).boxed()
    }

    fn reads_client_memory(&self) -> bool {
        true
    }

    fn is_ready(&self) -> bool {
        self.instances.all.iter().any(Instance::is_ready)
    }

    fn probe(&self) -> BoxFuture<'_, bool> {
        let ready = self.instances.all.iter().filter(|instance| instance.is_ready());
        let connections: Vec<_> = ready.filter_map(Instance::connection).collect();
        async move { join_all(connections.iter().map(|connection| connection.probe())).await.contains(&true) }.boxed()
    }

    fn drain(&self) -> BoxFuture<'_, ()> {
        self.instances.drain().boxed()
    }
}
