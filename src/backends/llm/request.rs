//! One request in flight: turns its sequences' events into responses, and its client's leaving into cancels.

use std::collections::HashMap;
use std::sync::{Arc, Mutex};
use std::task::{Context, Poll, ready};
use std::time::Instant;

use engine::{BlockUsage, FinishReason, RowId, SampledToken, SequenceId, TokenEvent};
use serving::{Changes, ErrorKind, InferError, InferResponse, Name, Repeat, Respond, ResponseSender, Update};
use tokio::runtime::Handle;
use tokio::sync::{mpsc, watch};

use super::inbox::{Message, OneToken, RequestEvent};
use super::outputs::{News, Responses, Tokens};
use super::router::Admission;
use super::text_stop::TextStop;
use super::timing::Timing;

/// What a client hears of a model that goes.
const UNLOADED: &str = "the model was unloaded while the request ran";

/// Where to tell requests that they are to end, by the client's request id.
pub(crate) type ById = Arc<Mutex<HashMap<Name, Arc<Stop>>>>;

/// Ends a request for a client that asks for it.
pub(crate) struct Stop(pub(crate) mpsc::WeakUnboundedSender<RequestEvent>);

impl Stop {
    /// Tells the request, if somebody may still tell it anything.
    pub(crate) fn tell(&self) {
        let _ = self.0.upgrade().map(|events| events.send(RequestEvent::Stop));
    }
}

/// A request on its way to a replica.
pub(crate) struct Pending {
    pub(crate) admission: Admission,
    /// What a replica is to be told, until it is.
    pub(crate) submit: Option<Message>,
    /// Until when it may wait; when the flag is false, others are then served before it.
    pub(crate) timeout: Option<(Instant, bool)>,
}

impl Pending {
    /// Tells the replica that takes the request, if one does. False when the model is being unloaded.
    pub(crate) fn submit_if_placed(&mut self) -> bool {
        match (&self.admission, self.submit.take()) {
            (Admission::Placed(place), Some(submit)) => place.replica().inbox.send(submit),
            (_, submit) => {
                self.submit = submit;
                true
            }
        }
    }

    /// Tells the replica that has the request something of one of its sequences.
    fn send(&self, message: Message) {
        if let Admission::Placed(place) = &self.admission {
            place.replica().inbox.send(message);
        }
    }
}

/// What came of the wait for a replica.
enum Waited {
    /// One has the request now.
    Placed,
    /// The client left.
    Left,
    /// The client asked to end it.
    Stopped,
    Failed(InferError),
}

type Events = mpsc::UnboundedReceiver<RequestEvent>;

type Item = Result<InferResponse, InferError>;

/// What the task of a request is made of.
pub(crate) struct RequestTask {
    pub(crate) client_id: Name,
    pub(crate) pending: Pending,
    pub(crate) by_id: ById,
    /// The client asks to end it.
    pub(crate) stop: Arc<Stop>,
    pub(crate) in_flight: Arc<watch::Sender<usize>>,
    pub(crate) responses: Responses,
    pub(crate) timing: Timing,
    /// One for each sequence, where there are stop words.
    pub(crate) text_stops: Vec<TextStop>,
    /// Known once accepted.
    pub(crate) sequences: Vec<SequenceId>,
    /// Which sequences have told their last.
    pub(crate) ended: Vec<bool>,
    /// Its sequences are to end as soon as they are known.
    pub(crate) is_cancelled: bool,
}

impl RequestTask {
    /// Waits for a replica; then the news of the request are what is left.
    pub(crate) async fn run(mut self, mut events: Events, sender: ResponseSender) -> Option<Box<dyn Respond>> {
        match self.wait_for_replica(&mut events, &sender).await {
            Waited::Placed => return Some(Box::new(Following::new(self, events, sender))),
            Waited::Left => self.end_unplaced(Some(FinishReason::Cancelled), &sender),
            Waited::Stopped => {
                self.end_unplaced(Some(FinishReason::Cancelled), &sender);
                for index in 0..self.ended.len() {
                    if let Some(response) = self.responses.push(News::end(index)) {
                        sender.send(Ok(response)).await;
                    }
                }
            }
            Waited::Failed(error) => {
                self.end_unplaced(None, &sender);
                sender.send(Err(error)).await;
            }
        }
        None
    }

