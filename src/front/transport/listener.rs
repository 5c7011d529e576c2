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

use serving::RateLimitedLog;

use crate::config::Address;
use crate::transport::client_stream::ClientStream;
use crate::transport::connections::{Activity, Admitted, Connections};
use crate::transport::tls::{Socket, TlsError};

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

/// What bounds the connections of a port.
#[derive(Debug, Clone, Copy)]
pub struct Limits {
    /// Connections at once. Idle ones make room when more than four fifths are taken; else more wait to be accepted.
    pub max_connections: u32,
    /// Connections of one client address; 0 is any number.
    pub max_per_address: u32,
    /// Age at which a connection takes no further request.
    pub max_age: Option<Duration>,
    /// Time that its last requests have from then on; `None` is for ever.
    pub age_grace: Option<Duration>,
    /// Time in which a client must have begun to speak the port's protocol, TLS before it included.
    pub patience: Duration,
    /// Time in which a client must read something of what is written to it; `None` is for ever.
    pub write_patience: Option<Duration>,
    /// The bytes of that beginning, where the protocol's own server would wait for them for ever.
    pub preface_bytes: usize,
}

/// A connection that is served, as a future that ends with it.
pub trait Connection: Future<Output = Result<(), Self::Error>> {
    /// Why it broke off.
    type Error: std::fmt::Display + Send;

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
/// Pause between two looks for connections that have become idle, while all are taken.
const ROOM_PAUSE: Duration = Duration::from_millis(100);
/// Time that a client has to end a connection that makes room for another one.
const LEAVE_GRACE: Duration = Duration::from_millis(300);
/// A client that has vanished is found by the kernel after this silence and probes.
const KEEP_ALIVE: (Duration, Duration, u32) = (Duration::from_secs(60), Duration::from_secs(15), 4);

/// Out of file descriptors, each connection would be a warning.
static ACCEPT_WARNINGS: RateLimitedLog = RateLimitedLog::new(1);

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
        F: Fn(ClientStream<Socket>, Arc<Activity>) -> C + Send + Sync + 'static,
        C: Connection + Send + 'static,
    {
        let local_address = listener.local_addr()?;
        keep_alive(&listener)?;
        let socket = listener.into_std()?;
        let listener = TcpListener::from_std(socket.try_clone()?)?;
        let stop = CancellationToken::new();
        let leave = watch::Sender::new(None);
        let permits = Arc::new(Semaphore::new(limits.max_connections as usize));
        let connections = Arc::new(Connections::new(limits.max_connections, limits.max_per_address));
        let (stopped, left) = (stop.clone(), leave.subscribe());
        let door = Arc::new(Door { limits, connections, stop: stopped, leave: left, acceptor, connect });
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

/// Has the kernel look whether clients are still there. Connections have it from the socket that accepts them.
fn keep_alive(listener: &TcpListener) -> io::Result<()> {
    use rustix::net::sockopt;
    let (silence, pause, count) = KEEP_ALIVE;
    sockopt::set_socket_keepalive(listener, true)?;
    sockopt::set_tcp_keepidle(listener, silence)?;
    sockopt::set_tcp_keepintvl(listener, pause)?;
    sockopt::set_tcp_keepcnt(listener, count)?;
    Ok(())
}

/// What every connection of a port passes.
struct Door<F> {
    limits: Limits,
    connections: Arc<Connections>,
    stop: CancellationToken,
    leave: watch::Receiver<Option<Duration>>,
    acceptor: Option<TlsAcceptor>,
    connect: F,
}

impl<F, C> Door<F>
where
    F: Fn(ClientStream<Socket>, Arc<Activity>) -> C,
    C: Connection,
{
    /// Serves a client from its first byte on.
    async fn pass(&self, stream: TcpStream, activity: &Arc<Activity>) {
        let begun = tokio::select! {
            begun = tokio::time::timeout(self.limits.patience, self.begin(stream, activity)) => begun,
            () = activity.told_to_leave() => return,
        };
        match begun {
            Ok(Ok(stream)) => {
                let connection = (self.connect)(stream, activity.clone());
                serve(connection, self.limits, self.stop.clone(), self.leave.clone(), activity).await;
            }
            Ok(Err(error)) => tracing::debug!("a client did not begin: {error}"),
            Err(_) => tracing::debug!("a client did not begin within {:?}", self.limits.patience),
        }
    }

    /// The bytes of a client that has begun to speak.
    async fn begin(&self, stream: TcpStream, activity: &Arc<Activity>) -> io::Result<ClientStream<Socket>> {
        let socket = Socket::accept(stream, self.acceptor.as_ref()).await?;
        let mut stream = ClientStream::new(socket, activity.clone(), self.limits.write_patience);
        if self.limits.preface_bytes > 0 {
            stream.await_bytes(self.limits.preface_bytes).await?;
        }
        Ok(stream)
    }

    /// The client's place and its permit, for which idle connections make room. `None` when its address has too many.
    async fn admit(
        &self,
        client: SocketAddr,
        permits: &Arc<Semaphore>,
    ) -> Option<(Admitted, tokio::sync::OwnedSemaphorePermit)> {
        let admitted = self.connections.admit(client.ip())?;
        self.connections.make_room(&admitted);
        let mut permit = std::pin::pin!(permits.clone().acquire_owned());
        loop {
            match tokio::time::timeout(ROOM_PAUSE, &mut permit).await {
                Ok(permit) => return Some((admitted, permit.ok()?)),
                Err(_) => self.connections.make_room(&admitted),
            }
        }
    }
}

async fn accept<F, C>(listener: TcpListener, permits: Arc<Semaphore>, door: Arc<Door<F>>)
where
    F: Fn(ClientStream<Socket>, Arc<Activity>) -> C + Send + Sync + 'static,
    C: Connection + Send + 'static,
{
    let mut leave = door.leave.clone();
    loop {
        let accepted = tokio::select! {
            biased;
            () = door.stop.cancelled() => return,
            _ = leave.wait_for(Option::is_some) => return,
            accepted = listener.accept() => accepted,
        };
        let (stream, client) = match accepted {
            Ok(accepted) => accepted,
            Err(error) => {
                if let Some(suppressed) = ACCEPT_WARNINGS.allow() {
                    tracing::warn!("cannot accept a connection: {error}{suppressed}");
                }
                // An idle connection that goes gives its file descriptor back.
                door.connections.make_room_for_files();
                tokio::time::sleep(ACCEPT_PAUSE).await;
                continue;
            }
        };
        let admitted = tokio::select! {
            () = door.stop.cancelled() => return,
            admitted = door.admit(client, &permits) => admitted,
        };
        let Some((admitted, permit)) = admitted else {
            tracing::debug!("{client} is refused: its address has all the connections that it may have");
            continue;
        };
        let _ = stream.set_nodelay(true); // Only costs latency where it fails.
        let door = door.clone();
        tokio::spawn(async move {
            door.pass(stream, &admitted.activity).await;
            drop((admitted, permit));
        });
    }
}

/// Serves a connection until its client leaves. When the server stops, or the connection is too old, until its last request has ended.
async fn serve<C: Connection>(
    connection: C,
    limits: Limits,
    stop: CancellationToken,
    leave: watch::Receiver<Option<Duration>>,
    activity: &Activity,
) {
    let mut connection = std::pin::pin!(connection);
    let grows_old = async {
        match limits.max_age {
            Some(age) => tokio::time::sleep(age).await,
            None => std::future::pending().await,
        }
    };
    let (grace, makes_room) = tokio::select! {
        result = &mut connection => return report(result),
        () = stop.cancelled() => (None, false),
        () = lingers(leave) => (None, false),
        () = grows_old => (limits.age_grace, false),
        () = activity.told_to_leave() => (Some(LEAVE_GRACE), true),
    };
    connection.as_mut().graceful_shutdown();
    match grace {
        // A request that was on its way is answered.
        Some(grace) if makes_room => match tokio::time::timeout(grace, &mut connection).await {
            Ok(result) => report(result),
            Err(_) if activity.is_idle() => tracing::debug!("an idle connection made room for another client"),
            Err(_) => report(connection.await),
        },
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
