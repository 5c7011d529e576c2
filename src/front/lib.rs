//! What clients talk to: KServe's protocol over gRPC and HTTP, and metrics.
//!
//! [`start`] binds every port of a [`Config`] and serves the models behind it until [`Running::shutdown`].
//! Only this room knows wire formats; the models' lives and their work are `serving`'s and `backends`'.
#![forbid(unsafe_code)]

mod ask;
mod body;
mod classification;
mod coding;
mod config;
mod door;
mod generate;
mod grpc_request;
mod grpc_service;
mod health;
mod http_infer;
mod http_route;
mod json;
mod json_writer;
mod kserve_grpc;
mod kserve_http;
mod listener;
mod models;
mod proto;
mod reply;
mod running;
mod settings;
mod shared_memory;
mod state;
mod status;
mod stream_infer;

pub use config::{Address, Compression, Config, ConfigError};
pub use door::{Models, Server};
pub use listener::StartError;
pub use running::{Addresses, Running, start};
pub use status::{grpc_code, http_status};
