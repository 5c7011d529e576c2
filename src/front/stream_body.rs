//! `ModelStreamInfer` without the layers between: replies leave as the frames of HTTP/2 that they were encoded as.
//!
//! For calls whose messages are not packed, in either direction; the others go through `tonic`.

use std::pin::Pin;
use std::sync::atomic::{
    AtomicBool,
    Ordering::{Acquire, Release},
};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, Waker, ready};

use bytes::{Bytes, BytesMut};
use futures::Stream as _;
use http::{HeaderMap, HeaderValue, Request, Response, header};
use hyper::body::{Body as HttpBody, Frame, Incoming};
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
use crate::together::Streams;

/// The call's path.
pub const PATH: &str = "/inference.GRPCInferenceService/ModelStreamInfer";

/// Replies are gathered up to this size.
const FULL_BYTES: usize = 16 << 10;

/// Answers the requests of one call on the connection of `streams`; `charge` pays for what has come of them.
pub fn answer(state: Arc<State>, request: Request<Incoming>, charge: Arc<Charge>, streams: &Streams) -> Response<Body> {
    let (parts, body) = request.into_parts();
    let decoder = ProstCodec::<StreamReply, ModelInferRequest>::default().decoder();
    let limit = state.config.max_grpc_message_bytes;
    let requests = Streaming::new_request(decoder, Counted::new(body, charge.clone()), None, Some(limit));
    let ends_on_error = parts.headers.get("triton_grpc_error").is_some_and(|value| value == "true");
    let forwarded = parts.extensions.get::<Forwarded>().cloned();
    let all = InferStream::new(state, requests, ends_on_error, forwarded, Some(charge));
    let outlet = Arc::<Outlet>::default();
    let replies = Replies { all, ending: None, is_over: false };
    streams.make(Maker { replies, made: None, way: Way(outlet.clone()), known: Known::default() });
    let mut response = Response::new(Body::new(StreamBody { outlet, known: Known::default(), is_over: false }));
    response.headers_mut().insert(header::CONTENT_TYPE, HeaderValue::from_static("application/grpc"));
    response
}

/// A frame, or why there is none.
type Made = Result<Frame<Bytes>, Status>;

/// One frame on its way from who makes it to the body that it is a part of.
#[derive(Default)]
struct Outlet {
    place: Mutex<Place>,
    /// There is a frame to take, or none to come: most looks find nothing.
    has_news: AtomicBool,
    is_body_gone: AtomicBool,
}

#[derive(Default)]
struct Place {
    made: Option<Made>,
    /// Who takes frames.
    body: Option<Waker>,
    /// Who is to know that the place is free, or the body gone.
    maker: Option<Waker>,
    /// The maker has another frame.
    is_awaited: bool,
    is_maker_gone: bool,
}

impl Outlet {
    fn place(&self) -> MutexGuard<'_, Place> {
        self.place.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Puts a frame there when the one before was taken.
    fn poll_put(&self, made: &mut Option<Made>) -> Poll<()> {
        let mut place = self.place();
        place.is_awaited = place.made.is_some();
        if place.is_awaited {
            return Poll::Pending;
        }
        place.made = made.take();
        self.has_news.store(true, Release);
        place.body.iter().for_each(Waker::wake_by_ref);
        Poll::Ready(())
    }

    /// The next frame; `None` behind the last, and where there is none yet.
    fn take(&self) -> Poll<Option<Made>> {
        let mut place = self.place();
        let made = place.made.take();
        self.has_news.store(place.is_maker_gone, Release);
        if std::mem::take(&mut place.is_awaited) {
            place.maker.iter().for_each(Waker::wake_by_ref);
        }
        if made.is_none() && !place.is_maker_gone { Poll::Pending } else { Poll::Ready(made) }
    }
}

/// What is woken at one end of an outlet, known there too, so that a look that finds nothing new stores nothing.
#[derive(Default)]
struct Known(Option<Waker>);

impl Known {
    /// Has the task that polls woken through `place` from here on.
    fn register(&mut self, context: &mut Context<'_>, place: impl FnOnce(Waker)) {
        if !self.0.as_ref().is_some_and(|known| known.will_wake(context.waker())) {
            place(context.waker().clone());
            self.0 = Some(context.waker().clone());
        }
    }
}

/// Makes the frames of a body, one ahead of it.
struct Maker {
    replies: Replies,
    made: Option<Made>,
    way: Way,
    known: Known,
}

/// The maker's end of an outlet.
struct Way(Arc<Outlet>);

impl Drop for Way {
    fn drop(&mut self) {
        let mut place = self.0.place();
        place.is_maker_gone = true;
        self.0.has_news.store(true, Release);
        place.body.iter().for_each(Waker::wake_by_ref);
    }
}

