//! A request and its responses, as every protocol and every backend sees them.

use std::collections::BTreeMap;
use std::fmt;
use std::future::poll_fn;
use std::pin::Pin;
use std::task::{Context, Poll};

use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::time::{Duration, Instant};

use futures::Stream;
use futures::future::{BoxFuture, FutureExt as _};
use tokio::runtime::Handle;
use tokio::sync::mpsc;

use crate::bell::Bell;
use crate::generation::{Generation, Progress};
use crate::scheduler::{Again, Turn};
use crate::slot::Slot;
use crate::statistics::Execution;
use crate::step::EnsembleStep;
use crate::watch::Watch;
use crate::{ClientMemory, InferError, Name, Tensor, Trace, Update};

/// A free-form request or response parameter.
#[derive(Debug, Clone, PartialEq)]
#[allow(missing_docs)] // The protocol's own choices.
pub enum Parameter {
    Bool(bool),
    Int(i64),
    Double(f64),
    String(String),
}

/// The correlation id of a stateful sequence of requests.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub enum CorrelationId {
    /// A number; 0 means none.
    Number(u64),
    /// A string; empty means none.
    Text(String),
}

impl Default for CorrelationId {
    fn default() -> Self {
        CorrelationId::Number(0)
    }
}

/// What a client asks of one model.
#[derive(Debug, Clone, Default)]
pub struct InferRequest {
    /// Model name.
    pub model_name: Name,
    /// Version, empty for the latest that the version policy serves.
    pub model_version: Name,
    /// The client's id, echoed in every response; may be empty.
    pub id: Name,
    /// Parameters that are not reserved by the protocol.
    pub parameters: BTreeMap<String, Parameter>,
    /// Input tensors.
    pub inputs: Vec<Tensor>,
    /// Names of the outputs asked for; empty asks for all.
    pub requested_outputs: Vec<Name>,
    /// Priority level, 0 for the model's default.
    pub priority: u64,
    /// Time the request may wait in a queue, 0 for the model's default.
    pub timeout_us: u64,
    /// Stateful sequence this request belongs to.
    pub correlation_id: CorrelationId,
    /// First request of its sequence.
    pub sequence_start: bool,
    /// Last request of its sequence.
    pub sequence_end: bool,
    /// Tensors that are in shared memory of the client.
    pub client_memory: ClientMemory,
    /// Set where the request is one step of an ensemble: state that lives as long as the ensemble's run.
    pub step: Option<EnsembleStep>,
    /// Set where what happens to the request is written down.
    pub trace: Option<Trace>,
}

impl InferRequest {
    /// The input called `name`.
    pub fn input(&self, name: &str) -> Option<&Tensor> {
        self.inputs.iter().find(|tensor| tensor.name == name)
    }
}

/// One response of a model.
#[derive(Debug, Clone, Default)]
pub struct InferResponse {
    /// Model name.
    pub model_name: Name,
    /// The version that answered.
    pub model_version: Name,
    /// The request's id.
    pub id: Name,
    /// Parameters, in the order they are sent.
    pub parameters: Arc<[(Name, Parameter)]>,
    /// Output tensors; none in an empty final response.
    pub outputs: Vec<Tensor>,
    /// No response follows this one.
    pub is_final: bool,
    /// What follows may be [`Update::Again`].
    pub may_be_repeated: bool,
}

type Item = Result<InferResponse, InferError>;

/// The same on its way from sender to stream.
type Sent = Result<Update, InferError>;

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

