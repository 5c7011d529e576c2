//! Start-up and shutdown of the front: binding the ports, serving, draining.

use std::convert::Infallible;
use std::net::SocketAddr;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::{Duration, Instant};

use bytes::Bytes;
use http::header::{CONNECTION, HeaderValue, RETRY_AFTER};
use http::{Request, StatusCode};
use hyper::body::{Body, Frame, Incoming, SizeHint};
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper_util::rt::{TokioIo, TokioTimer};
use serving::Server;
use tokio::net::{TcpListener, UnixListener};
use tokio::runtime::Handle;
use tokio_rustls::TlsAcceptor;

use self::header_timeout::{HeaderTimeout, RequestCounts};
use crate::api::request_key::RequestKey;
use crate::api::status::RETRY_AFTER_SECS;
use crate::api::triton::grpc::service::grpc_service;
use crate::api::triton::http as triton_http;
use crate::api::triton::http::reply::Reply;
use crate::config::Config;
use crate::state::{Addresses, State};
use crate::telemetry::metrics;
use crate::telemetry::metrics_settings::MetricsSource;
use crate::transport::body::ReplyBody;
use crate::transport::budget::ProgressLimits;
use crate::transport::connections::BusyGuard;
use crate::transport::http2::{GrpcConnection, KeepAliveConfig};
use crate::transport::listener::{Limits, Listener, Port, StartError, bind, resolve};
use crate::transport::tls::Tls;

mod header_timeout;

/// Listening sockets of another process.
#[derive(Debug, Default)]
pub struct Listeners {
    /// For KServe gRPC.
    pub grpc: Option<std::net::TcpListener>,
    /// For KServe HTTP.
    pub http: Option<std::net::TcpListener>,
    /// For metrics.
    pub metrics: Option<std::net::TcpListener>,
    /// The sockets of a server behind the relay, in place of those above.
    pub relay: Option<RelayListeners>,
}

/// The sockets on which a server accepts the connections of the relay.
#[derive(Debug)]
pub struct RelayListeners {
    /// For KServe gRPC.
    pub grpc: std::os::unix::net::UnixListener,
    /// For KServe HTTP.
    pub http: std::os::unix::net::UnixListener,
    /// For metrics.
    pub metrics: std::os::unix::net::UnixListener,
}

/// A running front. Dropping it does not stop it; [`Running::shutdown`] does.
pub struct Running {
    addresses: Addresses,
    state: Arc<State>,
    ports: Vec<Port>,
}

/// Minimum time for connections to send their buffered responses.
const CLOSE_GRACE: Duration = Duration::from_secs(1);
/// Time for which idle HTTP connections stay open after another process has taken over. The next response makes the client open a
/// new connection.
const LINGER: Duration = Duration::from_secs(5);
/// Length of the HTTP/2 connection preface (RFC 9113, 3.4).
const PREFACE_BYTES: usize = 24;
/// Maximum connections of the metrics port, which has few clients.
const MAX_METRICS_CONNECTIONS: u32 = 256;

/// Binds all configured ports and starts to serve on the current runtime.
///
/// # Errors
/// When a setting is invalid or a port cannot be bound; the message names it. No port is then open.
pub async fn start(
    config: Config,
    server: Arc<Server>,
    sources: Vec<Arc<dyn MetricsSource>>,
) -> Result<Running, StartError> {
    start_on(Listeners::default(), &Handle::current(), config, server, sources).await
}

/// As [`start`], with the sockets of `listeners` in place of new ones. gRPC is served on `grpc_runtime`.
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
    let grpc_acceptor = acceptor("gRPC service", config.grpc_tls.as_ref(), b"h2")?;
    let http_acceptor = acceptor("HTTP service", config.http_tls.as_ref(), b"http/1.1")?;
    let metrics_acceptor = acceptor("metrics service", config.metrics_tls.as_ref(), b"http/1.1")?;
    let [grpc, http, metrics] = match listeners.relay {
        Some(RelayListeners { grpc, http, metrics }) => [
            listen_to_relay("gRPC service", grpc, config.grpc.as_ref()).await?,
            listen_to_relay("HTTP service", http, config.http.as_ref()).await?,
            listen_to_relay("metrics service", metrics, config.metrics.as_ref()).await?,
        ],
        None => [
            listen("gRPC service", listeners.grpc, config.grpc.as_ref(), config.reuse_grpc_port).await?,
            listen("HTTP service", listeners.http, config.http.as_ref(), config.reuse_http_port).await?,
            listen("metrics service", listeners.metrics, config.metrics.as_ref(), false).await?,
        ],
    };
    let state = Arc::new(State::new(config, server, sources)?);
    let mut running = Running { addresses: Addresses::default(), state: state.clone(), ports: Vec::new() };
    if let Some(listener) = grpc {
        let _entered = grpc_runtime.enter();
        running.addresses.grpc = Some(running.add(serve_grpc(listener, grpc_acceptor, state.clone()), "gRPC service")?);
    }
    if let Some(listener) = http {
        running.addresses.http = Some(running.add(serve_http(listener, http_acceptor, state.clone()), "HTTP service")?);
    }
    if let Some(listener) = metrics {
        running.addresses.metrics =
            Some(running.add(serve_metrics(listener, metrics_acceptor, state), "metrics service")?);
    }
    let _ = running.state.addresses.set(running.addresses); // Set once, here.
    Ok(running)
}

