//! News of a step on their way from the step thread to who waits for them: all of a step's at once.
//!
//! To tell a request wakes the task of its connection through every layer between. Done by the step thread, that work
//! would move the memory of all these layers from one core to another and back for each token, and a connection would
//! be awake before the step's other tokens are there. So a task of the runtime tells them, woken once a step.

use std::panic::AssertUnwindSafe;
use std::sync::{Arc, Mutex};

use engine::SequenceId;
use futures::FutureExt as _;
use rustc_hash::{FxHashMap, FxHashSet};
use serving::InferError;
use tokio::runtime::Handle;
use tokio::sync::Notify;

use super::inbox::RequestEvent;
use super::mailbox;

/// Where the news of a request go.
type Listener = mailbox::Sender;

/// What the task is told.
enum News {
    /// A request has sequences.
    Accepted(Vec<SequenceId>, Listener),
    Event(SequenceId, RequestEvent),
    /// The last of a sequence.
    Last(SequenceId, RequestEvent),
}

/// Between thread and task.
#[derive(Default)]
struct Mailbox {
    letters: Mutex<Letters>,
    arrived: Notify,
}

#[derive(Default)]
struct Letters {
    /// Bounded by what was admitted: an event for each token that a request in flight may still get, a few more for each.
    news: Vec<News>,
    /// Nothing more will come.
    is_closed: bool,
}

/// The step thread's end. Requests whose sequences have not ended hear that theirs is gone when it is dropped.
pub(crate) struct Teller {
    mailbox: Arc<Mailbox>,
    /// Of which sequences somebody waits for news.
    listening: FxHashSet<SequenceId>,
    /// What is to be told next.
    news: Vec<News>,
}

impl Teller {
    /// Starts the task on `runtime`.
    pub(crate) fn start(runtime: &Handle) -> Self {
        let mailbox = Arc::<Mailbox>::default();
        runtime.spawn(keep_telling(Arc::clone(&mailbox)));
        Self { mailbox, listening: FxHashSet::default(), news: Vec::new() }
    }

    /// From here on `listener` hears of these sequences, which it is told first.
    pub(crate) fn accept(&mut self, sequences: Vec<SequenceId>, listener: Listener) {
        self.listening.extend(&sequences);
        self.news.push(News::Accepted(sequences, listener));
    }

    /// Has `event` told when [`Teller::send`] is called next. Nobody hears of a sequence that has ended.
    pub(crate) fn tell(&mut self, sequence: SequenceId, event: RequestEvent) {
        self.news.push(News::Event(sequence, event));
    }

    /// The same, for the last event of a sequence.
    pub(crate) fn tell_last(&mut self, sequence: SequenceId, event: RequestEvent) {
        self.listening.remove(&sequence);
        self.news.push(News::Last(sequence, event));
    }

    /// The same, for the last event of all sequences.
    pub(crate) fn tell_all_last(&mut self, event: impl Fn() -> RequestEvent) {
        self.news.extend(self.listening.drain().map(|sequence| News::Last(sequence, event())));
    }

    /// Sequences whose news somebody waits for.
    pub(crate) fn num_listening(&self) -> usize {
        self.listening.len()
    }

    /// Sends what there is to tell.
    pub(crate) fn send(&mut self) {
        if self.news.is_empty() {
            return;
        }
        let mut letters = ipc::lock(&self.mailbox.letters);
        match letters.news.is_empty() {
            true => std::mem::swap(&mut letters.news, &mut self.news),
            false => letters.news.append(&mut self.news),
        }
        drop(letters);
        self.mailbox.arrived.notify_one();
    }
}

impl Drop for Teller {
    fn drop(&mut self) {
        self.send();
        ipc::lock(&self.mailbox.letters).is_closed = true;
        self.mailbox.arrived.notify_one();
    }
}

/// Who waits for news of which sequence.
type Listeners = FxHashMap<SequenceId, Listener>;

/// Tells listeners their news until nothing more will come. After a panic, who may have missed some hears that; others are
/// told on.
async fn keep_telling(mailbox: Arc<Mailbox>) {
    let mut listeners = Listeners::default();
    while AssertUnwindSafe(tell_all(&mailbox, &mut listeners)).catch_unwind().await.is_err() {
        tracing::error!("telling requests their tokens broke off; those in flight end with an error");
        let error = InferError::internal("the request's tokens were lost on their way; send it again");
        for (_, listener) in listeners.drain() {
            let fail = AssertUnwindSafe(|| listener.send(RequestEvent::Failed(error.clone())));
            // One that cannot be told leaves the others to be told.
            let _ = std::panic::catch_unwind(fail);
        }
    }
}

