//! Where the front listens and what it bounds.

use std::sync::Arc;
use std::time::Duration;

use tokio::sync::Semaphore;

use crate::api::triton::header_parameters::HeaderPattern;
use crate::api::triton::shared_memory::{ClientDevices, ClientObjects, MAX_REGIONS};
use crate::chat::{Chat, UnknownFields};
use crate::telemetry::ledger::LedgerSource;
use crate::telemetry::log_settings::LogControl;
use crate::telemetry::metrics_settings::MetricsOptions;
use crate::telemetry::trace_settings::TraceOptions;
use crate::transport::origins::Origins;
use crate::transport::restricted::{Api, Restrictions};
use crate::transport::tls::Tls;

/// A host (name or address) and a port; port 0 lets the system choose.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Address {
    /// Such as `0.0.0.0`.
    pub host: String,
    /// Such as 8001.
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

/// How gRPC responses are compressed for clients that accept it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Compression {
    /// Not at all, as fast networks like it.
    #[default]
    None,
    /// gzip.
    Gzip,
    /// deflate.
    Deflate,
}

/// Settings of the front. [`Config::default`] is what Triton's users expect.
#[derive(Debug, Clone)]
pub struct Config {
    /// KServe gRPC; `None` is off.
    pub grpc: Option<Address>,
    /// KServe HTTP; `None` is off.
    pub http: Option<Address>,
    /// Prometheus metrics; `None` is off.
    pub metrics: Option<Address>,
    /// Which durations of models they show.
    pub metrics_options: MetricsOptions,
    /// Largest gRPC message of a client, unpacked.
    pub max_grpc_message_bytes: usize,
    /// gRPC calls that may be open at once, over all connections; more are refused.
    pub max_grpc_streams: usize,
    /// Largest HTTP request body, before and after decompression.
    pub max_http_body_bytes: usize,
    /// Bytes that the bodies of all requests in flight may have together; more are refused.
    pub max_bytes_in_flight: usize,
    /// Requests of one gRPC stream that may be in flight; more wait in the client's window.
    pub max_requests_per_stream: usize,
    /// Connections of one port. Idle ones make room for more; where none is idle, more wait to be accepted.
    pub max_connections: u32,
    /// Connections of one client address; more are closed. 0 is any number.
    pub max_connections_per_address: u32,
    /// Time in which a client must read something of its answers; `None` is for ever.
    pub write_timeout: Option<Duration>,
    /// Compression of gRPC responses.
    pub grpc_response_compression: Compression,
    /// TLS of the gRPC port; `None` serves in the clear.
    pub grpc_tls: Option<Tls>,
    /// TLS of the HTTP port; `None` serves in the clear.
    pub http_tls: Option<Tls>,
    /// TLS of the metrics port; `None` serves in the clear.
    pub metrics_tls: Option<Tls>,
    /// Whether other servers may have the gRPC port too, if they all say so.
    pub reuse_grpc_port: bool,
    /// Whether other servers may have the HTTP port too, if they all say so.
    pub reuse_http_port: bool,
    /// APIs that need a key over gRPC.
    pub grpc_restrictions: Restrictions,
    /// APIs that need a key over HTTP.
    pub http_restrictions: Restrictions,
    /// Metadata of gRPC that models see as parameters.
    pub grpc_forward: HeaderPattern,
    /// Headers of HTTP that models see as parameters.
    pub http_forward: HeaderPattern,
    /// Age at which a gRPC connection takes no further call; `None` for any age.
    pub grpc_max_connection_age: Option<Duration>,
    /// Time that the calls of a connection have from then on; `None` is for ever.
    pub grpc_max_connection_age_grace: Option<Duration>,
    /// Silence after which a gRPC connection is probed.
    pub grpc_keepalive_time: Duration,
    /// Silence after a probe that ends the connection.
    pub grpc_keepalive_timeout: Duration,
    /// Time in which a client must send the head of an HTTP request.
    pub http_header_timeout: Duration,
    /// Longest silence of a client in the middle of a request's body or a gRPC message.
    pub http_body_timeout: Duration,
    /// Bytes a second that such a body must bring, measured over that time.
    pub min_body_rate: usize,
    /// Web pages of other servers that may use the HTTP port.
    pub http_origins: Origins,
    /// What is logged, and who follows its changes.
    pub log: LogControl,
    /// What is traced at the start, and where traces go.
    pub trace: TraceOptions,
    /// What `GET /debug/ledger` of the metrics port answers; `None` hides it.
    pub ledger: Option<LedgerSource>,
    /// Where prompts of conversations come from, for OpenAI's protocol.
    pub chat: Chat,
    /// What OpenAI's endpoints do with fields that they do not know.
    pub unknown_fields: UnknownFields,
    /// Whether OpenAI's endpoints use the sampling settings of a checkpoint's `generation_config.json` where a request has none.
    pub uses_generation_config: bool,
    /// Whether clients may register shared memory.
    pub allow_client_shm: bool,
    /// Who opens device memory of clients; `None` where there is none.
    pub client_devices: Option<Arc<dyn ClientDevices>>,
    /// Which objects of shared memory they may register.
    pub client_objects: ClientObjects,
    /// Regions of shared memory that may be registered at once.
    pub max_shm_regions: usize,
}

impl Default for Config {
    fn default() -> Self {
        Self {
            grpc: Some(Address::new("0.0.0.0", 8001)),
            http: Some(Address::new("0.0.0.0", 8000)),
            metrics: Some(Address::new("0.0.0.0", 8002)),
            // Tensors of images and prompts are far smaller; a client of 2 GiB messages says so with a flag.
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
            ledger: None,
            chat: Chat::default(),
            unknown_fields: UnknownFields::Refuse,
            uses_generation_config: true,
            allow_client_shm: true,
            client_devices: None,
            client_objects: ClientObjects::default(),
            max_shm_regions: MAX_REGIONS,
        }
    }
}

/// A field of [`Config`] that cannot be.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("front: `{field}` {reason}")]
pub struct ConfigError {
    /// Which.
    pub field: &'static str,
    /// Why, and what it may be.
    pub reason: String,
}

impl Config {
    /// Whether only clients with a key may change trace settings, over every protocol that is served.
    pub(crate) fn restricts_trace(&self) -> bool {
        let ports = [(&self.http, &self.http_restrictions), (&self.grpc, &self.grpc_restrictions)];
        ports.into_iter().all(|(port, restrictions)| port.is_none() || restrictions.restricts(Api::Trace))
    }

    /// Checks every field.
    ///
    /// # Errors
    /// Names the first field that cannot be.
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
    fn trace_is_restricted_where_no_port_is_left_open() {
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
