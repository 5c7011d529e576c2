//! The body of a request over HTTP/2.

use std::pin::Pin;
use std::task::{Context, Poll, ready};

use bytes::Bytes;
use h2::{Reason, RecvStream};
use hyper::body::{Body, Frame};

/// What a client sends on a stream, then its trailers. Its window opens again by what was read.
pub struct RequestBody {
    stream: RecvStream,
    is_data_over: bool,
}

impl RequestBody {
    /// What comes on `stream`.
    pub fn new(stream: RecvStream) -> Self {
        Self { stream, is_data_over: false }
    }
}

impl Body for RequestBody {
    type Data = Bytes;
    type Error = h2::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, h2::Error>>> {
        if !self.is_data_over {
            match ready!(self.stream.poll_data(context)) {
                Some(Ok(data)) => {
                    let _ = self.stream.flow_control().release_capacity(data.len()); // It was just given.
                    return Poll::Ready(Some(Ok(Frame::data(data))));
                }
                Some(Err(error)) => return Poll::Ready(unless_early(error)),
                None => self.is_data_over = true,
            }
        }
        Poll::Ready(match ready!(self.stream.poll_trailers(context)) {
            Ok(trailers) => trailers.map(|trailers| Ok(Frame::trailers(trailers))),
            Err(error) => unless_early(error),
        })
    }

    fn is_end_stream(&self) -> bool {
        self.stream.is_end_stream()
    }
}

/// A client that has its answer may leave the rest of its request away (RFC 9113, 8.1).
fn unless_early(error: h2::Error) -> Option<Result<Frame<Bytes>, h2::Error>> {
    (error.reason() != Some(Reason::NO_ERROR)).then_some(Err(error))
}
