//! Errors of clients.

/// Why a command failed.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs)] // Fields are named by their messages.
pub enum ClientError {
    #[error(
        "nothing answers at `{url}`: start a server with `launch --model_repo=DIR`, or name another with `-u HOST:PORT`"
    )]
    Unreachable { url: String, source: std::io::Error },
    #[error("`{url}` does not speak gRPC: give the gRPC port, 8001 unless the server has another")]
    NotGrpc { url: String, source: h2::Error },
    #[error("the connection to `{url}` broke: {source}")]
    Connection { url: String, source: h2::Error },
    #[error("model `{model}` is not ready at `{url}`; {known}")]
    NotReady { model: String, url: String, known: String },
    #[error("{message} ({code})")]
    Refused { code: &'static str, message: String },
    #[error("the server answered something else than the protocol allows: {0}")]
    Protocol(String),
    #[error("{what}: {source}")]
    Io { what: String, source: std::io::Error },
    #[error("{0}")]
    Usage(String),
    #[error("cancelled")]
    Cancelled,
}

impl ClientError {
    /// Converts the error of a connection's first call: a connection that breaks there does not speak gRPC.
    pub fn on_first_call(self) -> Self {
        match self {
            ClientError::Connection { url, source } => ClientError::NotGrpc { url, source },
            other => other,
        }
    }
}
