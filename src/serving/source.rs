//! Where the items of a stream come from.

use std::task::{Context, Poll};

use futures::future::BoxFuture;
use tokio::sync::mpsc;

use crate::ensemble::TextStream;
use crate::{InferError, InferResponse, OutputDelta, StreamItem};

/// Produces the items of one stream when it is polled.
pub trait ResponseSource: Send {
    /// The next item; `None` after the last. Sends [`StreamItem::Delta`] only where `accepts_deltas`, with the new values
    /// in `delta`, which is empty at the call.
    fn poll_next(
        &mut self,
        accepts_deltas: bool,
        delta: &mut OutputDelta,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<StreamItem, InferError>>>;
}

/// A response, or an error, on its way from a [`crate::ResponseSender`] to its stream.
pub(crate) type Sent = Result<Box<InferResponse>, InferError>;

/// Work that may leave the rest of the stream to a language model.
pub(crate) type Work = BoxFuture<'static, Option<TextStream>>;

/// Work that sends responses and goes on only while the stream is polled.
///
/// It needs no task of its own, and sending wakes nobody: the reader polls the work, then looks for what was sent. So the
/// work must keep its sender to itself.
pub(crate) struct PolledWork {
    /// `None` when it has ended.
    work: Option<Work>,
    sent: mpsc::Receiver<Sent>,
    /// What continues the stream after the last response that the work sent.
    rest: Option<TextStream>,
}

/// What polling work has led to.
pub(crate) enum Polled {
    Item(Poll<Option<Sent>>),
    /// The work has ended, and this continues the stream.
    Rest(TextStream),
}

impl PolledWork {
    /// Polls `work`, which sends through the channel of `sent`.
    pub fn new(work: Work, sent: mpsc::Receiver<Sent>) -> Self {
        Self { work: Some(work), sent, rest: None }
    }

    pub fn poll(&mut self, context: &mut Context<'_>) -> Polled {
        if let Ok(item) = self.sent.try_recv() {
            return Polled::Item(Poll::Ready(Some(item)));
        }
        if let Some(work) = &mut self.work
            && let Poll::Ready(rest) = work.as_mut().poll(context)
        {
            self.work = None;
            self.rest = rest;
        }
        if let Ok(item) = self.sent.try_recv() {
            return Polled::Item(Poll::Ready(Some(item)));
        }
        match self.rest.take() {
            Some(rest) => Polled::Rest(rest),
            None if self.work.is_some() => Polled::Item(Poll::Pending),
            None => Polled::Item(Poll::Ready(None)),
        }
    }
}
