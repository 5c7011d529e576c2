//! The reading end of a stream of responses.

use std::fmt;
use std::future::poll_fn;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};

use futures::Stream;
use futures::future::{BoxFuture, FutureExt as _};
use tokio::sync::mpsc;

use crate::progress::{Generation, Progress, ProgressReporter};
use crate::response_order::OrderTicket;
use crate::sender::ResponseSender;
use crate::source::{FutureSource, Polled, ResponseSource, SentItem};
use crate::{InferError, InferResponse, OutputDelta, StreamItem};

type Item = Result<InferResponse, InferError>;

/// The responses to one request. The stream ends with a response marked final, or with an error.
///
/// Dropping it cancels the request: [`ResponseSender::is_cancelled`] becomes true.
pub struct ResponseStream {
    source: Source,
    accepts_deltas: bool,
    /// `None` where the only response was available from the start.
    progress: Option<Arc<Progress>>,
    observer: Option<Box<dyn StreamObserver>>,
    /// Resolves when all earlier requests are answered, where the model preserves the order of responses.
    earlier_answered: Option<BoxFuture<'static, ()>>,
}

enum Source {
    /// The only response, until it is taken.
    Ready(Option<Item>),
    /// Responses sent through a [`ResponseSender`] from any thread.
    Channel(mpsc::Receiver<SentItem>),
    /// A future that sends responses and is polled with the stream.
    Future(FutureSource),
    Custom(Box<dyn ResponseSource>),
}

/// Completes and counts the items of a stream before the reader gets them.
pub(crate) trait StreamObserver: fmt::Debug + Send + Sync {
    /// Completes and counts one item of a stream without deltas.
    fn observe(&mut self, item: Option<Item>) -> Option<Item>;

    /// Completes and counts one item of a stream that may have deltas.
    fn observe_item(&mut self, item: Option<Result<StreamItem, InferError>>) -> Option<Result<StreamItem, InferError>>;

    /// Whether outputs may be removed from responses.
    fn removes_outputs(&self) -> bool;
}

impl ResponseStream {
    /// A stream that buffers at most `capacity` responses.
    pub fn channel(capacity: usize) -> (ResponseSender, ResponseStream) {
        let (sender, receiver) = mpsc::channel(capacity);
        let progress = Arc::new(Progress::default());
        let sender = ResponseSender::new(sender, progress.clone());
        (sender, Self::new(Source::Channel(receiver), Some(progress)))
    }

    /// A stream of one response that is available already.
    pub fn ready(response: InferResponse) -> ResponseStream {
        Self::new(Source::Ready(Some(Ok(InferResponse { is_final: true, ..response }))), None)
    }

