//! Models whose weights are replaced while they are served.

use std::sync::Arc;

use super::Server;
use crate::{ErrorKind, InferError, NewWeights, Weights};

impl Server {
    /// Replaces the weights of a model; without one, of the only one whose weights can be replaced. Resolves to the names of the model and
    /// of the new version when requests are served with the new weights.
    ///
    /// # Errors
    /// When there is no such model, its weights cannot be replaced, or with the reason why they were not.
    pub async fn replace_weights(&self, model: Option<&str>, new: NewWeights) -> Result<(String, String), InferError> {
        let (name, weights) = self.weights(model)?;
        let version = weights.replace(new).await?;
        // What the response cache has was computed with the old weights, for ensembles of the model, too.
        self.registry().all_ready().iter().for_each(|model| model.forget_cached());
        Ok((name, version))
    }

    /// The version of the weights of a model; `None` where they cannot be replaced.
    pub fn weights_version(&self, model: &str) -> Option<String> {
        self.weights_of(model).map(|weights| weights.version())
    }

    /// A model as one whose weights can be replaced; `None` where they cannot.
    pub fn weights_of(&self, model: &str) -> Option<Arc<dyn Weights>> {
        self.resolve(model, "").ok()?.weights()
    }

    /// The weights of the model, or of the only one. Ensembles stand for models that are among these.
    fn weights(&self, model: Option<&str>) -> Result<(String, Arc<dyn Weights>), InferError> {
        let unable = |message: String| InferError::new(ErrorKind::Unsupported, message);
        if let Some(name) = model {
            let found = self.resolve(name, "")?.weights().map(|weights| (name.to_owned(), weights));
            return found.ok_or_else(|| {
                unable(format!(
                    "the weights of model `{name}` cannot be replaced; those of language models can, of a server started with \
                     `--weight-updates-dir=DIR`"
                ))
            });
        }
        let models = self.registry().all_ready();
        let own = models.iter().filter(|model| model.config.ensemble().is_none());
        let mut all = own.filter_map(|model| Some((model.config.name.clone(), model.weights()?)));
        match (all.next(), all.next()) {
            (Some((first, _)), Some((second, _))) => Err(InferError::invalid(format!(
                "the weights of models `{first}` and `{second}` can be replaced; name one by `?model=NAME`"
            ))),
            (only, _) => only.ok_or_else(|| {
                unable(
                    "the weights of no model can be replaced: it needs `--weight-updates-dir=DIR`, and a language model"
                        .to_owned(),
                )
            }),
        }
    }
}
