//! The queue of a request's events. It nearly always has at most one event, which is stored inline.
//!
//! Each token passes through a queue whose memory is no longer cached. A general channel touches three times as many cache lines.

use std::collections::VecDeque;
use std::future::poll_fn;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, Waker};

use super::request_event::RequestEvent;

/// A new queue. The request's `max_tokens` bounds its length.
pub(crate) fn event_queue() -> (Sender, Receiver) {
    let queue = Arc::new(Queue(Mutex::new(State { num_senders: 1, ..State::default() })));
    (Sender(queue.clone()), Receiver(queue))
}

#[derive(Default)]
#[repr(align(64))]
struct Queue(Mutex<State>);

#[derive(Default)]
struct State {
    first: Option<RequestEvent>,
    others: VecDeque<RequestEvent>,
    /// The receiver's waker.
    waker: Option<Waker>,
    /// Whether the receiver found the queue empty and was not woken since.
    is_waiting: bool,
    num_senders: usize,
    is_receiver_gone: bool,
}

impl Queue {
    fn state(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl State {
    fn put(&mut self, event: RequestEvent) {
        if self.is_receiver_gone {
            return;
        }
        match &self.first {
            None => self.first = Some(event),
            Some(_) => self.others.push_back(event),
        }
        self.wake();
    }

    fn take(&mut self) -> Option<RequestEvent> {
        let first = self.first.take()?;
        if !self.others.is_empty() {
            self.first = self.others.pop_front();
        }
        Some(first)
    }

    fn wake(&mut self) {
        if std::mem::take(&mut self.is_waiting) {
            self.waker.iter().for_each(Waker::wake_by_ref);
        }
    }
}

/// Sends events. The receiver gets `None` once all senders are dropped.
pub(crate) struct Sender(Arc<Queue>);

impl Sender {
    /// Sends `event`; drops it when the receiver is gone.
    pub(crate) fn send(&self, event: RequestEvent) {
        self.0.state().put(event);
    }

    /// Whether the receiver is gone.
    #[cfg(test)]
    pub(crate) fn is_closed(&self) -> bool {
        self.0.state().is_receiver_gone
    }

    /// A sender that does not keep the queue open.
    pub(crate) fn downgrade(&self) -> WeakSender {
        WeakSender(self.0.clone())
    }
}

impl Clone for Sender {
    fn clone(&self) -> Self {
        self.0.state().num_senders += 1;
        Self(self.0.clone())
    }
}

impl Drop for Sender {
    fn drop(&mut self) {
        let mut state = self.0.state();
        state.num_senders -= 1;
        if state.num_senders == 0 {
            state.wake();
        }
    }
}

/// A sender that does not keep the queue open.
pub(crate) struct WeakSender(Arc<Queue>);

impl WeakSender {
    /// Sends `event`; drops it when all [`Sender`]s are gone.
    pub(crate) fn send(&self, event: RequestEvent) {
        let mut state = self.0.state();
        if state.num_senders > 0 {
            state.put(event);
        }
    }
}

/// Receives events.
pub(crate) struct Receiver(Arc<Queue>);

/// A received event.
pub(crate) struct Received {
    pub(crate) event: RequestEvent,
    /// Whether the queue is empty now and the receiver's waker is registered.
    pub(crate) is_drained: bool,
}

impl Receiver {
    /// Another sender, also when there is none any more.
    pub(crate) fn sender(&self) -> Sender {
        self.0.state().num_senders += 1;
        Sender(self.0.clone())
    }

    /// The next event; `None` when no sender is left.
    pub(crate) fn poll_receive(&mut self, context: &mut Context<'_>) -> Poll<Option<Received>> {
        let mut state = self.0.state();
        let event = state.take();
        let is_drained = state.first.is_none() && state.num_senders > 0;
        state.is_waiting = is_drained;
        if is_drained && !state.waker.as_ref().is_some_and(|known| known.will_wake(context.waker())) {
            state.waker = Some(context.waker().clone());
        }
        match event {
            None if is_drained => Poll::Pending,
            event => Poll::Ready(event.map(|event| Received { event, is_drained })),
        }
    }

    /// Like [`Receiver::poll_receive`], without `is_drained`.
    pub(crate) async fn receive(&mut self) -> Option<RequestEvent> {
        poll_fn(|context| self.poll_receive(context)).await.map(|received| received.event)
    }
}

impl Drop for Receiver {
    fn drop(&mut self) {
        let mut state = self.0.state();
        state.is_receiver_gone = true;
        let left = (state.first.take(), std::mem::take(&mut state.others), state.waker.take());
        drop(state);
        drop(left);
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};
    use std::task::Wake;

    use engine::SequenceId;

    use super::*;

    /// Counts how often it wakes.
    #[derive(Default)]
    pub(crate) struct Count(pub(crate) AtomicUsize);

    impl Wake for Count {
        fn wake(self: Arc<Self>) {
            self.0.fetch_add(1, SeqCst);
        }
    }

    fn event(number: u64) -> RequestEvent {
        RequestEvent::Accepted(vec![SequenceId(number)])
    }

    /// The number of an event and whether the queue was drained; `None` for the end.
    fn taken(received: Poll<Option<Received>>) -> Poll<Option<(u64, bool)>> {
        received.map(|received| {
            received.map(|Received { event, is_drained }| match event {
                RequestEvent::Accepted(sequences) => (sequences[0].0, is_drained),
                other => panic!("{other:?}"),
            })
        })
    }

    #[test]
    fn events_come_in_order_and_wake_a_waiting_receiver() {
        let count = Arc::<Count>::default();
        let waker = Waker::from(count.clone());
        let mut context = Context::from_waker(&waker);
        let (sender, mut receiver) = event_queue();
        let mut receive = || taken(receiver.poll_receive(&mut context));
        assert_eq!(receive(), Poll::Pending);
        sender.send(event(1));
        assert_eq!(count.0.load(SeqCst), 1);
        assert_eq!(receive(), Poll::Ready(Some((1, true))));
        (2..5).for_each(|number| sender.send(event(number)));
        assert_eq!(count.0.load(SeqCst), 2, "a receiver that knows that the queue is drained is woken, once");
        let others = [(2, false), (3, false), (4, true)];
        others.into_iter().for_each(|expected| assert_eq!(receive(), Poll::Ready(Some(expected))));
        assert_eq!(receive(), Poll::Pending);
    }

    #[test]
    fn the_end_comes_after_the_last_event_of_the_last_sender() {
        let count = Arc::<Count>::default();
        let waker = Waker::from(count.clone());
        let mut context = Context::from_waker(&waker);
        let (sender, mut receiver) = event_queue();
        let (other, weak) = (sender.clone(), sender.downgrade());
        drop(sender);
        weak.send(event(1));
        assert_eq!(taken(receiver.poll_receive(&mut context)), Poll::Ready(Some((1, true))));
        other.send(event(2));
        drop(other);
        weak.send(event(3));
        assert_eq!(count.0.load(SeqCst), 1, "it was woken already");
        assert_eq!(taken(receiver.poll_receive(&mut context)), Poll::Ready(Some((2, false))), "the end follows");
        assert_eq!(taken(receiver.poll_receive(&mut context)), Poll::Ready(None));
    }

    #[test]
    fn the_end_wakes_a_waiting_receiver() {
        let count = Arc::<Count>::default();
        let waker = Waker::from(count.clone());
        let mut context = Context::from_waker(&waker);
        let (sender, mut receiver) = event_queue();
        assert_eq!(taken(receiver.poll_receive(&mut context)), Poll::Pending);
        drop(sender);
        assert_eq!(count.0.load(SeqCst), 1);
        assert_eq!(taken(receiver.poll_receive(&mut context)), Poll::Ready(None));
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn nothing_is_lost_between_threads() {
        let (sender, mut receiver) = event_queue();
        let sending = std::thread::spawn(move || (0..20_000).for_each(|number| sender.send(event(number))));
        for number in 0..20_000 {
            let received = tokio::time::timeout(std::time::Duration::from_secs(60), receiver.receive()).await;
            let Some(RequestEvent::Accepted(sequences)) = received.expect("a wake-up was lost") else { panic!() };
            assert_eq!(sequences[0].0, number);
        }
        sending.join().unwrap();
        assert!(receiver.receive().await.is_none());
    }
}
