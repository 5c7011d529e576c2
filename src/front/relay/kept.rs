//! The body of a request, kept while it may have to be sent again.

use std::pin::Pin;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, ready};

use bytes::Bytes;
use hyper::body::{Body, Frame, SizeHint};

/// Most bytes of one request that are kept.
pub(crate) const MAX_REQUEST_BYTES: usize = 16 << 20;

/// Most bytes of all requests that are kept.
const MAX_BYTES: usize = 256 << 20;

/// The bytes that all requests keep.
#[derive(Debug, Default)]
pub(crate) struct KeptBytes(AtomicUsize);

/// The share of one request in [`KeptBytes`], given back when dropped.
#[derive(Debug)]
pub(crate) struct KeptShare {
    all: Arc<KeptBytes>,
    bytes: usize,
}

impl KeptShare {
    pub(crate) fn new(all: &Arc<KeptBytes>) -> Self {
        Self { all: Arc::clone(all), bytes: 0 }
    }

    /// Takes room for `bytes` more. Returns false, and takes none, when the request or all requests would keep too many.
    pub(crate) fn take(&mut self, bytes: usize) -> bool {
        let fits = self.bytes + bytes <= MAX_REQUEST_BYTES
            && self.all.0.fetch_add(bytes, Ordering::Relaxed) + bytes <= MAX_BYTES;
        match fits {
            true => self.bytes += bytes,
            false if self.bytes + bytes <= MAX_REQUEST_BYTES => drop(self.all.0.fetch_sub(bytes, Ordering::Relaxed)),
            false => {}
        }
        fits
    }

    /// Gives `bytes` back.
    pub(crate) fn give_back(&mut self, bytes: usize) {
        self.bytes -= bytes;
        self.all.0.fetch_sub(bytes, Ordering::Relaxed);
    }
}

impl Drop for KeptShare {
    fn drop(&mut self) {
        self.all.0.fetch_sub(self.bytes, Ordering::Relaxed);
    }
}

/// A request's body that can be read several times, unless it is too large.
pub(crate) struct KeptBody<B>(Arc<Mutex<State<B>>>);

struct State<B> {
    rest: B,
    length: SizeHint,
    parts: Vec<Bytes>,
    share: KeptShare,
    is_kept: bool,
}

impl<B: Body<Data = Bytes> + Unpin> KeptBody<B> {
    pub(crate) fn new(body: B, all: &Arc<KeptBytes>) -> Self {
        let length = body.size_hint();
        let state = State { rest: body, length, parts: Vec::new(), share: KeptShare::new(all), is_kept: true };
        Self(Arc::new(Mutex::new(state)))
    }

    fn state(&self) -> MutexGuard<'_, State<B>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether all that was read so far is kept.
    pub(crate) fn is_kept(&self) -> bool {
        self.state().is_kept
    }

    /// Reads the body from its start. Call it again only while the body [is kept](KeptBody::is_kept).
    pub(crate) fn read(&self) -> KeptReader<B> {
        KeptReader { body: Self(Arc::clone(&self.0)), next: 0 }
    }
}

/// One reading of a [`KeptBody`].
pub(crate) struct KeptReader<B> {
    body: KeptBody<B>,
    /// The part that is read next.
    next: usize,
}

impl<B: Body<Data = Bytes> + Unpin> Body for KeptReader<B> {
    type Data = Bytes;
    type Error = B::Error;

    fn poll_frame(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, B::Error>>> {
        let reader = &mut *self;
        let mut state = reader.body.state();
        if let Some(part) = state.parts.get(reader.next) {
            reader.next += 1;
            return Poll::Ready(Some(Ok(Frame::data(part.clone()))));
        }
        let Some(frame) = ready!(Pin::new(&mut state.rest).poll_frame(context)?) else { return Poll::Ready(None) };
        if let Some(data) = frame.data_ref().filter(|_| state.is_kept).cloned() {
            match state.share.take(data.len()) {
                true => {
                    state.parts.push(data);
                    reader.next += 1;
                }
                false => {
                    state.is_kept = false;
                    state.parts = Vec::new();
                    let bytes = state.share.bytes;
                    state.share.give_back(bytes);
                }
            }
        }
        Poll::Ready(Some(Ok(frame)))
    }

    fn is_end_stream(&self) -> bool {
        self.body.state().length.exact() == Some(0)
    }

    fn size_hint(&self) -> SizeHint {
        self.body.state().length
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_one_and_all_requests_keep_is_bounded_and_given_back() {
        let all = Arc::new(KeptBytes::default());
        let mut one = KeptShare::new(&all);
        assert!(one.take(MAX_REQUEST_BYTES) && !one.take(1));
        let mut others: Vec<_> = (0..MAX_BYTES / MAX_REQUEST_BYTES).map(|_| KeptShare::new(&all)).collect();
        let taken = others.iter_mut().filter_map(|share| share.take(MAX_REQUEST_BYTES).then_some(())).count();
        assert_eq!(taken, MAX_BYTES / MAX_REQUEST_BYTES - 1);
        drop(one);
        assert!(others.last_mut().unwrap().take(MAX_REQUEST_BYTES));
        others[0].give_back(5);
        drop(others);
        assert_eq!(all.0.load(Ordering::Relaxed), 0);
    }
}
