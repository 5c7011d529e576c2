//! The front's life: bind all ports or none, serve, drain, end.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use http::StatusCode;
use http::header::{CONNECTION, HeaderValue, RETRY_AFTER};
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper_util::rt::{TokioIo, TokioTimer};
use serving::Server;
use tokio::net::TcpListener;
use tokio::runtime::Handle;
use tokio_rustls::TlsAcceptor;

use self::slow_heads::{Requests, SlowHeads};
use crate::config::Config;
use crate::grpc_service::grpc_service;
use crate::http2::{Patience, Together};
use crate::kserve_http;
use crate::listener::{Limits, MAX_PREFACE_BYTES, Port, StartError, bind};
use crate::metrics::{self, MetricsSource};
use crate::state::State;
use crate::status::RETRY_AFTER_SECS;

mod slow_heads;

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

/// Sockets that listen already, as another process bound them.
#[derive(Debug, Default)]
pub struct Listeners {
    /// For KServe gRPC.
    pub grpc: Option<std::net::TcpListener>,
    /// For KServe HTTP.
    pub http: Option<std::net::TcpListener>,
    /// For metrics.
    pub metrics: Option<std::net::TcpListener>,
}

/// The front while it serves. Dropping it leaves it serving; [`Running::shutdown`] ends it.
pub struct Running {
    addresses: Addresses,
    state: Arc<State>,
    ports: Vec<Port>,
}

/// Least time that connections have to send what they hold.
const CLOSE_GRACE: Duration = Duration::from_secs(1);
/// Time in which clients may use an HTTP connection that they hold idle while another world takes over; its next
/// answer tells them to open a new one.
const LINGER: Duration = Duration::from_secs(5);

/// Binds every configured port, or none, and begins to serve on the current runtime.
///
/// # Errors
/// When a setting cannot be, or a port cannot be had; the message names it.
pub async fn start(
    config: Config,
    server: Arc<Server>,
    sources: Vec<Arc<dyn MetricsSource>>,
) -> Result<Running, StartError> {
    start_on(Listeners::default(), &Handle::current(), config, server, sources).await
}

