//! Static batching, for `gpt_model_type: V1` and the Python `gpt` repository.

use std::sync::Arc;

use futures::FutureExt as _;
use futures::future::{BoxFuture, join_all};
use serving::{Backend, BatchedRequest, InferError, InferRequest, MemoryUsage, ResponseStream};

use super::forward::forward;

/// Runs one batch of the model's `dynamic_batching` after another. The next batch starts when all requests of the last one have ended.
pub(super) struct StaticBatch {
    inner: Arc<dyn Backend>,
    num_instances: usize,
}

impl StaticBatch {
    /// Runs `num_instances` batches at once.
    pub(super) fn new(inner: Arc<dyn Backend>, num_instances: usize) -> Self {
        Self { inner, num_instances }
    }
}

impl Backend for StaticBatch {
    fn infer(&self, request: InferRequest) -> Result<ResponseStream, InferError> {
        self.inner.infer(request)
    }

    fn num_instances(&self) -> usize {
        self.num_instances
    }

    fn execute(&self, _instance: usize, batch: Vec<BatchedRequest>) -> BoxFuture<'_, ()> {
        let respond = |BatchedRequest { request, responses }| async move {
            match self.inner.infer(request) {
                Ok(stream) => forward(stream, &responses, |response| response).await,
                Err(error) => drop(responses.send(Err(error)).await),
            }
        };
        join_all(batch.into_iter().map(respond)).map(drop).boxed()
    }

    fn reset_prefix_cache(&self) -> BoxFuture<'_, bool> {
        self.inner.reset_prefix_cache()
    }

    fn is_ready(&self) -> bool {
        self.inner.is_ready()
    }

    fn is_complete(&self) -> bool {
        self.inner.is_complete()
    }

    fn memory_usage(&self) -> Vec<MemoryUsage> {
        self.inner.memory_usage()
    }

    fn drain(&self) -> BoxFuture<'_, ()> {
        self.inner.drain()
    }
}
