//! Requests that a process works on, and buffers of responses for slow clients.

use std::time::{Duration, Instant};

use serving::{BatchedRequest, InferError, InferRequest, InferResponse, ResponseSender};
use tokio::sync::mpsc;

/// Responses of one request that are buffered for a slow client, in addition to those in its stream.
const MAX_UNREAD_RESPONSES: usize = 4096;

type Item = Result<InferResponse, InferError>;

/// A request that was sent to a process.
#[derive(Debug)]
pub(super) struct Running {
    pub request: InferRequest,
    sender: ResponseSender,
    /// Set when the stream was full: responses for a task that sends them as the client reads.
    unread: Option<mpsc::Sender<Item>>,
    /// Whether the process was sent a cancellation, because the client has left.
    pub is_cancelled: bool,
    pub num_responses: u64,
}

impl Running {
    pub fn new(batched: BatchedRequest) -> Self {
        let BatchedRequest { request, responses } = batched;
        Self { request, sender: responses, unread: None, is_cancelled: false, num_responses: 0 }
    }

    /// Whether the client has left.
    pub fn is_abandoned(&self) -> bool {
        self.sender.is_cancelled()
    }

    /// Counts the time that sending the inputs to the process took.
    pub fn took_input(&self, time: Duration) {
        self.sender.add_input_time(time);
    }

    /// Sets when the process sent the next response.
    pub fn computed_at(&self, at: Instant) {
        self.sender.set_computed_at(at);
    }

    /// Sends a response without waiting. Returns false when the buffer for a slow client is full.
    pub fn respond(&mut self, item: Item) -> bool {
        self.num_responses += 1;
        if let Some(unread) = &self.unread {
            return !matches!(unread.try_send(item), Err(mpsc::error::TrySendError::Full(_)));
        }
        let Err(item) = self.sender.try_send(item) else { return true };
        let (unread, mut waiting) = mpsc::channel(MAX_UNREAD_RESPONSES);
        self.unread = Some(unread);
        let sender = self.sender.clone();
        tokio::spawn(async move {
            let mut next = Some(*item);
            while let Some(item) = next {
                if !sender.send(item).await {
                    return;
                }
                next = waiting.recv().await;
            }
        });
        true
    }

    /// The request, to be sent to a process again.
    pub fn into_request(self) -> BatchedRequest {
        BatchedRequest { request: self.request, responses: self.sender }
    }
}
