//! The sending end of a stream of responses.

use std::fmt;
use std::sync::Arc;
use std::time::{Duration, Instant};

use tokio::sync::mpsc;

use crate::outcome::Execution;
use crate::progress::{Generation, Progress, Scheduled};
use crate::response_order::OrderTicket;
use crate::source::SentItem;
use crate::{InferError, InferRequest, InferResponse};

/// The sending end of a [`crate::ResponseStream`]: a model sends its responses here.
#[derive(Debug, Clone)]
pub struct ResponseSender {
    sent: mpsc::Sender<SentItem>,
    progress: Arc<Progress>,
    /// Later requests are answered after the last clone is dropped, where the model preserves the order of responses.
    _ticket: Option<Arc<OrderTicket>>,
    /// Returns the request to its queue for another execution, where the model may reschedule requests.
    rescheduler: Option<Arc<dyn Reschedule>>,
}

type Item = Result<InferResponse, InferError>;

/// Returns a request to its queue.
pub(crate) trait Reschedule: fmt::Debug + Send + Sync {
    /// Queues `request` again.
    ///
    /// # Errors
    /// When the queue is closed. The error returns the request and its sender.
    fn reschedule(
        &self,
        request: InferRequest,
        responses: ResponseSender,
    ) -> Result<(), Box<(InferRequest, ResponseSender)>>;
}

impl ResponseSender {
    pub(crate) fn new(sent: mpsc::Sender<SentItem>, progress: Arc<Progress>) -> Self {
        Self { sent, progress, _ticket: None, rescheduler: None }
    }

    pub(crate) fn progress(&self) -> &Arc<Progress> {
        &self.progress
    }

    /// Holds `ticket` until the last clone of this sender is dropped.
    pub(crate) fn with_ticket(self, ticket: OrderTicket) -> Self {
        Self { _ticket: Some(Arc::new(ticket)), ..self }
    }

    /// Sends one response, or an error. Waits while the stream is full. Returns false when the stream was dropped.
    pub async fn send(&self, response: Result<InferResponse, InferError>) -> bool {
        self.sent.send(response.map(Box::new)).await.is_ok()
    }

    /// Sends like [`ResponseSender::send`], without waiting.
    ///
    /// # Errors
    /// When the stream is full. The error returns the response.
    pub fn try_send(&self, response: Item) -> Result<bool, Box<Item>> {
        match self.sent.try_send(response.map(Box::new)) {
            Ok(()) => Ok(true),
            Err(mpsc::error::TrySendError::Closed(_)) => Ok(false),
            Err(mpsc::error::TrySendError::Full(response)) => Err(Box::new(response.map(|response| *response))),
        }
    }

    /// Sends like [`ResponseSender::send`]. It blocks, and is for threads outside the async runtime.
    pub fn blocking_send(&self, response: Result<InferResponse, InferError>) -> bool {
        futures::executor::block_on(self.send(response))
    }

    /// Marks the end of queueing: the time until now counts as queue time, later time as compute time.
    /// Without this call all of a request's time counts as compute time.
    pub fn mark_scheduled(&self) {
        let _ = self.progress.scheduled.set(Scheduled { at: Instant::now(), execution: None });
    }

    /// Marks the end of queueing for a request that is part of `execution`.
    pub(crate) fn begin_execution(&self, execution: &Arc<Execution>) {
        let _ = self.progress.scheduled.set(Scheduled { at: execution.started, execution: Some(execution.clone()) });
    }

    /// Adds time that copying inputs to the model took. It counts as `compute_input`.
    pub fn add_input_time(&self, time: Duration) {
        self.progress.add_input_time(time);
    }

    /// Sets when the model had computed the response that is sent next. The time from then until the response is read counts
    /// as `compute_output`. Cheap enough to be called for each token.
    pub fn set_computed_at(&self, at: Instant) {
        self.progress.set_computed_at(at);
    }

    /// Reports how the time of a request that generates text divides so far. The last report before the final response
    /// counts. Cheap enough to be called for each token.
    pub fn report(&self, generation: Generation) {
        self.progress.report(generation);
    }

    /// Returns a request to the queue that it came from, to be executed again. The model then sees it as a request in the
    /// middle of its sequence.
    ///
    /// # Errors
    /// When the model's queue does not support this. The error returns the request and this sender.
    pub fn reschedule(mut self, request: InferRequest) -> Result<(), Box<(InferRequest, Self)>> {
        match self.rescheduler.take() {
            Some(rescheduler) => rescheduler.reschedule(request, self),
            None => Err(Box::new((request, self))),
        }
    }

    pub(crate) fn with_rescheduler(self, rescheduler: Arc<dyn Reschedule>) -> Self {
        Self { rescheduler: Some(rescheduler), ..self }
    }

    /// Ends a request with an error. No response of it was sent yet.
    pub(crate) fn refuse(self, error: InferError) {
        // The stream is empty, so there is room. The error is lost if the client has left.
        let _ = self.try_send(Err(error));
    }

    /// Whether the client has left.
    pub fn is_cancelled(&self) -> bool {
        self.sent.is_closed()
    }

    /// Resolves when the client leaves.
    pub async fn cancelled(&self) {
        self.sent.closed().await;
    }
}
