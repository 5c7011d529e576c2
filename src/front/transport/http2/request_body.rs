//! The body of a request over HTTP/2.

use std::pin::Pin;
use std::task::{Context, Poll, ready};

use bytes::Bytes;
use h2::{Reason, RecvStream};
use hyper::body::{Body, Frame};

/// The data and trailers of a stream. Reading data releases its flow-control capacity.
pub struct RequestBody {
    stream: RecvStream,
    has_all_data: bool,
}

impl RequestBody {
    /// The body on `stream`.
    pub fn new(stream: RecvStream) -> Self {
        Self { stream, has_all_data: false }
    }
}

impl Body for RequestBody {
    type Data = Bytes;
    type Error = h2::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, h2::Error>>> {
        if !self.has_all_data {
            match ready!(self.stream.poll_data(context)) {
                Some(Ok(data)) => {
                    let _ = self.stream.flow_control().release_capacity(data.len()); // Fails only beyond the received bytes.
                    return Poll::Ready(Some(Ok(Frame::data(data))));
                }
                Some(Err(error)) => return Poll::Ready(stream_error(error)),
                None => self.has_all_data = true,
            }
        }
        Poll::Ready(match ready!(self.stream.poll_trailers(context)) {
            Ok(trailers) => trailers.map(|trailers| Ok(Frame::trailers(trailers))),
            Err(error) => stream_error(error),
        })
    }

    fn is_end_stream(&self) -> bool {
        self.stream.is_end_stream()
    }
}

/// `None` for a reset without an error: a client that has the response may omit the rest of the request (RFC 9113, 8.1).
fn stream_error(error: h2::Error) -> Option<Result<Frame<Bytes>, h2::Error>> {
    (error.reason() != Some(Reason::NO_ERROR)).then_some(Err(error))
}
