//! The door between serving and what answers.

use std::path::PathBuf;
use std::sync::Arc;

use futures::future::BoxFuture;
use repository::ModelConfig;

use crate::{InferError, InferRequest, ResponseStream};

/// One loaded model version: `serving` calls it, `backends` implement it.
///
/// Each accepted request gets one stream, ended by one response marked final or by one error.
/// A decoupled model may send any number of responses before that.
pub trait Backend: Send + Sync {
    /// Accepts the request, checked against the model's configuration, and returns at once.
    /// Dropping the stream cancels it.
    ///
    /// # Errors
    /// When the request cannot be accepted: wrong values, a full queue.
    fn infer(&self, request: InferRequest) -> Result<ResponseStream, InferError>;

    /// Whether a request would be served now. False while, say, workers restart.
    fn is_ready(&self) -> bool {
        true
    }

    /// Resolves when no request is in flight. No new one is given to it any more.
    fn drain(&self) -> BoxFuture<'_, ()>;
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

    /// Completes a configuration, for example with the inputs and outputs it leaves out.
    fn complete(&self, _config: &mut ModelConfig) {}

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
}
