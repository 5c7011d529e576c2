//! What talks to a running server: `trireme client` and `trireme bench`.
//!
//! [`ClientArgs`] and [`BenchArgs`] are the command lines, [`run_client`] and [`run_bench`] carry them out.
//! Both speak the protocol as any client would; gRPC goes straight over HTTP/2, so that a load generator on the
//! server's own cores takes little from it.
#![forbid(unsafe_code)]

mod bench_infer;
mod bench_serve;
mod error;
pub mod grpc;
mod http_load;
mod prompt;
mod report;
mod tensor;

use clap::{Args, Subcommand};

pub use bench_infer::InferArgs;
pub use bench_serve::ServeArgs;
pub use error::ClientError;
pub use prompt::{ClientArgs, run_client};

/// The protocol's messages.
#[allow(missing_docs, clippy::all)] // Generated from the protocol's own file.
pub mod proto {
    include!(concat!(env!("OUT_DIR"), "/inference.rs"));
}

/// `trireme bench`
#[derive(Debug, Clone, Args)]
pub struct BenchArgs {
    /// What to measure.
    #[command(subcommand)]
    pub command: BenchCommand,
}

/// What to measure.
#[derive(Debug, Clone, Subcommand)]
pub enum BenchCommand {
    /// Token throughput and latencies of an LLM over a workload file
    Serve(ServeArgs),
    /// Requests per second and latencies of any model
    Infer(InferArgs),
}

/// Runs a benchmark and prints its figures.
///
/// # Errors
/// When the server cannot be asked, or a file cannot be read or written.
pub fn run_bench(args: BenchArgs) -> Result<(), ClientError> {
    match args.command {
        BenchCommand::Serve(args) => runtime()?.block_on(bench_serve::run(args)),
        BenchCommand::Infer(args) => runtime()?.block_on(bench_infer::run(args)),
    }
}

/// One thread is enough for a client, and leaves the other cores to the server.
fn runtime() -> Result<tokio::runtime::Runtime, ClientError> {
    tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .map_err(|source| ClientError::Io { what: "starting the client's runtime".into(), source })
}
