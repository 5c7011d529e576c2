//! Submits a request to a replica as soon as one has room, and lets its client stop it.

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Instant;

use serving::{ErrorKind, InferError, Name};

use super::event_queue::{self, WeakSender};
use super::inbox::Message;
use super::request_event::RequestEvent;
use super::router::Admission;

/// The error of a request whose model is unloaded while it runs.
pub(crate) const UNLOADED: &str = "the model was unloaded while the request ran";

/// Handles of requests in flight, by the client's request id.
pub(crate) type StopHandles = Arc<Mutex<HashMap<Name, Arc<StopHandle>>>>;

/// Stops one request.
pub(crate) struct StopHandle {
    events: WeakSender,
    is_sent: AtomicBool,
}

impl StopHandle {
    pub(crate) fn new(events: WeakSender) -> Self {
        Self { events, is_sent: AtomicBool::new(false) }
    }

    /// Stops the request. Only the first call has an effect.
    pub(crate) fn send(&self) {
        if !self.is_sent.swap(true, Ordering::Relaxed) {
            self.events.send(RequestEvent::Stop);
        }
    }
}

/// A request that waits for a replica or was submitted to one.
pub(crate) struct Submission {
    pub(crate) admission: Admission,
    /// The message for the replica; `None` once it is sent.
    pub(crate) submit: Option<Message>,
    /// When the wait expires. The request is then refused if the flag is true, otherwise it is moved after others.
    pub(crate) timeout: Option<(Instant, bool)>,
}

impl Submission {
    /// Submits the request if it is assigned to a replica. Returns false when the model is being unloaded.
    pub(crate) fn submit_if_assigned(&mut self) -> bool {
        match (&self.admission, self.submit.take()) {
            (Admission::Assigned(reservation), Some(submit)) => reservation.replica().inbox.send(submit),
            (_, submit) => {
                self.submit = submit;
                true
            }
        }
    }

    /// Sends a message to the replica of the request, if it has one.
    pub(crate) fn send(&self, message: Message) {
        if let Admission::Assigned(reservation) = &self.admission {
            reservation.replica().inbox.send(message);
        }
    }

    /// Waits until the request is assigned to a replica.
    pub(crate) async fn wait(&mut self, events: &mut event_queue::Receiver) -> WaitOutcome {
        loop {
            let Self { admission, timeout, .. } = self;
            let ticket = match admission {
                Admission::Queued(ticket) => ticket,
                Admission::Assigned(_) => return WaitOutcome::Assigned,
            };
            tokio::select! {
                reservation = ticket.reservation() => {
                    *admission = Admission::Assigned(reservation);
                    if !self.submit_if_assigned() {
                        return WaitOutcome::Failed(InferError::new(ErrorKind::Unavailable, UNLOADED));
                    }
                }
                Some(RequestEvent::Stop) = events.receive() => return WaitOutcome::Stopped,
                rejects = expired(*timeout) => match rejects {
                    true => return WaitOutcome::Failed(InferError::unavailable("Request timeout expired")),
                    false => {
                        ticket.delay();
                        *timeout = None;
                    }
                }
            }
        }
    }
}

/// How the wait for a replica ended.
pub(crate) enum WaitOutcome {
    Assigned,
    /// The client stopped the request.
    Stopped,
    Failed(InferError),
}

/// Resolves when the timeout expires. Returns whether the request is then refused.
async fn expired(timeout: Option<(Instant, bool)>) -> bool {
    match timeout {
        Some((at, rejects)) => {
            tokio::time::sleep_until(at.into()).await;
            rejects
        }
        None => std::future::pending().await,
    }
}
