//! Messages to the step thread.

use std::sync::{Arc, Mutex, mpsc};
use std::time::Instant;

use engine::{MaskJob, MovedSequence, Request, SequenceId};
use ipc::Doorbell;
use serving::{InferError, SleepLevel};
use supervision::{DiskEvent, FromAgent};
use tokio::sync::oneshot;

use super::event_queue;
use super::ledger::Report;
use super::weights::Weights;

/// Receives the end of a sleep or of a wake, or the reason why it failed.
pub(crate) type SleepResult = oneshot::Sender<Result<(), String>>;

/// A message to the step thread.
pub(crate) enum Message {
    /// Submit the sequences of a request, all or none, and send their events to `events`. When `timeout` expires before their first
    /// step, they are refused if the flag is true, otherwise they are moved after other requests.
    Submit { sequences: Vec<Request>, timeout: Option<(Instant, bool)>, events: event_queue::Sender },
    /// The same for sequences of a replica that is lost.
    Adopt { sequences: Vec<MovedSequence>, timeout: Option<(Instant, bool)>, events: event_queue::Sender },
    /// Cancel a sequence: the client disconnected.
    Cancel(SequenceId),
    /// Finish a sequence: a stop word was found in its text.
    Finish(SequenceId),
    /// Take back these jobs, which have run.
    Masks(Vec<MaskJob>),
    /// Handle an event of an agent.
    Agent(FromAgent),
    /// Handle an event of the file of a rank below its host memory.
    Disk { event: DiskEvent },
    /// Empty the prefix cache, then answer.
    ResetPrefixCache(oneshot::Sender<()>),
    /// Report the resources that sequences use.
    Ledger(oneshot::Sender<Report>),
    /// Free the memory of the devices once the sequences that have begun have ended. `done` gets the result.
    Sleep { level: SleepLevel, done: SleepResult },
    /// Take the memory again. `done` gets the result once steps can run.
    Wake { done: SleepResult },
    /// The same with other weights, if there are no workers because of a sleep. When they cannot be loaded, `done` gets the reason, and the
    /// weights before are loaded again.
    WakeWith { weights: Weights, done: SleepResult },
    /// End all sequences with this error.
    Abort(InferError),
    /// End the workers, then this thread.
    Stop { done: oneshot::Sender<()> },
}

/// The sending side; clones go to request tasks and to agents' listeners.
///
/// It is bounded by the requests in flight: each sends one [`Message::Submit`], one [`Message::Adopt`] for each lost
/// replica, and at most one [`Message::Cancel`], one
/// [`Message::Finish`] and one mask job at a time for each of its sequences. Each connection adds at most one
/// [`Message::ResetPrefixCache`], and each slot of host memory at most one [`Message::Disk`] of every rank.
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

    /// Sends a message and wakes the step thread. Returns false when that thread has ended.
    pub(crate) fn send(&self, message: Message) -> bool {
        let sent = self.messages.send(message).is_ok();
        if let Some(doorbell) = &*ipc::lock(&self.doorbell) {
            doorbell.ring();
        }
        sent
    }

    /// Sets the doorbell that wakes the step thread; `None` while it waits for this inbox.
    pub(crate) fn set_doorbell(&self, doorbell: Option<Doorbell>) {
        *ipc::lock(&self.doorbell) = doorbell;
    }
}
