//! The bytes of a connection, in the clear or not, and a bound on how long its client may read none of them.

use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use bytes::{Buf, Bytes};
use tokio::io::{AsyncRead, AsyncReadExt as _, AsyncWrite, ReadBuf};
use tokio::time::{Sleep, sleep};

use crate::transport::connections::Activity;

/// A connection's bytes. Writing errs when the client has taken nothing of what is there for longer than the patience.
pub struct ClientStream<T> {
    socket: T,
    /// What was read before the protocol's own server looks.
    begun: Bytes,
    activity: Arc<Activity>,
    patience: Option<Duration>,
    /// Runs while the client takes nothing. Nothing is set for a client that reads.
    blocked: Option<Pin<Box<Sleep>>>,
}

impl<T: AsyncRead + Unpin> ClientStream<T> {
    /// Over `socket`; `None` waits for ever.
    pub fn new(socket: T, activity: Arc<Activity>, patience: Option<Duration>) -> Self {
        Self { socket, begun: Bytes::new(), activity, patience, blocked: None }
    }

    /// Waits until `count` bytes have come, which are then read as usual.
    ///
    /// # Errors
    /// When the client leaves before.
    pub async fn await_bytes(&mut self, count: usize) -> io::Result<()> {
        let mut begun = vec![0; count];
        self.socket.read_exact(&mut begun).await?;
        self.begun = begun.into();
        Ok(())
    }
}

impl<T: Unpin> ClientStream<T> {
    /// The outcome of a write, unless nothing could be written for too long.
    fn watch<R>(&mut self, context: &mut Context<'_>, polled: Poll<io::Result<R>>) -> Poll<io::Result<R>> {
        if polled.is_ready() {
            if self.blocked.take().is_some() {
                self.activity.set_blocked(false);
            }
            return polled;
        }
        let Some(patience) = self.patience else { return polled };
        let activity = &self.activity;
        let blocked = self.blocked.get_or_insert_with(|| {
            activity.set_blocked(true);
            Box::pin(sleep(patience))
        });
        match blocked.as_mut().poll(context) {
            Poll::Ready(()) => {
                tracing::debug!("a client has read nothing for {patience:?}");
                Poll::Ready(Err(io::ErrorKind::TimedOut.into()))
            }
            Poll::Pending => Poll::Pending,
        }
    }
}

impl<T: AsyncRead + Unpin> AsyncRead for ClientStream<T> {
    fn poll_read(self: Pin<&mut Self>, context: &mut Context<'_>, buffer: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        let this = self.get_mut();
        if this.begun.is_empty() {
            return Pin::new(&mut this.socket).poll_read(context, buffer);
        }
        let count = this.begun.len().min(buffer.remaining());
        buffer.put_slice(&this.begun[..count]);
        this.begun.advance(count);
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

    const PATIENCE: Duration = Duration::from_millis(200);
    const LONG: Duration = Duration::from_secs(60);

    #[tokio::test]
    async fn a_client_that_reads_nothing_is_given_up_and_one_that_reads_slowly_is_not() {
        let activity = Arc::new(Activity::default());
        let (server, mut client) = tokio::io::duplex(16);
        let mut stream = ClientStream::new(server, activity.clone(), Some(PATIENCE));
        let writing = tokio::spawn(async move { (stream.write_all(&[7; 256]).await, stream) });
        let mut taken = [0; 16];
        for _ in 0..8 {
            tokio::time::sleep(PATIENCE / 2).await;
            client.read_exact(&mut taken).await.unwrap();
        }
        assert!(!writing.is_finished() && !activity.is_idle());
        let (written, _stream) = timeout(LONG, writing).await.expect("it waits for ever").unwrap();
        assert_eq!(written.unwrap_err().kind(), io::ErrorKind::TimedOut);
    }

    #[tokio::test]
    async fn bytes_that_were_awaited_are_read_first() {
        let (server, mut client) = tokio::io::duplex(16);
        let mut stream = ClientStream::new(server, Arc::default(), None);
        client.write_all(b"abcdef").await.unwrap();
        stream.await_bytes(4).await.unwrap();
        let mut read = [0; 6];
        stream.read_exact(&mut read).await.unwrap();
        assert_eq!(&read, b"abcdef");
    }
}
