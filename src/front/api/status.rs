//! The table from error kinds to gRPC codes and HTTP statuses.

use std::borrow::Cow;

use http::StatusCode;
use serving::{ErrorKind, InferError};
use tonic::{Code, Status};

/// The gRPC code of an error kind.
pub fn grpc_code(kind: ErrorKind) -> Code {
    codes(kind).0
}

/// The HTTP status of an error kind.
pub fn http_status(kind: ErrorKind) -> StatusCode {
    codes(kind).1
}

fn codes(kind: ErrorKind) -> (Code, StatusCode) {
    match kind {
        ErrorKind::Unknown => (Code::Unknown, StatusCode::BAD_REQUEST),
        ErrorKind::Internal => (Code::Internal, StatusCode::INTERNAL_SERVER_ERROR),
        ErrorKind::NotFound => (Code::NotFound, StatusCode::NOT_FOUND),
        ErrorKind::InvalidArgument => (Code::InvalidArgument, StatusCode::BAD_REQUEST),
        ErrorKind::Unavailable => (Code::Unavailable, StatusCode::SERVICE_UNAVAILABLE),
        ErrorKind::Unsupported => (Code::Unimplemented, StatusCode::NOT_IMPLEMENTED),
        ErrorKind::AlreadyExists => (Code::AlreadyExists, StatusCode::BAD_REQUEST),
        ErrorKind::Cancelled => (Code::Cancelled, StatusCode::BAD_REQUEST),
    }
}

/// The HTTP status of a model's error in `generate`. As in Triton it is 400 for every kind, except that an unavailable model has
/// its own status, so that clients can retry at another server.
pub fn generate_status(kind: ErrorKind) -> StatusCode {
    match kind {
        ErrorKind::Unavailable => http_status(kind),
        _ => StatusCode::BAD_REQUEST,
    }
}

/// Seconds after which a client should retry an unavailable request. Lost workers restart within a second.
pub const RETRY_AFTER_SECS: u64 = 1;

/// The gRPC status of an error with its message. An unavailable one has `retry-after` metadata, as over HTTP.
pub fn grpc_status(error: InferError) -> Status {
    let mut status = Status::new(grpc_code(error.kind), shown(&error.message));
    if error.kind == ErrorKind::Unavailable {
        status.metadata_mut().insert("retry-after", RETRY_AFTER_SECS.into());
    }
    status
}

/// Maximum length of an error message to a client in bytes. Messages quote the request, which may be long.
const MAX_MESSAGE_BYTES: usize = 8 << 10;

/// An error's message for clients: complete, or truncated with its original length.
pub fn shown(message: &str) -> Cow<'_, str> {
    if message.len() <= MAX_MESSAGE_BYTES {
        return message.into();
    }
    let end = message.floor_char_boundary(MAX_MESSAGE_BYTES);
    format!("{}… ({} bytes in all)", &message[..end], message.len()).into()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_long_message_is_truncated_at_a_character_boundary() {
        assert_eq!(shown("as it is"), "as it is");
        let long = format!("a{}", "é".repeat(MAX_MESSAGE_BYTES));
        let cut = shown(&long);
        assert!(cut.starts_with("aé") && cut.ends_with("é… (16385 bytes in all)"), "{}", &cut[cut.len() - 40..]);
        assert!(cut.len() < MAX_MESSAGE_BYTES + 40);
    }
}