    /// A stream of the responses that a future sends. The future is polled with the stream: it has no task of its own, and
    /// is dropped with the stream. It must not give its sender to another task. At most one response is buffered.
    pub fn from_future<W: Future<Output = ()> + Send + 'static>(make: impl FnOnce(ResponseSender) -> W) -> Self {
        Self::from_future_then(|sender| make(sender).map(|()| None))
    }

    /// Makes a stream like [`ResponseStream::from_future`]. The stream that the future resolves to continues it.
    pub(crate) fn from_future_then<W>(make: impl FnOnce(ResponseSender) -> W) -> Self
    where
        W: Future<Output = Option<Box<dyn ResponseSource>>> + Send + 'static,
    {
        let (sender, receiver) = mpsc::channel(1);
        let progress = Arc::new(Progress::default());
        let future = make(ResponseSender::new(sender, progress.clone())).boxed();
        Self::new(Source::Future(FutureSource::new(future, receiver)), Some(progress))
    }

    /// A stream of the items that a source yields. The source reports the request's progress through the reporter.
    pub fn from_source(make: impl FnOnce(ProgressReporter) -> Box<dyn ResponseSource>) -> Self {
        let progress = Arc::new(Progress::default());
        Self::new(Source::Custom(make(ProgressReporter(progress.clone()))), Some(progress))
    }

    /// The items of `source`, whose request has this progress.
    pub(crate) fn of_inner(source: Box<dyn ResponseSource>, progress: Option<Arc<Progress>>) -> Self {
        Self::new(Source::Custom(source), progress)
    }

    fn new(source: Source, progress: Option<Arc<Progress>>) -> Self {
        Self { source, accepts_deltas: false, progress, observer: None, earlier_answered: None }
    }

    /// The next response; `None` after the final one. Not for streams that accept deltas.
    pub async fn next_response(&mut self) -> Option<Item> {
        poll_fn(|context| self.poll_response(context)).await
    }

    /// Lets the source send [`StreamItem::Delta`]. From now on the stream must be read by [`ResponseStream::poll_item`].
    pub fn accept_deltas(&mut self) {
        // Deltas name outputs by index, and removing outputs changes the indices.
        self.accepts_deltas = !self.observer.as_ref().is_some_and(|observer| observer.removes_outputs());
    }

    /// The next item, like [`ResponseStream::poll_item`].
    pub async fn next_item(&mut self, delta: &mut OutputDelta) -> Option<Result<StreamItem, InferError>> {
        poll_fn(|context| self.poll_item(delta, context)).await
    }

    /// The only response, where it was available from the start.
    pub(crate) fn take_ready(&mut self) -> Option<Item> {
        let Source::Ready(item) = &mut self.source else { return None };
        let item = item.take();
        match &mut self.observer {
            Some(observer) => observer.observe(item),
            None => item,
        }
    }

    /// What the model has reported about the text it generated.
    pub fn generation(&self) -> Option<Generation> {
        self.progress.as_ref()?.generation()
    }

    /// Where the model reports the request's progress.
    pub(crate) fn progress(&self) -> Option<&Arc<Progress>> {
        self.progress.as_ref()
    }

    /// Passes every item through `observer` from now on.
    pub(crate) fn with_observer(self, observer: Box<dyn StreamObserver>) -> Self {
        Self { observer: Some(observer), ..self }
    }

    /// Holds responses back until all requests before `ticket` are answered. The request itself counts as answered when
    /// `sender`, the other end of this stream, and its clones are dropped.
    pub(crate) fn in_order(mut self, sender: ResponseSender, ticket: OrderTicket) -> (ResponseSender, Self) {
        self.earlier_answered = Some(ticket.earlier_answered().boxed());
        (sender.with_ticket(ticket), self)
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
        if let Some(earlier_answered) = &mut self.earlier_answered {
            ready!(earlier_answered.as_mut().poll(context));
            self.earlier_answered = None;
        }
        delta.clear();
        let item = ready!(self.source.poll_next(self.accepts_deltas, delta, context));
        Poll::Ready(match &mut self.observer {
            Some(observer) => observer.observe_item(item),
            None => item,
        })
    }

    /// The source of the items, and their observer.
    pub(crate) fn into_parts(self) -> (Box<dyn ResponseSource>, Option<Box<dyn StreamObserver>>) {
        match self.source {
            Source::Custom(source) => (source, self.observer),
            source => (Box::new(source), self.observer),
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
        let item = |sent: Option<SentItem>| sent.map(|sent| sent.map(StreamItem::Response));
        match self {
            Source::Custom(source) => source.poll_next(accepts_deltas, delta, context),
            Source::Ready(only) => Poll::Ready(only.take().map(|only| only.map(StreamItem::from))),
            Source::Channel(receiver) => receiver.poll_recv(context).map(item),
            Source::Future(future) => {
                let mut continuation = match future.poll(context) {
                    Polled::Item(sent) => return sent.map(item),
                    Polled::Continuation(source) => source,
                };
                let first = continuation.poll_next(accepts_deltas, delta, context);
                *self = Source::Custom(continuation);
                first
            }
        }
    }
}

impl ResponseSender {
    /// Passes the reports of `stream` on for this request, without a call for each token.
    pub fn report_progress_of(&self, stream: &ResponseStream) {
        if let Some(progress) = &stream.progress {
            self.progress().report_progress_of(progress);
        }
    }
}

impl fmt::Debug for ResponseStream {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.debug_struct("ResponseStream").field("observer", &self.observer).finish_non_exhaustive()
    }
}

impl Stream for ResponseStream {
    type Item = Item;

    fn poll_next(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Item>> {
        self.poll_response(context)
    }
}
