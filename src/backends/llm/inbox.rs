//! Messages to the step thread, which may be waiting for its workers.

use std::sync::{Arc, Mutex, mpsc};
use std::time::Instant;

use engine::{Request, SequenceId};
use ipc::Doorbell;
use supervision::FromAgent;
use tokio::sync::oneshot;

use super::event_queue;
use super::ledger::Report;

/// A message to the step thread.
pub(crate) enum Message {
    /// The sequences of a request, all taken or none, and where their events go. At `timeout` they are refused if none has
    /// had a step by then, or, when the flag is false, others are served before them.
    Submit { sequences: Vec<Request>, timeout: Option<(Instant, bool)>, events: event_queue::Sender },
    /// The client left.
    Cancel(SequenceId),
    /// A stop word was found in its text.
    Finish(SequenceId),
    /// An event of a worker.
    Agent(FromAgent),
    /// Report which sequences hold what.
    Ledger(oneshot::Sender<Report>),
    /// End the workers, then this thread.
    Stop { done: oneshot::Sender<()> },
}

/// The sending side; clones go to request tasks and to agents' listeners.
///
/// It has no bound of its own: a request in flight, of which there are only so many, sends one [`Message::Submit`] and at most
/// one [`Message::Cancel`] and one [`Message::Finish`] for each of its sequences.
#[derive(Clone)]
pub(crate) struct Inbox {
    messages: mpsc::Sender<Message>,
    doorbell: Arc<Mutex<Option<Doorbell>>>,
}

impl Inbox {
    pub(crate) fn new() -> (Self, mpsc::Receiver<Message>) {
        let (messages, receiver) = mpsc::channel();
        (Self { messages, doorbell: Arc::default() }, receiver)
    }

    /// Hands over a message and wakes the step thread. False when that thread has ended.
    pub(crate) fn send(&self, message: Message) -> bool {
        let sent = self.messages.send(message).is_ok();
        if let Some(doorbell) = &*ipc::lock(&self.doorbell) {
            doorbell.ring();
        }
        sent
    }

    /// What to ring from now on; `None` while the step thread waits on this inbox itself.
    pub(crate) fn set_doorbell(&self, doorbell: Option<Doorbell>) {
        *ipc::lock(&self.doorbell) = doorbell;
    }
}
