//! The network front: Triton's (KServe v2), OpenAI's and Anthropic's protocols over HTTP and gRPC, and Prometheus metrics.
//!
//! [`start`] binds the ports of a [`Config`] and serves the models of a [`serving::Server`] until [`Running::shutdown`].
//! Only this crate knows wire formats. `serving` manages the models, and `backends` run them.
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

mod api;
mod chat;
mod config;
#[cfg(feature = "fuzzing")]
pub mod fuzz;
pub mod relay;
mod running;
mod state;
mod telemetry;
mod transport;

pub use api::status::{grpc_code, http_status};
pub use api::triton::header_parameters::HeaderPattern;
pub use api::triton::shared_memory::{ClientDevices, ClientObjects, DeviceMemory};
pub use chat::{Chat, ChatPrompts, Conversation, UnknownFields};
pub use config::{Address, Compression, Config, ConfigError, WorldFacts};
pub use running::{Listeners, RelayListeners, Running, start, start_on};
pub use state::Addresses;
pub use telemetry::exposition::{Family, FamilyKind, Labels, Sample};
pub use telemetry::ledger::LedgerSource;
pub use telemetry::log_settings::{LogControl, LogFormat, LogOptions};
pub use telemetry::metrics_settings::{MetricsOptions, MetricsSource};
pub use telemetry::otlp_export::Collector;
pub use telemetry::trace_file::TraceBounds;
pub use telemetry::trace_settings::TraceOptions;
pub use transport::listener::StartError;
pub use transport::origins::Origins;
pub use transport::restricted::{Api, Restrictions};
pub use transport::tls::{Tls, TlsError};