pub(crate) fn acceptor(
    service: &'static str,
    tls: Option<&Tls>,
    protocol: &[u8],
) -> Result<Option<TlsAcceptor>, StartError> {
    let acceptor = tls.map(|tls| tls.acceptor(protocol)).transpose();
    acceptor.map_err(|source| StartError::Tls { service, source })
}

async fn listen(
    service: &'static str,
    bound: Option<std::net::TcpListener>,
    address: Option<&crate::Address>,
    is_shared: bool,
) -> Result<Option<Listener>, StartError> {
    match (address, bound) {
        (Some(address), Some(socket)) => {
            let taken = socket.set_nonblocking(true).and_then(|()| TcpListener::from_std(socket));
            let taken = taken.map(|listener| Some(Listener::Tcp(listener)));
            taken.map_err(|source| StartError::Listen { service, address: address.clone(), source })
        }
        (Some(address), None) => Ok(Some(Listener::Tcp(bind(service, address, is_shared).await?))),
        (None, _) => Ok(None),
    }
}

/// The listener of a service that the relay makes available at `address`.
async fn listen_to_relay(
    service: &'static str,
    socket: std::os::unix::net::UnixListener,
    address: Option<&crate::Address>,
) -> Result<Option<Listener>, StartError> {
    let Some(address) = address else { return Ok(None) };
    let resolved = resolve(service, address).await?;
    let taken = socket.set_nonblocking(true).and_then(|()| UnixListener::from_std(socket));
    let taken = taken.map(|listener| Some(Listener::Relayed(listener, resolved)));
    taken.map_err(|source| StartError::Listen { service, address: address.clone(), source })
}

fn serve_grpc(listener: Listener, acceptor: Option<TlsAcceptor>, state: Arc<State>) -> std::io::Result<Port> {
    let (limits, keep_alive) = (grpc_limits(&state.config), grpc_keep_alive(&state.config));
    let service = grpc_service(state);
    Port::open(listener, limits, acceptor, move |stream, activity| {
        let mut service = service.clone();
        GrpcConnection::new(stream, activity, keep_alive, move |request, respond| service.begin(request, respond))
    })
}

/// Limits of gRPC connections.
pub(crate) fn grpc_limits(config: &Config) -> Limits {
    Limits {
        max_age: config.grpc_max_connection_age,
        age_grace: config.grpc_max_connection_age_grace,
        preface_bytes: PREFACE_BYTES,
        ..http_limits(config)
    }
}

/// The keep-alive of gRPC connections.
pub(crate) fn grpc_keep_alive(config: &Config) -> KeepAliveConfig {
    let progress = ProgressLimits { timeout: config.http_body_timeout, min_rate: config.min_body_rate };
    KeepAliveConfig {
        idle_time: config.grpc_keepalive_time,
        timeout: config.grpc_keepalive_timeout,
        check_interval: progress.check_interval(),
    }
}

fn serve_http(listener: Listener, acceptor: Option<TlsAcceptor>, state: Arc<State>) -> std::io::Result<Port> {
    let limits = http_limits(&state.config);
    let config = state.config.clone();
    serve_http1(listener, limits, acceptor, &config, move |request| {
        let state = Arc::clone(&state);
        async move { with_key(&state, request).await.map(|reply| with_client_hints(&state, reply)) }
    })
}

/// Answers a request with the numbers that the relay has chosen for it, if it came from there.
async fn with_key(state: &Arc<State>, request: Request<Incoming>) -> Result<Reply, Infallible> {
    let key = RequestKey::of(request.headers()).filter(|_| state.config.is_behind_relay);
    let answer = triton_http::handle(Arc::clone(state), request);
    match key {
        Some(key) => key.scope(answer).await,
        None => answer.await,
    }
}

/// Adds headers that ask the client to retry later or to open a new connection.
fn with_client_hints(state: &State, mut reply: Reply) -> Reply {
    if reply.status() == StatusCode::SERVICE_UNAVAILABLE {
        reply.headers_mut().insert(RETRY_AFTER, RETRY_AFTER_SECS.into());
    }
    if state.is_leaving() {
        reply.headers_mut().insert(CONNECTION, HeaderValue::from_static("close"));
    }
    reply
}

