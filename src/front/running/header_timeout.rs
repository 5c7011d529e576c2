//! A timeout for the head of HTTP requests. Idle connections stay open, as clients and load balancers with connection pools
//! expect.

use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering::Relaxed};
use std::task::{Context, Poll};
use std::time::Duration;

use hyper::rt::{Read, ReadBufCursor, Write};
use tokio::time::{Instant, Sleep, sleep};

/// Counts the requests of a connection whose heads were read, and those that were answered.
#[derive(Debug, Default)]
pub struct RequestCounts {
    started: AtomicU32,
    answered: AtomicU32,
}

impl RequestCounts {
    /// Counts the request that `future` answers.
    pub async fn count<F: Future>(&self, future: F) -> F::Output {
        self.started.fetch_add(1, Relaxed);
        let output = future.await;
        self.answered.fetch_add(1, Relaxed);
        output
    }

    fn started(&self) -> u32 {
        self.started.load(Relaxed)
    }

    fn are_answered(&self) -> bool {
        self.started() == self.answered.load(Relaxed)
    }
}

/// A socket whose reads fail if a request's head is incomplete for longer than the timeout, after twice that time at the latest.
pub struct HeaderTimeout<T> {
    inner: T,
    requests: Arc<RequestCounts>,
    timeout: Duration,
    /// When the first bytes of a head arrived, and how many requests had started before.
    head: Option<(Instant, u32)>,
    /// Wakes the connection every `check_interval` to check the head and the timeouts of its requests, so that no request needs a
    /// timer of its own.
    timer: Pin<Box<Sleep>>,
    check_interval: Duration,
}

impl<T> HeaderTimeout<T> {
    /// Wraps `inner`. Heads are checked every `check_interval`.
    pub fn new(inner: T, requests: Arc<RequestCounts>, timeout: Duration, check_interval: Duration) -> Self {
        Self { inner, requests, timeout, head: None, timer: Box::pin(sleep(check_interval)), check_interval }
    }

    /// Notes received bytes. They start a head unless a request or an incomplete head is in progress.
    fn note_bytes(&mut self) {
        let started = self.requests.started();
        if self.requests.are_answered() && self.head.is_none_or(|(_, before)| before != started) {
            self.head = Some((Instant::now(), started));
        }
    }

    fn is_late(&self) -> bool {
        let started = self.requests.started();
        self.head.is_some_and(|(since, before)| before == started && since.elapsed() >= self.timeout)
    }
}

impl<T: Read + Unpin> Read for HeaderTimeout<T> {
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
        while self.timer.as_mut().poll(context).is_ready() {
            if self.is_late() {
                return Poll::Ready(Err(io::ErrorKind::TimedOut.into()));
            }
            let next = Instant::now() + self.check_interval;
            self.timer.as_mut().reset(next);
        }
        Poll::Pending
    }
}

impl<T: Write + Unpin> Write for HeaderTimeout<T> {
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

    const TIMEOUT: Duration = Duration::from_millis(200);
    const REQUEST: &[u8] = b"GET / HTTP/1.1\r\nHost: x\r\n\r\n";

    /// A client of a server that answers each request after `delay`.
    fn connect(delay: Duration) -> DuplexStream {
        let (client, server) = tokio::io::duplex(1 << 10);
        let requests = Arc::new(RequestCounts::default());
        let io = HeaderTimeout::new(TokioIo::new(server), requests.clone(), TIMEOUT, TIMEOUT);
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
            sleep(4 * TIMEOUT).await;
        }
    }

    #[tokio::test]
    async fn an_incomplete_head_ends_the_connection() {
        let mut client = connect(Duration::ZERO);
        client.write_all(REQUEST).await.unwrap();
        assert!(answer(&mut client).await.starts_with("HTTP/1.1 200"));
        sleep(3 * TIMEOUT).await;
        client.write_all(b"GET / HTT").await.unwrap();
        let started = Instant::now();
        assert_eq!(answer(&mut client).await, "");
        assert!(started.elapsed() >= TIMEOUT, "{:?}", started.elapsed());
    }

    #[tokio::test]
    async fn a_response_may_take_longer_than_the_timeout() {
        let mut client = connect(4 * TIMEOUT);
        client.write_all(REQUEST).await.unwrap();
        assert!(answer(&mut client).await.starts_with("HTTP/1.1 200"));
    }
}
