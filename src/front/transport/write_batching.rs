//! Gathers what many streams of one connection write at about the same time into one system call.
//!
//! A connection that flushed what it has as soon as it has a frame would make one system call for each token of each
//! stream. It lets its other streams have their turn first, until they add nothing more.

use std::io::{self, IoSlice};
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::task::{Context, Poll, ready};

use bytes::{Buf, BytesMut};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};

/// Bytes gathered before they are written without waiting for others.
const FULL_BYTES: usize = 64 << 10;

/// Larger pieces are not copied.
const LARGE_BYTES: usize = 16 << 10;

/// A connection's bytes, gathered until the streams that are ready now have had their turn.
pub struct Coalesce<T> {
    inner: T,
    gathered: BytesMut,
    /// How much was gathered when the streams were last given a turn.
    yielded_at: usize,
    received: Arc<AtomicBool>,
}

impl<T: AsyncWrite + Unpin> Coalesce<T> {
    /// Gathers writes to `inner`.
    pub fn new(inner: T) -> Self {
        Self { inner, gathered: BytesMut::new(), yielded_at: 0, received: Arc::default() }
    }

    /// Set by each read that brings something, for who watches whether the other end lives.
    pub fn received(&self) -> Arc<AtomicBool> {
        self.received.clone()
    }

    fn poll_write_gathered(&mut self, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        while !self.gathered.is_empty() {
            let count = ready!(Pin::new(&mut self.inner).poll_write(context, &self.gathered))?;
            if count == 0 {
                return Poll::Ready(Err(io::ErrorKind::WriteZero.into()));
            }
            self.gathered.advance(count);
        }
        self.yielded_at = 0;
        Poll::Ready(Ok(()))
    }

    /// What was gathered and a large piece behind it, in one system call where the connection can: a client that is woken
    /// by a head alone has to come again. How much of the piece was taken.
    fn poll_write_large(&mut self, context: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        while !self.gathered.is_empty() {
            let both = [IoSlice::new(&self.gathered), IoSlice::new(bytes)];
            let count = ready!(Pin::new(&mut self.inner).poll_write_vectored(context, &both))?;
            if count == 0 {
                return Poll::Ready(Err(io::ErrorKind::WriteZero.into()));
            }
            let gathered = self.gathered.len().min(count);
            self.gathered.advance(gathered);
            if count > gathered {
                return Poll::Ready(Ok(count - gathered));
            }
        }
        Pin::new(&mut self.inner).poll_write(context, bytes)
    }
}

impl<T: AsyncWrite + Unpin> AsyncWrite for Coalesce<T> {
    fn poll_write(mut self: Pin<&mut Self>, context: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        if bytes.len() > LARGE_BYTES {
            return self.poll_write_large(context, bytes);
        }
        if self.gathered.len() + bytes.len() > FULL_BYTES {
            ready!(self.poll_write_gathered(context))?;
        }
        self.gathered.extend_from_slice(bytes);
        Poll::Ready(Ok(bytes.len()))
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        // As long as each turn brings more, up to what is full.
        if self.gathered.len() != self.yielded_at {
            self.yielded_at = self.gathered.len();
            context.waker().wake_by_ref();
            return Poll::Pending;
        }
        ready!(self.poll_write_gathered(context))?;
        Pin::new(&mut self.inner).poll_flush(context)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        ready!(self.poll_write_gathered(context))?;
        Pin::new(&mut self.inner).poll_shutdown(context)
    }
}

impl<T: AsyncRead + Unpin> AsyncRead for Coalesce<T> {
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

    /// Remembers each write, and takes at most `most` bytes of it.
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
    fn what_is_written_before_a_flush_that_finds_nothing_new_goes_out_together() {
        let mut context = Context::from_waker(noop_waker_ref());
        let mut connection = Coalesce::new(Log { writes: Vec::new(), most: usize::MAX });
        let _ = Pin::new(&mut connection).poll_write(&mut context, b"one ");
        assert!(Pin::new(&mut connection).poll_flush(&mut context).is_pending());
        let _ = Pin::new(&mut connection).poll_write(&mut context, b"two");
        assert!(Pin::new(&mut connection).poll_flush(&mut context).is_pending());
        assert!(Pin::new(&mut connection).poll_flush(&mut context).is_ready());
        assert_eq!(connection.inner.writes, [b"one two"]);
    }

    #[test]
    fn a_large_piece_goes_out_with_what_is_before_it() {
        let mut context = Context::from_waker(noop_waker_ref());
        let mut connection = Coalesce::new(Log { writes: Vec::new(), most: usize::MAX });
        let _ = Pin::new(&mut connection).poll_write(&mut context, b"head");
        let body = vec![3; LARGE_BYTES + 1];
        let taken = Pin::new(&mut connection).poll_write(&mut context, &body);
        assert!(matches!(taken, Poll::Ready(Ok(count)) if count == body.len()), "{taken:?}");
        assert_eq!(connection.inner.writes, [[b"head".as_slice(), &body].concat()]);
    }

    #[test]
    fn large_pieces_keep_their_place_and_short_writes_are_completed() {
        let mut context = Context::from_waker(noop_waker_ref());
        let mut connection = Coalesce::new(Log { writes: Vec::new(), most: 1000 });
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
