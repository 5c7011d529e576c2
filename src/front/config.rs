//! Addresses, limits and other settings of the front.

use std::sync::Arc;
use std::time::Duration;

use record::Recorder;
use tokio::sync::Semaphore;

use crate::api::triton::header_parameters::HeaderPattern;
use crate::api::triton::shared_memory::{ClientDevices, ClientObjects, DEFAULT_MAX_REGIONS};
use crate::chat::{Chat, UnknownFields};
use crate::telemetry::ledger::LedgerSource;
use crate::telemetry::log_settings::LogControl;
use crate::telemetry::metrics_settings::MetricsOptions;
use crate::telemetry::trace_settings::TraceOptions;
use crate::transport::origins::Origins;
use crate::transport::restricted::{Api, Restrictions};
use crate::transport::tls::Tls;

/// A host and a port. The system chooses the port if it is 0.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Address {
    /// Name or IP address, for example `0.0.0.0`.
    pub host: String,
    /// Port, for example 8001.
    pub port: u16,
}

impl Address {
    /// An address from its parts.
    pub fn new(host: impl Into<String>, port: u16) -> Self {
        Self { host: host.into(), port }
    }
}

impl std::fmt::Display for Address {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(formatter, "{}:{}", self.host, self.port)
    }
}

/// Compression of gRPC responses for clients that accept it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Compression {
    /// No compression, which suits fast networks.
    #[default]
    None,
    /// gzip.
    Gzip,
    /// deflate.
    Deflate,
}

/// What is known of the world of this server.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct WorldFacts {
    /// The host of each rank.
    pub hosts: Vec<String>,
    /// How often its launcher has started it again; `None` without a launcher.
    pub num_restarts: Option<u32>,
}

