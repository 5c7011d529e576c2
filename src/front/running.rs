//! The front's life: bind all ports or none, serve, drain, end.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use hyper::server::conn::{http1, http2};
use hyper::service::service_fn;
use hyper_util::rt::{TokioExecutor, TokioIo, TokioTimer};
use hyper_util::service::TowerToHyperService;
use serving::Server;
use tokio::net::TcpListener;
use tokio_rustls::TlsAcceptor;

use crate::coalesce::Coalesce;
use crate::config::Config;
use crate::grpc_service::grpc_service;
use crate::kserve_http;
use crate::listener::{Limits, MAX_PREFACE_BYTES, Port, StartError, bind};
use crate::metrics::{self, MetricsSource};
use crate::state::State;

/// Where the services listen, ports chosen by the system included.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Addresses {
    /// KServe gRPC.
    pub grpc: Option<SocketAddr>,
    /// KServe HTTP.
    pub http: Option<SocketAddr>,
    /// Metrics.
    pub metrics: Option<SocketAddr>,
}

/// The front while it serves. Dropping it leaves it serving; [`Running::shutdown`] ends it.
pub struct Running {
    addresses: Addresses,
    state: Arc<State>,
    ports: Vec<Port>,
}

/// HTTP/2 settings. A window of this size lets 1 MiB tensors through without a round trip.
const WINDOW_BYTES: u32 = 4 << 20;
const MAX_FRAME_BYTES: u32 = 1 << 20;
const MAX_STREAMS: u32 = 4096;
/// Least time that connections have to send what they hold.
const CLOSE_GRACE: Duration = Duration::from_secs(1);

/// Binds every configured port, or none, and begins to serve on the current runtime.
///
/// # Errors
/// When a setting cannot be, or a port cannot be had; the message names it.
pub async fn start(
    config: Config,
    server: Arc<Server>,
    sources: Vec<Arc<dyn MetricsSource>>,
) -> Result<Running, StartError> {
    config.validate()?;
    let acceptor = config.grpc_tls.as_ref().map(crate::Tls::acceptor).transpose()?;
    let grpc = listen("gRPC service", config.grpc.as_ref(), config.reuse_grpc_port).await?;
    let http = listen("HTTP service", config.http.as_ref(), config.reuse_http_port).await?;
    let metrics = listen("metrics service", config.metrics.as_ref(), false).await?;
    let state = Arc::new(State::new(config, server, sources)?);
    let mut running = Running { addresses: Addresses::default(), state: state.clone(), ports: Vec::new() };
    if let Some(listener) = grpc {
        running.addresses.grpc = Some(running.add(serve_grpc(listener, acceptor, state.clone()), "gRPC service")?);
    }
    if let Some(listener) = http {
        running.addresses.http = Some(running.add(serve_http(listener, state.clone()), "HTTP service")?);
    }
    if let Some(listener) = metrics {
        running.addresses.metrics = Some(running.add(serve_metrics(listener, state), "metrics service")?);
    }
    Ok(running)
}

async fn listen(
    service: &'static str,
    address: Option<&crate::Address>,
    is_shared: bool,
) -> Result<Option<TcpListener>, StartError> {
    match address {
        Some(address) => bind(service, address, is_shared).await.map(Some),
        None => Ok(None),
    }
}

fn serve_grpc(listener: TcpListener, acceptor: Option<TlsAcceptor>, state: Arc<State>) -> std::io::Result<Port> {
    let config = state.config.clone();
    let service = grpc_service(state);
    let mut builder = http2::Builder::new(TokioExecutor::new());
    builder
        .timer(TokioTimer::new())
        .initial_stream_window_size(WINDOW_BYTES)
        .initial_connection_window_size(WINDOW_BYTES)
        .max_frame_size(MAX_FRAME_BYTES)
        .max_concurrent_streams(MAX_STREAMS)
        .keep_alive_interval(Some(config.grpc_keepalive_time))
        .keep_alive_timeout(config.grpc_keepalive_timeout);
    let limits = Limits {
        max_connections: config.max_connections,
        max_age: config.grpc_max_connection_age,
        age_grace: config.grpc_max_connection_age_grace,
        patience: config.http_header_timeout,
        preface_bytes: MAX_PREFACE_BYTES, // "PRI * HTTP/2.0" and what follows (RFC 9113, 3.4).
    };
    Port::open(listener, limits, acceptor, move |stream| {
        let io = Coalesce::new(TokioIo::new(stream));
        builder.serve_connection(io, TowerToHyperService::new(service.clone()))
    })
}

fn serve_http(listener: TcpListener, state: Arc<State>) -> std::io::Result<Port> {
    let builder = http1_builder(&state.config);
    Port::open(listener, http_limits(&state.config), None, move |stream| {
        let state = state.clone();
        let service = service_fn(move |request| kserve_http::handle(state.clone(), request));
        builder.serve_connection(TokioIo::new(stream), service)
    })
}

fn serve_metrics(listener: TcpListener, state: Arc<State>) -> std::io::Result<Port> {
    let builder = http1_builder(&state.config);
    Port::open(listener, http_limits(&state.config), None, move |stream| {
        let state = state.clone();
        let service = service_fn(move |request| metrics::handle(state.clone(), request));
        builder.serve_connection(TokioIo::new(stream), service)
    })
}

fn http_limits(config: &Config) -> Limits {
    let (max_connections, patience) = (config.max_connections, config.http_header_timeout);
    Limits { max_connections, max_age: None, age_grace: None, patience, preface_bytes: 0 }
}

fn http1_builder(config: &Config) -> http1::Builder {
    let mut builder = http1::Builder::new();
    builder.timer(TokioTimer::new()).header_read_timeout(config.http_header_timeout);
    builder
}

impl Running {
    fn add(&mut self, port: std::io::Result<Port>, service: &'static str) -> Result<SocketAddr, StartError> {
        let unspecified = || crate::Address::new("", 0);
        let port = port.map_err(|source| StartError::Listen { service, address: unspecified(), source })?;
        let address = port.local_address();
        self.ports.push(port);
        Ok(address)
    }

    /// Where the services listen.
    pub fn addresses(&self) -> Addresses {
        self.addresses
    }

    /// Readiness answers "no" from now on, on ports that stay open.
    pub fn begin_drain(&self) {
        self.state.begin_drain();
    }

    /// Ends in good order: readiness answers "no" and new requests are refused while those in flight finish,
    /// then the models unload and the ports close. What is not finished after `deadline` is cut off.
    ///
    /// Returns how many requests were cut off.
    pub async fn shutdown(self, deadline: Duration) -> u64 {
        self.state.begin_drain();
        let begun = Instant::now();
        let num_left = self.state.server.drain(deadline).await;
        // What was answered must also be sent.
        let rest = deadline.saturating_sub(begun.elapsed()).max(CLOSE_GRACE);
        let close = futures::future::join_all(self.ports.into_iter().map(Port::close));
        let _ = tokio::time::timeout(rest, close).await;
        num_left
    }
}