fn serve_metrics(listener: Listener, acceptor: Option<TlsAcceptor>, state: Arc<State>) -> std::io::Result<Port> {
    let limits = http_limits(&state.config);
    let max_connections = limits.max_connections.min(MAX_METRICS_CONNECTIONS);
    let config = state.config.clone();
    let limits = Limits { max_connections, ..limits };
    serve_http1(listener, limits, acceptor, &config, move |request| metrics::handle(Arc::clone(&state), request))
}

/// Serves HTTP/1 requests with `handle`.
pub(crate) fn serve_http1<H, A>(
    listener: Listener,
    limits: Limits,
    acceptor: Option<TlsAcceptor>,
    config: &Config,
    handle: H,
) -> std::io::Result<Port>
where
    H: Fn(Request<Incoming>) -> A + Clone + Send + Sync + 'static,
    A: Future<Output = Result<Reply, Infallible>> + Send + 'static,
{
    let mut builder = http1::Builder::new();
    // hyper's own timeout is off, because it also closes idle connections and sets a timer for each request.
    builder.timer(TokioTimer::new()).header_read_timeout(None);
    let header_timeout = config.http_header_timeout;
    let check_interval = header_timeout.min(config.http_body_timeout);
    Port::open(listener, limits, acceptor, move |stream, activity| {
        let (handle, requests) = (handle.clone(), Arc::new(RequestCounts::default()));
        let io = HeaderTimeout::new(TokioIo::new(stream), requests.clone(), header_timeout, check_interval);
        let service = service_fn(move |request| {
            let (busy, requests) = (activity.request(), requests.clone());
            let answer = handle(request);
            async move {
                let reply = requests.count(answer).await?;
                Ok::<_, Infallible>(reply.map(|body| TrackedBody { body, _busy: busy }))
            }
        });
        builder.serve_connection(io, service)
    })
}

/// A response's body that keeps its connection from being idle.
struct TrackedBody {
    body: ReplyBody,
    _busy: BusyGuard,
}

impl Body for TrackedBody {
    type Data = Bytes;
    type Error = Infallible;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Infallible>>> {
        Pin::new(&mut self.body).poll_frame(context)
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}

pub(crate) fn http_limits(config: &Config) -> Limits {
    Limits {
        max_connections: config.max_connections,
        max_per_address: config.max_connections_per_address,
        max_age: None,
        age_grace: None,
        start_timeout: config.http_header_timeout,
        write_timeout: config.write_timeout,
        preface_bytes: 0,
    }
}

impl Running {
    fn add(&mut self, port: std::io::Result<Port>, service: &'static str) -> Result<SocketAddr, StartError> {
        let unspecified = || crate::Address::new("", 0);
        let port = port.map_err(|source| StartError::Listen { service, address: unspecified(), source })?;
        let address = port.local_address();
        self.ports.push(port);
        Ok(address)
    }

    /// The addresses of the services.
    pub fn addresses(&self) -> Addresses {
        self.addresses
    }

    /// Makes the readiness probes negative. The ports stay open.
    pub fn begin_drain(&self) {
        self.state.begin_drain();
    }

    /// Duplicates of the sockets, on which another process can accept too.
    ///
    /// # Errors
    /// When the process has no file descriptor left.
    pub fn listeners(&self) -> std::io::Result<Listeners> {
        let socket = |address: Option<SocketAddr>| -> std::io::Result<Option<std::net::TcpListener>> {
            let port = self.ports.iter().find(|port| Some(port.local_address()) == address);
            Ok(port.map(Port::socket).transpose()?.flatten())
        };
        let Addresses { grpc, http, metrics } = self.addresses;
        Ok(Listeners { grpc: socket(grpc)?, http: socket(http)?, metrics: socket(metrics)?, relay: None })
    }

    /// Stops accepting connections, because another process accepts them from now on. Requests on open connections are still
    /// answered. Resolves when all connections have ended, after `timeout` at the latest.
    pub async fn leave(&self, timeout: Duration) {
        self.state.begin_leaving();
        let linger =
            |port: &Port| if Some(port.local_address()) == self.addresses.grpc { Duration::ZERO } else { LINGER };
        let all = futures::future::join_all(self.ports.iter().map(|port| port.leave(linger(port))));
        let _ = tokio::time::timeout(timeout, all).await;
    }

    /// Shuts down gracefully: readiness probes are negative and new requests are refused while the requests in flight finish. Then
    /// the models are unloaded and the ports are closed. Requests that are unfinished after `deadline` are aborted.
    ///
    /// Returns the number of aborted requests.
    pub async fn shutdown(self, deadline: Duration) -> u64 {
        self.state.begin_drain();
        let start = Instant::now();
        let num_left = self.state.server.drain(deadline).await;
        // Finished responses must also be sent.
        let rest = deadline.saturating_sub(start.elapsed()).max(CLOSE_GRACE);
        let close = futures::future::join_all(self.ports.into_iter().map(Port::close));
        let _ = tokio::time::timeout(rest, close).await;
        num_left
    }
}
