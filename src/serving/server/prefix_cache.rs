//! The prefix caches of models.

use super::Server;
use crate::InferError;

impl Server {
    /// Empties the prefix cache of a model; without a model, those of all. Later requests find nothing in them.
    ///
    /// # Errors
    /// When there is no such model, or it has no prefix cache.
    pub async fn reset_prefix_cache(&self, model: Option<&str>) -> Result<(), InferError> {
        let Some(name) = model else {
            for model in self.registry().all_ready() {
                model.reset_prefix_cache().await;
            }
            return Ok(());
        };
        match self.resolve(self.model_of(name), "")?.reset_prefix_cache().await {
            true => Ok(()),
            false => Err(InferError::invalid(format!("model `{name}` has no prefix cache"))),
        }
    }
}
