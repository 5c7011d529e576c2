//! `ModelStreamInfer` without the layers between: replies are encoded as the messages that HTTP/2 sends.
//!
//! For calls whose messages are not packed, in either direction; the others go through `tonic`.

use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use bytes::{Bytes, BytesMut};
use futures::{Stream as _, StreamExt as _};
use h2::server::SendResponse;
use h2::{Reason, SendStream};
use http::{HeaderMap, HeaderValue, Request, Response, header};
use prost::Message as _;
use tokio::sync::OwnedSemaphorePermit;
use tokio::time::{Sleep, sleep};
use tonic::Status;

use crate::api::triton::grpc::call_context::Forwarded;
use crate::api::triton::grpc::messages::{Message, Messages};
use crate::api::triton::grpc::paths::MODEL_STREAM_INFER;
use crate::api::triton::grpc::proto::ModelInferRequest;
use crate::api::triton::grpc::response::StreamReply;
use crate::api::triton::grpc::stream_infer::InferStream;
use crate::state::State;
use crate::transport::budget::Charge;
use crate::transport::http2::{Call, Gone, Progress, RequestBody, poll_room};
use crate::transport::large_work::block_in_place_if_large;
use crate::transport::wake_flag::WakeFlag;

/// Replies are gathered up to this size.
const FULL_BYTES: usize = 16 << 10;

/// Bytes that are sent before it is looked again whether the client has room: what it does not take meanwhile is kept.
const UNASKED_BYTES: usize = 16 << 10;

/// One call: its requests are answered on its stream until both have ended. Dropping it cancels what is in flight.
pub struct StreamCall {
    replies: Replies,
    stream: SendStream<Bytes>,
    /// Set when the client has cancelled the call, or has room again.
    stream_flag: WakeFlag,
    /// The next messages, or how the call ended.
    made: Option<Result<Bytes, HeaderMap>>,
    /// Sent since the client was last known to have room.
    unasked_bytes: usize,
    /// How long the client may have no room, and the timer that runs while it has none.
    patience: Option<Duration>,
    stall: Option<Pin<Box<Sleep>>>,
    is_over: bool,
    _place: OwnedSemaphorePermit,
}

/// The request that a message is.
fn decode(message: Message) -> Result<(ModelInferRequest, Charge), Status> {
    let Message { bytes, charge } = message;
    let decoded = block_in_place_if_large(charge.held(), || ModelInferRequest::decode(bytes));
    Ok((decoded.map_err(|error| Status::internal(error.to_string()))?, charge))
}

impl StreamCall {
    /// Begins to answer `request`, which has its `place` among those that may be open. `None` where its client has left.
    pub fn begin(
        state: Arc<State>,
        request: Request<RequestBody>,
        place: OwnedSemaphorePermit,
        mut respond: SendResponse<Bytes>,
    ) -> Option<Self> {
        let (parts, body) = request.into_parts();
        let patience = state.config.write_timeout;
        let requests =
            Messages::new(state.clone(), MODEL_STREAM_INFER, None, body).map(|message| decode(message?)).boxed();
        let ends_on_error = parts.headers.get("triton_grpc_error").is_some_and(|value| value == "true");
        let forwarded = parts.extensions.get::<Forwarded>().cloned();
        let all = InferStream::new(state, requests, ends_on_error, forwarded);
        let mut head = Response::new(());
        head.headers_mut().insert(header::CONTENT_TYPE, HeaderValue::from_static("application/grpc"));
        Some(Self {
            replies: Replies { all, ending: None },
            stream: respond.send_response(head, false).ok()?,
            stream_flag: WakeFlag::default(),
            made: None,
            unasked_bytes: 0,
            patience,
            stall: None,
            is_over: false,
            _place: place,
        })
    }

    /// Whether the client has room for what was made. An error when it has left.
    fn poll_stream(&mut self, context: &mut Context<'_>) -> Poll<Result<(), Gone>> {
        let Self { stream, stream_flag, made, unasked_bytes, .. } = self;
        let waits = made.is_some();
        let polled = stream_flag.poll(context, |context| match stream.poll_reset(context) {
            Poll::Ready(_) => Poll::Ready(Err(Gone)),
            Poll::Pending if waits => poll_room(stream, context),
            Poll::Pending => Poll::Pending,
        });
        if polled.is_ready() {
            *unasked_bytes = 0;
        }
        polled
    }

