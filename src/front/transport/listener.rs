//! Listening sockets: binding, accepting, and the graceful shutdown of connections.

use std::io;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use hyper_util::server::graceful::GracefulConnection;
use tokio::net::{TcpListener, TcpSocket, UnixListener, lookup_host};
use tokio::sync::{Semaphore, watch};
use tokio_rustls::TlsAcceptor;
use tokio_util::sync::CancellationToken;

use serving::RateLimitedLog;

use crate::config::Address;
use crate::transport::client_stream::ClientStream;
use crate::transport::connections::{Activity, ConnectionSlot, Connections};
use crate::transport::tls::{Accepted, Socket, TlsError};

/// Why the front did not start.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs)] // Fields are named by their messages.
pub enum StartError {
    #[error("failed to start {service}: Socket '{address}' already in use")]
    InUse { service: &'static str, address: Address },
    #[error("failed to start {service}: cannot listen on `{address}`: {source}")]
    Listen { service: &'static str, address: Address, source: io::Error },
    #[error(transparent)]
    Config(#[from] crate::ConfigError),
    #[error("failed to start {service} with TLS: {source}")]
    Tls { service: &'static str, source: TlsError },
}

/// Maximum pending connections of a listening socket.
const BACKLOG: u32 = 1024;

/// Binds `address` for `service`. Several servers can bind the same port if all of them set `is_shared`.
///
/// # Errors
/// When the address is in use, or is not an address of this machine.
pub async fn bind(service: &'static str, address: &Address, is_shared: bool) -> Result<TcpListener, StartError> {
    let unavailable = |error: io::Error| match error.kind() {
        io::ErrorKind::AddrInUse => StartError::InUse { service, address: address.clone() },
        _ => StartError::Listen { service, address: address.clone(), source: error },
    };
    let mut last = io::Error::other("the name stands for no address");
    for candidate in lookup_host((address.host.as_str(), address.port)).await.map_err(unavailable)? {
        match listen(candidate, is_shared) {
            Ok(listener) => return Ok(listener),
            Err(error) => last = error,
        }
    }
    Err(unavailable(last))
}

/// The address at which the relay accepts for a server behind it.
///
/// # Errors
/// When it is not an address.
pub async fn resolve(service: &'static str, address: &Address) -> Result<SocketAddr, StartError> {
    let unknown = |source| StartError::Listen { service, address: address.clone(), source };
    let mut found = lookup_host((address.host.as_str(), address.port)).await.map_err(unknown)?;
    found.next().ok_or_else(|| unknown(io::Error::other("the name stands for no address")))
}

/// The socket on which a port accepts connections.
pub enum Listener {
    /// Those of clients.
    Tcp(TcpListener),
    /// Those of the relay, which accepts clients at this address.
    Relayed(UnixListener, SocketAddr),
}

impl Listener {
    /// The next connection, and the address of the other side.
    async fn accept(&self) -> io::Result<(Accepted, IpAddr)> {
        match self {
            Self::Tcp(listener) => {
                let (stream, client) = listener.accept().await?;
                let _ = stream.set_nodelay(true); // A failure affects the latency alone.
                Ok((Accepted::Tcp(stream), client.ip()))
            }
            Self::Relayed(listener, _) => {
                let (stream, _) = listener.accept().await?;
                Ok((Accepted::Relayed(stream), Ipv4Addr::LOCALHOST.into()))
            }
        }
    }
}

fn listen(address: SocketAddr, is_shared: bool) -> io::Result<TcpListener> {
    let socket = if address.is_ipv4() { TcpSocket::new_v4()? } else { TcpSocket::new_v6()? };
    socket.set_reuseaddr(true)?;
    socket.set_reuseport(is_shared)?;
    socket.bind(address)?;
    socket.listen(BACKLOG)
}

/// Limits of the connections of a port.
#[derive(Debug, Clone, Copy)]
pub struct Limits {
    /// Maximum concurrent connections. Beyond four fifths of them, idle connections are evicted. At the maximum, new
    /// connections wait to be accepted.
    pub max_connections: u32,
    /// Maximum connections of one client address; 0 is no limit.
    pub max_per_address: u32,
    /// Age at which a connection accepts no further request.
    pub max_age: Option<Duration>,
    /// Time for the remaining requests of such a connection; `None` is unlimited.
    pub age_grace: Option<Duration>,
    /// Time for the TLS handshake and the first `preface_bytes` of a client.
    pub start_timeout: Duration,
    /// Time after which a write fails if the client reads nothing; `None` is unlimited.
    pub write_timeout: Option<Duration>,
    /// Bytes that a client must send first, for protocols whose server has no timeout for them.
    pub preface_bytes: usize,
}

/// A connection being served: a future that resolves at its end.
pub trait Connection: Future<Output = Result<(), Self::Error>> {
    /// Why the connection failed.
    type Error: std::fmt::Display + Send;

    /// Accepts no further request, and ends after the requests in flight.
    fn graceful_shutdown(self: Pin<&mut Self>);
}

/// HTTP/1 connections of hyper.
impl<I, S> Connection for hyper::server::conn::http1::Connection<I, S>
where
    Self: GracefulConnection<Error = hyper::Error> + Future<Output = Result<(), hyper::Error>>,
    S: hyper::service::HttpService<hyper::body::Incoming>,
{
    type Error = hyper::Error;

    fn graceful_shutdown(self: Pin<&mut Self>) {
        GracefulConnection::graceful_shutdown(self);
    }
}

/// One port and its connections.
pub struct Port {
    local_address: SocketAddr,
    stop: CancellationToken,
    /// Set when another process has taken over: the time after which idle connections are closed.
    leave: watch::Sender<Option<Duration>>,
    /// A duplicate of the socket for a process that takes over; `None` behind the relay.
    socket: Option<std::net::TcpListener>,
    accepting: tokio::task::JoinHandle<()>,
    limits: Limits,
    /// One permit per connection that may still be accepted.
    permits: Arc<Semaphore>,
}

/// Pause after a failed accept, for example when the process has no file descriptor left.
const ACCEPT_PAUSE: Duration = Duration::from_millis(20);
/// Interval between two searches for idle connections at the maximum number of connections.
const EVICTION_INTERVAL: Duration = Duration::from_millis(100);
/// Time that a client has to close an evicted connection.
const EVICTION_GRACE: Duration = Duration::from_millis(300);
/// TCP keep-alive: idle time before the first probe, interval of probes, number of probes.
const KEEP_ALIVE: (Duration, Duration, u32) = (Duration::from_secs(60), Duration::from_secs(15), 4);

/// Limits the warnings about failed accepts.
static ACCEPT_WARNINGS: RateLimitedLog = RateLimitedLog::new(1);

impl Port {
    /// Serves the connections of `listener` with the futures that `connect` returns, within TLS if there is an acceptor.
    ///
    /// # Errors
    /// When the socket has no local address, or cannot be duplicated.
    pub fn open<F, C>(listener: Listener, limits: Limits, acceptor: Option<TlsAcceptor>, connect: F) -> io::Result<Self>
    where
        F: Fn(ClientStream<Socket>, Arc<Activity>) -> C + Send + Sync + 'static,
        C: Connection + Send + 'static,
    {
        let (listener, local_address, socket) = match listener {
            Listener::Relayed(_, address) => (listener, address, None),
            Listener::Tcp(listener) => {
                let local_address = listener.local_addr()?;
                keep_alive(&listener)?;
                let socket = listener.into_std()?;
                (Listener::Tcp(TcpListener::from_std(socket.try_clone()?)?), local_address, Some(socket))
            }
        };
        // The relay counts the connections of each client.
        let max_per_address = if socket.is_some() { limits.max_per_address } else { 0 };
        let stop = CancellationToken::new();
        let leave = watch::Sender::new(None);
        let permits = Arc::new(Semaphore::new(limits.max_connections as usize));
        let connections = Arc::new(Connections::new(limits.max_connections, max_per_address));
        let (stopped, left) = (stop.clone(), leave.subscribe());
        let handler =
            Arc::new(ConnectionHandler { limits, connections, stop: stopped, leave: left, acceptor, connect });
        let accepting = tokio::spawn(accept(listener, permits.clone(), handler));
        Ok(Self { local_address, stop, leave, socket, accepting, limits, permits })
    }

    /// The address of the socket.
    pub fn local_address(&self) -> SocketAddr {
        self.local_address
    }

    /// A duplicate of the socket, on which another process can accept; `None` behind the relay.
    ///
    /// # Errors
    /// When the process has no file descriptor left.
    pub fn socket(&self) -> io::Result<Option<std::net::TcpListener>> {
        self.socket.as_ref().map(std::net::TcpListener::try_clone).transpose()
    }

    /// Stops accepting, because another process accepts instead. Open connections end after their requests in flight, idle ones
    /// after `linger`, so that no request in transit meets a closed connection. Resolves when all have ended.
    pub async fn leave(&self, linger: Duration) {
        self.leave.send_replace(Some(linger));
        let _ = self.permits.acquire_many(self.limits.max_connections).await;
    }

    /// Stops accepting, completes the requests in flight, and resolves when all connections have ended.
    pub async fn close(self) {
        drop(self.socket); // New connections are refused instead of queued.
        self.stop.cancel();
        let _ = self.accepting.await;
        let _ = self.permits.acquire_many(self.limits.max_connections).await; // All permits are free when no connection is left.
    }
}

/// Sets TCP keep-alive; accepted connections inherit it from the listening socket.
fn keep_alive(listener: &TcpListener) -> io::Result<()> {
    use rustix::net::sockopt;
    let (idle, interval, count) = KEEP_ALIVE;
    sockopt::set_socket_keepalive(listener, true)?;
    sockopt::set_tcp_keepidle(listener, idle)?;
    sockopt::set_tcp_keepintvl(listener, interval)?;
    sockopt::set_tcp_keepcnt(listener, count)?;
    Ok(())
}

/// Admits and serves the connections of a port.
struct ConnectionHandler<F> {
    limits: Limits,
    connections: Arc<Connections>,
    stop: CancellationToken,
    leave: watch::Receiver<Option<Duration>>,
    acceptor: Option<TlsAcceptor>,
    connect: F,
}

impl<F, C> ConnectionHandler<F>
where
    F: Fn(ClientStream<Socket>, Arc<Activity>) -> C,
    C: Connection,
{
    /// Serves one connection.
    async fn handle(&self, stream: Accepted, activity: &Arc<Activity>) {
        let started = tokio::select! {
            started = tokio::time::timeout(self.limits.start_timeout, self.start(stream, activity)) => started,
            () = activity.evicted() => return,
        };
        match started {
            Ok(Ok(stream)) => {
                let connection = (self.connect)(stream, activity.clone());
                serve(connection, self.limits, self.stop.clone(), self.leave.clone(), activity).await;
            }
            Ok(Err(error)) => tracing::debug!("handshake failed: {error}"),
            Err(_) => tracing::debug!("no handshake within {:?}", self.limits.start_timeout),
        }
    }

    /// Performs the TLS handshake and reads the first bytes of the client.
    async fn start(&self, stream: Accepted, activity: &Arc<Activity>) -> io::Result<ClientStream<Socket>> {
        let socket = Socket::accept(stream, self.acceptor.as_ref()).await?;
        let mut stream = ClientStream::new(socket, activity.clone(), self.limits.write_timeout);
        if self.limits.preface_bytes > 0 {
            stream.read_ahead_exact(self.limits.preface_bytes).await?;
        }
        Ok(stream)
    }

    /// Registers a client and waits for a permit, evicting idle connections if necessary. `None` when its address has the maximum
    /// number of connections.
    async fn admit(
        &self,
        client: IpAddr,
        permits: &Arc<Semaphore>,
    ) -> Option<(ConnectionSlot, tokio::sync::OwnedSemaphorePermit)> {
        let slot = self.connections.admit(client)?;
        self.connections.make_room(&slot);
        let mut permit = std::pin::pin!(permits.clone().acquire_owned());
        loop {
            match tokio::time::timeout(EVICTION_INTERVAL, &mut permit).await {
                Ok(permit) => return Some((slot, permit.ok()?)),
                Err(_) => self.connections.make_room(&slot),
            }
        }
    }
}

async fn accept<F, C>(listener: Listener, permits: Arc<Semaphore>, handler: Arc<ConnectionHandler<F>>)
where
    F: Fn(ClientStream<Socket>, Arc<Activity>) -> C + Send + Sync + 'static,
    C: Connection + Send + 'static,
{
    let mut leave = handler.leave.clone();
    loop {
        let accepted = tokio::select! {
            biased;
            () = handler.stop.cancelled() => return,
            _ = leave.wait_for(Option::is_some) => return,
            accepted = listener.accept() => accepted,
        };
        let (stream, client) = match accepted {
            Ok(accepted) => accepted,
            Err(error) => {
                if let Some(suppressed) = ACCEPT_WARNINGS.allow() {
                    tracing::warn!("cannot accept a connection: {error}{suppressed}");
                }
                // An evicted connection releases its file descriptor.
                handler.connections.make_room_for_files();
                tokio::time::sleep(ACCEPT_PAUSE).await;
                continue;
            }
        };
        let admitted = tokio::select! {
            () = handler.stop.cancelled() => return,
            admitted = handler.admit(client, &permits) => admitted,
        };
        let Some((slot, permit)) = admitted else {
            tracing::debug!("connection from {client} refused: its address has the maximum number of connections");
            continue;
        };
        let handler = handler.clone();
        tokio::spawn(async move {
            handler.handle(stream, &slot.activity).await;
            drop((slot, permit));
        });
    }
}

/// Serves a connection until its client disconnects. When the server stops, or the connection reaches its maximum age or is
/// evicted, until its requests in flight have ended.
async fn serve<C: Connection>(
    connection: C,
    limits: Limits,
    stop: CancellationToken,
    leave: watch::Receiver<Option<Duration>>,
    activity: &Activity,
) {
    let mut connection = std::pin::pin!(connection);
    let max_age = async {
        match limits.max_age {
            Some(age) => tokio::time::sleep(age).await,
            None => std::future::pending().await,
        }
    };
    let (grace, is_evicted) = tokio::select! {
        result = &mut connection => return report(result),
        () = stop.cancelled() => (None, false),
        () = linger(leave) => (None, false),
        () = max_age => (limits.age_grace, false),
        () = activity.evicted() => (Some(EVICTION_GRACE), true),
    };
    connection.as_mut().graceful_shutdown();
    match grace {
        // A request in transit is still answered.
        Some(grace) if is_evicted => match tokio::time::timeout(grace, &mut connection).await {
            Ok(result) => report(result),
            Err(_) if activity.is_idle() => {
                tracing::debug!("an idle connection was closed in favour of another client")
            }
            Err(_) => report(connection.await),
        },
        Some(grace) => match tokio::time::timeout(grace, connection).await {
            Ok(result) => report(result),
            Err(_) => tracing::debug!("a connection exceeded its maximum age and the grace period of {grace:?}"),
        },
        None => report(connection.await),
    }
}

/// Resolves when another process accepts and the linger time has elapsed.
async fn linger(mut leave: watch::Receiver<Option<Duration>>) {
    let time = leave.wait_for(Option::is_some).await.ok().and_then(|time| *time);
    match time {
        Some(time) => tokio::time::sleep(time).await,
        // The port was closed, which `stop` signals.
        None => std::future::pending().await,
    }
}

fn report<E: std::fmt::Display>(result: Result<(), E>) {
    if let Err(error) = result {
        tracing::debug!("connection ended: {error}"); // Disconnects are normal.
    }
}
