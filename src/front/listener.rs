//! Sockets: bind, accept, and end every connection in good order.

use std::io;
use std::net::SocketAddr;
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use hyper_util::server::graceful::GracefulConnection;
use tokio::net::{TcpListener, TcpSocket, TcpStream, lookup_host};
use tokio::sync::{Semaphore, watch};
use tokio_rustls::TlsAcceptor;
use tokio_util::sync::CancellationToken;

use crate::config::Address;
use crate::tls::{Socket, TlsError};

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
    #[error("failed to start gRPC service with TLS: {0}")]
    Tls(#[from] TlsError),
}

/// Connections that wait to be accepted.
const BACKLOG: u32 = 1024;

/// Binds `address` for `service`. Servers that all say `is_shared` may have one port together.
///
/// # Errors
/// When another process has it, or it is not this machine's.
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

fn listen(address: SocketAddr, is_shared: bool) -> io::Result<TcpListener> {
    let socket = if address.is_ipv4() { TcpSocket::new_v4()? } else { TcpSocket::new_v6()? };
    socket.set_reuseaddr(true)?;
    socket.set_reuseport(is_shared)?;
    socket.bind(address)?;
    socket.listen(BACKLOG)
}

/// Longest beginning that is waited for.
pub const MAX_PREFACE_BYTES: usize = 24;

/// What bounds the connections of a port.
#[derive(Debug, Clone, Copy)]
pub struct Limits {
    /// Connections at once; more wait to be accepted.
    pub max_connections: u32,
    /// Age at which a connection takes no further request.
    pub max_age: Option<Duration>,
    /// Time that its last requests have from then on; `None` is for ever.
    pub age_grace: Option<Duration>,
    /// Time in which a client must have begun to speak the port's protocol.
    pub patience: Duration,
    /// The bytes of that beginning, where the protocol's own server would wait for them for ever.
    pub preface_bytes: usize,
}

/// A connection that is served, as a future that ends with it.
pub trait Connection: Future<Output = Result<(), Self::Error>> {
    /// Why it broke off.
    type Error;

    /// Takes no further request, and ends with the last of those that it has.
    fn graceful_shutdown(self: Pin<&mut Self>);
}

/// hyper's over HTTP/1.
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
    /// Set once another process accepts: how long clients may then use a connection they hold idle.
    leave: watch::Sender<Option<Duration>>,
    /// The socket, for another process to accept on.
    socket: std::net::TcpListener,
    accepting: tokio::task::JoinHandle<()>,
    limits: Limits,
    /// One for each connection that may still come.
    permits: Arc<Semaphore>,
}

/// Pause after a failed accept, so that a machine out of file descriptors is not made busier.
const ACCEPT_PAUSE: Duration = Duration::from_millis(20);

impl Port {
    /// Serves each connection of `listener` with what `connect` makes of it, within TLS if there is an acceptor.
    ///
    /// # Errors
    /// When the socket has lost its address.
    pub fn open<F, C>(
        listener: TcpListener,
        limits: Limits,
        acceptor: Option<TlsAcceptor>,
        connect: F,
    ) -> io::Result<Self>
    where
        F: Fn(Socket) -> C + Send + Sync + 'static,
        C: Connection<Error: std::fmt::Display> + Send + 'static,
    {
        let local_address = listener.local_addr()?;
        let socket = listener.into_std()?;
        let listener = TcpListener::from_std(socket.try_clone()?)?;
        let stop = CancellationToken::new();
        let leave = watch::Sender::new(None);
        let permits = Arc::new(Semaphore::new(limits.max_connections as usize));
        let door = Arc::new(Door { limits, stop: stop.clone(), leave: leave.subscribe(), acceptor, connect });
        let accepting = tokio::spawn(accept(listener, permits.clone(), door));
        Ok(Self { local_address, stop, leave, socket, accepting, limits, permits })
    }

    /// Where it listens.
    pub fn local_address(&self) -> SocketAddr {
        self.local_address
    }

    /// The socket, to be accepted on by another process too.
    ///
    /// # Errors
    /// When this process may not open any more files.
    pub fn socket(&self) -> io::Result<std::net::TcpListener> {
        self.socket.try_clone()
    }

    /// Takes no new connection: another process does. Connections go on and end with their last request, idle ones
    /// after `linger`, so that a request that is on its way meets no closed connection. Resolves when all have ended.
    pub async fn leave(&self, linger: Duration) {
        self.leave.send_replace(Some(linger));
        let _ = self.permits.acquire_many(self.limits.max_connections).await;
    }

