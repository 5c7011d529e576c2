//! Forwards gRPC calls to rank 0. Calls of one request are sent again as a whole; for streams of requests see [`super::stream_infer`].

use std::future::poll_fn;
use std::io;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use futures::{StreamExt as _, stream};
use h2::client::SendRequest;
use h2::{RecvStream, SendStream};
use http::header::{CONTENT_TYPE, HeaderName, HeaderValue};
use http::{HeaderMap, Request, Response, request};
use http_body_util::{BodyExt as _, StreamBody};
use hyper::body::Frame;
use tokio::sync::{Mutex, mpsc};
use tonic::Status;
use tonic::body::Body;

use crate::api::triton::grpc::paths;
use crate::relay::http::{ASLEEP, Forwarder, MAX_REPEATS, STATE};
use crate::relay::kept::KeptBody;
use crate::relay::request::Handling;
use crate::relay::stream_infer::StreamInfer;
use crate::relay::upstream::RelayedPort;
use crate::transport::http2::RequestBody;

/// Flow-control window of a connection to rank 0, as that of rank 0.
const WINDOW_BYTES: u32 = 4 << 20;

/// How long a probe waits for an answer: a rank 0 that hangs is not healthy.
const PROBE_TIMEOUT: Duration = Duration::from_secs(5);

/// Parts of an answer on their way to the client. An error resets the call.
pub(super) type Parts = mpsc::Sender<io::Result<Frame<Bytes>>>;

/// Forwards the calls of one client's connection over one connection to rank 0.
pub(crate) struct GrpcForwarder {
    pub(super) forwarder: Arc<Forwarder>,
    connection: Mutex<Option<Connection>>,
}

#[derive(Clone)]
struct Connection {
    sender: SendRequest<Bytes>,
    world: Arc<Path>,
}

/// A call that was begun at a rank 0.
pub(super) struct Begun {
    pub(super) response: h2::client::ResponseFuture,
    pub(super) request: SendStream<Bytes>,
    /// The world of that rank 0.
    pub(super) world: Arc<Path>,
}

impl GrpcForwarder {
    pub(crate) fn new(forwarder: Arc<Forwarder>) -> Arc<Self> {
        Arc::new(Self { forwarder, connection: Mutex::default() })
    }

    /// Answers a call. An error is an answer, too.
    pub(crate) async fn forward(self: Arc<Self>, request: Request<RequestBody>) -> Response<Body> {
        let (head, body) = request.into_parts();
        if head.uri.path() == paths::MODEL_STREAM_INFER {
            return StreamInfer::begin(self, head, body);
        }
        let handling = handling(head.uri.path());
        if handling == Handling::Probe && self.forwarder.upstream.is_asleep() {
            return asleep();
        }
        let _open = (handling != Handling::Probe).then(|| self.forwarder.demand.begin());
        let body = KeptBody::new(body, &self.forwarder.kept);
        let mut call = Call { forwarder: self, handling, head, body, repeats: 0 };
        let answered = match handling {
            Handling::Probe => tokio::time::timeout(PROBE_TIMEOUT, call.answer())
                .await
                .unwrap_or_else(|_| Err("the server does not answer: it is stopped or hangs".to_owned())),
            _ => call.answer().await,
        };
        answered.unwrap_or_else(|message| refusal(message).into_http())
    }

    /// Begins a call at the rank 0 that serves; unless it `is_probe`, waits for one.
    ///
    /// # Errors
    /// The message for the client, when none serves in time.
    pub(super) async fn begin(&self, head: &request::Parts, is_probe: bool) -> Result<Begun, String> {
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
    pub(super) async fn forget(&self, world: &Arc<Path>) {
        let mut connection = self.connection.lock().await;
        *connection = connection.take().filter(|open| !Arc::ptr_eq(&open.world, world));
    }
}

/// A call of one request, and all that is needed to send it again.
struct Call {
    forwarder: Arc<GrpcForwarder>,
    handling: Handling,
    head: request::Parts,
    body: KeptBody<RequestBody>,
    /// How often it was sent again.
    repeats: u32,
}

impl Call {
    async fn answer(&mut self) -> Result<Response<Body>, String> {
        loop {
            let begun = self.forwarder.begin(&self.head, self.handling == Handling::Probe).await?;
            let world = Arc::clone(&begun.world);
            match self.send(begun).await {
                Ok(answer) => return Ok(answer),
                Err(_) => {
                    self.forwarder.forget(&world).await;
                    self.check_repeat(&world).await?;
                }
            }
        }
    }

    /// Sends the request, and receives the head and the first part of the answer.
    async fn send(&self, begun: Begun) -> Result<Response<Body>, h2::Error> {
        let Begun { response, request, .. } = begun;
        let received = async {
            let (head, mut body) = response.await?.into_parts();
            let first = next_part(&mut body).await?;
            Ok::<_, h2::Error>((head, first, body))
        };
        let mut received = std::pin::pin!(received);
        let sent = send_body(self.body.read(), request);
        let (head, first, body) = tokio::select! {
            answer = &mut received => answer?,
            sent = sent => {
                sent?;
                received.await?
            }
        };
        let Some(first) = first else { return Ok(Response::from_parts(head, Body::empty())) };
        let rest = stream::unfold(Some(body), |body| async {
            let mut body = body?;
            match next_part(&mut body).await {
                Ok(part) => Some((Ok(part?), Some(body))),
                Err(error) => Some((Err(io::Error::other(error)), None)),
            }
        });
        let parts = stream::once(std::future::ready(Ok(first))).chain(rest);
        Ok(Response::from_parts(head, Body::new(StreamBody::new(parts))))
    }