impl Future for Maker {
    type Output = ();

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<()> {
        let Self { replies, made, way, known } = &mut *self;
        known.register(context, |waker| way.0.place().maker = Some(waker));
        let mut is_at_rest = false;
        while !way.0.is_body_gone.load(Acquire) {
            if made.is_some() {
                ready!(way.0.poll_put(made));
            }
            if replies.is_over {
                break;
            }
            if is_at_rest {
                return Poll::Pending;
            }
            let (frame, rests) = replies.poll_frame(context);
            is_at_rest = rests;
            *made = Some(ready!(frame));
        }
        Poll::Ready(())
    }
}

/// Replies, then how the call ended.
struct StreamBody {
    outlet: Arc<Outlet>,
    known: Known,
    is_over: bool,
}

impl Drop for StreamBody {
    fn drop(&mut self) {
        self.outlet.is_body_gone.store(true, Release);
        self.outlet.place().maker.iter().for_each(Waker::wake_by_ref);
    }
}

impl HttpBody for StreamBody {
    type Data = Bytes;
    type Error = Status;

    fn poll_frame(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Made>> {
        let Self { outlet, known, is_over } = &mut *self;
        if *is_over {
            return Poll::Ready(None);
        }
        known.register(context, |waker| outlet.place().body = Some(waker));
        if !outlet.has_news.load(Acquire) {
            return Poll::Pending;
        }
        let made = ready!(outlet.take());
        let broke_off = || Err(Status::internal("the call broke off; the server's log says why"));
        let made = made.unwrap_or_else(broke_off);
        *is_over = made.as_ref().map_or(true, Frame::is_trailers);
        Poll::Ready(Some(made))
    }

    fn is_end_stream(&self) -> bool {
        self.is_over
    }
}

struct Replies {
    all: InferStream,
    /// What followed the last reply, where that is known.
    ending: Option<Option<Result<Bytes, Status>>>,
    is_over: bool,
}

impl Replies {
    fn poll_reply(&mut self, context: &mut Context<'_>) -> Poll<Option<Result<Bytes, Status>>> {
        let reply = Pin::new(&mut self.all).poll_next(context);
        reply.map(|reply| reply.map(|reply| reply.and_then(StreamReply::framed)))
    }

    /// The next frame, and whether nothing follows it now.
    fn poll_frame(&mut self, context: &mut Context<'_>) -> (Poll<Made>, bool) {
        let next = match self.ending.take() {
            Some(ending) => Poll::Ready(ending),
            None => self.poll_reply(context),
        };
        match next {
            Poll::Pending => (Poll::Pending, true),
            Poll::Ready(Some(Ok(first))) => {
                let (all, is_at_rest) = self.gather(first, context);
                (Poll::Ready(Ok(Frame::data(all))), is_at_rest)
            }
            Poll::Ready(Some(Err(status))) => (Poll::Ready(self.end(&status)), false),
            Poll::Ready(None) => (Poll::Ready(self.end(&Status::ok(""))), false),
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

    fn end(&mut self, status: &Status) -> Made {
        self.is_over = true;
        let mut trailers = HeaderMap::with_capacity(2);
        status.add_header(&mut trailers).map(|()| Frame::trailers(trailers))
    }
}

#[cfg(test)]
mod tests {
    use futures::FutureExt as _;
    use futures::task::noop_waker_ref;

    use super::*;

    fn frame(text: &'static str) -> Option<Made> {
        Some(Ok(Frame::data(Bytes::from_static(text.as_bytes()))))
    }

    fn text(made: Poll<Option<Made>>) -> Bytes {
        let Poll::Ready(Some(Ok(frame))) = made else { panic!("no frame") };
        frame.into_data().unwrap()
    }

    #[tokio::test]
    async fn a_frame_waits_for_the_one_before_and_ends_are_seen_at_both_ends() {
        let outlet = Arc::<Outlet>::default();
        let mut body = StreamBody { outlet: outlet.clone(), known: Known::default(), is_over: false };
        let mut context = Context::from_waker(noop_waker_ref());
        assert!(Pin::new(&mut body).poll_frame(&mut context).is_pending());
        let way = Way(outlet.clone());
        let putting = tokio::spawn(async move {
            for text in ["a", "b", "c"] {
                let mut made = frame(text);
                std::future::poll_fn(|context| {
                    way.0.place().maker = Some(context.waker().clone());
                    way.0.poll_put(&mut made)
                })
                .await;
            }
        });
        for expected in ["a", "b", "c"] {
            let made = std::future::poll_fn(|context| Pin::new(&mut body).poll_frame(context).map(Some));
            let made = tokio::time::timeout(std::time::Duration::from_secs(60), made).await.expect("a frame was lost");
            assert_eq!(text(Poll::Ready(made.unwrap())), expected);
        }
        putting.await.unwrap();
        let ending = std::future::poll_fn(|context| Pin::new(&mut body).poll_frame(context)).now_or_never();
        assert!(matches!(ending, Some(Some(Err(_)))), "a maker that goes without trailers has failed");
        assert!(body.is_end_stream());
        drop(body);
        assert!(outlet.is_body_gone.load(Acquire));
    }
}
