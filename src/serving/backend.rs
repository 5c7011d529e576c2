//! The door between serving and what answers.

use std::path::PathBuf;
use std::sync::Arc;

use futures::future::{BoxFuture, FutureExt as _};
use repository::ModelConfig;

use crate::{Changes, EnsembleStep, InferError, InferRequest, InferResponse, Limits, ResponseSender, ResponseStream};

/// One loaded model version: `serving` calls it, `backends` implement it.
///
/// Each accepted request gets one stream, ended by one response marked final or by one error.
/// A decoupled model may send any number of responses before that, errors among them.
///
/// A backend takes requests in one of two ways. With [`Backend::num_instances`] of 0 each request goes to
/// [`Backend::infer`] at once, and the backend queues as it likes. Otherwise `serving` queues requests as the model's
/// configuration says (batches, priorities, timeouts, sequences) and gives them to [`Backend::execute`].
pub trait Backend: Send + Sync {
    /// Accepts the request, checked against the model's configuration, and returns at once.
    /// Dropping the stream cancels it. Not called where [`Backend::num_instances`] is above 0.
    ///
    /// # Errors
    /// When the request cannot be accepted: wrong values, a full queue.
    fn infer(&self, request: InferRequest) -> Result<ResponseStream, InferError>;

    /// Whether [`Backend::answer`] answers every request: a step of an ensemble is then a call.
    fn answers_at_once(&self) -> bool {
        false
    }

    /// Whether its responses hold no output beside those that a request names.
    fn keeps_to_requested_outputs(&self) -> bool {
        false
    }

    /// The one answer to a request, as [`Backend::infer`] would give it, where that waits for nothing. Asked where
    /// [`Backend::answers_at_once`] says so.
    ///
    /// # Errors
    /// As [`Backend::infer`].
    fn answer(&self, _request: &InferRequest) -> Result<InferResponse, InferError> {
        Err(InferError::internal("this backend does not answer at once"))
    }

    /// What is new in the answer to a request that differs from the last of this `step` in the elements of some inputs alone,
    /// `changes`, which are of the same number and size, and is not its last; put into `told`. `None` where it has to be
    /// answered in full.
    ///
    /// # Errors
    /// As [`Backend::infer`].
    fn answer_again(
        &self,
        _step: &EnsembleStep,
        _changes: &Changes,
        _told: &mut Changes,
    ) -> Option<Result<(), InferError>> {
        None
    }

    /// How many executions run side by side, for a backend that leaves queues and batches to `serving`.
    fn num_instances(&self) -> usize {
        0
    }

    /// Runs a batch on an instance, from 0, and resolves when that instance is free for the next one.
    ///
    /// Each request is answered through its own sender, before or after this resolves; a sender dropped without a final
    /// response or an error becomes an error. A batch holds one request unless the model's configuration has
    /// `dynamic_batching` or `sequence_batching`; its requests have the same inputs and shapes, but for batch sizes and
    /// inputs with `allow_ragged_batch`, and together at most `max_batch_size` rows.
    fn execute(&self, _instance: usize, batch: Vec<BatchedRequest>) -> BoxFuture<'_, ()> {
        drop(batch);
        std::future::ready(()).boxed()
    }

    /// Whether it reads inputs where a request's `client_memory` says. All are in `inputs` otherwise.
    fn reads_client_memory(&self) -> bool {
        false
    }

    /// Whether a request would be served now. False while, say, workers restart.
    fn is_ready(&self) -> bool {
        true
    }

    /// As [`Backend::is_ready`], and what the model says when it is asked itself.
    fn probe(&self) -> BoxFuture<'_, bool> {
        std::future::ready(self.is_ready()).boxed()
    }

    /// What the model holds of which memory, as far as it knows.
    fn memory_usage(&self) -> Vec<MemoryUsage> {
        Vec::new()
    }

    /// Resolves when no request is in flight. No new one is given to it any more.
    fn drain(&self) -> BoxFuture<'_, ()>;
}

/// Memory that a model holds.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MemoryUsage {
    /// `CPU` or `GPU`, as the statistics name them.
    pub kind: &'static str,
    /// Of a GPU, its number on its node.
    pub id: i64,
    /// Bytes.
    pub num_bytes: u64,
}

/// One request of a batch, and where its responses go.
#[derive(Debug)]
pub struct BatchedRequest {
    /// The request, with the control and state inputs of its sequence.
    pub request: InferRequest,
    /// Its responses. Knows too whether the client has left.
    pub responses: ResponseSender,
}

/// Makes the backend of a model, one per `backend:` (or `platform:`) name.
///
/// Loading may take long: it runs off the request path. An error's words are the reason in the repository index.
pub trait BackendFactory: Send + Sync {
    /// Whether an old load of a model must be gone before a new one starts, because the two would not fit side by side.
    /// Without it the old one serves until the new one is ready.
    fn is_exclusive(&self) -> bool {
        false
    }

    /// Who loads this model in this factory's place, for example because its files are known to be a layout that is
    /// served without them; `None` for this factory itself.
    fn stand_in(&self, _model: &LoadRequest) -> Option<Arc<dyn BackendFactory>> {
        None
    }

    /// Completes a configuration, for example with the inputs and outputs it leaves out.
    fn complete(&self, _config: &mut ModelConfig) {}

    /// Completes a configuration from the model's own files, before a version is loaded; `None` leaves it as it is.
    ///
    /// What it returns is checked again. An error is the reason why no version loads.
    fn auto_complete(&self, _model: LoadRequest) -> BoxFuture<'static, Result<Option<ModelConfig>, InferError>> {
        std::future::ready(Ok(None)).boxed()
    }

    /// Loads one version of a model.
    fn load(&self, model: LoadRequest) -> BoxFuture<'static, Result<Arc<dyn Backend>, InferError>>;
}

/// What a backend needs to load one version of a model.
#[derive(Debug, Clone)]
pub struct LoadRequest {
    /// `<repository>/<model>`.
    pub model_dir: PathBuf,
    /// `<repository>/<model>/<version>`.
    pub version_dir: PathBuf,
    /// The version's number.
    pub version: i64,
    /// Name, inputs, outputs and parameters as configured.
    pub config: Arc<ModelConfig>,
    /// What one request may contain.
    pub limits: Limits,
}
