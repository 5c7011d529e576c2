//! Errors that are returned to clients.

/// Kinds of errors. `front` maps each to one gRPC code and one HTTP status.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum ErrorKind {
    /// The cause is unknown.
    Unknown,
    /// A fault in the server or the model.
    Internal,
    /// The model, version or region does not exist.
    NotFound,
    /// The request is invalid.
    InvalidArgument,
    /// The request cannot be served now: loading, draining, queue full, timed out.
    Unavailable,
    /// The model or server does not support the operation.
    Unsupported,
    /// The object exists already.
    AlreadyExists,
    /// The client left or cancelled.
    Cancelled,
}

impl ErrorKind {
    /// The name of the kind, which reasons in the repository index begin with.
    pub fn title(self) -> &'static str {
        match self {
            ErrorKind::Unknown => "Unknown",
            ErrorKind::Internal => "Internal",
            ErrorKind::NotFound => "Not found",
            ErrorKind::InvalidArgument => "Invalid argument",
            ErrorKind::Unavailable => "Unavailable",
            ErrorKind::Unsupported => "Unsupported",
            ErrorKind::AlreadyExists => "Already exists",
            ErrorKind::Cancelled => "Cancelled",
        }
    }
}

/// An error with the message that the client gets.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{message}")]
pub struct InferError {
    /// The kind of error.
    pub kind: ErrorKind,
    /// What failed, where, and what to do.
    pub message: String,
}

impl InferError {
    /// An error of `kind`.
    pub fn new(kind: ErrorKind, message: impl Into<String>) -> Self {
        Self { kind, message: message.into() }
    }

    /// An error for an invalid request.
    pub fn invalid(message: impl Into<String>) -> Self {
        Self::new(ErrorKind::InvalidArgument, message)
    }

    /// An error for a request that cannot be served now.
    pub fn unavailable(message: impl Into<String>) -> Self {
        Self::new(ErrorKind::Unavailable, message)
    }

    /// An error for a model, version or region that does not exist.
    pub fn not_found(message: impl Into<String>) -> Self {
        Self::new(ErrorKind::NotFound, message)
    }

    /// An error for a fault in the server or the model.
    pub fn internal(message: impl Into<String>) -> Self {
        Self::new(ErrorKind::Internal, message)
    }
}
