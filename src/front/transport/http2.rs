//! An HTTP/2 connection and all of its calls in one task.
//!
//! With a task per call, each token wakes the call's task, which then wakes the connection's task. Here a step of 32 streams
//! wakes the connection once: it polls all calls and then writes their output together.

use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::task::{Context, Poll, Waker, ready};

use bytes::Bytes;
use h2::server::{Builder, Connection, Handshake, SendResponse};
use http::Request;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::task::coop::has_budget_remaining;
use tokio::time::{Instant, Sleep, sleep};

mod calls;
mod connection_waker;
mod keep_alive;
mod request_body;
mod response;

use calls::Calls;
pub use calls::{Call, Progress};
use connection_waker::ConnectionWaker;
use keep_alive::KeepAlive;
pub use keep_alive::KeepAliveConfig;
pub use request_body::RequestBody;
pub use response::{ClientGone, poll_capacity, send};

use crate::transport::connections::Activity;
use crate::transport::listener;
use crate::transport::write_batching::WriteBatcher;

/// Rounds of polling before the task yields to other tasks of the runtime.
const MAX_ROUNDS: usize = 32;

/// Flow-control window. Tensors of 1 MiB fit without a round trip.
const WINDOW_BYTES: u32 = 4 << 20;
const MAX_FRAME_BYTES: u32 = 1 << 20;
const MAX_CALLS: u32 = 4096;
const MAX_HEADER_BYTES: u32 = 16 << 10;
/// Maximum bytes of a call that are buffered for writing.
const MAX_UNWRITTEN_BYTES: usize = 400 << 10;
/// Maximum calls reset because of errors of the client; beyond it the connection ends.
const MAX_BROKEN_CALLS: usize = 1024;

/// A gRPC connection and its calls as one future, which resolves when the connection ends.
pub struct GrpcConnection<T, F> {
    wire: Wire<T>,
    begin: F,
    calls: Calls,
    keep_alive: KeepAliveConfig,
    is_shutting_down: bool,
    /// Timer after which pending calls check their timeouts; set while there are calls.
    check: Option<Pin<Box<Sleep>>>,
    connection_waker: Arc<ConnectionWaker>,
    waker: Waker,
}

enum Wire<T> {
    /// The handshake is in progress. The flag is passed on to the keep-alive.
    Handshake(Handshake<WriteBatcher<T>, Bytes>, Arc<AtomicBool>),
    Open(Connection<WriteBatcher<T>, Bytes>, KeepAlive),
}

impl<T, F> GrpcConnection<T, F>
where
    T: AsyncRead + AsyncWrite + Unpin,
    F: FnMut(Request<RequestBody>, SendResponse<Bytes>) -> Option<Box<dyn Call>>,
{
    /// Serves a client over `io`. `begin` starts a call; `activity` is busy while there are calls.
    pub fn new(io: T, activity: Arc<Activity>, keep_alive: KeepAliveConfig, begin: F) -> Self {
        let mut settings = Builder::new();
        settings
            .initial_window_size(WINDOW_BYTES)
            .initial_connection_window_size(WINDOW_BYTES)
            .max_frame_size(MAX_FRAME_BYTES)
            .max_concurrent_streams(MAX_CALLS)
            .max_header_list_size(MAX_HEADER_BYTES)
            .max_send_buffer_size(MAX_UNWRITTEN_BYTES)
            .max_local_error_reset_streams(Some(MAX_BROKEN_CALLS));
        let io = WriteBatcher::new(io);
        let received = io.received();
        let (connection_waker, calls) = (Arc::<ConnectionWaker>::default(), Calls::new(activity));
        let waker = Waker::from(connection_waker.clone());
        let wire = Wire::Handshake(settings.handshake(io), received);
        Self { wire, begin, calls, keep_alive, is_shutting_down: false, check: None, connection_waker, waker }
    }

    /// Lets all calls check their timeouts at intervals, with one timer for all of them.
    fn poll_check(&mut self, context: &mut Context<'_>) {
        if self.calls.is_empty() {
            return;
        }
        let check = self.check.get_or_insert_with(|| Box::pin(sleep(self.keep_alive.check_interval)));
        while check.as_mut().poll(context).is_ready() {
            self.calls.wake_all();
            check.as_mut().reset(Instant::now() + self.keep_alive.check_interval);
        }
    }

    /// Sends, receives and starts calls until nothing is ready. Ready when the connection ends.
    fn poll_wire(&mut self, context: &mut Context<'_>) -> Poll<Result<(), h2::Error>> {
        loop {
            match &mut self.wire {
                Wire::Handshake(handshake, received) => {
                    let mut connection = ready!(Pin::new(handshake).poll(context))?;
                    if self.is_shutting_down {
                        connection.graceful_shutdown();
                    }
                    let ping_pong = connection.ping_pong().expect("taken only once");
                    let keep_alive = KeepAlive::new(self.keep_alive, ping_pong, received.clone());
                    self.wire = Wire::Open(connection, keep_alive);
                }
                Wire::Open(connection, keep_alive) => {
                    if keep_alive.poll_timeout(context).is_ready() {
                        tracing::debug!("keep-alive timeout: the client did not answer a ping");
                        return Poll::Ready(Ok(()));
                    }
                    let Some(call) = ready!(connection.poll_accept(context)) else { return Poll::Ready(Ok(())) };
                    let (request, respond) = call?;
                    if let Some(call) = (self.begin)(request.map(RequestBody::new), respond) {
                        self.calls.push(call, &self.connection_waker);
                    }
                }
            }
        }
    }
}

