//! `ModelStreamInfer` without `tonic`: replies are encoded directly as the data frames of HTTP/2.

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
use record::Recorder;
use tokio::sync::OwnedSemaphorePermit;
use tokio::time::{Sleep, sleep};
use tonic::Status;

use crate::api::triton::grpc::call_context::CallContext;
use crate::api::triton::grpc::codings::Codings;
use crate::api::triton::grpc::messages::{Message, Messages};
use crate::api::triton::grpc::paths::MODEL_STREAM_INFER;
use crate::api::triton::grpc::proto::ModelInferRequest;
use crate::api::triton::grpc::stream_infer::{InferStream, StreamRequest};
use crate::state::State;
use crate::telemetry::recording::Recorded;
use crate::transport::content_coding::Coding;
use crate::transport::http2::{Call, ClientGone, Progress, RequestBody, poll_capacity};
use crate::transport::large_work::block_in_place_if_large;
use crate::transport::wake_flag::WakeFlag;

/// Replies are batched up to this size.
const FULL_BYTES: usize = 16 << 10;

/// Bytes that are sent before the capacity of the stream is checked again. Data beyond the capacity is buffered.
const UNCHECKED_BYTES: usize = 16 << 10;

/// One call. Its requests are answered on its stream until both have ended. Dropping it cancels the requests in flight.
pub struct StreamCall {
    replies: Replies,
    stream: SendStream<Bytes>,
    /// Set when the client has cancelled the call, or the stream has capacity again.
    stream_flag: WakeFlag,
    /// The next messages, or the trailers.
    output: Option<Result<Bytes, HeaderMap>>,
    /// Bytes sent since the capacity was last checked.
    unchecked_bytes: usize,
    /// How long the stream may be without capacity, and the timer while it has none.
    write_timeout: Option<Duration>,
    stall: Option<Pin<Box<Sleep>>>,
    has_ended: bool,
    _permit: OwnedSemaphorePermit,
}

/// Decodes a request, and begins its record.
fn decode(message: Message, recorder: Option<&Arc<Recorder>>) -> Result<StreamRequest, Status> {
    let Message { bytes, charge } = message;
    let decoded = block_in_place_if_large(charge.held(), || ModelInferRequest::decode(bytes.clone()));
    let message = decoded.map_err(|error| Status::internal(error.to_string()))?;
    let recorded = Recorded::begin_message(recorder, MODEL_STREAM_INFER, &bytes, &message.id);
    Ok(StreamRequest { message, charge, recorded })
}

impl StreamCall {
    /// Starts to answer `request`, whose messages have these codings; `permit` counts it as open. `None` if its client has
    /// disconnected.
    pub fn begin(
        state: Arc<State>,
        request: Request<RequestBody>,
        codings: Codings,
        permit: OwnedSemaphorePermit,
        mut respond: SendResponse<Bytes>,
    ) -> Option<Self> {
        let (parts, body) = request.into_parts();
        let write_timeout = state.config.write_timeout;
        let recorder = state.config.recorder.clone();
        let requests = Messages::new(state.clone(), MODEL_STREAM_INFER, codings.requests, body)
            .map(move |message| decode(message?, recorder.as_ref()))
            .boxed();
        let ends_on_error = parts.headers.get("triton_grpc_error").is_some_and(|value| value == "true");
        let call = parts.extensions.get::<CallContext>().cloned();
        let all = InferStream::new(state, requests, ends_on_error, call);
        let mut head = Response::new(());
        head.headers_mut().insert(header::CONTENT_TYPE, HeaderValue::from_static("application/grpc"));
        if let Some(coding) = codings.replies {
            head.headers_mut().insert("grpc-encoding", HeaderValue::from_static(coding.name()));
        }
        Some(Self {
            replies: Replies { all, coding: codings.replies, end: None },
            stream: respond.send_response(head, false).ok()?,
            stream_flag: WakeFlag::default(),
            output: None,
            unchecked_bytes: 0,
            write_timeout,
            stall: None,
            has_ended: false,
            _permit: permit,
        })
    }