    async fn wait_for_replica(&mut self, events: &mut Events, sender: &ResponseSender) -> Waited {
        loop {
            let Pending { admission, timeout, .. } = &mut self.pending;
            let ticket = match admission {
                Admission::Queued(ticket) => ticket,
                Admission::Placed(place) => {
                    self.timing.taken_by(&place.replica().shared);
                    return Waited::Placed;
                }
            };
            tokio::select! {
                place = ticket.place() => {
                    *admission = Admission::Placed(place);
                    if !self.pending.submit_if_placed() {
                        return Waited::Failed(InferError::new(ErrorKind::Unavailable, UNLOADED));
                    }
                }
                () = sender.cancelled() => return Waited::Left,
                Some(RequestEvent::Stop) = events.recv() => return Waited::Stopped,
                rejects = expired(*timeout) => match rejects {
                    true => return Waited::Failed(InferError::unavailable("Request timeout expired")),
                    false => {
                        ticket.delay();
                        *timeout = None;
                    }
                }
            }
        }
    }

    /// Counts the end of what no replica has seen.
    fn end_unplaced(&self, reason: Option<FinishReason>, sender: &ResponseSender) {
        self.ended.iter().for_each(|_| self.timing.ended(reason));
        sender.report(self.timing.generation());
    }

    /// The response that `event` completes, or the error that ends the request.
    fn take(&mut self, event: Option<RequestEvent>, sender: &ResponseSender) -> Option<Item> {
        match event {
            Some(RequestEvent::Token(token)) => {
                let (event, at) = token.open();
                return self.hear(event, at, sender).map(Ok);
            }
            Some(RequestEvent::Tokens(event, at)) => return self.hear(*event, at, sender).map(Ok),
            Some(RequestEvent::Accepted(sequences)) => {
                self.sequences = sequences;
                if self.is_cancelled {
                    self.cancel();
                }
            }
            Some(RequestEvent::Logits(piece)) => {
                if let Some(index) = self.index_of(piece.sequence) {
                    self.responses.keep_logits(index, &piece);
                }
            }
            Some(RequestEvent::Joined { sequence, at, start }) => {
                sender.mark_scheduled();
                if let Some(index) = self.index_of(sequence) {
                    self.timing.joined(index, at, start);
                    self.responses.joined(index, at);
                }
                sender.report(self.timing.generation());
            }
            Some(RequestEvent::Stop) => self.cancel(),
            Some(RequestEvent::Failed(error)) => {
                self.ended.iter().filter(|ended| !**ended).for_each(|_| self.timing.ended(None));
                sender.report(self.timing.generation());
                return Some(Err(error));
            }
            None => {
                sender.report(self.timing.generation());
                return Some(Err(InferError::new(ErrorKind::Unavailable, UNLOADED)));
            }
        }
        None
    }

    /// Counts a token whose response is the last one again, and puts what is new into `told`. False, and nothing is done,
    /// where it needs a response of its own.
    fn repeat(&mut self, token: &OneToken, told: &mut Changes) -> bool {
        let is_searched = !self.text_stops.is_empty() || self.ended.len() > self.sequences.len();
        let index = self.index_of(token.sequence).filter(|_| !is_searched);
        let Some(index) = index.filter(|&index| self.responses.repeat(index, token, told)) else { return false };
        self.timing.tokens(index, 1, token.at);
        true
    }

    fn has_ended(&self) -> bool {
        self.ended.iter().all(|&ended| ended)
    }

    fn index_of(&self, sequence: SequenceId) -> Option<usize> {
        self.sequences.iter().position(|&known| known == sequence)
    }

    /// Counts news of a sequence; the response that they complete.
    fn hear(&mut self, event: TokenEvent, at: Instant, sender: &ResponseSender) -> Option<InferResponse> {
        self.time(&event, at);
        sender.report(self.timing.generation());
        sender.computed_at(at);
        self.answer(event, at)
    }

    /// Counts news of a sequence, unless its end was told before.
    fn time(&mut self, event: &TokenEvent, at: Instant) {
        if let Some(index) = self.index_of(event.sequence).filter(|&index| !self.ended[index]) {
            self.timing.heard(index, event, at);
            if event.finished.is_some() {
                self.timing.ended(event.finished);
            }
        }
    }

    /// The response that news of a sequence complete.
    fn answer(&mut self, event: TokenEvent, at: Instant) -> Option<InferResponse> {
        if !event.beams.is_empty() || self.ended.len() > self.sequences.len() {
            return self.hear_beams(event, at);
        }
        let TokenEvent { sequence, tokens, finished, blocks, drafts, .. } = event;
        let index = self.sequences.iter().position(|&known| known == sequence)?;
        if self.ended[index] {
            // Sampled before the engine heard of a stop word in the text.
            return None;
        }
        let mut ends = finished.is_some();
        let tokens = match self.text_stops.get_mut(index) {
            None => tokens,
            Some(text_stop) => {
                let mut told = Tokens::new();
                if text_stop.push(tokens, ends, &mut told) && !ends {
                    ends = true;
                    self.timing.ended(Some(FinishReason::StopWord));
                    self.pending.send(Message::Finish(sequence));
                }
                told
            }
        };
        self.ended[index] = ends;
        self.responses.push(News { index, tokens, at, ends, blocks, drafts, cum_log_prob: None })
    }

