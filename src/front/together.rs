//! One task for an HTTP/2 connection and all of its streams.
//!
//! A task for each stream would be woken for each token, and would then wake the connection's. Here a step of 32 streams
//! wakes a connection once: all that it has to say is made, then handed to its streams, then to the connection, which
//! writes it at once. Each of the three is more code than a processor's first cache holds together with the others, so
//! each is done for all streams before the next.

use std::panic::AssertUnwindSafe;
use std::pin::Pin;
use std::sync::atomic::{AtomicBool, Ordering::SeqCst};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, Wake, Waker};

use futures::StreamExt;
use futures::future::{BoxFuture, FutureExt as _};
use futures::stream::FuturesUnordered;
use futures::task::AtomicWaker;
use tokio::task::coop::has_budget_remaining;

use crate::listener::Connection;

/// Turns that streams and connection have before other tasks of the runtime have theirs.
const MAX_ROUNDS: usize = 32;

type Work = BoxFuture<'static, ()>;

/// Takes a connection's streams, and what makes their frames; clones belong to the same connection.
#[derive(Clone, Default)]
pub struct Streams(Arc<Mutex<New>>);

/// What the connection has not begun to poll.
#[derive(Default)]
struct New {
    makers: Vec<Work>,
    streams: Vec<Work>,
}

impl Streams {
    /// Takes work that makes frames for a stream. It is polled before the streams.
    pub fn make(&self, maker: impl Future<Output = ()> + Send + 'static) {
        self.begun().makers.push(on_its_own(maker));
    }

    fn begun(&self) -> MutexGuard<'_, New> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl<F: Future<Output = ()> + Send + 'static> hyper::rt::Executor<F> for Streams {
    fn execute(&self, stream: F) {
        self.begun().streams.push(on_its_own(stream));
    }
}

/// Work that takes no other with it when it panics.
fn on_its_own(work: impl Future<Output = ()> + Send + 'static) -> Work {
    let result = AssertUnwindSafe(work).catch_unwind();
    Box::pin(result.map(|result| result.unwrap_or_else(|_| tracing::error!("a stream broke off"))))
}

/// A connection and its streams as one future. Ends with the connection.
pub struct Together<C> {
    connection: Pin<Box<C>>,
    new: Streams,
    makers: FuturesUnordered<Work>,
    streams: FuturesUnordered<Work>,
    alarm: Arc<Alarm>,
    waker: Waker,
}

impl<C> Together<C> {
    /// `connection`, which hands its streams to `new`.
    pub fn new(connection: C, new: Streams) -> Self {
        let alarm = Arc::new(Alarm::default());
        let waker = Waker::from(alarm.clone());
        let (makers, streams) = Default::default();
        Self { connection: Box::pin(connection), new, makers, streams, alarm, waker }
    }

    /// Polls all makers, then all streams that can go on, until none can.
    fn poll_streams(&mut self, context: &mut Context<'_>) {
        // A set of futures rests after two that woke themselves, as all do that send.
        for _ in 0..=self.makers.len() + self.streams.len() {
            self.alarm.begin();
            while let Poll::Ready(Some(())) = self.makers.poll_next_unpin(context) {}
            while let Poll::Ready(Some(())) = self.streams.poll_next_unpin(context) {}
            // Without budget streams wake themselves, and find none before the next turn.
            if !self.alarm.is_rung() || !has_budget_remaining() {
                return;
            }
        }
    }

    /// Takes what has begun; whether there was anything.
    fn take_new(&mut self) -> bool {
        let New { makers, streams } = std::mem::take(&mut *self.new.begun());
        let is_any = !makers.is_empty() || !streams.is_empty();
        self.makers.extend(makers);
        self.streams.extend(streams);
        is_any
    }
}

impl<C: Connection> Future for Together<C> {
    type Output = Result<(), C::Error>;

