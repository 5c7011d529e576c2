//! What the front asks of the models, until `serving::Server` answers it.

use serving::{InferError, InferRequest, ResponseStream};

/// The front's own view of the server.
pub trait Models: Send + Sync + 'static {
    /// Accepts a request.
    fn infer(&self, request: InferRequest) -> Result<ResponseStream, InferError>;
    /// Whether the process serves at all.
    fn is_live(&self) -> bool;
    /// Whether every model that should serve does.
    fn is_ready(&self) -> bool;
    /// Whether one model serves.
    fn model_is_ready(&self, name: &str, version: &str) -> Result<bool, InferError>;
    /// The configuration of a model.
    fn model_config(&self, name: &str, version: &str) -> Result<std::sync::Arc<repository::ModelConfig>, InferError>;
    /// Whether a model answers with any number of responses.
    fn is_decoupled(&self, name: &str, version: &str) -> Result<bool, InferError>;
}

/// The models.
pub type Server = dyn Models;
