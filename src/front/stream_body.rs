//! `ModelStreamInfer` without the layers between: replies leave as the frames of HTTP/2 that they were encoded as.
//!
//! For calls whose messages are not packed, in either direction; the others go through `tonic`.

use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use bytes::{Bytes, BytesMut};
use futures::Stream as _;
use http::{HeaderMap, HeaderValue, Request, Response, header};
use hyper::body::{Body as HttpBody, Frame, Incoming};
use serving::Bell;
use tonic::body::Body;
use tonic::codec::Codec as _;
use tonic::{Status, Streaming};
use tonic_prost::ProstCodec;

use crate::budget::{Charge, Counted};
use crate::grpc_service::Forwarded;
use crate::proto::ModelInferRequest;
use crate::reply::StreamReply;
use crate::state::State;
use crate::stream_infer::InferStream;

/// The call's path.
pub const PATH: &str = "/inference.GRPCInferenceService/ModelStreamInfer";

/// Replies are gathered up to this size.
const FULL_BYTES: usize = 16 << 10;

/// Answers the requests of one call; `charge` pays for what has come of them.
pub fn answer(state: Arc<State>, request: Request<Incoming>, charge: Arc<Charge>) -> Response<Body> {
    let (parts, body) = request.into_parts();
    let decoder = ProstCodec::<StreamReply, ModelInferRequest>::default().decoder();
    let limit = state.config.max_grpc_message_bytes;
    let requests = Streaming::new_request(decoder, Counted::new(body, charge.clone()), None, Some(limit));
    let ends_on_error = parts.headers.get("triton_grpc_error").is_some_and(|value| value == "true");
    let forwarded = parts.extensions.get::<Forwarded>().cloned();
    let all = InferStream::new(state, requests, ends_on_error, forwarded, Some(charge));
    let mut response = Response::new(Body::new(StreamBody {
        bell: Bell::default(),
        replies: Replies { all, ending: None, is_over: false },
    }));
    response.headers_mut().insert(header::CONTENT_TYPE, HeaderValue::from_static("application/grpc"));
    response
}

/// Replies, then how the call ended.
struct StreamBody {
    /// Rings when there may be more; the connection asks for more after each frame.
    bell: Bell,
    replies: Replies,
}

struct Replies {
    all: InferStream,
    /// What followed the last reply, where that is known.
    ending: Option<Option<Result<Bytes, Status>>>,
    is_over: bool,
}

type NextFrame = Poll<Option<Result<Frame<Bytes>, Status>>>;

impl Replies {
    fn poll_reply(&mut self, context: &mut Context<'_>) -> Poll<Option<Result<Bytes, Status>>> {
        let reply = Pin::new(&mut self.all).poll_next(context);
        reply.map(|reply| reply.map(|reply| reply.and_then(StreamReply::framed)))
    }

    /// The next frame, and whether nothing follows it now.
    fn poll_frame(&mut self, context: &mut Context<'_>) -> (NextFrame, bool) {
        let next = match self.ending.take() {
            Some(ending) => Poll::Ready(ending),
            None => self.poll_reply(context),
        };
        match next {
            Poll::Pending => (Poll::Pending, true),
            Poll::Ready(Some(Ok(first))) => {
                let (all, is_at_rest) = self.gather(first, context);
                (Poll::Ready(Some(Ok(Frame::data(all)))), is_at_rest)
            }
            Poll::Ready(Some(Err(status))) => (Poll::Ready(Some(self.end(&status))), false),
            Poll::Ready(None) => (Poll::Ready(Some(self.end(&Status::ok("")))), false),
        }
    }

    /// `first` and what is ready behind it, as one frame; and whether there was nothing more.
    fn gather(&mut self, first: Bytes, context: &mut Context<'_>) -> (Bytes, bool) {
        let (mut all, mut is_at_rest) = (BytesMut::new(), false);
        while first.len().max(all.len()) < FULL_BYTES {
            match self.poll_reply(context) {
                Poll::Ready(Some(Ok(next))) => {
                    if all.is_empty() {
                        all.extend_from_slice(&first);
                    }
                    all.extend_from_slice(&next);
                    continue;
                }
                Poll::Ready(ending) => self.ending = Some(ending),
                Poll::Pending => is_at_rest = true,
            }
            break;
        }
        (if all.is_empty() { first } else { all.freeze() }, is_at_rest)
    }

    fn end(&mut self, status: &Status) -> Result<Frame<Bytes>, Status> {
        self.is_over = true;
        let mut trailers = HeaderMap::with_capacity(2);
        status.add_header(&mut trailers).map(|()| Frame::trailers(trailers))
    }
}

impl HttpBody for StreamBody {
    type Data = Bytes;
    type Error = Status;

    fn poll_frame(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> NextFrame {
        let Self { bell, replies } = &mut *self;
        if replies.is_over {
            return Poll::Ready(None);
        }
        bell.poll_until_rest(context, |context| replies.poll_frame(context))
    }

    fn is_end_stream(&self) -> bool {
        self.replies.is_over
    }
}
