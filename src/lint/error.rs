//! Errors of the commands.

/// Why a command failed.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs)] // Fields are named by their messages.
pub enum LintError {
    #[error("{0}")]
    Repository(#[from] repository::RepositoryError),
    #[error("{what}: {source}")]
    Io { what: String, source: std::io::Error },
    #[error("{0}")]
    Usage(String),
}
