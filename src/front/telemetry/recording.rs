//! Keeps requests for models and their replies in a recording.
//!
//! A request costs the clone of its path and of references to its bytes. Without `--record` it costs one comparison.

use std::pin::Pin;
use std::sync::{Arc, OnceLock};
use std::task::{Context, Poll};
use std::time::Instant;

use bytes::Bytes;
use futures::{Stream, StreamExt};
use http::header::{CONTENT_TYPE, HeaderName};
use http::{Method, request};
use record::{Recorder, RequestItem};
use tonic::Status;

use crate::api::openai::endpoint::Endpoint;
use crate::api::request_effect::Effect;
use crate::api::triton::grpc::redact;
use crate::api::triton::http::reply::Reply;
use crate::api::triton::http::route::Route;
use crate::transport::body::ReplyBody;

/// Bytes of one reply that are kept.
const MAX_REPLY_BYTES: u64 = 8 << 20;
const REQUEST_ID: HeaderName = HeaderName::from_static("x-request-id");
const HEAD_LENGTH: HeaderName = HeaderName::from_static("inference-header-content-length");

tokio::task_local! {
    /// The body of the request that the task answers.
    static BODY: Arc<OnceLock<Bytes>>;
}

/// A request that is recorded.
pub(crate) struct Recorded {
    recorder: Arc<Recorder>,
    item: RequestItem,
    body: Arc<OnceLock<Bytes>>,
}

impl Recorded {
    /// The request with this head, if it is inference and the recording goes on.
    pub(crate) fn begin(recorder: Option<&Arc<Recorder>>, head: &request::Parts) -> Option<Self> {
        let recorder = recorder.filter(|_| head.method == Method::POST && is_inference(head.uri.path()))?;
        let text = |name: &HeaderName| Some(head.headers.get(name)?.to_str().ok()?.to_owned());
        let item = RequestItem {
            path: head.uri.path_and_query().map(ToString::to_string).unwrap_or_default(),
            request_id: text(&REQUEST_ID),
            content_type: text(&CONTENT_TYPE),
            json_bytes: text(&HEAD_LENGTH).and_then(|length| length.parse().ok()),
            ..RequestItem::new(recorder.arrival()?)
        };
        Some(Self { recorder: Arc::clone(recorder), item, body: Arc::default() })
    }

    /// A message of the call at `path` over gRPC, if the recording goes on.
    pub(crate) fn begin_message(
        recorder: Option<&Arc<Recorder>>,
        path: &str,
        message: &Bytes,
        id: &str,
    ) -> Option<Self> {
        let recorder = recorder?;
        let item = RequestItem {
            path: path.to_owned(),
            request_id: (!id.is_empty()).then(|| id.to_owned()),
            redact: Some(redact::message),
            ..RequestItem::new(recorder.arrival()?)
        };
        Some(Self { recorder: Arc::clone(recorder), item, body: Arc::new(OnceLock::from(message.clone())) })
    }

    /// Records a message of the reply, which may come in parts.
    pub(crate) fn message(&mut self, parts: impl IntoIterator<Item = Bytes>) {
        self.piece();
        parts.into_iter().for_each(|part| self.keep(&part));
    }

    /// Records the status that ends the call with an error.
    pub(crate) fn fail(&mut self, status: &Status) {
        self.item.status = status.code() as u16;
        self.message([Bytes::copy_from_slice(status.message().as_bytes())]);
    }

    /// Records that the reply is whole.
    pub(crate) fn finish(mut self) {
        self.item.is_whole = true;
    }

    /// Runs `answer`, in which [`note_body`] may be called, and records its reply.
    pub(crate) async fn answered(mut self, answer: impl Future<Output = Reply>) -> Reply {
        let (head, body) = BODY.scope(Arc::clone(&self.body), answer).await.into_parts();
        self.item.status = head.status.as_u16();
        let body = match body {
            ReplyBody::Parts(parts) => {
                parts.iter().for_each(|part| self.add(part));
                self.item.is_whole = true;
                ReplyBody::Parts(parts)
            }
            ReplyBody::Events(events) => ReplyBody::Events(Box::pin(RecordedEvents { events, recorded: self })),
        };
        Reply::from_parts(head, body)
    }

    fn add(&mut self, part: &Bytes) {
        self.piece();
        self.keep(part);
    }

    fn piece(&mut self) {
        self.item.first.get_or_insert_with(Instant::now);
        self.item.pieces += 1;
    }

    fn keep(&mut self, part: &Bytes) {
        let (item, bytes) = (&mut self.item, part.len() as u64);
        // A reply of which a part does not fit is not kept any further.
        let is_kept_so_far = item.held_bytes == item.reply_bytes;
        item.reply_bytes += bytes;
        if is_kept_so_far && item.reply_bytes <= MAX_REPLY_BYTES && self.recorder.hold(bytes) {
            item.held_bytes += bytes;
            item.reply.push(part.clone());
        }
    }
}

/// At the end of the reply, or when the client has left.
impl Drop for Recorded {
    fn drop(&mut self) {
        let arrival = self.item.arrival;
        let mut item = std::mem::replace(&mut self.item, RequestItem::new(arrival));
        item.last = Instant::now();
        item.body = self.body.get().cloned().unwrap_or_default();
        self.recorder.request(item);
    }
}

/// Keeps the body of the request that this task answers, if it is recorded.
pub(crate) fn note_body(bytes: &Bytes) {
    // Outside of a recorded request there is no value.
    let _ = BODY.try_with(|body| body.set(bytes.clone()));
}

/// The events of a stream, which are recorded as they pass.
struct RecordedEvents {
    events: Pin<Box<dyn Stream<Item = Bytes> + Send>>,
    recorded: Recorded,
}

impl Stream for RecordedEvents {
    type Item = Bytes;

    fn poll_next(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Bytes>> {
        let this = self.get_mut();
        let event = this.events.poll_next_unpin(context);
        match &event {
            Poll::Ready(Some(part)) => this.recorded.add(part),
            Poll::Ready(None) => this.recorded.item.is_whole = true,
            Poll::Pending => {}
        }
        event
    }
}

/// Whether requests of this path run a model.
fn is_inference(path: &str) -> bool {
    let effect = Endpoint::of(path).map(Endpoint::effect).or_else(|| Some(Route::of(path)?.effect()));
    effect == Some(Effect::Generates)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn requests_that_run_a_model_are_kept_and_others_are_not() {
        for (path, is_kept) in [
            ("/v1/chat/completions", true),
            ("/v2/models/m/versions/1/generate_stream", true),
            ("/v2/models/m/infer", true),
            ("/v1/models", false),
            ("/v1/chat/completions/render", false),
            ("/v2/repository/models/m/load", false),
        ] {
            assert_eq!(is_inference(path), is_kept, "{path}");
        }
    }
}
