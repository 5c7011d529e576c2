//! Errors that a client hears of.

/// What kind of failure: `front` maps each to one gRPC code and one HTTP status.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum ErrorKind {
    /// Not known to anyone.
    Unknown,
    /// A fault of ours.
    Internal,
    /// No such model, version or region.
    NotFound,
    /// The request is wrong.
    InvalidArgument,
    /// Not now: loading, draining, queue full, timed out.
    Unavailable,
    /// Not something this model or server does.
    Unsupported,
    /// It is there already.
    AlreadyExists,
    /// The client left or cancelled.
    Cancelled,
}

impl ErrorKind {
    /// The kind in words, as reasons in the repository index begin.
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

/// An error with the words a client reads.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{message}")]
pub struct InferError {
    /// What kind.
    pub kind: ErrorKind,
    /// What, where, and what to do.
    pub message: String,
}

impl InferError {
    /// An error of `kind`.
    pub fn new(kind: ErrorKind, message: impl Into<String>) -> Self {
        Self { kind, message: message.into() }
    }

    /// The request is wrong.
    pub fn invalid(message: impl Into<String>) -> Self {
        Self::new(ErrorKind::InvalidArgument, message)
    }

    /// Not now.
    pub fn unavailable(message: impl Into<String>) -> Self {
        Self::new(ErrorKind::Unavailable, message)
    }

    /// No such model, version or region.
    pub fn not_found(message: impl Into<String>) -> Self {
        Self::new(ErrorKind::NotFound, message)
    }

    /// A fault of ours.
    pub fn internal(message: impl Into<String>) -> Self {
        Self::new(ErrorKind::Internal, message)
    }
}
