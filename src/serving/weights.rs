//! The interface to models whose weights can be replaced while they are served.

use std::path::PathBuf;

use futures::future::BoxFuture;

use crate::InferError;

/// A request to replace the weights of a model.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NewWeights {
    /// The directory of a checkpoint with the same configuration, and tensors of the same names, types and shapes. Relative paths
    /// start at the directory that the operator allows.
    pub checkpoint: PathBuf,
    /// The version that the model shows from then on; `None` for the number of the replacement.
    pub version: Option<String>,
    /// Whether requests that the model has end with an error. Otherwise those that have begun end first, with the old weights.
    pub aborts_requests: bool,
}

/// A model whose weights can be replaced.
pub trait Weights: Send + Sync {
    /// The version of the weights that are served.
    fn version(&self) -> String;

    /// Replaces the weights. Requests that arrive meanwhile wait in the model's queue. Resolves to the new version when requests are
    /// served with the new weights. The work goes on to its end if the future is dropped.
    ///
    /// # Errors
    /// When the checkpoint is not in a directory that the operator allows, or differs in more than its values: nothing has changed
    /// then. When workers cannot load it: the old weights are loaded again.
    fn replace(&self, new: NewWeights) -> BoxFuture<'static, Result<String, InferError>>;
}