    /// Checks that the call may be sent again after its connection to the rank 0 of `world` broke.
    async fn check_repeat(&mut self, world: &Path) -> Result<(), String> {
        match self.handling {
            Handling::Probe => return Err("the server died".to_owned()),
            Handling::Once => {
                let what =
                    "the server died while it had this call, which is not sent again because it may change the server";
                return Err(format!("{what}; look whether it did, and send it again if not"));
            }
            Handling::Repeat => {}
        }
        if !self.body.is_kept() {
            return Err(
                "the server died while it had this call, which is too large to be kept; send it again".to_owned()
            );
        }
        self.repeats += 1;
        check_repeats(self.repeats, &self.forwarder.forwarder, world).await
    }
}

/// Checks that a call may be sent again for the `repeats`th time, after the rank 0 of `world` has broken its connection.
pub(super) async fn check_repeats(repeats: u32, forwarder: &Forwarder, world: &Path) -> Result<(), String> {
    if forwarder.upstream.is_alive(world).await {
        return Err("the server ended this call; send it again".to_owned());
    }
    match repeats > MAX_REPEATS {
        true => Err(format!("the server died {repeats} times while it had this call; do not send it again")),
        false => Ok(()),
    }
}

/// The answer to a probe while a world is started only for a request: it is ready, since a call is answered after a pause.
fn asleep() -> Response<Body> {
    // A message of two bytes. `ServerLiveResponse`, `ServerReadyResponse`, `ModelReadyResponse` and `HealthCheckResponse` have the same
    // form: field 1 is 1, for true or for SERVING.
    const YES: &[u8] = &[0, 0, 0, 0, 2, 0x08, 1];
    let trailers = HeaderMap::from_iter([
        (HeaderName::from_static("grpc-status"), HeaderValue::from_static("0")),
        (STATE, ASLEEP),
    ]);
    let parts = [Ok::<_, io::Error>(Frame::data(Bytes::from_static(YES))), Ok(Frame::trailers(trailers))];
    let mut answer = Response::new(Body::new(StreamBody::new(stream::iter(parts))));
    answer.headers_mut().insert(CONTENT_TYPE, HeaderValue::from_static("application/grpc"));
    answer
}

/// The handling of a call.
fn handling(path: &str) -> Handling {
    let (service, method) = path.trim_start_matches('/').split_once('/').unwrap_or_default();
    match (service, method) {
        ("grpc.health.v1.Health", "Check") | (_, "ServerLive" | "ServerReady" | "ModelReady") => Handling::Probe,
        (
            "inference.GRPCInferenceService",
            "ModelInfer" | "ServerMetadata" | "ModelMetadata" | "ModelConfig" | "ModelStatistics" | "RepositoryIndex",
        ) => Handling::Repeat,
        _ => Handling::Once,
    }
}

/// UNAVAILABLE with a message.
pub(super) fn refusal(message: String) -> Status {
    let mut metadata = HeaderMap::new();
    metadata.insert("retry-after", crate::api::status::RETRY_AFTER_SECS.into());
    Status::with_metadata(tonic::Code::Unavailable, message, tonic::metadata::MetadataMap::from_headers(metadata))
}

/// Sends a body within the flow-control window of rank 0.
async fn send_body<B>(body: B, mut request: SendStream<Bytes>) -> Result<(), h2::Error>
where
    B: hyper::body::Body<Data = Bytes, Error = h2::Error>,
{
    let mut body = std::pin::pin!(body);
    while let Some(frame) = body.frame().await {
        // A client that has left ends this call.
        if let Ok(data) = frame?.into_data() {
            send_data(&mut request, data).await?;
        }
    }
    request.send_data(Bytes::new(), true)
}

/// Sends data within the flow-control window of rank 0.
pub(super) async fn send_data(request: &mut SendStream<Bytes>, mut data: Bytes) -> Result<(), h2::Error> {
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
pub(super) async fn next_part(body: &mut RecvStream) -> Result<Option<Frame<Bytes>>, h2::Error> {
    if let Some(data) = body.data().await {
        let data = data?;
        let _ = body.flow_control().release_capacity(data.len()); // Fails only after the end of the call.
        return Ok(Some(Frame::data(data)));
    }
    Ok(body.trailers().await?.map(Frame::trailers))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn calls_that_change_the_server_are_not_sent_again() {
        let of = |method: &str| handling(&format!("/inference.GRPCInferenceService/{method}"));
        assert_eq!([of("ModelInfer"), of("RepositoryIndex")], [Handling::Repeat; 2]);
        assert_eq!(
            [of("RepositoryModelLoad"), of("TraceSetting"), of("SystemSharedMemoryRegister")],
            [Handling::Once; 3]
        );
        assert_eq!([of("ServerReady"), handling("/grpc.health.v1.Health/Check")], [Handling::Probe; 2]);
    }
}
