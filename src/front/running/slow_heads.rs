//! Ends HTTP connections whose client begins a request and does not finish its head. Idle ones stay open, as clients
//! and load balancers that keep connections expect.

use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering::Relaxed};
use std::task::{Context, Poll};
use std::time::Duration;

use hyper::rt::{Read, ReadBufCursor, Write};
use tokio::time::{Instant, Sleep, sleep};

/// How many requests of a connection have begun, their heads read, and how many of these have been answered.
#[derive(Debug, Default)]
pub struct Requests {
    begun: AtomicU32,
    answered: AtomicU32,
}

impl Requests {
    /// Counts the request whose answer `future` makes.
    pub async fn count<F: Future>(&self, future: F) -> F::Output {
        self.begun.fetch_add(1, Relaxed);
        let output = future.await;
        self.answered.fetch_add(1, Relaxed);
        output
    }

    fn begun(&self) -> u32 {
        self.begun.load(Relaxed)
    }

    fn are_answered(&self) -> bool {
        self.begun() == self.answered.load(Relaxed)
    }
}

/// A connection's bytes. Reading errs when a head takes longer than the patience, and at most twice that.
pub struct SlowHeads<T> {
    inner: T,
    requests: Arc<Requests>,
    patience: Duration,
    /// When the first bytes of a head came, and how many requests had begun by then.
    head: Option<(Instant, u32)>,
    /// Looks at the head every `look_time`, and has the connection look at what else it waits for: nothing is set or cleared
    /// for a request.
    look: Pin<Box<Sleep>>,
    look_time: Duration,
}

impl<T> SlowHeads<T> {
    /// Watches the heads that come through `inner`, every `look_time`.
    pub fn new(inner: T, requests: Arc<Requests>, patience: Duration, look_time: Duration) -> Self {
        Self { inner, requests, patience, head: None, look: Box::pin(sleep(look_time)), look_time }
    }

    /// Bytes came: the first of a head, unless they belong to a request or to a head that is under way.
    fn note_bytes(&mut self) {
        let begun = self.requests.begun();
        if self.requests.are_answered() && self.head.is_none_or(|(_, before)| before != begun) {
            self.head = Some((Instant::now(), begun));
        }
    }

    fn is_late(&self) -> bool {
        let begun = self.requests.begun();
        self.head.is_some_and(|(since, before)| before == begun && since.elapsed() >= self.patience)
    }
}

impl<T: Read + Unpin> Read for SlowHeads<T> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: ReadBufCursor<'_>,
    ) -> Poll<io::Result<()>> {
        let read = Pin::new(&mut self.inner).poll_read(context, buffer);
        if read.is_ready() {
            self.note_bytes();
            return read;
        }
        while self.look.as_mut().poll(context).is_ready() {
            if self.is_late() {
                return Poll::Ready(Err(io::ErrorKind::TimedOut.into()));
            }
            let next = Instant::now() + self.look_time;
            self.look.as_mut().reset(next);
        }
        Poll::Pending
    }
}

impl<T: Write + Unpin> Write for SlowHeads<T> {
    fn poll_write(mut self: Pin<&mut Self>, context: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.inner).poll_write(context, bytes)
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.inner).poll_flush(context)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.inner).poll_shutdown(context)
    }

    fn is_write_vectored(&self) -> bool {
        self.inner.is_write_vectored()
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        pieces: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.inner).poll_write_vectored(context, pieces)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use http::{Request, Response};
    use http_body_util::Empty;
    use hyper::body::Incoming;
    use hyper::server::conn::http1;
    use hyper::service::service_fn;
    use hyper_util::rt::{TokioIo, TokioTimer};
    use tokio::io::{AsyncReadExt, AsyncWriteExt, DuplexStream};

    const PATIENCE: Duration = Duration::from_millis(200);
    const REQUEST: &[u8] = b"GET / HTTP/1.1\r\nHost: x\r\n\r\n";

    /// A client of a server that answers everything after `delay`.
    fn connect(delay: Duration) -> DuplexStream {
        let (client, server) = tokio::io::duplex(1 << 10);
        let requests = Arc::new(Requests::default());
        let io = SlowHeads::new(TokioIo::new(server), requests.clone(), PATIENCE, PATIENCE);
        let service = service_fn(move |_: Request<Incoming>| {
            let requests = requests.clone();
            async move {
                let answer = requests.count(async {
                    sleep(delay).await;
                    Response::new(Empty::<bytes::Bytes>::new())
                });
                Ok::<_, std::convert::Infallible>(answer.await)
            }
        });
        let connection =
            http1::Builder::new().timer(TokioTimer::new()).header_read_timeout(None).serve_connection(io, service);
        tokio::spawn(connection);
        client
    }

    async fn answer(client: &mut DuplexStream) -> String {
        let mut text = vec![0; 1 << 10];
        let count = client.read(&mut text).await.unwrap_or(0);
        String::from_utf8_lossy(&text[..count]).into_owned()
    }

    #[tokio::test]
    async fn an_idle_connection_stays_open() {
        let mut client = connect(Duration::ZERO);
        for _ in 0..2 {
            client.write_all(REQUEST).await.unwrap();
            assert!(answer(&mut client).await.starts_with("HTTP/1.1 200"));
            sleep(4 * PATIENCE).await;
        }
    }

    #[tokio::test]
    async fn a_head_that_does_not_end_ends_the_connection() {
        let mut client = connect(Duration::ZERO);
        client.write_all(REQUEST).await.unwrap();
        assert!(answer(&mut client).await.starts_with("HTTP/1.1 200"));
        sleep(3 * PATIENCE).await;
        client.write_all(b"GET / HTT").await.unwrap();
        let begun = Instant::now();
        assert_eq!(answer(&mut client).await, "");
        assert!(begun.elapsed() >= PATIENCE, "{:?}", begun.elapsed());
    }

    #[tokio::test]
    async fn an_answer_may_take_its_time() {
        let mut client = connect(4 * PATIENCE);
        client.write_all(REQUEST).await.unwrap();
        assert!(answer(&mut client).await.starts_with("HTTP/1.1 200"));
    }
}
