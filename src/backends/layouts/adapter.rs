//! Adapters: models that change the requests and responses of another model.

use std::sync::Arc;

use futures::future::BoxFuture;
use generation::Generator;
use serving::{
    Adapters, Backend, GenerateCall, InferError, InferRequest, MemoryUsage, ResponseStream, Sleeper, TextModel,
    TextOutputs,
};

/// Changes of the requests and responses of a model. Everything else is passed to the model unchanged.
pub(super) trait Adapter: Send + Sync + 'static {
    /// The model.
    fn model(&self) -> &Arc<dyn Backend>;

    /// Starts a request on the model.
    fn infer(&self, request: InferRequest) -> Result<ResponseStream, InferError>;

    /// Changes a request of a text ensemble, which has one row.
    fn prepare_text(&self, request: InferRequest) -> Result<InferRequest, InferError> {
        Ok(request)
    }
}

/// An adapter as a backend.
pub(super) struct Adapted<A>(pub(super) A);

impl<A: Adapter> Backend for Adapted<A> {
    fn infer(&self, request: InferRequest) -> Result<ResponseStream, InferError> {
        self.0.infer(request)
    }

    fn generator(&self) -> Option<Generator> {
        self.0.model().generator()
    }

    fn generate(&self, call: GenerateCall) -> Result<ResponseStream, InferError> {
        self.0.model().generate(call)
    }

    fn sleeper(&self) -> Option<Arc<dyn Sleeper>> {
        self.0.model().sleeper()
    }

    fn weights(&self) -> Option<Arc<dyn serving::Weights>> {
        self.0.model().weights()
    }

    fn adapters(&self) -> Option<Arc<dyn Adapters>> {
        self.0.model().adapters()
    }

    fn reset_prefix_cache(&self) -> BoxFuture<'_, bool> {
        self.0.model().reset_prefix_cache()
    }

    fn text_model(&self) -> Option<TextModel> {
        self.0.model().text_model()
    }

    fn infer_text(&self, request: InferRequest, outputs: TextOutputs) -> Result<ResponseStream, InferError> {
        self.0.model().infer_text(self.0.prepare_text(request)?, outputs)
    }

    fn is_ready(&self) -> bool {
        self.0.model().is_ready()
    }

    fn is_complete(&self) -> bool {
        self.0.model().is_complete()
    }

    fn memory_usage(&self) -> Vec<MemoryUsage> {
        self.0.model().memory_usage()
    }

    fn drain(&self) -> BoxFuture<'_, ()> {
        self.0.model().drain()
    }
}