    fn poll(mut self: Pin<&mut Self>, outer: &mut Context<'_>) -> Poll<Self::Output> {
        let this = &mut *self;
        this.alarm.task.register(outer.waker());
        let waker = this.waker.clone();
        let mut context = Context::from_waker(&waker);
        for _ in 0..MAX_ROUNDS {
            this.poll_streams(&mut context);
            if let Poll::Ready(result) = this.connection.as_mut().poll(&mut context) {
                return Poll::Ready(result);
            }
            if !this.take_new() && this.alarm.rest() {
                return Poll::Pending;
            }
            if !has_budget_remaining() {
                break;
            }
        }
        this.alarm.end();
        outer.waker().wake_by_ref();
        Poll::Pending
    }
}

impl<C: Connection> Connection for Together<C> {
    type Error = C::Error;

    fn graceful_shutdown(mut self: Pin<&mut Self>) {
        self.connection.as_mut().graceful_shutdown();
    }
}

/// Wakes the task of a connection, unless it is at work: then it looks itself.
#[derive(Default)]
struct Alarm {
    task: AtomicWaker,
    is_rung: AtomicBool,
    is_at_work: AtomicBool,
}

impl Alarm {
    /// A round begins: it sees what rang until now.
    fn begin(&self) {
        self.is_at_work.store(true, SeqCst);
        self.is_rung.store(false, SeqCst);
    }

    /// Ends the work, unless it rang since the round began.
    fn rest(&self) -> bool {
        self.is_at_work.store(false, SeqCst);
        !self.is_rung()
    }

    fn is_rung(&self) -> bool {
        self.is_rung.load(SeqCst)
    }

    fn end(&self) {
        self.is_at_work.store(false, SeqCst);
    }
}

impl Wake for Alarm {
    fn wake(self: Arc<Self>) {
        self.wake_by_ref();
    }

    fn wake_by_ref(self: &Arc<Self>) {
        self.is_rung.store(true, SeqCst);
        if !self.is_at_work.load(SeqCst) {
            self.task.wake();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tokio::sync::mpsc;

    /// Ends when told; begins a stream for each number it gets, which passes on what that stream is sent.
    struct Fake {
        begin: mpsc::UnboundedReceiver<mpsc::UnboundedReceiver<u32>>,
        streams: Streams,
        told: mpsc::UnboundedSender<u32>,
        polls: Arc<std::sync::atomic::AtomicUsize>,
    }

    impl Future for Fake {
        type Output = Result<(), std::io::Error>;

        fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
            self.polls.fetch_add(1, SeqCst);
            loop {
                let Some(mut numbers) = std::task::ready!(self.begin.poll_recv(context)) else {
                    return Poll::Ready(Ok(()));
                };
                let told = self.told.clone();
                let pass = async move {
                    while let Some(number) = numbers.recv().await {
                        told.send(number).unwrap();
                    }
                };
                hyper::rt::Executor::execute(&self.streams, pass);
            }
        }
    }

    impl Connection for Fake {
        type Error = std::io::Error;

        fn graceful_shutdown(self: Pin<&mut Self>) {}
    }

    #[tokio::test]
    async fn streams_go_on_with_their_connection_and_end_with_it() {
        let (begin, begins) = mpsc::unbounded_channel();
        let (told, mut heard) = mpsc::unbounded_channel();
        let (streams, polls) = (Streams::default(), Arc::default());
        let fake = Fake { begin: begins, streams: streams.clone(), told, polls: Arc::clone(&polls) };
        let running = tokio::spawn(Together::new(fake, streams));
        let senders: Vec<_> = (0..200)
            .map(|_| {
                let (sender, numbers) = mpsc::unbounded_channel();
                begin.send(numbers).unwrap();
                sender
            })
            .collect();
        // From another thread, in bursts larger than a task's budget, none of which may be lost.
        let rounds = 50;
        let sending = std::thread::spawn(move || {
            (0..rounds).for_each(|round| senders.iter().for_each(|sender| sender.send(round).unwrap()));
            senders
        });
        let mut sum = 0;
        for _ in 0..200 * rounds {
            let waited = tokio::time::timeout(std::time::Duration::from_secs(60), heard.recv()).await;
            sum += u64::from(waited.expect("a wake-up was lost").unwrap());
        }
        assert_eq!(sum, 200 * (0..u64::from(rounds)).sum::<u64>());
        let senders = sending.join().unwrap();
        drop(begin);
        running.await.unwrap().unwrap();
        assert!(senders.iter().all(|sender| sender.is_closed()), "a stream outlived its connection");
    }
}
