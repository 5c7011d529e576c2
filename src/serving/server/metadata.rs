//! What clients ask about the server and its models: metadata, configurations, statistics, the index of the repository.

use std::collections::BTreeSet;
use std::sync::Arc;

use repository::ModelConfig;

use super::Server;
use crate::cache::CacheStatistics;
use crate::model::ServedModel;
use crate::registry::{ModelIndexEntry, ModelState, parse_version};
use crate::statistics::ModelStatistics;
use crate::{InferError, ModelMetadata, ServerConfig, ServerMetadata};

impl Server {
    /// Metadata of the server.
    pub fn server_metadata(&self) -> ServerMetadata {
        let ServerConfig { name, version, extensions, .. } = &self.config;
        ServerMetadata { name: name.clone(), version: version.clone(), extensions: extensions.clone() }
    }

    /// Metadata of a model.
    ///
    /// # Errors
    /// When the model does not serve.
    pub fn model_metadata(&self, name: &str, version: &str) -> Result<ModelMetadata, InferError> {
        let model = self.resolve(name, version)?;
        let versions = match version {
            "" => self
                .registry()
                .ready_versions(self.model_of(name))
                .iter()
                .map(|model| model.version.to_string())
                .collect(),
            _ => vec![model.version_text.to_string()],
        };
        Ok(ModelMetadata::new(&model.config, versions))
    }

    /// A model's configuration with all defaults. [`repository::to_json`] converts it to JSON.
    ///
    /// # Errors
    /// When the model does not serve.
    pub fn model_config(&self, name: &str, version: &str) -> Result<Arc<ModelConfig>, InferError> {
        Ok(self.resolve(name, version)?.config.clone())
    }

    /// Names of the classes of an output, from its `label_filename`; `None` without one.
    pub fn output_labels(&self, name: &str, version: &str, output: &str) -> Option<Arc<[String]>> {
        self.resolve(name, version).ok()?.labels.get(output).cloned()
    }

    /// Statistics of a model's version, of all its versions (`version` empty), or of all models (`name` empty too).
    ///
    /// # Errors
    /// When the model does not serve.
    pub fn model_statistics(&self, name: &str, version: &str) -> Result<Vec<ModelStatistics>, InferError> {
        let models: Vec<Arc<ServedModel>> = match (self.model_of(name), parse_version(version)?) {
            ("", _) => self.registry().all_ready(),
            (name, None) => self.registry().ready_versions(name),
            (name, Some(number)) => {
                let mut models = self.registry().ready_versions(name);
                if models.is_empty() {
                    return Err(InferError::invalid(format!("requested model '{name}' is not available")));
                }
                models.retain(|model| model.version == number);
                if models.is_empty() {
                    let message = format!("requested model version is not available for model '{name}'");
                    return Err(InferError::invalid(message));
                }
                models
            }
        };
        if models.is_empty() && !name.is_empty() {
            return Err(InferError::invalid(format!("requested model '{name}' is not available")));
        }
        Ok(models.iter().map(|model| model.statistics()).collect())
    }

    /// Statistics of the response cache; `None` without one.
    pub fn cache_statistics(&self) -> Option<CacheStatistics> {
        self.lifecycle.cache.as_ref().map(|cache| cache.statistics())
    }

    /// Every model of the repository with its versions and their states, by name; with `ready_only`, only versions that serve.
    /// A model whose directory was removed is listed until it is unloaded.
    pub fn repository_index(&self, ready_only: bool) -> Vec<ModelIndexEntry> {
        let mut names: BTreeSet<String> = self.registry().names().into_iter().collect();
        if let Ok(present) = self.lifecycle.repository.model_names() {
            names.retain(|name| present.contains(name) || self.registry().is_active(name));
            names.extend(present);
        }
        let entries = names.iter().flat_map(|name| self.registry().index(name));
        entries.filter(|entry| !ready_only || entry.state == ModelState::Ready).collect()
    }
}
