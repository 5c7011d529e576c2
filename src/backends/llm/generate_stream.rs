//! The events of one request as a stream.

use std::collections::VecDeque;
use std::task::{Context, Poll, ready};

use engine::FinishReason;
use futures::FutureExt as _;
use futures::future::BoxFuture;
use generation::GenerateEvent;
use serving::{Generation, InferError};
use tokio::runtime::Handle;

use super::active_request::{ActiveRequest, cancelled};
use super::event_queue;
use super::request_event::RequestEvent;
use super::router::Admission;
use super::submission::WaitOutcome;

/// The events of one request. When it is dropped before the end, its sequences are cancelled.
pub(crate) struct GenerateStream {
    running: Option<(ActiveRequest, event_queue::Receiver)>,
    /// Set while the request waits for a replica.
    waiting: Option<BoxFuture<'static, (ActiveRequest, event_queue::Receiver, WaitOutcome)>>,
    /// The last events of a request that has ended, and the error after them.
    last: VecDeque<GenerateEvent>,
    error: Option<InferError>,
    /// Durations and token counts of a request that has ended.
    generation: Option<Generation>,
    /// Polls a request whose client has disconnected until its end.
    runtime: Handle,
}

impl GenerateStream {
    /// The stream of a request whose events arrive by `events`.
    pub(crate) fn new(mut request: ActiveRequest, events: event_queue::Receiver) -> Self {
        let (mut running, mut waiting) = (None, None);
        match request.submission.admission {
            Admission::Assigned(_) => {
                request.assigned();
                running = Some((request, events));
            }
            Admission::Queued(_) => waiting = Some(request.wait(events).boxed()),
        }
        let (last, error, generation) = Default::default();
        Self { running, waiting, last, error, generation, runtime: Handle::current() }
    }

    /// Durations and token counts of the request so far; `None` while it waits for a replica.
    pub(crate) fn generation(&self) -> Option<Generation> {
        match &self.running {
            Some((request, _)) => Some(request.timing.generation()),
            None => self.generation,
        }
    }

    /// The next event; `None` after the last.
    pub(crate) fn poll_event(&mut self, context: &mut Context<'_>) -> Poll<Option<Result<GenerateEvent, InferError>>> {
        loop {
            if let Some(waiting) = &mut self.waiting {
                let (request, events, waited) = ready!(waiting.poll_unpin(context));
                self.waiting = None;
                self.waited(request, events, waited);
            }
            let Some((request, events)) = &mut self.running else { break };
            if let Some(event) = request.ready.pop_front() {
                return Poll::Ready(Some(Ok(event)));
            }
            if request.has_moved() {
                let (mut request, events) = self.running.take().expect("it runs");
                request.move_on(&events);
                self.waiting = Some(request.wait(events).boxed());
                continue;
            }
            let received = ready!(events.poll_receive(context));
            let is_drained = received.as_ref().is_some_and(|it| it.is_drained);
            let event = received.map(|it| it.event);
            if let Some(RequestEvent::Token(token)) = &event
                && let Some(delta) = request.one_token(token, is_drained)
            {
                return Poll::Ready(Some(Ok(GenerateEvent::Delta(delta))));
            }
            let error = request.take(event, is_drained).err();
            if error.is_some() || request.has_ended() {
                self.last = std::mem::take(&mut request.ready);
                (self.error, self.generation) = (error, Some(request.timing.generation()));
                self.running = None;
            }
        }
        Poll::Ready(match self.last.pop_front() {
            Some(event) => Some(Ok(event)),
            None => self.error.take().map(Err),
        })
    }

    /// Handles the end of the wait for a replica.
    fn waited(&mut self, mut request: ActiveRequest, events: event_queue::Receiver, waited: WaitOutcome) {
        match waited {
            WaitOutcome::Assigned => {
                request.assigned();
                self.running = Some((request, events));
                return;
            }
            WaitOutcome::Stopped => {
                let ended = request.end_unassigned(Some(FinishReason::Cancelled));
                self.last = ended.into_iter().map(cancelled).collect();
            }
            WaitOutcome::Failed(error) => {
                request.end_unassigned(None);
                self.error = Some(error);
            }
        }
        self.generation = Some(request.timing.generation());
    }
}

impl Drop for GenerateStream {
    /// Cancels a request whose client has disconnected, and polls it until its end so that it is counted.
    fn drop(&mut self) {
        let Some((mut request, mut events)) = self.running.take() else { return };
        request.cancel();
        self.runtime.spawn(async move {
            while !request.has_ended() {
                let event = events.receive().await;
                if request.take(event, false).is_err() {
                    break;
                }
                request.ready.clear();
            }
        });
    }
}

#[cfg(test)]
mod tests;