    /// Ends the call when its client has had no room for too long.
    fn wait_for_room(&mut self, context: &mut Context<'_>) -> Progress {
        let Some(patience) = self.patience else { return Progress::Waits };
        let stall = self.stall.get_or_insert_with(|| Box::pin(sleep(patience)));
        match stall.as_mut().poll(context) {
            Poll::Ready(()) => {
                tracing::debug!("a stream's client has made no room for its answers in {patience:?}");
                Progress::Ended
            }
            Poll::Pending => Progress::Waits,
        }
    }
}

impl Call for StreamCall {
    fn proceed(&mut self, context: &mut Context<'_>) -> Progress {
        match self.poll_stream(context) {
            Poll::Ready(Err(Gone)) => return Progress::Ended,
            Poll::Ready(Ok(())) => {
                self.stall = None;
                context.waker().wake_by_ref(); // What came meanwhile was not looked at.
                return Progress::Made;
            }
            Poll::Pending if self.made.is_some() => return self.wait_for_room(context),
            Poll::Pending => {}
        }
        let Poll::Ready(made) = self.replies.poll_messages(context) else { return Progress::Waits };
        self.unasked_bytes += made.as_ref().map_or(0, Bytes::len);
        self.made = Some(made);
        if self.unasked_bytes <= UNASKED_BYTES {
            return Progress::Made;
        }
        self.stream_flag.set();
        self.proceed(context)
    }

    fn send(&mut self) -> Poll<()> {
        let sent = match self.made.take() {
            Some(Ok(messages)) => self.stream.send_data(messages, false),
            Some(Err(trailers)) => {
                self.is_over = true;
                self.stream.send_trailers(trailers)
            }
            None => Ok(()),
        };
        if self.is_over || sent.is_err() { Poll::Ready(()) } else { Poll::Pending }
    }
}

impl Drop for StreamCall {
    /// A call that breaks off, as in a panic, has failed.
    fn drop(&mut self) {
        if !self.is_over {
            self.stream.send_reset(Reason::INTERNAL_ERROR);
        }
    }
}

struct Replies {
    all: InferStream,
    /// What followed the last reply, where that is known.
    ending: Option<Option<Result<Bytes, Status>>>,
}

impl Replies {
    fn poll_reply(&mut self, context: &mut Context<'_>) -> Poll<Option<Result<Bytes, Status>>> {
        let reply = Pin::new(&mut self.all).poll_next(context);
        reply.map(|reply| reply.map(|reply| reply.and_then(StreamReply::framed)))
    }

    /// The next messages, as many as are ready; or how the call ended.
    fn poll_messages(&mut self, context: &mut Context<'_>) -> Poll<Result<Bytes, HeaderMap>> {
        let next = match self.ending.take() {
            Some(ending) => ending,
            None => ready!(self.poll_reply(context)),
        };
        Poll::Ready(match next {
            Some(Ok(first)) => Ok(self.gather(first, context)),
            Some(Err(status)) => Err(trailers(&status)),
            None => Err(trailers(&Status::ok(""))),
        })
    }

    /// `first` and what is ready behind it.
    fn gather(&mut self, first: Bytes, context: &mut Context<'_>) -> Bytes {
        let mut all = BytesMut::new();
        while !self.all.is_drained() {
            if first.len().max(all.len()) >= FULL_BYTES {
                context.waker().wake_by_ref();
                break;
            }
            match self.poll_reply(context) {
                Poll::Ready(Some(Ok(next))) => {
                    if all.is_empty() {
                        all.extend_from_slice(&first);
                    }
                    all.extend_from_slice(&next);
                }
                Poll::Ready(ending) => {
                    self.ending = Some(ending);
                    context.waker().wake_by_ref();
                    break;
                }
                Poll::Pending => break,
            }
        }
        if all.is_empty() { first } else { all.freeze() }
    }
}

/// How a call ended, as it is sent.
fn trailers(status: &Status) -> HeaderMap {
    let mut trailers = HeaderMap::with_capacity(2);
    if status.add_header(&mut trailers).is_err() {
        trailers.insert(Status::GRPC_STATUS, HeaderValue::from(status.code() as i32)); // Its words cannot be sent.
    }
    trailers
}
