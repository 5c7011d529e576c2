//! Gathers what many streams of one connection write at about the same time into one system call.
//!
//! Each stream is a task of its own, and each wakes its connection as soon as it has a frame. A connection that flushed at
//! once would make one system call for each token of each stream. It lets the other ready tasks run first.

use std::io;
use std::pin::Pin;
use std::task::{Context, Poll, ready};

use bytes::{Buf, BytesMut};
use hyper::rt::{Read, ReadBufCursor, Write};

/// Bytes gathered before they are written without waiting for others.
const FULL_BYTES: usize = 64 << 10;

/// A connection's bytes, gathered until the tasks that are ready now have had their turn.
pub struct Coalesce<T> {
    inner: T,
    gathered: BytesMut,
    has_yielded: bool,
}

impl<T: Write + Unpin> Coalesce<T> {
    /// Gathers writes to `inner`.
    pub fn new(inner: T) -> Self {
        Self { inner, gathered: BytesMut::new(), has_yielded: false }
    }

    fn poll_write_gathered(&mut self, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        while !self.gathered.is_empty() {
            let count = ready!(Pin::new(&mut self.inner).poll_write(context, &self.gathered))?;
            if count == 0 {
                return Poll::Ready(Err(io::ErrorKind::WriteZero.into()));
            }
            self.gathered.advance(count);
        }
        self.has_yielded = false;
        Poll::Ready(Ok(()))
    }
}

impl<T: Write + Unpin> Write for Coalesce<T> {
    fn poll_write(mut self: Pin<&mut Self>, context: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        if self.gathered.len() + bytes.len() > FULL_BYTES {
            ready!(self.poll_write_gathered(context))?;
            if bytes.len() > FULL_BYTES / 4 {
                return Pin::new(&mut self.inner).poll_write(context, bytes); // Large pieces are not copied.
            }
        }
        self.gathered.extend_from_slice(bytes);
        Poll::Ready(Ok(bytes.len()))
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        if !self.gathered.is_empty() && !self.has_yielded {
            self.has_yielded = true;
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

impl<T: Read + Unpin> Read for Coalesce<T> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: ReadBufCursor<'_>,
    ) -> Poll<io::Result<()>> {
        Pin::new(&mut self.inner).poll_read(context, buffer)
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

    impl Write for Log {
        fn poll_write(mut self: Pin<&mut Self>, _: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
            let count = bytes.len().min(self.most);
            self.writes.push(bytes[..count].to_vec());
            Poll::Ready(Ok(count))
        }

        fn poll_flush(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
            Poll::Ready(Ok(()))
        }

        fn poll_shutdown(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
            Poll::Ready(Ok(()))
        }
    }

    #[test]
    fn what_is_written_before_the_second_flush_goes_out_together() {
        let mut context = Context::from_waker(noop_waker_ref());
        let mut connection = Coalesce::new(Log { writes: Vec::new(), most: usize::MAX });
        let _ = Pin::new(&mut connection).poll_write(&mut context, b"one ");
        assert!(Pin::new(&mut connection).poll_flush(&mut context).is_pending());
        let _ = Pin::new(&mut connection).poll_write(&mut context, b"two");
        assert!(Pin::new(&mut connection).poll_flush(&mut context).is_ready());
        assert_eq!(connection.inner.writes, [b"one two"]);
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
