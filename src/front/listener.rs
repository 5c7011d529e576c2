//! Sockets: bind, accept, and end every connection in good order.

use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use hyper_util::server::graceful::{GracefulConnection, GracefulShutdown, Watcher};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::Semaphore;
use tokio_util::sync::CancellationToken;

use crate::config::Address;

/// Why the front did not start.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs)] // Fields are named by their messages.
pub enum StartError {
    #[error("failed to start {service}: Socket '{address}' already in use")]
    InUse { service: &'static str, address: Address },
    #[error("failed to start {service}: cannot listen on `{address}`")]
    Listen { service: &'static str, address: Address, source: io::Error },
    #[error(transparent)]
    Config(#[from] crate::ConfigError),
}

/// Binds `address` for `service`.
///
/// # Errors
/// When another process has it, or it is not this machine's.
pub async fn bind(service: &'static str, address: &Address) -> Result<TcpListener, StartError> {
    match TcpListener::bind((address.host.as_str(), address.port)).await {
        Ok(listener) => Ok(listener),
        Err(error) if error.kind() == io::ErrorKind::AddrInUse => {
            Err(StartError::InUse { service, address: address.clone() })
        }
        Err(source) => Err(StartError::Listen { service, address: address.clone(), source }),
    }
}

/// One port and its connections.
pub struct Port {
    local_address: SocketAddr,
    stop: CancellationToken,
    accepting: tokio::task::JoinHandle<GracefulShutdown>,
}

/// Pause after a failed accept, so that a machine out of file descriptors is not made busier.
const ACCEPT_PAUSE: Duration = Duration::from_millis(20);

impl Port {
    /// Serves each connection of `listener` with what `connect` makes of it, at most `max_connections` at once.
    ///
    /// # Errors
    /// When the socket has lost its address.
    pub fn open<F, C>(listener: TcpListener, max_connections: usize, connect: F) -> io::Result<Self>
    where
        F: Fn(TcpStream) -> C + Send + 'static,
        C: GracefulConnection<Error: std::fmt::Display> + Send + 'static,
    {
        let local_address = listener.local_addr()?;
        let stop = CancellationToken::new();
        let accepting = tokio::spawn(accept(listener, max_connections, stop.clone(), connect));
        Ok(Self { local_address, stop, accepting })
    }

    /// Where it listens.
    pub fn local_address(&self) -> SocketAddr {
        self.local_address
    }

    /// Takes no new connection, lets each finish the requests it has begun, and resolves when all have ended.
    pub async fn close(self) {
        self.stop.cancel();
        if let Ok(connections) = self.accepting.await {
            connections.shutdown().await;
        }
    }
}

async fn accept<F, C>(
    listener: TcpListener,
    max_connections: usize,
    stop: CancellationToken,
    connect: F,
) -> GracefulShutdown
where
    F: Fn(TcpStream) -> C + Send + 'static,
    C: GracefulConnection<Error: std::fmt::Display> + Send + 'static,
{
    let connections = GracefulShutdown::new();
    let permits = Arc::new(Semaphore::new(max_connections));
    loop {
        let accepted = tokio::select! {
            biased;
            () = stop.cancelled() => break,
            accepted = async {
                let permit = permits.clone().acquire_owned().await;
                listener.accept().await.map(|(stream, _)| (stream, permit))
            } => accepted,
        };
        match accepted {
            Ok((stream, permit)) => {
                let _ = stream.set_nodelay(true); // Only costs latency where it fails.
                let watcher = connections.watcher();
                let connection = connect(stream);
                tokio::spawn(async move {
                    serve(watcher, connection).await;
                    drop(permit);
                });
            }
            Err(error) => {
                tracing::warn!("cannot accept a connection: {error}");
                tokio::time::sleep(ACCEPT_PAUSE).await;
            }
        }
    }
    connections
}

async fn serve<C: GracefulConnection<Error: std::fmt::Display>>(watcher: Watcher, connection: C) {
    if let Err(error) = watcher.watch(connection).await {
        tracing::debug!("connection ended: {error}"); // A client that leaves is no event.
    }
}
