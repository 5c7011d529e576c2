//! Delivers the events of a step to the queues of their requests.
//!
//! Delivering an event wakes the task of a connection. If the step thread did this, each token would move cache lines from core to
//! core, and a connection would wake before the step's other tokens are available. So a task of the runtime delivers the events,
//! and the step thread wakes it once a step.

use std::panic::AssertUnwindSafe;
use std::sync::{Arc, Mutex};

use engine::SequenceId;
use futures::FutureExt as _;
use rustc_hash::{FxHashMap, FxHashSet};
use serving::InferError;
use tokio::runtime::Handle;
use tokio::sync::Notify;

use super::event_queue;
use super::request_event::RequestEvent;

/// One item for the task to deliver.
enum Delivery {
    /// The sequences of a request, and the queue for their events.
    Accepted(Vec<SequenceId>, event_queue::Sender),
    Event(SequenceId, RequestEvent),
    /// The last event of a sequence.
    Last(SequenceId, RequestEvent),
}

/// State that the step thread and the task share.
#[derive(Default)]
struct Shared {
    pending: Mutex<Pending>,
    arrived: Notify,
}

#[derive(Default)]
struct Pending {
    /// Bounded by the admitted requests: one event for each token that they may still get, and a few more for each request.
    deliveries: Vec<Delivery>,
    /// Whether no more deliveries follow.
    is_closed: bool,
}

/// The step thread's handle. When it is dropped, the queues of sequences that have not ended are closed.
pub(crate) struct Dispatcher {
    shared: Arc<Shared>,
    /// Sequences that have not ended.
    open: FxHashSet<SequenceId>,
    /// Delivered by the next [`Dispatcher::flush`].
    deliveries: Vec<Delivery>,
}

impl Dispatcher {
    /// Starts the task on `runtime`.
    pub(crate) fn start(runtime: &Handle) -> Self {
        let shared = Arc::<Shared>::default();
        runtime.spawn(run(Arc::clone(&shared)));
        Self { shared, open: FxHashSet::default(), deliveries: Vec::new() }
    }

    /// Registers `queue` for the events of these sequences. Their ids are its first event.
    pub(crate) fn accept(&mut self, sequences: Vec<SequenceId>, queue: event_queue::Sender) {
        self.open.extend(&sequences);
        self.deliveries.push(Delivery::Accepted(sequences, queue));
    }

    /// Adds an event for the next [`Dispatcher::flush`]. Events of a sequence that has ended are dropped.
    pub(crate) fn push(&mut self, sequence: SequenceId, event: RequestEvent) {
        self.deliveries.push(Delivery::Event(sequence, event));
    }

    /// Like [`Dispatcher::push`], for the last event of a sequence.
    pub(crate) fn push_last(&mut self, sequence: SequenceId, event: RequestEvent) {
        self.open.remove(&sequence);
        self.deliveries.push(Delivery::Last(sequence, event));
    }

    /// Like [`Dispatcher::push_last`], for all sequences that have not ended.
    pub(crate) fn push_last_to_all(&mut self, event: impl Fn() -> RequestEvent) {
        self.deliveries.extend(self.open.drain().map(|sequence| Delivery::Last(sequence, event())));
    }

    /// Sequences that have not ended.
    pub(crate) fn num_open(&self) -> usize {
        self.open.len()
    }

    /// Passes the pushed events to the task.
    pub(crate) fn flush(&mut self) {
        if self.deliveries.is_empty() {
            return;
        }
        let mut pending = ipc::lock(&self.shared.pending);
        match pending.deliveries.is_empty() {
            true => std::mem::swap(&mut pending.deliveries, &mut self.deliveries),
            false => pending.deliveries.append(&mut self.deliveries),
        }
        drop(pending);
        self.shared.arrived.notify_one();
    }
}

impl Drop for Dispatcher {
    fn drop(&mut self) {
        self.flush();
        ipc::lock(&self.shared.pending).is_closed = true;
        self.shared.arrived.notify_one();
    }
}

/// The queue of each sequence's request.
type Queues = FxHashMap<SequenceId, event_queue::Sender>;

/// Delivers until the [`Dispatcher`] is dropped. After a panic, requests in flight get an error, because they may have missed an event.
/// Later requests are served.
async fn run(shared: Arc<Shared>) {
    let mut queues = Queues::default();
    while AssertUnwindSafe(dispatch(&shared, &mut queues)).catch_unwind().await.is_err() {
        tracing::error!("delivering tokens to requests failed; those in flight end with an error");
        let error = InferError::internal("the request's tokens were lost; send it again");
        for (_, queue) in queues.drain() {
            let fail = AssertUnwindSafe(|| queue.send(RequestEvent::Failed(error.clone())));
            // A panic of one queue must not prevent errors of the others.
            let _ = std::panic::catch_unwind(fail);
        }
    }
}

