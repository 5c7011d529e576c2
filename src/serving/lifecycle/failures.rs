//! Loads that fail: the log, the reasons in the repository index, and the error with the words of Triton.

use repository::ModelSource;

use super::Lifecycle;
use crate::found_model::FindError;
use crate::registry::VersionState;
use crate::{InferError, RateLimitedLog};

/// Log of failed loads. Clients may request any number of them.
static FAILURES: RateLimitedLog = RateLimitedLog::new(200);

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
    pub(super) fn versions_failed(&self, name: &str, failed: &[(i64, InferError)]) -> InferError {
        failed.iter().for_each(|(version, error)| self.record_version_error(name, *version, error));
        Self::load_failed(name, failed)
    }

    /// The same for all versions, with one reason.
    pub(super) fn all_versions_failed(&self, source: &ModelSource, reason: &InferError) -> InferError {
        let failed: Vec<_> = source.versions.iter().map(|&version| (version, reason.clone())).collect();
        self.versions_failed(&source.name, &failed)
    }

    /// The error of a model of which versions could not be loaded, with the reason of each.
    pub(super) fn load_failed(name: &str, versions: &[(i64, InferError)]) -> InferError {
        let line = |(version, error): &(i64, InferError)| {
            format!("version {version} is at UNAVAILABLE state: {}: {};", error.kind.title(), error.message)
        };
        let lines: Vec<String> = versions.iter().map(line).collect();
        InferError::invalid(format!("load failed for model '{name}': {}\n", lines.join("\n")))
    }
}
