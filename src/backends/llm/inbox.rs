//! How other threads hand work to the step thread, which may be waiting for its workers.

use std::sync::{Arc, Mutex, mpsc};
use std::time::Instant;

use engine::{Request, SequenceId, TokenEvent};
use ipc::Doorbell;
use serving::InferError;
use tokio::sync::{mpsc as async_mpsc, oneshot};
use worker::{FromAgent, LogitsPiece};

use super::ledger::Report;

/// What the step thread is told.
pub(crate) enum Message {
    /// The sequences of a request, all taken or none, and where their events go. At `timeout` they are refused if none has
    /// had a step by then, or, when the flag is false, others are served before them.
    Submit {
        sequences: Vec<Request>,
        timeout: Option<(Instant, bool)>,
        events: async_mpsc::UnboundedSender<RequestEvent>,
    },
    /// The client left.
    Cancel(SequenceId),
    /// A stop word was found in its text.
    Finish(SequenceId),
    /// News of a worker.
    Agent(FromAgent),
    /// Tell who holds what.
    Ledger(oneshot::Sender<Report>),
    /// End the workers, then this thread.
    Stop { done: oneshot::Sender<()> },
}

/// What a request hears. Bounded by the request's own `max_tokens`, so the channel that carries it needs no bound.
#[derive(Debug)]
pub(crate) enum RequestEvent {
    /// Its sequences are queued under these ids.
    Accepted(Vec<SequenceId>),
    /// Logits of a sequence, before the tokens chosen from them.
    Logits(LogitsPiece),
    /// A step has room for a sequence: new, preempted before, or of lost workers. `start` counts starts of the workers.
    Joined { sequence: SequenceId, at: Instant, start: u64 },
    /// Tokens of a sequence, or its end, as told at that time.
    Tokens(TokenEvent, Instant),
    /// Its client asks to end it.
    Stop,
    /// It ends with this error.
    Failed(InferError),
}

/// The sending side; clones go to request tasks and to agents' listeners.
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
        if let Some(doorbell) = &*self.doorbell.lock().unwrap() {
            doorbell.ring();
        }
        sent
    }

    /// What to ring from now on; `None` while the step thread waits on this inbox itself.
    pub(crate) fn set_doorbell(&self, doorbell: Option<Doorbell>) {
        *self.doorbell.lock().unwrap() = doorbell;
    }
}
