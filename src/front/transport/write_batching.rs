//! Batches the writes of the streams of one connection into one system call.
//!
//! A connection that flushes every frame makes one system call per token and stream. Here a flush first lets the other streams
//! of the connection run, until they write nothing more.

use std::io::{self, IoSlice};
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::task::{Context, Poll, ready};

use bytes::{Buf, BytesMut};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};

/// A batch of this size is written at once.
const FULL_BYTES: usize = 64 << 10;

/// Larger writes are not copied into the batch.
const LARGE_BYTES: usize = 16 << 10;

/// A socket whose writes are batched until the streams that are ready have written.
pub struct WriteBatcher<T> {
    inner: T,
    batch: BytesMut,
    /// The size of the batch when the streams were last allowed to run.
    yielded_at: usize,
    received: Arc<AtomicBool>,
}

impl<T: AsyncWrite + Unpin> WriteBatcher<T> {
    /// Batches writes to `inner`.
    pub fn new(inner: T) -> Self {
        Self { inner, batch: BytesMut::new(), yielded_at: 0, received: Arc::default() }
    }

    /// A flag that each read with data sets, for keep-alive.
    pub fn received(&self) -> Arc<AtomicBool> {
        self.received.clone()
    }

    fn poll_write_batch(&mut self, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        while !self.batch.is_empty() {
            let count = ready!(Pin::new(&mut self.inner).poll_write(context, &self.batch))?;
            if count == 0 {
                return Poll::Ready(Err(io::ErrorKind::WriteZero.into()));
            }
            self.batch.advance(count);
        }
        self.yielded_at = 0;
        Poll::Ready(Ok(()))
    }

    /// Writes the batch and then `bytes`, if possible in one system call, so that a client is not woken for the head alone.
    /// Returns how many of `bytes` were written.
    fn poll_write_large(&mut self, context: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        while !self.batch.is_empty() {
            let both = [IoSlice::new(&self.batch), IoSlice::new(bytes)];
            let count = ready!(Pin::new(&mut self.inner).poll_write_vectored(context, &both))?;
            if count == 0 {
                return Poll::Ready(Err(io::ErrorKind::WriteZero.into()));
            }
            let num_batched = self.batch.len().min(count);
            self.batch.advance(num_batched);
            if count > num_batched {
                return Poll::Ready(Ok(count - num_batched));
            }
        }
        Pin::new(&mut self.inner).poll_write(context, bytes)
    }
}

impl<T: AsyncWrite + Unpin> AsyncWrite for WriteBatcher<T> {
    fn poll_write(mut self: Pin<&mut Self>, context: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        if bytes.len() > LARGE_BYTES {
            return self.poll_write_large(context, bytes);
        }
        if self.batch.len() + bytes.len() > FULL_BYTES {
            ready!(self.poll_write_batch(context))?;
        }
        self.batch.extend_from_slice(bytes);
        Poll::Ready(Ok(bytes.len()))
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        // Repeated while the batch grows.
        if self.batch.len() != self.yielded_at {
            self.yielded_at = self.batch.len();
            context.waker().wake_by_ref();
            return Poll::Pending;
        }
        ready!(self.poll_write_batch(context))?;
        Pin::new(&mut self.inner).poll_flush(context)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        ready!(self.poll_write_batch(context))?;
        Pin::new(&mut self.inner).poll_shutdown(context)
    }
}

impl<T: AsyncRead + Unpin> AsyncRead for WriteBatcher<T> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let before = buffer.filled().len();
        let polled = Pin::new(&mut self.inner).poll_read(context, buffer);
        if buffer.filled().len() > before {
            self.received.store(true, Relaxed);
        }
        polled
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use futures::task::noop_waker_ref;

    /// Records each write, and accepts at most `most` bytes of it.
    struct Log {
        writes: Vec<Vec<u8>>,
        most: usize,
    }

    impl AsyncWrite for Log {
        fn poll_write(mut self: Pin<&mut Self>, _: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
            let count = bytes.len().min(self.most);
            self.writes.push(bytes[..count].to_vec());
            Poll::Ready(Ok(count))
        }

        fn is_write_vectored(&self) -> bool {
            true
        }

        fn poll_write_vectored(
            self: Pin<&mut Self>,
            context: &mut Context<'_>,
            pieces: &[IoSlice<'_>],
        ) -> Poll<io::Result<usize>> {
            let all: Vec<u8> = pieces.iter().flat_map(|piece| piece.iter().copied()).collect();
            self.poll_write(context, &all)
        }

        fn poll_flush(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
            Poll::Ready(Ok(()))
        }

        fn poll_shutdown(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
            Poll::Ready(Ok(()))
        }
    }

    #[test]
    fn writes_are_sent_together_by_the_first_flush_after_which_nothing_was_added() {
        let mut context = Context::from_waker(noop_waker_ref());
        let mut connection = WriteBatcher::new(Log { writes: Vec::new(), most: usize::MAX });
        let _ = Pin::new(&mut connection).poll_write(&mut context, b"one ");
        assert!(Pin::new(&mut connection).poll_flush(&mut context).is_pending());
        let _ = Pin::new(&mut connection).poll_write(&mut context, b"two");
        assert!(Pin::new(&mut connection).poll_flush(&mut context).is_pending());
        assert!(Pin::new(&mut connection).poll_flush(&mut context).is_ready());
        assert_eq!(connection.inner.writes, [b"one two"]);
    }

    #[test]
    fn a_large_write_is_sent_together_with_the_batch() {
        let mut context = Context::from_waker(noop_waker_ref());
        let mut connection = WriteBatcher::new(Log { writes: Vec::new(), most: usize::MAX });
        let _ = Pin::new(&mut connection).poll_write(&mut context, b"head");
        let body = vec![3; LARGE_BYTES + 1];
        let taken = Pin::new(&mut connection).poll_write(&mut context, &body);
        assert!(matches!(taken, Poll::Ready(Ok(count)) if count == body.len()), "{taken:?}");
        assert_eq!(connection.inner.writes, [[b"head".as_slice(), &body].concat()]);
    }

    #[test]
    fn large_writes_keep_their_order_and_short_writes_are_completed() {
        let mut context = Context::from_waker(noop_waker_ref());
        let mut connection = WriteBatcher::new(Log { writes: Vec::new(), most: 1000 });
        let (small, large) = (vec![1; 3000], vec![2; FULL_BYTES]);
        let _ = Pin::new(&mut connection).poll_write(&mut context, &small);
        let mut rest = large.as_slice();
        while !rest.is_empty() {
            match Pin::new(&mut connection).poll_write(&mut context, rest) {
                Poll::Ready(Ok(count)) => rest = &rest[count..],
                other => panic!("{other:?}"),
            }
        }
        let _ = Pin::new(&mut connection).poll_shutdown(&mut context);
        assert_eq!(connection.inner.writes.concat(), [small, large].concat());
    }
}
