//! Requests that the engine refuses, as errors of their clients.

use engine::Refused;
use serving::{ErrorKind, InferError};

/// The error that a client gets.
pub(crate) fn error_of(refused: &Refused) -> InferError {
    let kind = match refused {
        Refused::QueueFull { .. } | Refused::LevelFull { .. } => ErrorKind::Unavailable,
        _ => ErrorKind::InvalidArgument,
    };
    InferError::new(kind, refused.to_string())
}