/// Makes responses when it is asked for them: what is left of the work behind a stream once all that it waits for is one
/// thing. Less than a future and a place for what it sends, which a token would have to pass.
pub trait Respond: Send {
    /// The next response, or, where the reader takes updates, what is new in it; `None` behind the last.
    fn poll_respond(
        &mut self,
        takes_updates: bool,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Update, InferError>>>;
}

/// Work that may leave the rest to what it ends with.
type Work = BoxFuture<'static, Option<Box<dyn Respond>>>;

/// The work that makes a stream's responses.
struct Driver {
    slot: Arc<Slot>,
    /// Rings when the work can go on.
    bell: Bell,
    work: Option<Work>,
    /// What the work ended with.
    respond: Option<Box<dyn Respond>>,
    /// Where it goes on when the stream is dropped; `None` when it ends with it.
    afterwards: Option<Handle>,
}

impl Drop for Driver {
    fn drop(&mut self) {
        // The sender is told that the client has left before its work goes on elsewhere.
        self.slot.close();
        if let (Some(work), Some(runtime)) = (self.work.take(), self.afterwards.take()) {
            runtime.spawn(work.map(drop));
        }
    }
}

/// When a request left its queue, and with which others.
#[derive(Debug)]
pub(crate) struct Scheduled {
    pub at: Instant,
    pub execution: Option<Arc<Execution>>,
}

/// How responses get to their stream.
#[derive(Debug, Clone)]
enum Way {
    Channel(mpsc::Sender<Sent>),
    /// To who carries the work on that sends them.
    Slot(Arc<Slot>),
}

/// The model's end of a [`ResponseStream`].
#[derive(Debug, Clone)]
pub struct ResponseSender {
    way: Way,
    progress: Arc<Progress>,
    /// Requests behind this one are answered after the last sender is gone.
    _turn: Option<Arc<Turn>>,
    /// Who takes the request back for another execution, where its model may ask for one.
    again: Option<Again>,
}

impl ResponseStream {
    /// A stream that holds at most `capacity` responses that nobody has read.
    pub fn channel(capacity: usize) -> (ResponseSender, ResponseStream) {
        let (sender, receiver) = mpsc::channel(capacity);
        Self::of(Way::Channel(sender), Source::Channel(receiver))
    }

    fn of(way: Way, source: Source) -> (ResponseSender, ResponseStream) {
        let progress = Arc::new(Progress::default());
        let sender = ResponseSender { way, progress: progress.clone(), _turn: None, again: None };
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
        let driver = Driver { slot: slot.clone(), bell: Bell::default(), work: None, respond: None, afterwards };
        let (sender, mut stream) = Self::of(Way::Slot(slot), Source::Driven(driver));
        let work = make(sender).boxed();
        if let Source::Driven(driver) = &mut stream.source {
            driver.work = Some(work);
        }
        stream
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
            Source::Driven(driver) => driver.slot.takes_updates.store(!removes_outputs, Relaxed),
            Source::Handed(_, takes_updates) => *takes_updates = !removes_outputs,
            Source::Ready(_) | Source::Channel(_) => {}
        }
    }