async fn tell_all(mailbox: &Mailbox, listeners: &mut Listeners) {
    let mut news = Vec::new();
    loop {
        let is_closed = {
            let mut letters = ipc::lock(&mailbox.letters);
            std::mem::swap(&mut letters.news, &mut news);
            letters.is_closed
        };
        // Whoever no longer listens has its sequences cancelled by itself.
        for told in news.drain(..) {
            match told {
                News::Accepted(sequences, listener) => {
                    listeners.extend(sequences.iter().map(|&sequence| (sequence, listener.clone())));
                    listener.send(RequestEvent::Accepted(sequences));
                }
                News::Event(sequence, event) => drop(listeners.get(&sequence).map(|it| it.send(event))),
                News::Last(sequence, event) => drop(listeners.remove(&sequence).map(|it| it.send(event))),
            }
        }
        if is_closed {
            return;
        }
        mailbox.arrived.notified().await;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    async fn next(listener: &mut mailbox::Receiver) -> Option<RequestEvent> {
        let heard = tokio::time::timeout(std::time::Duration::from_secs(60), listener.receive()).await;
        heard.expect("news were lost")
    }

    /// Panics when it is to wake somebody.
    struct Panics;

    impl std::task::Wake for Panics {
        fn wake(self: Arc<Self>) {
            panic!("a waker broke");
        }
    }

    #[tokio::test]
    async fn a_panic_on_the_way_ends_who_may_have_missed_something_and_nobody_who_comes_later() {
        let mut teller = Teller::start(&Handle::current());
        let (broken, mut its_receiver) = mailbox::mailbox();
        let (one, mut first) = mailbox::mailbox();
        let (two, mut second) = mailbox::mailbox();
        let waker = std::task::Waker::from(Arc::new(Panics));
        assert!(its_receiver.poll_receive(&mut std::task::Context::from_waker(&waker)).is_pending());
        teller.accept(vec![SequenceId(1)], one);
        teller.send();
        assert!(matches!(next(&mut first).await, Some(RequestEvent::Accepted(_))));
        teller.accept(vec![SequenceId(2)], broken);
        teller.send();
        let Some(RequestEvent::Failed(error)) = next(&mut first).await else { panic!("it waits for ever") };
        assert_eq!(error.message, "the request's tokens were lost on their way; send it again");
        teller.accept(vec![SequenceId(3)], two);
        teller.tell_last(SequenceId(3), RequestEvent::Stop);
        teller.send();
        assert!(matches!(next(&mut second).await, Some(RequestEvent::Accepted(_))));
        assert!(matches!(next(&mut second).await, Some(RequestEvent::Stop)));
    }

    #[tokio::test]
    async fn each_request_hears_its_own_news_in_their_order_and_when_they_end() {
        let mut teller = Teller::start(&Handle::current());
        let ids = [7, 8, 9].map(SequenceId);
        let (one, mut first) = mailbox::mailbox();
        let (two, mut second) = mailbox::mailbox();
        let failed = |words: &str| RequestEvent::Failed(serving::InferError::internal(words));
        let thread = std::thread::spawn(move || {
            teller.accept(vec![ids[0], ids[1]], one);
            teller.send();
            teller.accept(vec![ids[2]], two);
            teller.tell(ids[1], failed("a"));
            teller.tell(ids[2], failed("b"));
            teller.tell_last(ids[1], failed("c"));
            teller.tell(ids[1], failed("after its end"));
            assert_eq!(teller.num_listening(), 2);
            teller.send();
            teller.tell_last(ids[0], failed("d"));
            teller.tell(ids[2], failed("e"));
            assert_eq!(teller.num_listening(), 1);
        });
        assert!(matches!(next(&mut first).await, Some(RequestEvent::Accepted(told)) if told == ids[..2]));
        assert!(matches!(next(&mut second).await, Some(RequestEvent::Accepted(told)) if told == ids[2..]));
        let heard = |event| matches!(event, Some(RequestEvent::Failed(error)) if error.message == "a");
        assert!(heard(next(&mut first).await));
        for (listener, words) in [(&mut first, &["c", "d"][..]), (&mut second, &["b", "e"])] {
            for words in words {
                let Some(RequestEvent::Failed(error)) = next(listener).await else { panic!("{words}") };
                assert_eq!(error.message, *words);
            }
            assert!(next(listener).await.is_none(), "there is nothing behind the last");
        }
        thread.join().unwrap();
    }
}
