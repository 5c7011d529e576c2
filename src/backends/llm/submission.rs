//! A request's wait for a replica, and how its client stops it.

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

/// How to stop requests in flight, by the client's request id.
pub(crate) type StopHandles = Arc<Mutex<HashMap<Name, Arc<StopHandle>>>>;

/// Stops a request when its client asks for it.
pub(crate) struct StopHandle {
    events: WeakSender,
    is_sent: AtomicBool,
}

impl StopHandle {
    pub(crate) fn new(events: WeakSender) -> Self {
        Self { events, is_sent: AtomicBool::new(false) }
    }

    /// Sends the request its stop: once, however often a client asks.
    pub(crate) fn send(&self) {
        if !self.is_sent.swap(true, Ordering::Relaxed) {
            self.events.send(RequestEvent::Stop);
        }
    }
}

/// A request on its way to a replica.
pub(crate) struct Submission {
    pub(crate) admission: Admission,
    /// The message for the replica that takes the request, until it is sent.
    pub(crate) submit: Option<Message>,
    /// How long it may wait. When the flag is false, it goes on waiting then, behind others.
    pub(crate) timeout: Option<(Instant, bool)>,
}

impl Submission {
    /// Sends the request to the replica that has a place for it. False when the model is being unloaded.
    pub(crate) fn submit_if_assigned(&mut self) -> bool {
        match (&self.admission, self.submit.take()) {
            (Admission::Assigned(reservation), Some(submit)) => reservation.replica().inbox.send(submit),
            (_, submit) => {
                self.submit = submit;
                true
            }
        }
    }

    /// Sends a message to the replica that has the request.
    pub(crate) fn send(&self, message: Message) {
        if let Admission::Assigned(reservation) = &self.admission {
            reservation.replica().inbox.send(message);
        }
    }

    /// Waits until a replica has a place for the request.
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

/// Resolves when the request has waited as long as it may: whether it is then refused.
async fn expired(timeout: Option<(Instant, bool)>) -> bool {
    match timeout {
        Some((at, rejects)) => {
            tokio::time::sleep_until(at.into()).await;
            rejects
        }
        None => std::future::pending().await,
    }
}
