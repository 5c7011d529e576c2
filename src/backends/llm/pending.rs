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
pub(crate) type ById = Arc<Mutex<HashMap<Name, Arc<Stop>>>>;

/// Stops a request when its client asks for it.
pub(crate) struct Stop {
    events: WeakSender,
    is_sent: AtomicBool,
}

impl Stop {
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
pub(crate) struct Pending {
    pub(crate) admission: Admission,
    /// The message for the replica that takes the request, until it is sent.
    pub(crate) submit: Option<Message>,
    /// How long it may wait. When the flag is false, it goes on waiting then, behind others.
    pub(crate) timeout: Option<(Instant, bool)>,
}

impl Pending {
    /// Sends the request to the replica that has a place for it. False when the model is being unloaded.
    pub(crate) fn submit_if_placed(&mut self) -> bool {
        match (&self.admission, self.submit.take()) {
            (Admission::Placed(place), Some(submit)) => place.replica().inbox.send(submit),
            (_, submit) => {
                self.submit = submit;
                true
            }
        }
    }

    /// Sends a message to the replica that has the request.
    pub(crate) fn send(&self, message: Message) {
        if let Admission::Placed(place) = &self.admission {
            place.replica().inbox.send(message);
        }
    }

    /// Waits until a replica has a place for the request.
    pub(crate) async fn wait(&mut self, events: &mut event_queue::Receiver) -> Waited {
        loop {
            let Self { admission, timeout, .. } = self;
            let ticket = match admission {
                Admission::Queued(ticket) => ticket,
                Admission::Placed(_) => return Waited::Placed,
            };
            tokio::select! {
                place = ticket.place() => {
                    *admission = Admission::Placed(place);
                    if !self.submit_if_placed() {
                        return Waited::Failed(InferError::new(ErrorKind::Unavailable, UNLOADED));
                    }
                }
                Some(RequestEvent::Stop) = events.receive() => return Waited::Stopped,
                rejects = expired(*timeout) => match rejects {
                    true => return Waited::Failed(InferError::unavailable("Request timeout expired")),
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
pub(crate) enum Waited {
    Placed,
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
