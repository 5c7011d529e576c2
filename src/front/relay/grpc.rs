//! Forwards gRPC calls to rank 0. Calls of one request are sent again as a whole; for streams of requests see [`super::stream_infer`].

use std::io;
use std::path::Path;
use std::sync::Arc;

use bytes::Bytes;
use futures::{StreamExt as _, stream};
use h2::SendStream;
use http::header::{CONTENT_TYPE, HeaderName, HeaderValue};
use http::{HeaderMap, Request, Response, request};
use http_body_util::{BodyExt as _, StreamBody};
use hyper::body::Frame;
use tonic::Status;
use tonic::body::Body;

use crate::api::triton::grpc::paths;
use crate::relay::forwarder::{ASLEEP, PROBE_TIMEOUT, STATE};
use crate::relay::grpc_upstream::{Begun, GrpcUpstream, check_repeats, next_part, refusal, send_data};
use crate::relay::kept::KeptBody;
use crate::relay::request::Handling;
use crate::relay::stream_infer::StreamInfer;
use crate::transport::http2::RequestBody;

/// Answers a call. An error is an answer, too.
pub(crate) async fn forward(upstream: Arc<GrpcUpstream>, request: Request<RequestBody>) -> Response<Body> {
    let (head, body) = request.into_parts();
    if head.uri.path() == paths::MODEL_STREAM_INFER {
        return StreamInfer::begin(upstream, head, body);
    }
    let handling = handling(head.uri.path());
    if handling == Handling::Probe && upstream.forwarder.upstream.is_asleep() {
        return asleep();
    }
    let _open = (handling != Handling::Probe).then(|| upstream.forwarder.demand.begin());
    let body = KeptBody::new(body, &upstream.forwarder.kept);
    let mut call = Call { upstream, handling, head, body, repeats: 0 };
    let answered = match handling {
        Handling::Probe => tokio::time::timeout(PROBE_TIMEOUT, call.answer())
            .await
            .unwrap_or_else(|_| Err("the server does not answer: it is stopped or hangs".to_owned())),
        _ => call.answer().await,
    };
    answered.unwrap_or_else(|message| refusal(message).into_http())
}

/// A call of one request, and all that is needed to send it again.
struct Call {
    upstream: Arc<GrpcUpstream>,
    handling: Handling,
    head: request::Parts,
    body: KeptBody<RequestBody>,
    /// How often it was sent again.
    repeats: u32,
}

impl Call {
    async fn answer(&mut self) -> Result<Response<Body>, String> {
        loop {
            let begun = self.upstream.begin(&self.head, self.handling == Handling::Probe).await?;
            let world = Arc::clone(&begun.world);
            match self.send(begun).await {
                Ok(Some(answer)) => return Ok(answer),
                Ok(None) => self.upstream.forget(&world).await,
                Err(_) => {
                    self.upstream.forget(&world).await;
                    self.check_repeat(&world).await?;
                }
            }
        }
    }

    /// Sends the request, and receives the head and the first part of the answer. `None`: this rank 0 ends, and the request is one for
    /// the next.
    async fn send(&self, begun: Begun) -> Result<Option<Response<Body>>, h2::Error> {
        let Begun { response, request, world } = begun;
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
        let trailers = first.as_ref().and_then(Frame::trailers_ref);
        let is_refused = [Some(&head.headers), trailers].into_iter().flatten().any(says_stopping);
        if is_refused && self.body.is_kept() && self.upstream.forwarder.upstream.goes_on_after_refusal(&world).await {
            return Ok(None);
        }
        let Some(first) = first else { return Ok(Some(Response::from_parts(head, Body::empty()))) };
        let rest = stream::unfold(Some(body), |body| async {
            let mut body = body?;
            match next_part(&mut body).await {
                Ok(part) => Some((Ok(part?), Some(body))),
                Err(error) => Some((Err(io::Error::other(error)), None)),
            }
        });
        let parts = stream::once(std::future::ready(Ok(first))).chain(rest);
        Ok(Some(Response::from_parts(head, Body::new(StreamBody::new(parts)))))
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
        check_repeats(self.repeats, &self.upstream.forwarder, world).await
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

/// Whether the status in these headers or trailers is the refusal of a rank 0 that ends.
fn says_stopping(headers: &HeaderMap) -> bool {
    Status::from_header_map(headers).is_some_and(|status| status.message().contains(serving::STOPPING))
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
