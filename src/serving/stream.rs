//! The responses to one request, for the side that reads them.

use std::fmt;
use std::future::poll_fn;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};

use futures::Stream;
use futures::future::{BoxFuture, FutureExt as _};
use tokio::sync::mpsc;

use crate::ensemble::TextStream;
use crate::progress::{Generation, Progress, ProgressReporter};
use crate::request_metrics::Watch;
use crate::scheduler::Turn;
use crate::sender::ResponseSender;
use crate::source::{Polled, PolledWork, ResponseSource, Sent};
use crate::{InferError, InferResponse, OutputDelta, StreamItem};

type Item = Result<InferResponse, InferError>;

/// The responses to one request. It ends with a response marked final, or with an error.
///
/// Dropping it cancels the request: [`ResponseSender::is_cancelled`] becomes true.
pub struct ResponseStream {
    source: Source,
    accepts_deltas: bool,
    /// `None` where the only response was there from the start.
    progress: Option<Arc<Progress>>,
    watch: Option<Box<Watch>>,
    /// Until it resolves, requests before this one are not answered yet.
    turn: Option<BoxFuture<'static, ()>>,
}

enum Source {
    /// The only response, until it is taken.
    Ready(Option<Item>),
    /// A sender on any thread.
    Channel(mpsc::Receiver<Sent>),
    /// Work that is polled with the stream.
    Work(PolledWork),
    Custom(Box<dyn ResponseSource>),
    /// The language model of an ensemble.
    Text(TextStream),
}

impl ResponseStream {
    /// A stream that holds at most `capacity` responses that were not read.
    pub fn channel(capacity: usize) -> (ResponseSender, ResponseStream) {
        let (sender, receiver) = mpsc::channel(capacity);
        let progress = Arc::new(Progress::default());
        let sender = ResponseSender::new(sender, progress.clone());
        (sender, Self::of(Source::Channel(receiver), Some(progress)))
    }

    /// A stream of one response, which is there already.
    pub fn ready(response: InferResponse) -> ResponseStream {
        Self::of(Source::Ready(Some(Ok(InferResponse { is_final: true, ..response }))), None)
    }

