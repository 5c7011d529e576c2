//! Bodies of HTTP responses and requests.

use std::collections::VecDeque;
use std::convert::Infallible;
use std::future::poll_fn;
use std::pin::Pin;
use std::task::{Context, Poll};

use bytes::{Bytes, BytesMut};
use futures::{Stream, StreamExt};
use hyper::body::{Body, Frame, Incoming, SizeHint};
use serving::InferError;

use crate::transport::budget::{ArrivalWatch, Charge};

/// A response's body: known parts, or a stream of events.
pub enum ReplyBody {
    /// The complete body, in parts that are not copied together.
    Parts(VecDeque<Bytes>),
    /// Chunks of a stream; dropping the body drops the stream.
    Events(Pin<Box<dyn Stream<Item = Bytes> + Send>>),
}

impl ReplyBody {
    /// No body.
    pub fn empty() -> Self {
        Self::Parts(VecDeque::new())
    }
}

impl From<Vec<u8>> for ReplyBody {
    fn from(text: Vec<u8>) -> Self {
        Bytes::from(text).into()
    }
}

impl From<Bytes> for ReplyBody {
    fn from(bytes: Bytes) -> Self {
        Self::Parts(if bytes.is_empty() { VecDeque::new() } else { VecDeque::from([bytes]) })
    }
}

impl Body for ReplyBody {
    type Data = Bytes;
    type Error = Infallible;

    fn poll_frame(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, Infallible>>> {
        match self.get_mut() {
            ReplyBody::Parts(parts) => Poll::Ready(parts.pop_front().map(|part| Ok(Frame::data(part)))),
            ReplyBody::Events(events) => {
                events.poll_next_unpin(context).map(|event| event.map(|data| Ok(Frame::data(data))))
            }
        }
    }

    fn is_end_stream(&self) -> bool {
        matches!(self, ReplyBody::Parts(parts) if parts.is_empty())
    }

    fn size_hint(&self) -> SizeHint {
        match self {
            ReplyBody::Parts(parts) => SizeHint::with_exact(parts.iter().map(|part| part.len() as u64).sum()),
            ReplyBody::Events(_) => SizeHint::default(),
        }
    }
}

/// The first allocation for a body, whatever length was announced.
const FIRST_BYTES: usize = 1 << 20;

/// Reads a request's body and adds its bytes to `charge`.
///
/// # Errors
/// When it is larger than `limit`, the budget is exhausted, or the client disconnects, stalls or is too slow.
pub async fn read_all(mut body: Incoming, limit: usize, charge: &Charge) -> Result<Bytes, InferError> {
    let too_large = || InferError::invalid(format!("request body is larger than the limit of {limit} bytes"));
    let expected = body.size_hint().lower();
    if expected > limit as u64 {
        return Err(too_large());
    }
    let mut first = Bytes::new();
    let mut rest: Option<BytesMut> = None;
    let mut watch = ArrivalWatch::default();
    loop {
        let frame = poll_fn(|context| match Pin::new(&mut body).poll_frame(context) {
            Poll::Ready(frame) => Poll::Ready(Ok(frame)),
            Poll::Pending => watch.poll_late(charge, context).map(Err),
        });
        let Some(frame) = frame.await? else { break };
        let frame = frame.map_err(|error| InferError::invalid(format!("request body broke off: {error}")))?;
        let Ok(data) = frame.into_data() else { continue };
        charge.add(data.len())?;
        watch.received(data.len());
        if first.is_empty() {
            first = data; // Most bodies arrive in one frame and are not copied.
        } else {
            let whole = rest.get_or_insert_with(|| {
                let mut whole = BytesMut::with_capacity((expected as usize).min(FIRST_BYTES));
                whole.extend_from_slice(&first);
                whole
            });
            whole.extend_from_slice(&data);
        }
        if rest.as_ref().map_or(first.len(), BytesMut::len) > limit {
            return Err(too_large());
        }
    }
    Ok(rest.map_or(first, BytesMut::freeze))
}
