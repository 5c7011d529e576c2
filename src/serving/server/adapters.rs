//! Adapters (LoRA) of models: each name is that of a model, too.

use std::path::Path;
use std::sync::Arc;

use super::Server;
use crate::model::ServedModel;
use crate::{AdapterInfo, Adapters, InferError, Limit};

impl Server {
    /// The adapters of a model; `None` for a model that takes none.
    pub fn adapters_of(&self, model: &str) -> Option<Arc<dyn Adapters>> {
        self.registry().resolve(self.model_of(model), "").ok()?.adapters()
    }

    /// The adapters of a model that requests may name; none for a model that is not loaded.
    pub fn adapters(&self, model: &str) -> Vec<AdapterInfo> {
        self.adapters_of(model).map_or_else(Vec::new, |adapters| adapters.list())
    }

    /// Whether a model, and not an adapter, has this name.
    pub fn has_model(&self, name: &str) -> bool {
        !self.registry().ready_versions(name).is_empty()
    }

    /// The name of the model that has this adapter. Where an ensemble serves it, that is the ensemble.
    pub fn model_of_adapter(&self, name: &str) -> Option<String> {
        self.served_with(name).map(|model| model.config.name.clone())
    }

    /// The model that serves requests with this adapter.
    pub(super) fn served_with(&self, adapter: &str) -> Option<Arc<ServedModel>> {
        let has_adapter = |model: &Arc<ServedModel>| model.adapters().is_some_and(|it| it.contains(adapter));
        let mut models: Vec<_> = self.registry().all_ready().into_iter().filter(has_adapter).collect();
        // Models of texts come first: an ensemble, then others with a tokenizer.
        models.sort_by_key(|model| (model.config.ensemble().is_none(), model.generator().is_none()));
        models.into_iter().next()
    }

    /// Loads an adapter of a model from a folder; without a model, of the only one that takes adapters.
    ///
    /// # Errors
    /// When there is no such model, a model has the name, or the adapter does not fit.
    pub async fn load_adapter(&self, model: Option<&str>, name: &str, path: &Path) -> Result<(), InferError> {
        self.config.limits.check(Limit::NameBytes, name.len())?;
        if name.is_empty() {
            return Err(InferError::invalid("the name of an adapter is empty"));
        }
        if self.registry().names().iter().any(|known| known == name) || self.model_of(name) != name {
            return Err(InferError::invalid(format!(
                "`{name}` is the name of a model; choose another for the adapter"
            )));
        }
        if let Some(other) = self.model_of_adapter(name) {
            let message = format!("adapter `{name}` is loaded already, for model `{other}`; unload it first");
            return Err(InferError::invalid(message));
        }
        let adapters = match model {
            Some(model) => self.resolve(model, "")?.adapters(),
            None => self.only_adapters()?,
        };
        let none = || InferError::invalid("the model takes no adapters; load it with the parameter `max_loras`");
        adapters.ok_or_else(none)?.load(name, path).await
    }

    /// The adapters of the only model that takes some.
    fn only_adapters(&self) -> Result<Option<Arc<dyn Adapters>>, InferError> {
        let models = self.registry().all_ready();
        let is_own = |model: &&Arc<ServedModel>| model.config.ensemble().is_none() && model.adapters().is_some();
        let mut own = models.iter().filter(is_own);
        match (own.next(), own.next()) {
            (Some(first), Some(second)) => Err(InferError::invalid(format!(
                "models `{}` and `{}` take adapters; name one of them by `base_model_name`",
                first.config.name, second.config.name
            ))),
            (only, _) => Ok(only.and_then(|model| model.adapters())),
        }
    }

    /// Removes an adapter. New requests do not find it; resolves when no request uses it.
    ///
    /// # Errors
    /// When there is no adapter of this name.
    pub async fn unload_adapter(&self, name: &str) -> Result<(), InferError> {
        let unknown = || InferError::not_found(format!("there is no adapter `{name}`; `GET /v1/models` lists them"));
        let adapters = self.served_with(name).and_then(|model| model.adapters()).ok_or_else(unknown)?;
        adapters.unload(name).await
    }
}
