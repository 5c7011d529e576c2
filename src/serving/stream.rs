//! The responses to one request, as who asked reads them.

use std::fmt;
use std::future::poll_fn;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use futures::Stream;
use futures::future::{BoxFuture, FutureExt as _};
use tokio::runtime::Handle;
use tokio::sync::mpsc;

use crate::driver::{Driven, Driver, Respond};
use crate::generation::{Generation, Progress};
use crate::scheduler::Turn;
use crate::sender::{ResponseSender, Way};
use crate::slot::Slot;
use crate::update::Sent;
use crate::watch::Watch;
use crate::{Changes, InferError, InferResponse, Update, near};

type Item = Result<InferResponse, InferError>;

/// The responses to one request, ended by a response marked final, or by an error and nothing behind it.
///
/// Dropping it cancels the request: the sender sees [`ResponseSender::is_cancelled`].
pub struct ResponseStream {
    source: Source,
    /// `None` where the only response was there from the start.
    progress: Option<Arc<Progress>>,
    watch: Option<Box<Watch>>,
    /// Until it resolves, requests before this one are not answered yet.
    turn: Option<BoxFuture<'static, ()>>,
}

/// Where the responses come from.
enum Source {
    /// The only one, until it is taken.
    Ready(Option<Item>),
    /// A sender, wherever it is.
    Channel(mpsc::Receiver<Sent>),
    /// Work that reading the stream carries on.
    Driven(Driver),
    /// What that work left the rest to, and whether the reader takes updates.
    Handed(Box<dyn Respond>, bool),
}

impl ResponseStream {
    /// A stream that holds at most `capacity` responses that nobody has read.
    pub fn channel(capacity: usize) -> (ResponseSender, ResponseStream) {
        let (sender, receiver) = mpsc::channel(capacity);
        let progress = Arc::new(Progress::default());
        let sender = ResponseSender::new(Way::Channel(sender), progress.clone());
        let source = Source::Channel(receiver);
        (sender, ResponseStream { source, progress: Some(progress), watch: None, turn: None })
    }

    /// A stream that holds its only response already.
    pub fn ready(response: InferResponse) -> ResponseStream {
        let source = Source::Ready(Some(Ok(InferResponse { is_final: true, ..response })));
        ResponseStream { source, progress: None, watch: None, turn: None }
    }