    /// Takes no new connection, lets each finish the requests it has begun, and resolves when all have ended.
    pub async fn close(self) {
        drop(self.socket); // Clients are refused from now on, not kept waiting.
        self.stop.cancel();
        let _ = self.accepting.await; // It only ends.
        let _ = self.permits.acquire_many(self.limits.max_connections).await; // All are back: no connection is left.
    }
}

/// What every connection of a port passes.
struct Door<F> {
    limits: Limits,
    stop: CancellationToken,
    leave: watch::Receiver<Option<Duration>>,
    acceptor: Option<TlsAcceptor>,
    connect: F,
}

/// Pause between two looks at a preface that comes in pieces.
const PREFACE_PAUSE: Duration = Duration::from_millis(20);

impl<F> Door<F> {
    /// The socket of a client that has begun to speak.
    async fn greet(&self, stream: TcpStream) -> io::Result<Socket> {
        if self.acceptor.is_none() && self.limits.preface_bytes > 0 {
            let mut preface = [0; MAX_PREFACE_BYTES];
            let preface = &mut preface[..self.limits.preface_bytes];
            while let 1.. = self.missing(&stream, preface).await? {
                tokio::time::sleep(PREFACE_PAUSE).await;
            }
        }
        Socket::accept(stream, self.acceptor.as_ref()).await
    }

    /// How many bytes of the preface have not come yet. They stay in the socket.
    async fn missing(&self, stream: &TcpStream, preface: &mut [u8]) -> io::Result<usize> {
        let wanted = preface.len();
        match stream.peek(preface).await? {
            0 => Err(io::ErrorKind::UnexpectedEof.into()),
            found => Ok(wanted - found),
        }
    }
}

async fn accept<F, C>(listener: TcpListener, permits: Arc<Semaphore>, door: Arc<Door<F>>)
where
    F: Fn(Socket) -> C + Send + Sync + 'static,
    C: Connection<Error: std::fmt::Display> + Send + 'static,
{
    let mut leave = door.leave.clone();
    loop {
        let accepted = tokio::select! {
            biased;
            () = door.stop.cancelled() => return,
            _ = leave.wait_for(Option::is_some) => return,
            accepted = async {
                let permit = permits.clone().acquire_owned().await;
                listener.accept().await.map(|(stream, _)| (stream, permit))
            } => accepted,
        };
        match accepted {
            Ok((stream, permit)) => {
                let _ = stream.set_nodelay(true); // Only costs latency where it fails.
                let door = door.clone();
                tokio::spawn(async move {
                    let greeted = tokio::time::timeout(door.limits.patience, door.greet(stream));
                    match greeted.await {
                        Ok(Ok(socket)) => {
                            serve((door.connect)(socket), door.limits, door.stop.clone(), door.leave.clone()).await
                        }
                        Ok(Err(error)) => tracing::debug!("a client did not begin: {error}"),
                        Err(_) => tracing::debug!("a client did not begin within {:?}", door.limits.patience),
                    }
                    drop(permit);
                });
            }
            Err(error) => {
                tracing::warn!("cannot accept a connection: {error}");
                tokio::time::sleep(ACCEPT_PAUSE).await;
            }
        }
    }
}

/// Serves a connection until its client leaves, or, told to stop or too old, until its last request has ended.
async fn serve<C: Connection<Error: std::fmt::Display>>(
    connection: C,
    limits: Limits,
    stop: CancellationToken,
    leave: watch::Receiver<Option<Duration>>,
) {
    let mut connection = std::pin::pin!(connection);
    let grows_old = async {
        match limits.max_age {
            Some(age) => tokio::time::sleep(age).await,
            None => std::future::pending().await,
        }
    };
    let grace = tokio::select! {
        result = &mut connection => return report(result),
        () = stop.cancelled() => None,
        () = lingers(leave) => None,
        () = grows_old => limits.age_grace,
    };
    connection.as_mut().graceful_shutdown();
    match grace {
        Some(grace) => match tokio::time::timeout(grace, connection).await {
            Ok(result) => report(result),
            Err(_) => tracing::debug!("a connection outlived its age and its grace of {grace:?}"),
        },
        None => report(connection.await),
    }
}

/// Resolves when another process accepts and idle connections have had their time.
async fn lingers(mut leave: watch::Receiver<Option<Duration>>) {
    let linger = leave.wait_for(Option::is_some).await.ok().and_then(|linger| *linger);
    match linger {
        Some(linger) => tokio::time::sleep(linger).await,
        // The port is gone, and `stop` says so.
        None => std::future::pending().await,
    }
}

fn report<E: std::fmt::Display>(result: Result<(), E>) {
    if let Err(error) = result {
        tracing::debug!("connection ended: {error}"); // A client that leaves is no event.
    }
}
