//! The interface between `serving` and the backends that run models.

use std::path::PathBuf;
use std::sync::Arc;

use futures::future::{BoxFuture, FutureExt as _};
use generation::{Generator, RequestBounds};
use repository::{ModelConfig, ModelSource};

use crate::{
    Adapters, GenerateCall, InferError, InferRequest, Limits, MemoryUsage, ResponseSender, ResponseStream, Sleeper,
    TextModel, TextOutputs, Weights,
};

/// One loaded model version: `serving` calls it, `backends` implement it.
///
/// Each accepted request gets one stream, which ends with one response marked final or with one error.
/// A decoupled model may send any number of responses and errors before that.
///
/// A backend receives requests in one of two ways. Where [`Backend::num_instances`] is 0, each request goes to
/// [`Backend::infer`] at once, and the backend has its own queue. Otherwise `serving` queues requests as the model's
/// configuration says (batches, priorities, timeouts, sequences) and passes batches to [`Backend::execute`].
pub trait Backend: Send + Sync {
    /// Accepts a request, which is checked against the model's configuration, and returns at once.
    /// Dropping the stream cancels the request. Not called where [`Backend::num_instances`] is above 0.
    ///
    /// # Errors
    /// When the request cannot be accepted, for example because of invalid values or a full queue.
    fn infer(&self, request: InferRequest) -> Result<ResponseStream, InferError>;

    /// Whether responses contain only the outputs that the request names.
    fn returns_only_requested_outputs(&self) -> bool {
        false
    }

    /// The model's role in an ensemble that generates text; `None` for other models.
    fn text_model(&self) -> Option<TextModel> {
        None
    }

    /// Accepts a request like [`Backend::infer`]; the responses have the outputs of a text ensemble instead of the model's own.
    /// Only called where [`Backend::text_model`] is [`TextModel::Generator`].
    ///
    /// # Errors
    /// When the request cannot be accepted, for example because of invalid values or a full queue.
    fn infer_text(&self, request: InferRequest, _outputs: TextOutputs) -> Result<ResponseStream, InferError> {
        let model = request.model_name;
        Err(InferError::internal(format!("model '{model}' generates no text")))
    }

    /// Properties of the model that adapters of protocols need for [`GenerateCall`]s; `None` for a model without text generation.
    fn generator(&self) -> Option<Generator> {
        None
    }

    /// Bounds of requests to generate, for adapters inside a backend; `None` for a model without generation. A model without a
    /// tokenizer has them, too.
    fn request_bounds(&self) -> Option<RequestBounds> {
        None
    }

    /// Accepts a request to generate, and returns at once. Only called where [`Backend::generator`] is `Some`, or without text
    /// options where [`Backend::request_bounds`] is.
    ///
    /// # Errors
    /// When the request cannot be accepted, for example because of invalid values or a full queue.
    fn generate(&self, call: GenerateCall) -> Result<ResponseStream, InferError> {
        Err(InferError::internal(format!("model '{}' generates no text", call.model_name)))
    }

    /// The adapters (LoRA) of the model; `None` for a model that takes none.
    fn adapters(&self) -> Option<Arc<dyn Adapters>> {
        None
    }

    /// The model as one that can sleep; `None` for a model that cannot.
    fn sleeper(&self) -> Option<Arc<dyn Sleeper>> {
        None
    }

    /// The model as one whose weights can be replaced; `None` for a model whose weights cannot.
    fn weights(&self) -> Option<Arc<dyn Weights>> {
        None
    }