    /// A stream of what the work that `make` makes sends, which goes on whenever the stream is read: no task of its own, and
    /// none to wake for a response. It holds one response that nobody has read. Work and stream end with each other; the work
    /// keeps its sender to itself.
    pub fn driven_by<W: Future<Output = ()> + Send + 'static>(make: impl FnOnce(ResponseSender) -> W) -> Self {
        Self::driven(None, |sender| make(sender).map(|()| None))
    }

    /// As [`ResponseStream::driven_by`]; what the work ends with carries the stream on.
    pub fn begun_by<W>(make: impl FnOnce(ResponseSender) -> W) -> Self
    where
        W: Future<Output = Option<Box<dyn Respond>>> + Send + 'static,
    {
        Self::driven(None, make)
    }

    /// As [`ResponseStream::begun_by`], but when the stream is dropped before the work has ended, that goes on as a task. It
    /// is polled then, and [`ResponseSender::is_cancelled`] tells it.
    ///
    /// # Panics
    /// Outside of a runtime.
    pub fn begun_to_its_end_by<W>(make: impl FnOnce(ResponseSender) -> W) -> Self
    where
        W: Future<Output = Option<Box<dyn Respond>>> + Send + 'static,
    {
        Self::driven(Some(Handle::current()), make)
    }

    fn driven<W>(afterwards: Option<Handle>, make: impl FnOnce(ResponseSender) -> W) -> Self
    where
        W: Future<Output = Option<Box<dyn Respond>>> + Send + 'static,
    {
        let slot = Arc::new(Slot::default());
        let progress = Arc::new(Progress::default());
        let sender = ResponseSender::new(Way::Slot(slot.clone()), progress.clone());
        let driver = Driver::new(slot, make(sender).boxed(), afterwards);
        ResponseStream { source: Source::Driven(driver), progress: Some(progress), watch: None, turn: None }
    }

    /// The next response; `None` after the final one. Not to be asked after [`ResponseStream::take_updates`].
    pub async fn next_response(&mut self) -> Option<Item> {
        poll_fn(|context| self.poll_response(context)).await
    }

    /// Has responses come as what is new in them, where their sender knows and no output is left out on the way: from
    /// here on [`ResponseStream::poll_update`] is what to ask for them.
    pub fn take_updates(&mut self) {
        let removes_outputs = self.watch.as_ref().is_some_and(|watch| watch.removes_outputs());
        match &mut self.source {
            Source::Driven(driver) => driver.take_updates(!removes_outputs),
            Source::Handed(_, takes_updates) => *takes_updates = !removes_outputs,
            Source::Ready(_) | Source::Channel(_) => {}
        }
    }

    /// As [`ResponseStream::poll_update`].
    pub async fn next_update(&mut self, told: &mut Changes) -> Option<Result<Update, InferError>> {
        poll_fn(|context| self.poll_update(told, context)).await
    }

    /// Has the processor fetch what the next response needs, as [`Respond::fetch`].
    pub fn fetch(&self, depth: usize) {
        let Source::Handed(respond, _) = &self.source else { return };
        if depth > 0 {
            return respond.fetch(depth - 1);
        }
        near::fetch(&**respond);
        self.watch.iter().for_each(|watch| near::fetch(&**watch));
        self.progress.iter().for_each(|progress| near::fetch(&**progress));
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

    /// What the model has told of the text it generated.
    pub fn generation(&self) -> Option<Generation> {
        self.progress.as_ref()?.generation()
    }

    /// Where its model tells how far it has come.
    pub(crate) fn progress(&self) -> Option<&Arc<Progress>> {
        self.progress.as_ref()
    }

    /// Has `watch` see, complete and count every response from here on.
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
        let update = self.poll_update(&mut Changes::default(), context);
        update.map(|update| update.map(|update| update.map(Update::into_response)))
    }

    /// The next response, or the last one again, what is new in it put into `told`; `None` after the final one. What is in
    /// `told` from earlier asking stays there until it is told anew, or `told` is cleared.
    pub fn poll_update(
        &mut self,
        told: &mut Changes,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Update, InferError>>> {
        if let Some(turn) = &mut self.turn {
            std::task::ready!(turn.as_mut().poll(context));
            self.turn = None;
        }
        let mut item = std::task::ready!(self.source.poll(self.progress.as_deref(), told, context));
        if let Some(watch) = &mut self.watch {
            match &mut item {
                Some(Ok(Update::Again(repeat))) => watch.count_again(repeat),
                _ => item = watch.see_update(item),
            }
        }
        Poll::Ready(item)
    }
}

impl Source {
    fn poll(
        &mut self,
        progress: Option<&Progress>,
        told: &mut Changes,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Update, InferError>>> {
        let open = |sent: Sent| sent.map(|letter| letter.open(told, progress));
        match self {
            Source::Ready(item) => Poll::Ready(item.take().map(|item| item.map(Update::from))),
            Source::Channel(receiver) => receiver.poll_recv(context).map(|sent| sent.map(open)),
            Source::Handed(respond, takes_updates) => respond.poll_respond(*takes_updates, told, context),
            Source::Driven(driver) => {
                let mut respond = match driver.poll(context) {
                    Driven::Sent(sent) => return sent.map(|sent| sent.map(open)),
                    Driven::HandedOver(respond) => respond,
                };
                let takes_updates = driver.takes_updates();
                let update = respond.poll_respond(takes_updates, told, context);
                *self = Source::Handed(respond, takes_updates);
                update
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