    /// As [`ResponseStream::poll_update`].
    pub async fn next_update(&mut self) -> Option<Result<Update, InferError>> {
        poll_fn(|context| self.poll_update(context)).await
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

    /// Has `watch` see, complete and count every response from here on.
    pub(crate) fn watched(mut self, watch: Watch) -> Self {
        self.watch = Some(Box::new(watch.follow(self.progress.clone())));
        self
    }

    /// Has this stream, and the sender that goes with it, take turns with those of other requests.
    pub(crate) fn in_turn(mut self, sender: ResponseSender, turn: Turn) -> (ResponseSender, Self) {
        self.turn = Some(turn.comes().boxed());
        (ResponseSender { _turn: Some(Arc::new(turn)), ..sender }, self)
    }

    fn poll_response(&mut self, context: &mut Context<'_>) -> Poll<Option<Item>> {
        self.poll_update(context).map(|update| update.map(|update| update.map(response_of)))
    }

    /// The next response, or what is new in it; `None` after the final one.
    pub fn poll_update(&mut self, context: &mut Context<'_>) -> Poll<Option<Result<Update, InferError>>> {
        if let Some(turn) = &mut self.turn {
            std::task::ready!(turn.as_mut().poll(context));
            self.turn = None;
        }
        let item = std::task::ready!(self.source.poll(context));
        Poll::Ready(match &mut self.watch {
            Some(watch) => watch.see_update(item),
            None => item,
        })
    }
}

/// Where nobody asked for updates.
fn response_of(update: Update) -> InferResponse {
    match update {
        Update::Response(response) => *response,
        Update::Again(_) => unreachable!("sent only to who takes updates, which asks for them"),
    }
}

impl Source {
    fn poll(&mut self, context: &mut Context<'_>) -> Poll<Option<Sent>> {
        match self {
            Source::Ready(item) => Poll::Ready(item.take().map(|item| item.map(Update::from))),
            Source::Channel(receiver) => receiver.poll_recv(context),
            Source::Handed(respond, takes_updates) => respond.poll_respond(*takes_updates, context),
            Source::Driven(driver) => {
                let respond = match driver.poll(context) {
                    Driven::Sent(item) => return item,
                    Driven::HandedOver(respond) => respond,
                };
                let takes_updates = driver.slot.takes_updates.load(Relaxed);
                *self = Source::Handed(respond, takes_updates);
                self.poll(context)
            }
        }
    }
}

/// What polling work has come to.
enum Driven {
    Sent(Poll<Option<Sent>>),
    /// It has ended, and all that it sent was taken.
    HandedOver(Box<dyn Respond>),
}

impl Driver {
    fn poll(&mut self, context: &mut Context<'_>) -> Driven {
        if let Some(item) = self.slot.take() {
            return Driven::Sent(Poll::Ready(Some(item)));
        }
        if let Some(work) = &mut self.work
            && let Poll::Ready(respond) = self.bell.poll(context, |context| work.as_mut().poll(context))
        {
            self.work = None;
            self.respond = respond;
        }
        if let Some(item) = self.slot.take() {
            return Driven::Sent(Poll::Ready(Some(item)));
        }
        match self.respond.take() {
            Some(respond) => Driven::HandedOver(respond),
            None if self.work.is_some() => Driven::Sent(Poll::Pending),
            None => Driven::Sent(Poll::Ready(None)),
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

impl ResponseSender {
    /// Sends one response or the ending error, waiting while the stream is full.
    /// False when the client has left.
    pub async fn send(&self, response: Result<InferResponse, InferError>) -> bool {
        self.send_update(response.map(Update::from)).await
    }

    /// As [`ResponseSender::send`]; [`Update::Again`] only where [`ResponseSender::takes_updates`] says so, behind a
    /// response that may be repeated.
    pub async fn send_update(&self, update: Result<Update, InferError>) -> bool {
        match &self.way {
            Way::Channel(sender) => sender.send(update).await.is_ok(),
            Way::Slot(slot) => {
                let mut update = slot.try_put(update);
                if update.is_some() {
                    poll_fn(|context| slot.poll_put(&mut update, context)).await;
                }
                !slot.is_closed()
            }
        }
    }

    /// Whether a response may be sent as what is new in it.
    pub fn takes_updates(&self) -> bool {
        matches!(&self.way, Way::Slot(slot) if slot.takes_updates.load(Relaxed))
    }

    /// As [`ResponseSender::send`], without waiting.
    ///
    /// # Errors
    /// With the response, when the stream is full.
    pub fn try_send(&self, response: Item) -> Result<bool, Box<Item>> {
        let response = response.map(Update::from);
        let full = match &self.way {
            Way::Channel(sender) => match sender.try_send(response) {
                Ok(()) => return Ok(true),
                Err(mpsc::error::TrySendError::Closed(_)) => return Ok(false),
                Err(mpsc::error::TrySendError::Full(response)) => response,
            },
            Way::Slot(slot) => match slot.try_put(response) {
                None => return Ok(!slot.is_closed()),
                Some(response) => response,
            },
        };
        Err(Box::new(full.map(response_of)))
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
        if let Some(progress) = &stream.progress {
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
        match &self.way {
            Way::Channel(sender) => sender.is_closed(),
            Way::Slot(slot) => slot.is_closed(),
        }
    }

    /// Resolves when the client leaves.
    pub async fn cancelled(&self) {
        match &self.way {
            Way::Channel(sender) => sender.closed().await,
            // Work that outlives its reader is polled when that leaves.
            Way::Slot(slot) => poll_fn(|_| if slot.is_closed() { Poll::Ready(()) } else { Poll::Pending }).await,
        }
    }
}