    /// Empties the prefix cache of the model, on its device and in host memory. Resolves when later requests find nothing in it, with
    /// false for a model that has none.
    fn reset_prefix_cache(&self) -> BoxFuture<'_, bool> {
        std::future::ready(false).boxed()
    }

    /// Number of executions that may run at the same time; 0 for a backend that queues and batches requests itself.
    fn num_instances(&self) -> usize {
        0
    }

    /// Runs a batch on an instance, numbered from 0. It resolves when the instance is free for the next batch.
    ///
    /// Each request has its own sender, which may send responses before or after this resolves. If the sender is dropped
    /// before a final response or an error, the client gets an error. A batch holds one request unless the model's
    /// configuration has `dynamic_batching` or `sequence_batching`. Its requests have at most `max_batch_size` rows together,
    /// and the same inputs with the same shapes, except for batch sizes and for inputs with `allow_ragged_batch`.
    fn execute(&self, _instance: usize, batch: Vec<BatchedRequest>) -> BoxFuture<'_, ()> {
        drop(batch);
        std::future::ready(()).boxed()
    }

    /// Whether the backend reads inputs from `client_memory` of a request. Otherwise `serving` copies all of them to `inputs`.
    fn reads_client_memory(&self) -> bool {
        false
    }

    /// Whether the model can serve a request now. False, for example, while its workers restart.
    fn is_ready(&self) -> bool {
        true
    }

    /// Whether the models that this one passes its requests to are loaded, ready or not.
    fn is_complete(&self) -> bool {
        true
    }

    /// Like [`Backend::is_ready`], with the model's own check, which may take seconds.
    fn probe(&self) -> BoxFuture<'_, bool> {
        std::future::ready(self.is_ready()).boxed()
    }

    /// Memory that the model holds, as far as the backend knows.
    fn memory_usage(&self) -> Vec<MemoryUsage> {
        Vec::new()
    }

    /// Resolves when no request is in flight. Called after the last request was passed to the backend.
    fn drain(&self) -> BoxFuture<'_, ()>;
}

/// One request of a batch, and the sender of its responses.
#[derive(Debug)]
pub struct BatchedRequest {
    /// The request, including control and state inputs where it belongs to a sequence.
    pub request: InferRequest,
    /// Sends the responses, and knows whether the client has left.
    pub responses: ResponseSender,
}

/// Loads models. Each `backend:` (or `platform:`) name has one factory.
///
/// Loading does not block requests and may take long. The text of an error is the reason in the repository index.
pub trait BackendFactory: Send + Sync {
    /// Whether a loaded model must be unloaded before it is loaded again, because both would not fit into memory.
    /// If not, the old load serves until the new one is ready.
    fn is_exclusive(&self) -> bool {
        false
    }

    /// Checks what can be checked of a version before the old load of an [exclusive](Self::is_exclusive) model is unloaded for it.
    ///
    /// # Errors
    /// Why it cannot be loaded. If that holds for all versions, the old load continues to serve.
    fn check(&self, _model: LoadRequest) -> BoxFuture<'static, Result<(), InferError>> {
        std::future::ready(Ok(())).boxed()
    }

    /// The factory that loads this model instead of this one, for example because the files are a known layout with a backend
    /// of its own; `None` for this factory itself.
    fn replacement(&self, _model: &LoadRequest) -> Option<Arc<dyn BackendFactory>> {
        None
    }

    /// Completes a configuration, for example with inputs and outputs that it does not list.
    fn complete(&self, _config: &mut ModelConfig) {}

    /// Completes a configuration from the model's own files, before a version is loaded; `None` leaves it unchanged.
    ///
    /// The returned configuration is checked again. After an error no version is loaded, and the error is the reason.
    fn auto_complete(&self, _model: LoadRequest) -> BoxFuture<'static, Result<Option<ModelConfig>, InferError>> {
        std::future::ready(Ok(None)).boxed()
    }

    /// Loads one version of a model.
    fn load(&self, model: LoadRequest) -> BoxFuture<'static, Result<Arc<dyn Backend>, InferError>>;
}

/// Arguments for loading one version of a model.
#[derive(Debug, Clone)]
pub struct LoadRequest {
    /// `<repository>/<model>`.
    pub model_dir: PathBuf,
    /// `<repository>/<model>/<version>`.
    pub version_dir: PathBuf,
    /// The version's number.
    pub version: i64,
    /// The model's configuration, completed.
    pub config: Arc<ModelConfig>,
    /// Set if a client sent the configuration: that of the repository, which the operator wrote, without parameters if there is none.
    pub replaced: Option<Arc<ModelConfig>>,
    /// Limits on the contents of one request.
    pub limits: Limits,
}

impl LoadRequest {
    pub(crate) fn new(source: &ModelSource, version: i64, config: &Arc<ModelConfig>, limits: Limits) -> Self {
        Self {
            model_dir: source.dir.clone(),
            version_dir: source.dir.join(version.to_string()),
            version,
            config: config.clone(),
            replaced: source.replaced.clone().map(Arc::new),
            limits,
        }
    }
}
