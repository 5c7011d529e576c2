//! The connection for the gRPC calls of one client to the rank 0 that serves.

use std::future::poll_fn;
use std::io;
use std::path::Path;
use std::sync::Arc;

use bytes::Bytes;
use h2::client::SendRequest;
use h2::{RecvStream, SendStream};
use http::{HeaderMap, Request, request};
use hyper::body::Frame;
use tokio::sync::{Mutex, mpsc};
use tonic::Status;

use crate::relay::forwarder::{Forwarder, MAX_REPEATS};
use crate::relay::upstream::RelayedPort;

/// Flow-control window of a connection to rank 0, as that of rank 0.
const WINDOW_BYTES: u32 = 4 << 20;

/// Parts of an answer on their way to the client. An error resets the call.
pub(crate) type Parts = mpsc::Sender<io::Result<Frame<Bytes>>>;

/// One connection to rank 0 for the calls of one client's connection.
pub(crate) struct GrpcUpstream {
    pub(crate) forwarder: Arc<Forwarder>,
    connection: Mutex<Option<Connection>>,
}

#[derive(Clone)]
struct Connection {
    sender: SendRequest<Bytes>,
    world: Arc<Path>,
}

/// A call that was begun at a rank 0.
pub(crate) struct Begun {
    pub(crate) response: h2::client::ResponseFuture,
    pub(crate) request: SendStream<Bytes>,
    /// The world of that rank 0.
    pub(crate) world: Arc<Path>,
}

impl GrpcUpstream {
    pub(crate) fn new(forwarder: Arc<Forwarder>) -> Arc<Self> {
        Arc::new(Self { forwarder, connection: Mutex::default() })
    }

    /// Begins a call at the rank 0 that serves; unless it `is_probe`, waits for one.
    ///
    /// # Errors
    /// The message for the client, when none serves in time.
    pub(crate) async fn begin(&self, head: &request::Parts, is_probe: bool) -> Result<Begun, String> {
        loop {
            let Connection { sender, world } = self.connect(is_probe).await?;
            let mut request = Request::new(());
            *request.method_mut() = head.method.clone();
            *request.uri_mut() = head.uri.clone();
            *request.version_mut() = head.version;
            *request.headers_mut() = head.headers.clone();
            let begun = async { sender.ready().await?.send_request(request, false) };
            match begun.await {
                Ok((response, request)) => return Ok(Begun { response, request, world }),
                // This rank 0 has died since.
                Err(_) => self.forget(&world).await,
            }
        }
    }

    async fn connect(&self, is_probe: bool) -> Result<Connection, String> {
        let upstream = &self.forwarder.upstream;
        loop {
            if let Some(open) = self.connection.lock().await.as_ref().filter(|open| upstream.serves(&open.world)) {
                return Ok(open.clone());
            }
            // Without the lock, so that a call that waits for a rank 0 holds up no probe.
            let link = match is_probe {
                true => upstream.connect_now(RelayedPort::Grpc).await?,
                false => upstream.connect(RelayedPort::Grpc).await?,
            };
            let mut settings = h2::client::Builder::new();
            settings.initial_window_size(WINDOW_BYTES).initial_connection_window_size(WINDOW_BYTES);
            let Ok((sender, wire)) = settings.handshake(link.stream).await else { continue };
            tokio::spawn(wire);
            let open = Connection { sender, world: link.world };
            *self.connection.lock().await = Some(open.clone());
            return Ok(open);
        }
    }

    /// Closes the connection to the rank 0 of `world`.
    pub(crate) async fn forget(&self, world: &Arc<Path>) {
        let mut connection = self.connection.lock().await;
        *connection = connection.take().filter(|open| !Arc::ptr_eq(&open.world, world));
    }
}

/// Checks that a call may be sent again for the `repeats`th time, after the rank 0 of `world` has broken its connection.
pub(crate) async fn check_repeats(repeats: u32, forwarder: &Forwarder, world: &Path) -> Result<(), String> {
    if forwarder.upstream.is_alive(world).await {
        return Err("the server ended this call; send it again".to_owned());
    }
    match repeats > MAX_REPEATS {
        true => Err(format!("the server died {repeats} times while it had this call; do not send it again")),
        false => Ok(()),
    }
}

/// UNAVAILABLE with a message.
pub(crate) fn refusal(message: String) -> Status {
    let mut metadata = HeaderMap::new();
    metadata.insert("retry-after", crate::api::status::RETRY_AFTER_SECS.into());
    Status::with_metadata(tonic::Code::Unavailable, message, tonic::metadata::MetadataMap::from_headers(metadata))
}

/// Sends data within the flow-control window of rank 0.
pub(crate) async fn send_data(request: &mut SendStream<Bytes>, mut data: Bytes) -> Result<(), h2::Error> {
    while !data.is_empty() {
        request.reserve_capacity(data.len());
        let Some(room) = poll_fn(|context| request.poll_capacity(context)).await.transpose()? else {
            return Err(h2::Reason::CANCEL.into());
        };
        request.send_data(data.split_to(room.min(data.len())), false)?;
    }
    Ok(())
}

/// The next data or the trailers of an answer; `None` at its end.
pub(crate) async fn next_part(body: &mut RecvStream) -> Result<Option<Frame<Bytes>>, h2::Error> {
    if let Some(data) = body.data().await {
        let data = data?;
        let _ = body.flow_control().release_capacity(data.len()); // Fails only after the end of the call.
        return Ok(Some(Frame::data(data)));
    }
    Ok(body.trailers().await?.map(Frame::trailers))
}