impl<T, F> Future for GrpcConnection<T, F>
where
    T: AsyncRead + AsyncWrite + Unpin,
    F: FnMut(Request<RequestBody>, SendResponse<Bytes>) -> Option<Box<dyn Call>> + Unpin,
{
    type Output = Result<(), h2::Error>;

    fn poll(mut self: Pin<&mut Self>, outer: &mut Context<'_>) -> Poll<Self::Output> {
        let this = &mut *self;
        this.connection_waker.task.register(outer.waker());
        let waker = this.waker.clone();
        let mut context = Context::from_waker(&waker);
        for _ in 0..MAX_ROUNDS {
            this.connection_waker.begin();
            while this.calls.advance() {
                this.connection_waker.begin();
            }
            if let Poll::Ready(result) = this.poll_wire(&mut context) {
                return Poll::Ready(result);
            }
            this.poll_check(&mut context);
            if this.connection_waker.finish_round() {
                return Poll::Pending;
            }
            if !has_budget_remaining() {
                break;
            }
        }
        this.connection_waker.end();
        outer.waker().wake_by_ref();
        Poll::Pending
    }
}

impl<T, F> listener::Connection for GrpcConnection<T, F>
where
    T: AsyncRead + AsyncWrite + Unpin,
    F: FnMut(Request<RequestBody>, SendResponse<Bytes>) -> Option<Box<dyn Call>> + Unpin,
{
    type Error = h2::Error;

    fn graceful_shutdown(mut self: Pin<&mut Self>) {
        self.is_shutting_down = true;
        if let Wire::Open(connection, _) = &mut self.wire {
            connection.graceful_shutdown();
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};
    use std::time::Duration;

    use futures::FutureExt as _;
    use h2::client;
    use http::Response;
    use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _, DuplexStream};
    use tokio::sync::mpsc;
    use tokio::time::timeout;

    use super::*;

    const LONG: Duration = Duration::from_secs(60);
    const NEVER: KeepAliveConfig = KeepAliveConfig { idle_time: LONG, timeout: LONG, check_interval: LONG };

    /// A call that sends each received piece.
    async fn pass_on(mut pieces: mpsc::UnboundedReceiver<u8>, mut respond: SendResponse<Bytes>) {
        let mut stream = respond.send_response(Response::new(()), false).unwrap();
        while let Some(piece) = pieces.recv().await {
            stream.send_data(Bytes::from(vec![piece]), false).unwrap();
        }
        stream.send_data(Bytes::new(), true).unwrap();
    }

    /// Connects a client to a server whose calls `begin` starts.
    async fn serve<F>(
        keep_alive: KeepAliveConfig,
        begin: F,
    ) -> (client::SendRequest<Bytes>, tokio::task::JoinHandle<()>)
    where
        F: FnMut(Request<RequestBody>, SendResponse<Bytes>) -> Option<Box<dyn Call>> + Unpin + Send + 'static,
    {
        let (server, client) = tokio::io::duplex(1 << 16);
        let serving =
            tokio::spawn(async move { GrpcConnection::new(server, Arc::default(), keep_alive, begin).await.unwrap() });
        // Many small frames arrive before they are read.
        let client = client::Builder::new().data_frame_budget(usize::MAX).handshake(client).await;
        let (requests, driver) = client.unwrap();
        tokio::spawn(driver);
        (requests, serving)
    }

    async fn call(requests: &client::SendRequest<Bytes>) -> client::ResponseFuture {
        let mut ready = requests.clone().ready().await.unwrap();
        ready.send_request(Request::post("http://test/").body(()).unwrap(), true).unwrap().0
    }

    #[tokio::test]
    async fn calls_run_within_their_connection_and_end_with_it() {
        const CALLS: usize = 100;
        let (begun, mut begins) = mpsc::unbounded_channel();
        let (requests, serving) = serve(NEVER, move |_, respond| {
            let (sender, pieces) = mpsc::unbounded_channel();
            begun.send(sender).unwrap();
            Some(Box::new(pass_on(pieces, respond).boxed()))
        })
        .await;
        let mut answers = Vec::new();
        let mut senders = Vec::new();
        for _ in 0..CALLS {
            answers.push(call(&requests).await);
            senders.push(begins.recv().await.unwrap());
        }
        // From another thread, in bursts larger than a task's budget. No wake-up may be lost.
        let rounds = 50;
        let sending = std::thread::spawn(move || {
            (0..rounds).for_each(|round| senders.iter().for_each(|sender| sender.send(round).unwrap()));
            senders
        });
        let (expected, mut bodies): (Vec<u8>, _) = ((0..rounds).collect(), Vec::new());
        for answer in answers {
            let (mut body, mut came) = (answer.await.unwrap().into_body(), Vec::new());
            while came.len() < expected.len() {
                let data = timeout(LONG, body.data()).await.expect("a wake-up was lost").unwrap().unwrap();
                body.flow_control().release_capacity(data.len()).unwrap();
                came.extend(data);
            }
            assert_eq!(came, expected);
            bodies.push(body);
        }
        let senders = sending.join().unwrap();
        drop((bodies, requests));
        timeout(LONG, serving).await.unwrap().unwrap();
        assert!(senders.iter().all(|sender| sender.is_closed()), "a call outlived its connection");
    }

    #[tokio::test]
    async fn a_panic_of_a_call_does_not_affect_other_calls() {
        let count = AtomicUsize::new(0);
        let (requests, _serving) = serve(NEVER, move |_, respond| {
            let is_first = count.fetch_add(1, SeqCst) == 0;
            let answer = async move {
                assert!(!is_first, "on purpose");
                Response::new(http_body_util::Full::new(Bytes::from_static(b"well")))
            };
            Some(Box::new(send(answer, respond, None).boxed()))
        })
        .await;
        let (first, second) = (call(&requests).await, call(&requests).await);
        assert!(timeout(LONG, first).await.unwrap().is_err());
        let mut body = timeout(LONG, second).await.unwrap().unwrap().into_body();
        assert_eq!(body.data().await.unwrap().unwrap(), "well");
    }

    /// A client that has sent the preface and its settings.
    async fn handshake_client() -> (DuplexStream, DuplexStream) {
        let (server, mut client) = tokio::io::duplex(1 << 16);
        let settings = [0, 0, 0, 4, 0, 0, 0, 0, 0];
        client.write_all(&[b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n".as_slice(), &settings].concat()).await.unwrap();
        (server, client)
    }

    #[tokio::test]
    async fn an_idle_client_is_pinged_and_disconnected_without_an_answer() {
        let keep_alive = KeepAliveConfig {
            idle_time: Duration::from_millis(20),
            timeout: Duration::from_millis(200),
            check_interval: LONG,
        };
        let (server, mut silent) = handshake_client().await;
        timeout(LONG, GrpcConnection::new(server, Arc::default(), keep_alive, |_, _| None))
            .await
            .expect("it waits for ever")
            .unwrap();
        let mut received = Vec::new();
        silent.read_to_end(&mut received).await.unwrap();
        let is_ping = |frame: &[u8]| frame[..5] == [0, 0, 8, 6, 0];
        assert!(received.windows(9).any(is_ping), "no ping was sent: {received:?}");
        // A client that answers is kept.
        let (requests, serving) = serve(keep_alive, |_, _| None).await;
        assert!(timeout(4 * keep_alive.timeout, serving).await.is_err(), "a client that answers was disconnected");
        drop(requests);
    }

    #[tokio::test]
    async fn a_shutdown_before_the_handshake_ends_the_connection() {
        let (server, client) = tokio::io::duplex(1 << 16);
        let mut connection = Box::pin(GrpcConnection::new(server, Arc::default(), NEVER, |_, _| None));
        listener::Connection::graceful_shutdown(connection.as_mut());
        let serving = tokio::spawn(connection);
        let (_requests, driver) = client::handshake(client).await.unwrap();
        let _ = timeout(LONG, driver).await.expect("the client got no end");
        assert!(timeout(LONG, serving).await.is_ok(), "the connection did not end");
    }
}
