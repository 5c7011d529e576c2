//! `trireme client`, and the KServe gRPC client of the project's tools.
//!
//! [`ClientArgs`] is the command line, [`run_client`] executes it. [`grpc::Connection`] implements gRPC directly on HTTP/2, so that a
//! load generator takes little CPU time from a server on the same cores.
#![forbid(unsafe_code)]

mod error;
pub mod grpc;
mod prompt;
pub mod tensor;

pub use error::ClientError;
pub use prompt::{ClientArgs, run_client};

/// The protocol's messages.
#[allow(missing_docs, clippy::all)] // Generated from the protocol's own file.
pub mod proto {
    include!(concat!(env!("OUT_DIR"), "/inference.rs"));
}

/// A runtime of one thread: enough for a client, and it leaves the other cores to the server.
///
/// # Errors
/// When the system refuses it.
pub fn runtime() -> Result<tokio::runtime::Runtime, ClientError> {
    tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .map_err(|source| ClientError::Io { what: "starting the client's runtime".into(), source })
}