/// Settings of the front. [`Config::default`] listens on Triton's ports.
#[derive(Debug, Clone)]
pub struct Config {
    /// Address of gRPC; `None` disables it.
    pub grpc: Option<Address>,
    /// Address of HTTP; `None` disables it.
    pub http: Option<Address>,
    /// Address of Prometheus metrics; `None` disables them.
    pub metrics: Option<Address>,
    /// Which durations of models the metrics contain.
    pub metrics_options: MetricsOptions,
    /// Maximum gRPC message of a client, after decompression.
    pub max_grpc_message_bytes: usize,
    /// Maximum concurrent gRPC calls over all connections; further calls are refused.
    pub max_grpc_streams: usize,
    /// Maximum HTTP request body, before and after decompression.
    pub max_http_body_bytes: usize,
    /// Maximum memory in bytes for the bodies of all requests in flight; further requests are refused.
    pub max_bytes_in_flight: usize,
    /// Maximum requests in flight of one gRPC stream; further requests wait in the client's flow-control window.
    pub max_requests_per_stream: usize,
    /// Maximum connections of one port. Idle connections are evicted in favour of new ones; if none is idle, new ones wait.
    pub max_connections: u32,
    /// Maximum connections of one client address; further connections are closed. 0 is no limit.
    pub max_connections_per_address: u32,
    /// Time after which a write fails if the client reads nothing; `None` is unlimited.
    pub write_timeout: Option<Duration>,
    /// Compression of gRPC responses.
    pub grpc_response_compression: Compression,
    /// TLS of the gRPC port; `None` serves without TLS.
    pub grpc_tls: Option<Tls>,
    /// TLS of the HTTP port; `None` serves without TLS.
    pub http_tls: Option<Tls>,
    /// TLS of the metrics port; `None` serves without TLS.
    pub metrics_tls: Option<Tls>,
    /// Whether every request comes from the launcher's relay, which has the connections of the clients.
    pub is_behind_relay: bool,
    /// Whether other servers may bind the gRPC port too, if all of them set this.
    pub reuse_grpc_port: bool,
    /// Whether other servers may bind the HTTP port too, if all of them set this.
    pub reuse_http_port: bool,
    /// APIs that require a key over gRPC.
    pub grpc_restrictions: Restrictions,
    /// APIs that require a key over HTTP.
    pub http_restrictions: Restrictions,
    /// gRPC metadata that is passed to models as parameters.
    pub grpc_forward: HeaderPattern,
    /// HTTP headers that are passed to models as parameters.
    pub http_forward: HeaderPattern,
    /// Age at which a gRPC connection accepts no further call; `None` is unlimited.
    pub grpc_max_connection_age: Option<Duration>,
    /// Time for the remaining calls of such a connection; `None` is unlimited.
    pub grpc_max_connection_age_grace: Option<Duration>,
    /// Time without data after which a gRPC client is pinged.
    pub grpc_keepalive_time: Duration,
    /// Time after a ping without data that ends the connection.
    pub grpc_keepalive_timeout: Duration,
    /// Timeout of the head of an HTTP request.
    pub http_header_timeout: Duration,
    /// Maximum time without data in the middle of a request's body or a gRPC message.
    pub http_body_timeout: Duration,
    /// Minimum rate of such a body in bytes per second, measured over that time.
    pub min_body_rate: usize,
    /// Origins whose web pages may use the HTTP port.
    pub http_origins: Origins,
    /// Log settings and the function that applies changes.
    pub log: LogControl,
    /// Initial trace settings and the destination of traces.
    pub trace: TraceOptions,
    /// The response of `GET /debug/ledger` on the metrics port; `None` disables it.
    pub ledger: Option<LedgerSource>,
    /// Where requests over HTTP are recorded; `None` records none.
    pub recorder: Option<Arc<Recorder>>,
    /// Renders prompts of conversations, for OpenAI's and Anthropic's protocols.
    pub chat: Chat,
    /// How OpenAI's endpoints handle unknown fields.
    pub unknown_fields: UnknownFields,
    /// Whether OpenAI's endpoints take defaults of sampling from a checkpoint's `generation_config.json`.
    pub uses_generation_config: bool,
    /// Whether HTTP serves the page at `/` and `/ui`.
    pub serves_page: bool,
    /// The world of this server, for the page.
    pub world: WorldFacts,
    /// Whether clients may register shared memory.
    pub allow_client_shm: bool,
    /// Opens device memory of clients; `None` without devices.
    pub client_devices: Option<Arc<dyn ClientDevices>>,
    /// Which shared-memory objects clients may register.
    pub client_objects: ClientObjects,
    /// Maximum registered regions of shared memory.
    pub max_shm_regions: usize,
}

impl Default for Config {
    fn default() -> Self {
        Self {
            grpc: Some(Address::new("0.0.0.0", 8001)),
            http: Some(Address::new("0.0.0.0", 8000)),
            metrics: Some(Address::new("0.0.0.0", 8002)),
            // Tensors of images and prompts are far smaller; clients with larger messages need a flag.
            max_grpc_message_bytes: 256 << 20,
            max_grpc_streams: 16_384,
            max_http_body_bytes: 64 << 20,
            max_bytes_in_flight: 4 << 30,
            max_requests_per_stream: 4096,
            max_connections: 16_384,
            max_connections_per_address: 0,
            write_timeout: Some(Duration::from_secs(300)),
            grpc_response_compression: Compression::None,
            grpc_tls: None,
            http_tls: None,
            metrics_tls: None,
            is_behind_relay: false,
            reuse_grpc_port: false,
            reuse_http_port: false,
            grpc_restrictions: Restrictions::default(),
            http_restrictions: Restrictions::default(),
            grpc_forward: HeaderPattern::default(),
            http_forward: HeaderPattern::default(),
            metrics_options: MetricsOptions::default(),
            grpc_max_connection_age: None,
            grpc_max_connection_age_grace: None,
            grpc_keepalive_time: Duration::from_secs(7200),
            grpc_keepalive_timeout: Duration::from_secs(20),
            http_header_timeout: Duration::from_secs(30),
            http_body_timeout: Duration::from_secs(30),
            min_body_rate: 1024,
            http_origins: Origins::default(),
            log: LogControl::default(),
            trace: TraceOptions::default(),
            recorder: None,
            ledger: None,
            chat: Chat::default(),
            unknown_fields: UnknownFields::Refuse,
            uses_generation_config: true,
            serves_page: true,
            world: WorldFacts::default(),
            allow_client_shm: true,
            client_devices: None,
            client_objects: ClientObjects::default(),
            max_shm_regions: DEFAULT_MAX_REGIONS,
        }
    }
}

