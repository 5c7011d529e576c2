//! Checks an LLM's configuration and checkpoint without starting workers, for `trireme lint`.

use std::sync::Arc;

use futures::FutureExt as _;
use futures::future::BoxFuture;
use models::EstimateMemory;
use ops::{PipelineStage, Target, TensorParallel};
use serving::{Backend, BackendFactory, InferError, InferRequest, InferResponse, LoadRequest, ResponseStream};

use super::config::LlmConfig;
use super::config::LlmDefaults;

/// Makes the checks of [`super::LlmFactory`], including those of the weights' names and shapes, and starts no worker.
pub struct CheckFactory {
    defaults: LlmDefaults,
    estimate: EstimateMemory,
}

impl CheckFactory {
    /// A factory that checks models with `defaults`.
    pub fn new(defaults: LlmDefaults, estimate: EstimateMemory) -> Self {
        Self { defaults, estimate }
    }

    fn check(&self, load: &LoadRequest) -> Result<(), InferError> {
        let config = LlmConfig::new(load, &self.defaults)?;
        let wrong = |error: models::ModelError| InferError::invalid(format!("model `{}`: {error}", config.name));
        let model = config.model(Target::Cpu).map_err(wrong)?;
        let tp = TensorParallel { rank: 0, size: config.tp_size };
        let worker = config.worker_shape(Target::Cpu, tp, PipelineStage::WHOLE);
        (self.estimate)(&config.checkpoint, &model, &worker).map(drop).map_err(wrong)
    }
}

impl BackendFactory for CheckFactory {
    fn load(&self, load: LoadRequest) -> BoxFuture<'static, Result<Arc<dyn Backend>, InferError>> {
        let checked = self.check(&load).map(|()| Arc::new(CheckedModel) as Arc<dyn Backend>);
        async move { checked }.boxed()
    }
}

/// A model that passed its check. It returns an empty response to each request.
pub struct CheckedModel;

impl Backend for CheckedModel {
    fn infer(&self, _request: InferRequest) -> Result<ResponseStream, InferError> {
        Ok(ResponseStream::ready(InferResponse::default()))
    }

    fn drain(&self) -> BoxFuture<'_, ()> {
        std::future::ready(()).boxed()
    }
}
