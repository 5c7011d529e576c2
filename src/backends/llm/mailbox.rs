//! Where a request hears of its sequences: one event at a time in nearly all cases, which has a place of its own.
//!
//! Each token passes here, through memory that has long not been touched: a channel of blocks would be three times as much
//! of it.

use std::collections::VecDeque;
use std::future::poll_fn;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, Waker};

use super::inbox::RequestEvent;

/// A mailbox that holds what comes until it is taken; one end to send, one to receive. Bounded by the request's own
/// `max_tokens`, so it needs no bound.
pub(crate) fn mailbox() -> (Sender, Receiver) {
    let mailbox = Arc::new(Mailbox(Mutex::new(Letters { num_senders: 1, ..Letters::default() })));
    (Sender(mailbox.clone()), Receiver(mailbox))
}

#[derive(Default)]
#[repr(align(64))]
struct Mailbox(Mutex<Letters>);

#[derive(Default)]
struct Letters {
    first: Option<RequestEvent>,
    others: VecDeque<RequestEvent>,
    /// Who receives.
    waker: Option<Waker>,
    /// It has found nothing more, and was not woken since.
    is_waiting: bool,
    num_senders: usize,
    is_receiver_gone: bool,
}

impl Mailbox {
    fn letters(&self) -> MutexGuard<'_, Letters> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Letters {
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

/// Sends events. When all senders are gone, the receiver hears that nothing more comes.
pub(crate) struct Sender(Arc<Mailbox>);

impl Sender {
    /// Sends `event`, if somebody receives.
    pub(crate) fn send(&self, event: RequestEvent) {
        self.0.letters().put(event);
    }

    /// Whether nobody receives any more.
    #[cfg(test)]
    pub(crate) fn is_closed(&self) -> bool {
        self.0.letters().is_receiver_gone
    }

    /// One that sends as long as another one may.
    pub(crate) fn downgrade(&self) -> WeakSender {
        WeakSender(self.0.clone())
    }
}

impl Clone for Sender {
    fn clone(&self) -> Self {
        self.0.letters().num_senders += 1;
        Self(self.0.clone())
    }
}

impl Drop for Sender {
    fn drop(&mut self) {
        let mut letters = self.0.letters();
        letters.num_senders -= 1;
        if letters.num_senders == 0 {
            letters.wake();
        }
    }
}

/// Sends, and keeps no receiver waiting.
pub(crate) struct WeakSender(Arc<Mailbox>);

impl WeakSender {
    /// Sends `event`, if a [`Sender`] still could.
    pub(crate) fn send(&self, event: RequestEvent) {
        let mut letters = self.0.letters();
        if letters.num_senders > 0 {
            letters.put(event);
        }
    }
}

/// Receives events.
pub(crate) struct Receiver(Arc<Mailbox>);

/// What was received.
pub(crate) struct Received {
    pub(crate) event: RequestEvent,
    /// Nothing follows it now, and who received it is woken when something comes.
    pub(crate) rests: bool,
}

impl Receiver {
    /// The next event; `None` when no more can come.
    pub(crate) fn poll_receive(&mut self, context: &mut Context<'_>) -> Poll<Option<Received>> {
        let mut letters = self.0.letters();
        let event = letters.take();
        let rests = letters.first.is_none() && letters.num_senders > 0;
        letters.is_waiting = rests;
        if rests && !letters.waker.as_ref().is_some_and(|known| known.will_wake(context.waker())) {
            letters.waker = Some(context.waker().clone());
        }
        match event {
            None if rests => Poll::Pending,
            event => Poll::Ready(event.map(|event| Received { event, rests })),
        }
    }

    /// As [`Receiver::poll_receive`].
    pub(crate) async fn receive(&mut self) -> Option<RequestEvent> {
        poll_fn(|context| self.poll_receive(context)).await.map(|received| received.event)
    }
}

impl Drop for Receiver {
    fn drop(&mut self) {
        let mut letters = self.0.letters();
        letters.is_receiver_gone = true;
        let left = (letters.first.take(), std::mem::take(&mut letters.others), letters.waker.take());
        drop(letters);
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

    /// The number of an event and whether it rests; `None` for the end.
    fn taken(received: Poll<Option<Received>>) -> Poll<Option<(u64, bool)>> {
        received.map(|received| {
            received.map(|Received { event, rests }| match event {
                RequestEvent::Accepted(sequences) => (sequences[0].0, rests),
                other => panic!("{other:?}"),
            })
        })
    }

    #[test]
    fn events_come_in_their_order_and_wake_who_rests() {
        let count = Arc::<Count>::default();
        let waker = Waker::from(count.clone());
        let mut context = Context::from_waker(&waker);
        let (sender, mut receiver) = mailbox();
        let mut receive = || taken(receiver.poll_receive(&mut context));
        assert_eq!(receive(), Poll::Pending);
        sender.send(event(1));
        assert_eq!(count.0.load(SeqCst), 1);
        assert_eq!(receive(), Poll::Ready(Some((1, true))));
        (2..5).for_each(|number| sender.send(event(number)));
        assert_eq!(count.0.load(SeqCst), 2, "who was told that it rests is woken, once");
        let rest = [(2, false), (3, false), (4, true)];
        rest.into_iter().for_each(|expected| assert_eq!(receive(), Poll::Ready(Some(expected))));
        assert_eq!(receive(), Poll::Pending);
    }

    #[test]
    fn the_end_comes_behind_the_last_event_of_the_last_sender() {
        let count = Arc::<Count>::default();
        let waker = Waker::from(count.clone());
        let mut context = Context::from_waker(&waker);
        let (sender, mut receiver) = mailbox();
        let (other, weak) = (sender.clone(), sender.downgrade());
        drop(sender);
        weak.send(event(1));
        assert_eq!(taken(receiver.poll_receive(&mut context)), Poll::Ready(Some((1, true))));
        other.send(event(2));
        drop(other);
        weak.send(event(3));
        assert_eq!(count.0.load(SeqCst), 1, "it was woken, and looks");
        assert_eq!(
            taken(receiver.poll_receive(&mut context)),
            Poll::Ready(Some((2, false))),
            "more is to be asked for"
        );
        assert_eq!(taken(receiver.poll_receive(&mut context)), Poll::Ready(None));
    }

    #[test]
    fn the_end_wakes_who_rests() {
        let count = Arc::<Count>::default();
        let waker = Waker::from(count.clone());
        let mut context = Context::from_waker(&waker);
        let (sender, mut receiver) = mailbox();
        assert_eq!(taken(receiver.poll_receive(&mut context)), Poll::Pending);
        drop(sender);
        assert_eq!(count.0.load(SeqCst), 1);
        assert_eq!(taken(receiver.poll_receive(&mut context)), Poll::Ready(None));
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn nothing_is_lost_between_threads() {
        let (sender, mut receiver) = mailbox();
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
