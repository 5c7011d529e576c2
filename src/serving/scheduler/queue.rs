//! The interface of queues: requests wait in one until an instance takes them in batches.

use std::time::Instant;

use crate::{CorrelationId, InferError, InferRequest, ResponseSender, ResponseStream, Tensor};

/// Responses of one request that are buffered for a slow reader. When the buffer is full, the model waits.
pub(crate) const STREAM_CAPACITY: usize = 64;

/// A request that waits for its execution.
#[derive(Debug)]
pub(crate) struct QueuedRequest {
    pub request: InferRequest,
    pub responses: ResponseSender,
    /// Rows that the request adds to a batch.
    pub num_rows: u64,
    pub arrived: Instant,
    /// Set by the queue where the request can time out.
    pub deadline: Option<Instant>,
    /// Set by the queue where the model has states: the sequence whose states the response updates.
    pub stateful: Option<CorrelationId>,
    /// The stream of a null request, which only fills a slot. It is held open and never read.
    pub ignored_responses: Option<ResponseStream>,
}

impl QueuedRequest {
    pub fn new(request: InferRequest, responses: ResponseSender, num_rows: u64) -> Self {
        let arrived = Instant::now();
        Self { request, responses, num_rows, arrived, deadline: None, stateful: None, ignored_responses: None }
    }

    /// A request that only fills a slot of a batch.
    pub fn null(request: InferRequest) -> Self {
        let (responses, stream) = ResponseStream::channel(STREAM_CAPACITY);
        Self { ignored_responses: Some(stream), ..Self::new(request, responses, 0) }
    }
}

/// What a free instance does next.
#[derive(Debug)]
pub(crate) enum NextBatch {
    /// Wait for a request.
    Empty,
    /// Wait for further requests, at most until this time.
    WaitUntil(Instant),
    /// Run this batch.
    Run(Vec<QueuedRequest>),
}

/// Requests that wait for an instance, and the order in which they are served.
pub(crate) trait Queue: Send {
    /// Adds a request.
    ///
    /// # Errors
    /// When the queue is full, or the request does not fit its sequence.
    fn push(&mut self, queued: QueuedRequest) -> Result<(), InferError>;

    /// Removes and returns the next batch for a free instance.
    fn take(&mut self, instance: usize, now: Instant) -> NextBatch;

    /// Called when the last batch of this instance has run.
    fn finish_batch(&mut self, _instance: usize, _now: Instant) {}

    /// Adds a request again that was executed.
    fn push_again(&mut self, _queued: QueuedRequest) {}

    /// Stores the states that a model returned for a sequence.
    fn update_state(&mut self, _sequence: &CorrelationId, _state: Vec<Tensor>) {}

    /// Number of waiting requests.
    fn len(&self) -> usize;

    /// Whether [`Queue::expire`] must be called at all.
    fn has_timeouts(&self) -> bool;

    /// When [`Queue::expire`] must be called next.
    fn first_deadline(&self) -> Option<Instant>;

    /// Applies timeouts, and returns the requests that must be refused.
    fn expire(&mut self, now: Instant) -> Vec<QueuedRequest>;
}