    /// All beams at once, when their search has ended; empty ones when it was cancelled.
    fn hear_beams(&mut self, event: TokenEvent, at: Instant) -> Option<InferResponse> {
        event.finished?;
        let mut beams = event.beams.into_iter();
        let mut response = None;
        for index in 0..self.ended.len() {
            let beam = beams.next();
            let cum_log_prob = beam.as_ref().map(|beam| beam.cum_log_prob);
            let sampled =
                |(token, logprob)| SampledToken { row: RowId(0), token, logprob: Some(logprob), top: Vec::new() };
            let tokens = beam.into_iter().flat_map(|beam| beam.tokens).map(sampled).collect();
            // Blocks are the search's, so they count once.
            let blocks = if index == 0 { event.blocks } else { BlockUsage::default() };
            self.ended[index] = true;
            let news = News { index, tokens, at, ends: true, blocks, drafts: event.drafts, cum_log_prob };
            response = self.responses.push(news);
        }
        response
    }

    /// Has the replica end what has not ended; what is not known yet, once it is.
    fn cancel(&mut self) {
        self.is_cancelled = true;
        for (&sequence, _) in self.sequences.iter().zip(&self.ended).filter(|(_, ended)| !**ended) {
            self.pending.send(Message::Cancel(sequence));
        }
    }
}

/// A request that a replica has: its news, as responses.
struct Following {
    /// Until it has ended.
    request: Option<Heard>,
    /// Where a request whose client leaves is followed to its end.
    runtime: Handle,
}

struct Heard {
    task: RequestTask,
    events: Events,
    /// The next of them, where it came before it was asked for.
    next: Option<RequestEvent>,
    sender: ResponseSender,
}

impl Following {
    fn new(task: RequestTask, events: Events, sender: ResponseSender) -> Self {
        Self { request: Some(Heard { task, events, next: None, sender }), runtime: Handle::current() }
    }
}

impl Respond for Following {
    fn poll_respond(
        &mut self,
        takes_updates: bool,
        told: &mut Changes,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Update, InferError>>> {
        while let Some(Heard { task, events, next, sender }) = &mut self.request {
            let event = match next.take() {
                Some(event) => Some(event),
                None => ready!(events.poll_recv(context)),
            };
            if let Some(RequestEvent::Token(token)) = &event
                && takes_updates
                && task.repeat(token, told)
            {
                // Who asked need not ask again where nothing has come by now: that it waits is known here already.
                let rests = match events.poll_recv(context) {
                    Poll::Pending => true,
                    Poll::Ready(event) => {
                        *next = event;
                        false
                    }
                };
                return Poll::Ready(Some(Ok(Update::Again(Repeat::new(token.at, rests)))));
            }
            let response = task.take(event, sender);
            if matches!(response, Some(Err(_))) || task.has_ended() {
                self.request = None;
            }
            if let Some(response) = response {
                return Poll::Ready(Some(response.map(Update::from)));
            }
        }
        Poll::Ready(None)
    }
}

impl Drop for Following {
    /// The client has left, if anything is to come.
    fn drop(&mut self) {
        let Some(Heard { mut task, mut events, mut next, sender }) = self.request.take() else { return };
        sender.report(task.timing.generation()); // Tokens that were told as what is new are not reported one by one.
        task.cancel();
        self.runtime.spawn(async move {
            while !task.has_ended() {
                let event = match next.take() {
                    Some(event) => Some(event),
                    None => events.recv().await,
                };
                if let Some(Err(_)) = task.take(event, &sender) {
                    break;
                }
            }
        });
    }
}

impl Drop for RequestTask {
    fn drop(&mut self) {
        let mut by_id = self.by_id.lock().unwrap();
        if by_id.get(&self.client_id).is_some_and(|stop| Arc::ptr_eq(stop, &self.stop)) {
            by_id.remove(&self.client_id);
        }
        drop(by_id);
        self.in_flight.send_modify(|count| *count -= 1);
    }
}

/// Whether the request is refused, once it has waited for as long as it may.
async fn expired(timeout: Option<(Instant, bool)>) -> bool {
    match timeout {
        Some((at, rejects)) => {
            tokio::time::sleep_until(at.into()).await;
            rejects
        }
        None => std::future::pending().await,
    }
}