/// As [`start`], on sockets that listen already where they are given. gRPC is served on `grpc_runtime`.
///
/// # Errors
/// As [`start`].
pub async fn start_on(
    listeners: Listeners,
    grpc_runtime: &Handle,
    config: Config,
    server: Arc<Server>,
    sources: Vec<Arc<dyn MetricsSource>>,
) -> Result<Running, StartError> {
    config.validate()?;
    let acceptor = config.grpc_tls.as_ref().map(crate::Tls::acceptor).transpose()?;
    let grpc = listen("gRPC service", listeners.grpc, config.grpc.as_ref(), config.reuse_grpc_port).await?;
    let http = listen("HTTP service", listeners.http, config.http.as_ref(), config.reuse_http_port).await?;
    let metrics = listen("metrics service", listeners.metrics, config.metrics.as_ref(), false).await?;
    let state = Arc::new(State::new(config, server, sources)?);
    let mut running = Running { addresses: Addresses::default(), state: state.clone(), ports: Vec::new() };
    if let Some(listener) = grpc {
        let _entered = grpc_runtime.enter();
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
    bound: Option<std::net::TcpListener>,
    address: Option<&crate::Address>,
    is_shared: bool,
) -> Result<Option<TcpListener>, StartError> {
    match (address, bound) {
        (Some(address), Some(socket)) => {
            let taken = socket.set_nonblocking(true).and_then(|()| TcpListener::from_std(socket));
            taken.map(Some).map_err(|source| StartError::Listen { service, address: address.clone(), source })
        }
        (Some(address), None) => bind(service, address, is_shared).await.map(Some),
        (None, _) => Ok(None),
    }
}

fn serve_grpc(listener: TcpListener, acceptor: Option<TlsAcceptor>, state: Arc<State>) -> std::io::Result<Port> {
    let config = state.config.clone();
    let service = grpc_service(state);
    let limits = Limits {
        max_connections: config.max_connections,
        max_age: config.grpc_max_connection_age,
        age_grace: config.grpc_max_connection_age_grace,
        patience: config.http_header_timeout,
        preface_bytes: MAX_PREFACE_BYTES, // "PRI * HTTP/2.0" and what follows (RFC 9113, 3.4).
    };
    let patience = Patience { silence: config.grpc_keepalive_time, answer: config.grpc_keepalive_timeout };
    Port::open(listener, limits, acceptor, move |stream| {
        let mut service = service.clone();
        Together::new(stream, patience, move |request, respond| service.begin(request, respond))
    })
}

fn serve_http(listener: TcpListener, state: Arc<State>) -> std::io::Result<Port> {
    let builder = http1_builder();
    Port::open(listener, http_limits(&state.config), None, move |stream| {
        let (state, requests) = (state.clone(), Arc::new(Requests::default()));
        let io = SlowHeads::new(TokioIo::new(stream), requests.clone(), state.config.http_header_timeout);
        let service = service_fn(move |request| {
            let (state, requests) = (state.clone(), requests.clone());
            async move {
                let reply = requests.count(kserve_http::handle(state.clone(), request)).await;
                reply.map(|reply| advised(&state, reply))
            }
        });
        builder.serve_connection(io, service)
    })
}

/// Adds what clients should do next: come again later, or over a new connection.
fn advised(state: &State, mut reply: kserve_http::Reply) -> kserve_http::Reply {
    if reply.status() == StatusCode::SERVICE_UNAVAILABLE {
        reply.headers_mut().insert(RETRY_AFTER, RETRY_AFTER_SECS.into());
    }
    if state.is_leaving() {
        reply.headers_mut().insert(CONNECTION, HeaderValue::from_static("close"));
    }
    reply
}

fn serve_metrics(listener: TcpListener, state: Arc<State>) -> std::io::Result<Port> {
    let builder = http1_builder();
    Port::open(listener, http_limits(&state.config), None, move |stream| {
        let (state, requests) = (state.clone(), Arc::new(Requests::default()));
        let io = SlowHeads::new(TokioIo::new(stream), requests.clone(), state.config.http_header_timeout);
        let service = service_fn(move |request| {
            let (state, requests) = (state.clone(), requests.clone());
            async move { requests.count(metrics::handle(state, request)).await }
        });
        builder.serve_connection(io, service)
    })
}

fn http_limits(config: &Config) -> Limits {
    let (max_connections, patience) = (config.max_connections, config.http_header_timeout);
    Limits { max_connections, max_age: None, age_grace: None, patience, preface_bytes: 0 }
}

/// Without hyper's own patience, which would also end idle connections and sets a timer for each request.
fn http1_builder() -> http1::Builder {
    let mut builder = http1::Builder::new();
    builder.timer(TokioTimer::new()).header_read_timeout(None);
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

    /// The sockets, for another process to accept on beside this one.
    ///
    /// # Errors
    /// When this process may not open any more files.
    pub fn listeners(&self) -> std::io::Result<Listeners> {
        let socket = |address: Option<SocketAddr>| -> std::io::Result<Option<std::net::TcpListener>> {
            let port = self.ports.iter().find(|port| Some(port.local_address()) == address);
            port.map(Port::socket).transpose()
        };
        let Addresses { grpc, http, metrics } = self.addresses;
        Ok(Listeners { grpc: socket(grpc)?, http: socket(http)?, metrics: socket(metrics)? })
    }

    /// Takes no new connections, which another process does from now on; requests on those that are open are
    /// answered. Resolves when all have ended, at the latest after `patience`.
    pub async fn leave(&self, patience: Duration) {
        self.state.begin_leaving();
        let linger =
            |port: &Port| if Some(port.local_address()) == self.addresses.grpc { Duration::ZERO } else { LINGER };
        let all = futures::future::join_all(self.ports.iter().map(|port| port.leave(linger(port))));
        let _ = tokio::time::timeout(patience, all).await;
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
