//! Checks of an LLM before any worker starts, for the loader and for `trireme lint`.

use std::sync::Arc;

use device::Estimator;
use futures::FutureExt as _;
use futures::future::BoxFuture;
use ops::{StepLimits, Target, TensorParallel};
use serving::{Backend, BackendFactory, InferError, InferRequest, InferResponse, LoadRequest, ResponseStream};

use super::LlmDefaults;
use super::config::LlmConfig;

/// In the place of [`super::LlmFactory`]: looks at all that loading would look at, weights' names and shapes among it, and
/// starts no worker.
pub struct CheckFactory {
    defaults: LlmDefaults,
}

impl CheckFactory {
    /// For models that `defaults` would be used for.
    pub fn new(defaults: LlmDefaults) -> Self {
        Self { defaults }
    }

    fn check(&self, load: &LoadRequest) -> Result<(), InferError> {
        let config = LlmConfig::new(load, &self.defaults)?;
        let wrong = |error: models::ModelError| InferError::invalid(format!("model `{}`: {error}", config.name));
        let model = models::Config::from_dir(&config.checkpoint).map_err(wrong)?;
        let limits = StepLimits {
            max_tokens: config.engine.max_step_tokens,
            max_rows: config.engine.max_rows,
            max_sequence_len: config.engine.max_sequence_len,
            vocab_size: config.vocab_size,
        };
        let share = TensorParallel { rank: 0, size: config.tp_size };
        models::load(&config.checkpoint, &model, &mut Estimator::new(Target::Cpu, share, limits))
            .map(drop)
            .map_err(wrong)
    }
}

impl BackendFactory for CheckFactory {
    fn load(&self, load: LoadRequest) -> BoxFuture<'static, Result<Arc<dyn Backend>, InferError>> {
        let checked = self.check(&load).map(|()| Arc::new(Sound) as Arc<dyn Backend>);
        async move { checked }.boxed()
    }
}

/// A model whose check found nothing wrong. It answers warm-up requests only.
pub struct Sound;

impl Backend for Sound {
    fn infer(&self, _request: InferRequest) -> Result<ResponseStream, InferError> {
        Ok(ResponseStream::ready(InferResponse::default()))
    }

    fn drain(&self) -> BoxFuture<'_, ()> {
        std::future::ready(()).boxed()
    }
}