async fn dispatch(shared: &Shared, queues: &mut Queues) {
    let mut deliveries = Vec::new();
    loop {
        let is_closed = {
            let mut pending = ipc::lock(&shared.pending);
            std::mem::swap(&mut pending.deliveries, &mut deliveries);
            pending.is_closed
        };
        // Events without a receiver are dropped: the request cancels its sequences itself.
        for delivery in deliveries.drain(..) {
            match delivery {
                Delivery::Accepted(sequences, queue) => {
                    queues.extend(sequences.iter().map(|&sequence| (sequence, queue.clone())));
                    queue.send(RequestEvent::Accepted(sequences));
                }
                Delivery::Event(sequence, event) => drop(queues.get(&sequence).map(|queue| queue.send(event))),
                Delivery::Last(sequence, event) => drop(queues.remove(&sequence).map(|queue| queue.send(event))),
            }
        }
        if is_closed {
            return;
        }
        shared.arrived.notified().await;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    async fn next(queue: &mut event_queue::Receiver) -> Option<RequestEvent> {
        let event = tokio::time::timeout(std::time::Duration::from_secs(60), queue.receive()).await;
        event.expect("events were lost")
    }

    /// Panics when it is woken.
    struct Panics;

    impl std::task::Wake for Panics {
        fn wake(self: Arc<Self>) {
            panic!("a waker broke");
        }
    }

    #[tokio::test]
    async fn after_a_panic_requests_in_flight_get_an_error_and_later_ones_are_served() {
        let mut dispatcher = Dispatcher::start(&Handle::current());
        let (broken, mut its_receiver) = event_queue::event_queue();
        let (one, mut first) = event_queue::event_queue();
        let (two, mut second) = event_queue::event_queue();
        let waker = std::task::Waker::from(Arc::new(Panics));
        assert!(its_receiver.poll_receive(&mut std::task::Context::from_waker(&waker)).is_pending());
        dispatcher.accept(vec![SequenceId(1)], one);
        dispatcher.flush();
        assert!(matches!(next(&mut first).await, Some(RequestEvent::Accepted(_))));
        dispatcher.accept(vec![SequenceId(2)], broken);
        dispatcher.flush();
        let Some(RequestEvent::Failed(error)) = next(&mut first).await else { panic!("no error came") };
        assert_eq!(error.message, "the request's tokens were lost; send it again");
        dispatcher.accept(vec![SequenceId(3)], two);
        dispatcher.push_last(SequenceId(3), RequestEvent::Stop);
        dispatcher.flush();
        assert!(matches!(next(&mut second).await, Some(RequestEvent::Accepted(_))));
        assert!(matches!(next(&mut second).await, Some(RequestEvent::Stop)));
    }

    #[tokio::test]
    async fn each_request_gets_its_own_events_in_order_and_the_end() {
        let mut dispatcher = Dispatcher::start(&Handle::current());
        let ids = [7, 8, 9].map(SequenceId);
        let (one, mut first) = event_queue::event_queue();
        let (two, mut second) = event_queue::event_queue();
        let failed = |words: &str| RequestEvent::Failed(serving::InferError::internal(words));
        let thread = std::thread::spawn(move || {
            dispatcher.accept(vec![ids[0], ids[1]], one);
            dispatcher.flush();
            dispatcher.accept(vec![ids[2]], two);
            dispatcher.push(ids[1], failed("a"));
            dispatcher.push(ids[2], failed("b"));
            dispatcher.push_last(ids[1], failed("c"));
            dispatcher.push(ids[1], failed("after its end"));
            assert_eq!(dispatcher.num_open(), 2);
            dispatcher.flush();
            dispatcher.push_last(ids[0], failed("d"));
            dispatcher.push(ids[2], failed("e"));
            assert_eq!(dispatcher.num_open(), 1);
        });
        assert!(matches!(next(&mut first).await, Some(RequestEvent::Accepted(sequences)) if sequences == ids[..2]));
        assert!(matches!(next(&mut second).await, Some(RequestEvent::Accepted(sequences)) if sequences == ids[2..]));
        let is_a = |event| matches!(event, Some(RequestEvent::Failed(error)) if error.message == "a");
        assert!(is_a(next(&mut first).await));
        for (queue, words) in [(&mut first, &["c", "d"][..]), (&mut second, &["b", "e"])] {
            for words in words {
                let Some(RequestEvent::Failed(error)) = next(queue).await else { panic!("{words}") };
                assert_eq!(error.message, *words);
            }
            assert!(next(queue).await.is_none(), "nothing follows the last");
        }
        thread.join().unwrap();
    }
}
