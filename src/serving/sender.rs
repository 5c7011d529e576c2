//! The model's end of a stream of responses.

use std::sync::Arc;
use std::time::{Duration, Instant};

use tokio::sync::mpsc;

use crate::progress::{Generation, Progress, Scheduled};
use crate::scheduler::{Again, Turn};
use crate::source::Sent;
use crate::statistics::Execution;
use crate::{InferError, InferRequest, InferResponse, ResponseStream};

/// The model's end of a [`ResponseStream`].
#[derive(Debug, Clone)]
pub struct ResponseSender {
    sent: mpsc::Sender<Sent>,
    progress: Arc<Progress>,
    /// Requests behind this one are answered after the last sender is gone.
    _turn: Option<Arc<Turn>>,
    /// Who takes the request back for another execution, where its model may ask for one.
    again: Option<Again>,
}

type Item = Result<InferResponse, InferError>;

impl ResponseSender {
    pub(crate) fn new(sent: mpsc::Sender<Sent>, progress: Arc<Progress>) -> Self {
        Self { sent, progress, _turn: None, again: None }
    }

    /// The same; requests behind it are answered after `turn`.
    pub(crate) fn in_turn(self, turn: Turn) -> Self {
        Self { _turn: Some(Arc::new(turn)), ..self }
    }

    /// Sends one response or the ending error, waiting while the stream is full.
    /// False when the client has left.
    pub async fn send(&self, response: Result<InferResponse, InferError>) -> bool {
        self.sent.send(response.map(Box::new)).await.is_ok()
    }

    /// As [`ResponseSender::send`], without waiting.
    ///
    /// # Errors
    /// With the response, when the stream is full.
    pub fn try_send(&self, response: Item) -> Result<bool, Box<Item>> {
        match self.sent.try_send(response.map(Box::new)) {
            Ok(()) => Ok(true),
            Err(mpsc::error::TrySendError::Closed(_)) => Ok(false),
            Err(mpsc::error::TrySendError::Full(response)) => Err(Box::new(response.map(|response| *response))),
        }
    }

    /// As [`ResponseSender::send`] for threads outside the async runtime.
    pub fn blocking_send(&self, response: Result<InferResponse, InferError>) -> bool {
        futures::executor::block_on(self.send(response))
    }

    /// Says that the request left its queue: the time until now counts as queueing, the rest as computing.
    /// Without it all of a request's time counts as computing.
    pub fn mark_scheduled(&self) {
        let _ = self.progress.scheduled.set(Scheduled { at: Instant::now(), execution: None });
    }

    /// As [`ResponseSender::mark_scheduled`], for a request that is part of `execution`.
    pub(crate) fn begin_execution(&self, execution: &Arc<Execution>) {
        let _ = self.progress.scheduled.set(Scheduled { at: execution.started, execution: Some(execution.clone()) });
    }

    /// Says how long it took to bring inputs to where the model reads them, which counts as `compute_input`.
    pub fn took_input(&self, time: Duration) {
        self.progress.took_input(time);
    }

    /// Says when the model had computed the response that is sent next; what follows until it is read counts as
    /// `compute_output`. Cheap enough for each token.
    pub fn computed_at(&self, at: Instant) {
        self.progress.computed_at(at);
    }

    /// Says where the time of a request that generates text went, so far; before its final response, to count. Cheap
    /// enough for each token.
    pub fn report(&self, generation: Generation) {
        self.progress.report(generation);
    }

    /// Says that the time of this request goes where that of `stream` goes, without a word for each token.
    pub fn follow(&self, stream: &ResponseStream) {
        if let Some(progress) = stream.progress() {
            self.progress.follow(progress);
        }
    }

    /// Gives a request that is to be executed again back to the queue it came from, if that takes it. The model sees it as
    /// one in the middle of its sequence.
    ///
    /// # Errors
    /// With both, where the model's queue takes no request back.
    pub fn reschedule(mut self, request: InferRequest) -> Result<(), Box<(InferRequest, Self)>> {
        match self.again.take() {
            Some(again) => again.take_back(request, self),
            None => Err(Box::new((request, self))),
        }
    }

    pub(crate) fn coming_back_through(self, again: Again) -> Self {
        Self { again: Some(again), ..self }
    }

    /// Ends a request that nothing was sent for yet.
    pub(crate) fn refuse(self, error: InferError) {
        // The stream has room for it; it is gone if the client has left.
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
