//! Errors of this crate.

use std::path::PathBuf;

/// Why a model repository, or one model in it, cannot be read.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs)] // Fields are named by their messages.
pub enum RepositoryError {
    #[error("cannot read {}: {source}", .path.display())]
    Read { path: PathBuf, source: std::io::Error },
    #[error("no model repository given; start with `--model-repository=DIR`")]
    NoRepository,
    #[error("model repository {} is not a directory; `--model-repository` takes the directory that holds one folder a model", .path.display())]
    NotADirectory { path: PathBuf },
    #[error("no model `{name}` in the model repository")]
    UnknownModel { name: String },
    #[error("model `{name}` is in {} and in {}; keep one of them", .first.display(), .second.display())]
    Ambiguous { name: String, first: PathBuf, second: PathBuf },
    #[error("{}:{line}:{column}: {message}", .path.display())]
    Syntax { path: PathBuf, line: usize, column: usize, message: String },
    #[error("configuration given as JSON for model `{name}`: line {line}, column {column}: {message}")]
    Json { name: String, line: usize, column: usize, message: String },
    #[error("{}: {message}", .path.display())]
    Invalid { path: PathBuf, message: String },
    #[error("model `{name}` has no config.pbtxt in {} and its backend cannot be detected from its files; write a config.pbtxt with `backend:`", .dir.display())]
    NoConfig { name: String, dir: PathBuf },
    /// Uses Triton's wording, which clients may match.
    #[error("at least one version must be available under the version policy of model '{name}'")]
    NoVersion { name: String },
}