    /// Ready when the stream has capacity for the output; an error when the client has cancelled the call.
    fn poll_stream(&mut self, context: &mut Context<'_>) -> Poll<Result<(), ClientGone>> {
        let Self { stream, stream_flag, output, unchecked_bytes, .. } = self;
        let has_output = output.is_some();
        let polled = stream_flag.poll(context, |context| match stream.poll_reset(context) {
            Poll::Ready(_) => Poll::Ready(Err(ClientGone)),
            Poll::Pending if has_output => poll_capacity(stream, context),
            Poll::Pending => Poll::Pending,
        });
        if polled.is_ready() {
            *unchecked_bytes = 0;
        }
        polled
    }

    /// Ends the call when its stream was without capacity for too long.
    fn await_capacity(&mut self, context: &mut Context<'_>) -> Progress {
        let Some(timeout) = self.write_timeout else { return Progress::Pending };
        let stall = self.stall.get_or_insert_with(|| Box::pin(sleep(timeout)));
        match stall.as_mut().poll(context) {
            Poll::Ready(()) => {
                tracing::debug!("the flow-control window of a stream was exhausted for {timeout:?}");
                Progress::Ended
            }
            Poll::Pending => Progress::Pending,
        }
    }
}

impl Call for StreamCall {
    fn advance(&mut self, context: &mut Context<'_>) -> Progress {
        match self.poll_stream(context) {
            Poll::Ready(Err(ClientGone)) => return Progress::Ended,
            Poll::Ready(Ok(())) => {
                self.stall = None;
                context.waker().wake_by_ref(); // Replies that became ready meanwhile were not polled.
                return Progress::HasOutput;
            }
            Poll::Pending if self.output.is_some() => return self.await_capacity(context),
            Poll::Pending => {}
        }
        let Poll::Ready(output) = self.replies.poll_messages(context) else { return Progress::Pending };
        self.unchecked_bytes += output.as_ref().map_or(0, Bytes::len);
        self.output = Some(output);
        if self.unchecked_bytes <= UNCHECKED_BYTES {
            return Progress::HasOutput;
        }
        self.stream_flag.set();
        self.advance(context)
    }

    fn send(&mut self) -> Poll<()> {
        let sent = match self.output.take() {
            Some(Ok(messages)) => self.stream.send_data(messages, false),
            Some(Err(trailers)) => {
                self.has_ended = true;
                self.stream.send_trailers(trailers)
            }
            None => Ok(()),
        };
        if self.has_ended || sent.is_err() { Poll::Ready(()) } else { Poll::Pending }
    }
}

impl Drop for StreamCall {
    /// Resets the stream of a call that has not ended, for example after a panic.
    fn drop(&mut self) {
        if !self.has_ended {
            self.stream.send_reset(Reason::INTERNAL_ERROR);
        }
    }
}

struct Replies {
    all: InferStream,
    coding: Option<Coding>,
    /// The end of the replies, if it was already polled.
    end: Option<Option<Result<Bytes, Status>>>,
}

impl Replies {
    fn poll_reply(&mut self, context: &mut Context<'_>) -> Poll<Option<Result<Bytes, Status>>> {
        let reply = Pin::new(&mut self.all).poll_next(context);
        reply.map(|reply| reply.map(|reply| reply.and_then(|reply| reply.framed(self.coding))))
    }

    /// The next messages, as many as are ready, or the trailers.
    fn poll_messages(&mut self, context: &mut Context<'_>) -> Poll<Result<Bytes, HeaderMap>> {
        let next = match self.end.take() {
            Some(end) => end,
            None => ready!(self.poll_reply(context)),
        };
        Poll::Ready(match next {
            Some(Ok(first)) => Ok(self.batch(first, context)),
            Some(Err(status)) => Err(trailers(&status)),
            None => Err(trailers(&Status::ok(""))),
        })
    }

    /// `first` and all further replies that are ready.
    fn batch(&mut self, first: Bytes, context: &mut Context<'_>) -> Bytes {
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
                Poll::Ready(end) => {
                    self.end = Some(end);
                    context.waker().wake_by_ref();
                    break;
                }
                Poll::Pending => break,
            }
        }
        if all.is_empty() { first } else { all.freeze() }
    }
}

/// The trailers of a call with this status.
fn trailers(status: &Status) -> HeaderMap {
    let mut trailers = HeaderMap::with_capacity(2);
    if status.add_header(&mut trailers).is_err() {
        trailers.insert(Status::GRPC_STATUS, HeaderValue::from(status.code() as i32)); // The message is not a valid header.
    }
    trailers
}