    /// A stream of the responses that a future sends. The future is polled with the stream: it has no task of its own, and
    /// is dropped with the stream. It must keep its sender to itself. One response waits for the reader.
    pub fn from_future<W: Future<Output = ()> + Send + 'static>(make: impl FnOnce(ResponseSender) -> W) -> Self {
        Self::from_future_then(|sender| make(sender).map(|()| None))
    }

    /// As [`ResponseStream::from_future`]; what the future resolves to continues the stream.
    pub(crate) fn from_future_then<W>(make: impl FnOnce(ResponseSender) -> W) -> Self
    where
        W: Future<Output = Option<TextStream>> + Send + 'static,
    {
        let (sender, receiver) = mpsc::channel(1);
        let progress = Arc::new(Progress::default());
        let work = make(ResponseSender::new(sender, progress.clone())).boxed();
        Self::of(Source::Work(PolledWork::new(work, receiver)), Some(progress))
    }

    /// A stream of what a source yields. The source tells through the reporter how far the request has come.
    pub fn from_source(make: impl FnOnce(ProgressReporter) -> Box<dyn ResponseSource>) -> Self {
        let progress = Arc::new(Progress::default());
        Self::of(Source::Custom(make(ProgressReporter(progress.clone()))), Some(progress))
    }

    fn of(source: Source, progress: Option<Arc<Progress>>) -> Self {
        Self { source, accepts_deltas: false, progress, watch: None, turn: None }
    }

    /// The next response; `None` after the final one. Not for streams that accept deltas.
    pub async fn next_response(&mut self) -> Option<Item> {
        poll_fn(|context| self.poll_response(context)).await
    }

    /// Accepts [`StreamItem::Delta`] where the source can send it: from now on the stream is read by
    /// [`ResponseStream::poll_item`].
    pub fn accept_deltas(&mut self) {
        // Where outputs are removed on the way, their indices change.
        self.accepts_deltas = !self.watch.as_ref().is_some_and(|watch| watch.removes_outputs());
    }

    /// As [`ResponseStream::poll_item`].
    pub async fn next_item(&mut self, delta: &mut OutputDelta) -> Option<Result<StreamItem, InferError>> {
        poll_fn(|context| self.poll_item(delta, context)).await
    }

    /// The only response, where it was there from the start.
    pub(crate) fn take_ready(&mut self) -> Option<Item> {
        let Source::Ready(item) = &mut self.source else { return None };
        let item = item.take();
        match &mut self.watch {
            Some(watch) => watch.see(item),
            None => item,
        }
    }

    /// What the model has reported about the text it generated.
    pub fn generation(&self) -> Option<Generation> {
        self.progress.as_ref()?.generation()
    }

    /// Where its model reports how far it has come.
    pub(crate) fn progress(&self) -> Option<&Arc<Progress>> {
        self.progress.as_ref()
    }

    /// Has `watch` complete and count every response from now on.
    pub(crate) fn watched(mut self, watch: Watch) -> Self {
        self.watch = Some(Box::new(watch.follow(self.progress.clone())));
        self
    }

    /// Has this stream, and the sender that goes with it, take turns with those of other requests.
    pub(crate) fn in_turn(mut self, sender: ResponseSender, turn: Turn) -> (ResponseSender, Self) {
        self.turn = Some(turn.comes().boxed());
        (sender.in_turn(turn), self)
    }

    fn poll_response(&mut self, context: &mut Context<'_>) -> Poll<Option<Item>> {
        let item = self.poll_item(&mut OutputDelta::default(), context);
        item.map(|item| item.map(|item| item.map(StreamItem::into_response)))
    }

    /// The next item; `None` after the final response. `delta` then holds the new values of a [`StreamItem::Delta`].
    pub fn poll_item(
        &mut self,
        delta: &mut OutputDelta,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<StreamItem, InferError>>> {
        if let Some(turn) = &mut self.turn {
            ready!(turn.as_mut().poll(context));
            self.turn = None;
        }
        delta.clear();
        let item = ready!(self.source.poll_next(self.accepts_deltas, delta, context));
        Poll::Ready(match &mut self.watch {
            Some(watch) => watch.see_item(item),
            None => item,
        })
    }

    /// What yields the items, and what completes and counts them.
    pub(crate) fn into_parts(self) -> (Box<dyn ResponseSource>, Option<Box<Watch>>) {
        match self.source {
            Source::Custom(source) => (source, self.watch),
            source => (Box::new(source), self.watch),
        }
    }
}

impl ResponseSource for Source {
    fn poll_next(
        &mut self,
        accepts_deltas: bool,
        delta: &mut OutputDelta,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<StreamItem, InferError>>> {
        let item = |sent: Option<Sent>| sent.map(|sent| sent.map(StreamItem::Response));
        match self {
            Source::Text(text) => text.poll_next(accepts_deltas, delta, context),
            Source::Custom(source) => source.poll_next(accepts_deltas, delta, context),
            Source::Ready(only) => Poll::Ready(only.take().map(|only| only.map(StreamItem::from))),
            Source::Channel(receiver) => receiver.poll_recv(context).map(item),
            Source::Work(work) => {
                let mut rest = match work.poll(context) {
                    Polled::Item(sent) => return sent.map(item),
                    Polled::Rest(rest) => rest,
                };
                let first = rest.poll_next(accepts_deltas, delta, context);
                *self = Source::Text(rest);
                first
            }
        }
    }
}

impl fmt::Debug for ResponseStream {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.debug_struct("ResponseStream").field("watch", &self.watch).finish_non_exhaustive()
    }
}

impl Stream for ResponseStream {
    type Item = Item;

    fn poll_next(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Item>> {
        self.poll_response(context)
    }
}