/// An invalid field of [`Config`].
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("front: `{field}` {reason}")]
pub struct ConfigError {
    /// The name of the field.
    pub field: &'static str,
    /// Why it is invalid, and what is valid.
    pub reason: String,
}

impl Config {
    /// Whether trace settings require a key over every protocol that is served.
    pub(crate) fn restricts_trace(&self) -> bool {
        let ports = [(&self.http, &self.http_restrictions), (&self.grpc, &self.grpc_restrictions)];
        ports.into_iter().all(|(port, restrictions)| port.is_none() || restrictions.restricts(Api::Trace))
    }

    /// Checks every field.
    ///
    /// # Errors
    /// With the first invalid field.
    pub fn validate(&self) -> Result<(), ConfigError> {
        let bounds = [
            ("max_grpc_message_bytes", self.max_grpc_message_bytes),
            ("max_http_body_bytes", self.max_http_body_bytes),
            ("max_bytes_in_flight", self.max_bytes_in_flight),
            ("max_requests_per_stream", self.max_requests_per_stream),
            ("max_grpc_streams", self.max_grpc_streams),
            ("max_connections", self.max_connections as usize),
        ];
        if let Some((field, _)) = bounds.into_iter().find(|(_, bound)| *bound == 0) {
            return Err(ConfigError { field, reason: "is 0, expected at least 1".into() });
        }
        if self.max_grpc_message_bytes > i32::MAX as usize {
            let reason = format!("is {}, expected at most {}", self.max_grpc_message_bytes, i32::MAX);
            return Err(ConfigError { field: "max_grpc_message_bytes", reason });
        }
        if self.max_grpc_streams > Semaphore::MAX_PERMITS {
            let reason = format!("is {}, expected at most {}", self.max_grpc_streams, Semaphore::MAX_PERMITS);
            return Err(ConfigError { field: "max_grpc_streams", reason });
        }
        self.validate_ports()
    }

    fn validate_ports(&self) -> Result<(), ConfigError> {
        let named = [("http", &self.http), ("metrics", &self.metrics)];
        for (index, (field, address)) in named.into_iter().enumerate() {
            let Some(address) = address.as_ref().filter(|address| address.port != 0) else { continue };
            let others = [("grpc", &self.grpc), named[0]];
            let clash = others[..=index].iter().find(|(_, other)| other.as_ref() == Some(address));
            if let Some((other, _)) = clash {
                return Err(ConfigError {
                    field,
                    reason: format!("is {address}, and so is `{other}`: give each its port"),
                });
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_defaults_are_valid() {
        assert_eq!(Config::default().validate(), Ok(()));
    }

    #[test]
    fn trace_is_restricted_if_every_port_requires_a_key() {
        let mut config = Config::default();
        assert!(!config.restricts_trace());
        config.http_restrictions.add_keys(Api::Trace, &["k".to_owned()]);
        assert!(!config.restricts_trace(), "gRPC is open");
        config.grpc = None;
        assert!(config.restricts_trace());
    }

    #[test]
    fn two_services_on_one_port_are_refused() {
        let config = Config { metrics: Some(Address::new("0.0.0.0", 8001)), ..Config::default() };
        let error = config.validate().unwrap_err();
        assert_eq!(error.to_string(), "front: `metrics` is 0.0.0.0:8001, and so is `grpc`: give each its port");
    }

    #[test]
    fn a_bound_of_zero_is_refused() {
        let config = Config { max_http_body_bytes: 0, ..Config::default() };
        assert_eq!(config.validate().unwrap_err().field, "max_http_body_bytes");
    }
}
