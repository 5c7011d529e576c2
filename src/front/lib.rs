//! What clients talk to: KServe's protocol over gRPC and HTTP, and metrics.
//!
//! [`start`] binds every port of a [`Config`] and serves the models behind it until [`Running::shutdown`].
//! Only this room knows wire formats; the models' lives and their work are `serving`'s and `backends`'.
//!
//! ```
//! use front::{Address, Config};
//!
//! let config = Config { http: Some(Address::new("127.0.0.1", 9000)), metrics: None, ..Config::default() };
//! assert_eq!(config.grpc, Some(Address::new("0.0.0.0", 8001)));
//! config.validate()?;
//! // `front::start(config, server, Vec::new()).await?` binds the ports and serves.
//! # Ok::<(), front::ConfigError>(())
//! ```
#![forbid(unsafe_code)]

mod aside;
mod ask;
mod base64;
mod body;
mod budget;
mod classification;
mod client_stream;
mod coalesce;
mod codec;
mod coding;
mod config;
mod connections;
mod exposition;
mod forward;
#[cfg(feature = "fuzzing")]
pub mod fuzz;
mod generate;
mod grpc_messages;
mod grpc_models;
mod grpc_request;
mod grpc_scan;
mod grpc_service;
mod health;
mod http2;
mod http_infer;
mod http_models;
mod http_repository;
mod http_route;
mod http_settings;
mod json;
mod json_writer;
mod kserve_grpc;
mod kserve_http;
mod ledger;
mod listener;
mod log_settings;
mod metrics;
mod openai;
mod origins;
mod otlp;
mod otlp_export;
mod proto;
mod reply;
mod restricted;
mod running;
mod shapes;
mod shared_memory;
mod state;
mod status;
mod stream_call;
mod stream_infer;
mod tls;
mod trace_file;
mod trace_settings;
mod wake_flag;

pub use config::{Address, Compression, Config, ConfigError};
pub use exposition::{Family, FamilyKind, Labels, Sample};
pub use forward::HeaderPattern;
pub use ledger::LedgerSource;
pub use listener::StartError;
pub use log_settings::{LogControl, LogFormat, LogOptions};
pub use metrics::{MetricsOptions, MetricsSource};
pub use openai::{Chat, ChatPrompts, Conversation, UnknownFields};
pub use origins::Origins;
pub use otlp_export::Collector;
pub use restricted::{Api, Restrictions};
pub use running::{Addresses, Listeners, Running, start, start_on};
pub use shared_memory::{ClientDevices, ClientObjects, DeviceMemory};
pub use status::{grpc_code, http_status};
pub use tls::{Tls, TlsError};
pub use trace_file::TraceBounds;
pub use trace_settings::TraceOptions;
