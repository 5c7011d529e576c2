//! Finds a model before it is loaded: its directory in the repository, or the configuration and files of a load request.

use std::collections::{BTreeMap, BTreeSet};
use std::io::Write as _;
use std::path::{Component, Path};
use std::time::SystemTime;

use bytes::Bytes;
use repository::{ModelSource, Repository, RepositoryError};
use tempfile::TempDir;

use crate::InferError;

/// Configuration and files of a load request, which replace the repository's own.
#[derive(Debug, Clone, Default)]
pub struct LoadOverrides {
    /// The model's configuration as JSON.
    pub config: Option<String>,
    /// Files by `<version>/<name>`. If there are any, the model's own directory is not read.
    pub files: BTreeMap<String, Bytes>,
}

/// A model that was found and can be loaded.
pub(crate) struct FoundModel {
    pub source: ModelSource,
    pub modified: Option<SystemTime>,
    /// Files of the load request. They are removed when this is dropped.
    pub files: Option<TempDir>,
}

/// Why a model's directory, or the files of the load request, cannot be loaded.
#[derive(Debug, thiserror::Error)]
pub(crate) enum FindError {
    /// The configuration is valid, but no version exists that the version policy serves.
    #[error("load failed for model '{name}': {source}\n")]
    NoVersion { name: String, source: RepositoryError },
    /// The model does not exist or cannot be read.
    #[error("failed to load '{name}', failed to poll from model repository{why}")]
    Poll { name: String, why: String },
}

impl From<FindError> for InferError {
    fn from(error: FindError) -> Self {
        match error {
            FindError::NoVersion { .. } => InferError::invalid(error.to_string()),
            FindError::Poll { .. } => InferError::internal(error.to_string()),
        }
    }
}

/// Reads the model's directory, or the configuration and files of the load request.
pub(crate) fn find(repository: &Repository, name: &str, overrides: LoadOverrides) -> Result<FoundModel, FindError> {
    let poll_failed = |why: String| FindError::Poll { name: name.to_owned(), why };
    let explain = |error: RepositoryError| match error {
        RepositoryError::NoVersion { .. } => FindError::NoVersion { name: name.to_owned(), source: error },
        RepositoryError::UnknownModel { .. } => poll_failed(String::new()),
        error => poll_failed(format!(": {error}")),
    };
    Repository::check_name(name).map_err(explain)?;
    let modified = repository.modified(name);
    let LoadOverrides { config, files } = overrides;
    let (source, files) = match config {
        Some(config) if !files.is_empty() => {
            let dir = write_files(name, &files).map_err(poll_failed)?;
            let given = Repository::open(&[dir.path().to_owned()]).map_err(explain)?;
            (given.model_with_config(name, &config).map_err(explain)?, Some(dir))
        }
        Some(config) => (repository.model_with_config(name, &config).map_err(explain)?, None),
        None if !files.is_empty() => {
            return Err(poll_failed(": files need the parameter `config` beside them".into()));
        }
        None => (repository.model(name).map_err(explain)?, None),
    };
    Ok(FoundModel { source, modified, files })
}

/// Whether `name` is among the composing models of `models`, directly or through other ensembles.
pub(crate) fn contains_cycle(repository: &Repository, name: &str, models: &[String]) -> bool {
    let (mut open, mut seen) = (models.to_vec(), BTreeSet::new());
    while let Some(model) = open.pop() {
        if model == name {
            return true;
        }
        let source = seen.insert(model.clone()).then(|| repository.model(&model));
        let Some(Ok(source)) = source else { continue };
        open.extend(source.config.ensemble().iter().flat_map(|it| &it.step).map(|step| step.model_name.clone()));
    }
    false
}

/// Writes the files of a load request into a new temporary repository that only this user can access. The caller has
/// checked `name`.
fn write_files(name: &str, files: &BTreeMap<String, Bytes>) -> Result<TempDir, String> {
    let failed = |error: std::io::Error| format!(": cannot keep the given files: {error}");
    let dir = tempfile::Builder::new().prefix("trireme-model-").tempdir().map_err(failed)?;
    for (path, contents) in files {
        let is_plain = |part: Component| matches!(part, Component::Normal(_));
        if path.is_empty() || !Path::new(path).components().all(is_plain) {
            return Err(format!(": `file:{path}` is not of the form `file:<version>/<name>`"));
        }
        let path = dir.path().join(name).join(path);
        std::fs::create_dir_all(path.parent().expect("it is below the model's directory")).map_err(failed)?;
        std::fs::File::create_new(path).and_then(|mut file| file.write_all(contents)).map_err(failed)?;
    }
    Ok(dir)
}
