//! A client's socket, with or without TLS, and a timeout for writes to a client that does not read.

use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use bytes::{Buf, Bytes};
use tokio::io::{AsyncRead, AsyncReadExt as _, AsyncWrite, ReadBuf};
use tokio::time::{Sleep, sleep};

use crate::transport::connections::Activity;

/// A client's socket. A write fails when the client has read nothing for longer than the write timeout.
pub struct ClientStream<T> {
    socket: T,
    /// Bytes that were read ahead, before the protocol's server reads.
    read_ahead: Bytes,
    activity: Arc<Activity>,
    write_timeout: Option<Duration>,
    /// The timer of a blocked write; absent while the client reads.
    blocked: Option<Pin<Box<Sleep>>>,
}

impl<T: AsyncRead + Unpin> ClientStream<T> {
    /// Wraps `socket`; without a timeout, writes wait for ever.
    pub fn new(socket: T, activity: Arc<Activity>, write_timeout: Option<Duration>) -> Self {
        Self { socket, read_ahead: Bytes::new(), activity, write_timeout, blocked: None }
    }

    /// Reads `count` bytes ahead; later reads return them first.
    ///
    /// # Errors
    /// When the client disconnects before.
    pub async fn read_ahead_exact(&mut self, count: usize) -> io::Result<()> {
        let mut read_ahead = vec![0; count];
        self.socket.read_exact(&mut read_ahead).await?;
        self.read_ahead = read_ahead.into();
        Ok(())
    }
}

impl<T: Unpin> ClientStream<T> {
    /// Passes on the outcome of a write, or fails when the write has been blocked for longer than the timeout.
    fn watch<R>(&mut self, context: &mut Context<'_>, polled: Poll<io::Result<R>>) -> Poll<io::Result<R>> {
        if polled.is_ready() {
            if self.blocked.take().is_some() {
                self.activity.set_blocked(false);
            }
            return polled;
        }
        let Some(timeout) = self.write_timeout else { return polled };
        let activity = &self.activity;
        let blocked = self.blocked.get_or_insert_with(|| {
            activity.set_blocked(true);
            Box::pin(sleep(timeout))
        });
        match blocked.as_mut().poll(context) {
            Poll::Ready(()) => {
                tracing::debug!("a client has read nothing for {timeout:?}");
                Poll::Ready(Err(io::ErrorKind::TimedOut.into()))
            }
            Poll::Pending => Poll::Pending,
        }
    }
}

impl<T: AsyncRead + Unpin> AsyncRead for ClientStream<T> {
    fn poll_read(self: Pin<&mut Self>, context: &mut Context<'_>, buffer: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        let this = self.get_mut();
        if this.read_ahead.is_empty() {
            return Pin::new(&mut this.socket).poll_read(context, buffer);
        }
        let count = this.read_ahead.len().min(buffer.remaining());
        buffer.put_slice(&this.read_ahead[..count]);
        this.read_ahead.advance(count);
        Poll::Ready(Ok(()))
    }
}

impl<T: AsyncWrite + Unpin> AsyncWrite for ClientStream<T> {
    fn poll_write(self: Pin<&mut Self>, context: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        let this = self.get_mut();
        let polled = Pin::new(&mut this.socket).poll_write(context, bytes);
        this.watch(context, polled)
    }

    fn poll_write_vectored(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
        pieces: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let this = self.get_mut();
        let polled = Pin::new(&mut this.socket).poll_write_vectored(context, pieces);
        this.watch(context, polled)
    }

    fn is_write_vectored(&self) -> bool {
        self.socket.is_write_vectored()
    }

    fn poll_flush(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        let this = self.get_mut();
        let polled = Pin::new(&mut this.socket).poll_flush(context);
        this.watch(context, polled)
    }

    fn poll_shutdown(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        let this = self.get_mut();
        let polled = Pin::new(&mut this.socket).poll_shutdown(context);
        this.watch(context, polled)
    }
}

#[cfg(test)]
mod tests {
    use tokio::io::AsyncWriteExt as _;
    use tokio::time::timeout;

    use super::*;

    const WRITE_TIMEOUT: Duration = Duration::from_millis(200);
    const LONG: Duration = Duration::from_secs(60);

    #[tokio::test]
    async fn a_write_fails_if_the_client_reads_nothing_but_not_if_it_reads_slowly() {
        let activity = Arc::new(Activity::default());
        let (server, mut client) = tokio::io::duplex(16);
        let mut stream = ClientStream::new(server, activity.clone(), Some(WRITE_TIMEOUT));
        let writing = tokio::spawn(async move { (stream.write_all(&[7; 256]).await, stream) });
        let mut taken = [0; 16];
        for _ in 0..8 {
            tokio::time::sleep(WRITE_TIMEOUT / 2).await;
            client.read_exact(&mut taken).await.unwrap();
        }
        assert!(!writing.is_finished() && !activity.is_idle());
        let (written, _stream) = timeout(LONG, writing).await.expect("the write waits for ever").unwrap();
        assert_eq!(written.unwrap_err().kind(), io::ErrorKind::TimedOut);
    }

    #[tokio::test]
    async fn bytes_that_were_read_ahead_are_returned_first() {
        let (server, mut client) = tokio::io::duplex(16);
        let mut stream = ClientStream::new(server, Arc::default(), None);
        client.write_all(b"abcdef").await.unwrap();
        stream.read_ahead_exact(4).await.unwrap();
        let mut read = [0; 6];
        stream.read_exact(&mut read).await.unwrap();
        assert_eq!(&read, b"abcdef");
    }
}
