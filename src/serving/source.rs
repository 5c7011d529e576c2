//! Sources of the items of a stream.

use std::task::{Context, Poll};

use futures::future::BoxFuture;
use tokio::sync::mpsc;

use crate::{InferError, InferResponse, OutputDelta, StreamItem};

/// Produces the items of one stream when it is polled.
pub trait ResponseSource: Send {
    /// The next item; `None` after the last. Returns [`StreamItem::Delta`] only if `accepts_deltas`, and then writes the new
    /// values to `delta`, which the caller passes empty.
    fn poll_next(
        &mut self,
        accepts_deltas: bool,
        delta: &mut OutputDelta,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<StreamItem, InferError>>>;
}

/// A response or an error in the channel from a [`crate::ResponseSender`] to its stream.
pub(crate) type SentItem = Result<Box<InferResponse>, InferError>;

/// A future that sends responses. The source that it resolves to continues the stream.
pub(crate) type SendingFuture = BoxFuture<'static, Option<Box<dyn ResponseSource>>>;

/// A future that sends responses and runs only while the stream is polled.
///
/// It needs no task of its own, and sending wakes no task: the reader polls the future, then receives what it sent. So the
/// future must not give its sender to another task.
pub(crate) struct FutureSource {
    /// `None` when it has resolved.
    future: Option<SendingFuture>,
    sent: mpsc::Receiver<SentItem>,
    /// Continues the stream after the last response that the future sent.
    continuation: Option<Box<dyn ResponseSource>>,
}

/// Result of polling a [`FutureSource`].
pub(crate) enum Polled {
    Item(Poll<Option<SentItem>>),
    /// The future has resolved, and this continues the stream.
    Continuation(Box<dyn ResponseSource>),
}

impl FutureSource {
    /// Polls `future`, whose sender belongs to the channel of `sent`.
    pub fn new(future: SendingFuture, sent: mpsc::Receiver<SentItem>) -> Self {
        Self { future: Some(future), sent, continuation: None }
    }

    pub fn poll(&mut self, context: &mut Context<'_>) -> Polled {
        if let Ok(item) = self.sent.try_recv() {
            return Polled::Item(Poll::Ready(Some(item)));
        }
        if let Some(future) = &mut self.future
            && let Poll::Ready(continuation) = future.as_mut().poll(context)
        {
            self.future = None;
            self.continuation = continuation;
        }
        if let Ok(item) = self.sent.try_recv() {
            return Polled::Item(Poll::Ready(Some(item)));
        }
        match self.continuation.take() {
            Some(source) => Polled::Continuation(source),
            None if self.future.is_some() => Polled::Item(Poll::Pending),
            None => Polled::Item(Poll::Ready(None)),
        }
    }
}
