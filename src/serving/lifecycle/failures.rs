//! Loads that fail: the log, the reasons in the repository index, and the error with the words of Triton.

use repository::{ModelSource, RepositoryError};

use super::Lifecycle;
use crate::found_model::FindError;
use crate::registry::VersionState;
use crate::{InferError, RateLimitedLog};

/// Log of failed loads. Clients may request any number of them.
static FAILURES: RateLimitedLog = RateLimitedLog::new(200);

/// A model that could not be loaded.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LoadFailure {
    /// The model's name.
    pub model: String,
    /// Why it failed, and what to do: of each version.
    pub reason: String,
    /// The cause alone, of the first version that failed.
    pub cause: LoadCause,
}

impl LoadFailure {
    /// Of no model: the repository cannot be read.
    pub(crate) fn of_repository(error: &RepositoryError) -> Self {
        let reason = error.to_string();
        Self { model: String::new(), cause: LoadCause::Own(InferError::internal(reason.clone())), reason }
    }
}

/// What keeps a model from being loaded.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum LoadCause {
    /// The model itself.
    Own(InferError),
    /// A model of the ensemble is not loaded.
    ComposingModel(InferError),
}

impl LoadCause {
    /// What failed, and what to do.
    pub fn error(&self) -> &InferError {
        let (LoadCause::Own(error) | LoadCause::ComposingModel(error)) = self;
        error
    }
}

impl From<InferError> for LoadCause {
    fn from(error: InferError) -> Self {
        LoadCause::Own(error)
    }
}

/// Why a load failed.
#[derive(Debug)]
pub(crate) struct LoadError {
    /// The error that the client gets, with the words of Triton.
    pub error: InferError,
    /// The cause, of the first version that failed.
    pub cause: LoadCause,
}

impl From<InferError> for LoadError {
    fn from(error: InferError) -> Self {
        Self { cause: error.clone().into(), error }
    }
}

impl From<FindError> for LoadError {
    fn from(error: FindError) -> Self {
        InferError::from(error).into()
    }
}

impl Lifecycle {
    /// Logs that a model was not found, and records the reason for the repository index.
    pub(super) fn record_find_error(&self, name: &str, error: &FindError) {
        let message = error.to_string();
        if let Some(suppressed) = FAILURES.allow() {
            tracing::error!("{}{suppressed}", message.trim_end());
        }
        if self.repository.model_names().is_ok_and(|names| names.iter().any(|known| known == name)) {
            let lacks_versions = matches!(error, FindError::NoVersion { .. });
            self.registry.update(name, |entry| {
                (entry.failure, entry.lacks_versions) = (Some(message), lacks_versions);
            });
        }
    }

    /// Logs that a version did not load, and records the reason. An old load of this version continues to serve.
    pub(super) fn record_version_error(&self, name: &str, version: i64, error: &InferError) {
        let reason = format!("{}: {}", error.kind.title(), error.message);
        if let Some(suppressed) = FAILURES.allow() {
            tracing::error!("failed to load '{name}' version {version}: {reason}{suppressed}");
        }
        self.registry.update(name, |entry| {
            let state = entry.versions.entry(version).or_insert(VersionState::Loading);
            if !matches!(state, VersionState::Ready(_)) {
                *state = VersionState::Unavailable(reason);
            }
        });
    }

    /// Records why versions of a model cannot be loaded, and returns the error of the load.
    pub(super) fn versions_failed(&self, name: &str, failed: &[(i64, InferError)]) -> LoadError {
        failed.iter().for_each(|(version, error)| self.record_version_error(name, *version, error));
        Self::load_failed(name, failed)
    }

    /// The same for all versions, with one reason.
    pub(super) fn all_versions_failed(&self, source: &ModelSource, cause: LoadCause) -> LoadError {
        let failed: Vec<_> = source.versions.iter().map(|&version| (version, cause.error().clone())).collect();
        LoadError { cause, ..self.versions_failed(&source.name, &failed) }
    }

    /// The error of a model of which versions could not be loaded, with the reason of each.
    pub(super) fn load_failed(name: &str, versions: &[(i64, InferError)]) -> LoadError {
        let line = |(version, error): &(i64, InferError)| {
            format!("version {version} is at UNAVAILABLE state: {}: {};", error.kind.title(), error.message)
        };
        let lines: Vec<String> = versions.iter().map(line).collect();
        let error = InferError::invalid(format!("load failed for model '{name}': {}\n", lines.join("\n")));
        LoadError { cause: versions.first().map_or_else(|| error.clone(), |(_, first)| first.clone()).into(), error }
    }
}
