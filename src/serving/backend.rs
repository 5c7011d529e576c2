//! The door between serving and what answers.

use std::path::PathBuf;
use std::sync::Arc;

use futures::future::{BoxFuture, FutureExt as _};
use repository::ModelConfig;

use crate::{InferError, InferRequest, Limits, ResponseSender, ResponseStream, TextModel, TextOutputs};

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

    /// Whether its responses hold no output beside those that a request names.
    fn keeps_to_requested_outputs(&self) -> bool {
        false
    }

    /// What this model is in an ensemble that generates text; `None` for models of other kinds.
    fn text_model(&self) -> Option<TextModel> {
        None
    }

    /// As [`Backend::infer`], with the outputs of a text ensemble in place of its own. Only called where
    /// [`Backend::text_model`] is [`TextModel::Generator`].
    ///
    /// # Errors
    /// As [`Backend::infer`].
    fn infer_text(&self, request: InferRequest, _outputs: TextOutputs) -> Result<ResponseStream, InferError> {
        let model = request.model_name;
        Err(InferError::internal(format!("model '{model}' generates no text")))
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
