//! One request in flight: turns its sequences' events into responses, and its client's leaving into cancels.

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::task::{Context, Poll, ready};
use std::time::Instant;

use engine::{BlockUsage, FinishReason, RowId, SampledToken, SequenceId, TokenEvent};
use serving::{Changes, ErrorKind, InferError, InferResponse, Name, Repeat, Respond, ResponseSender, Update};
use tokio::runtime::Handle;
use tokio::sync::watch;

use super::inbox::{Message, RequestEvent};
use super::logits::LogitsCharge;
use super::mailbox::{self, WeakSender};
use super::outputs::{News, Responses, Tokens};
use super::router::Admission;
use super::steady::Steady;
use super::text_stop::TextStop;
use super::timing::Timing;

/// What a client hears of a model that goes.
const UNLOADED: &str = "the model was unloaded while the request ran";

/// Where to tell requests that they are to end, by the client's request id.
pub(crate) type ById = Arc<Mutex<HashMap<Name, Arc<Stop>>>>;

/// Ends a request for a client that asks for it.
pub(crate) struct Stop {
    events: WeakSender,
    is_told: AtomicBool,
}

impl Stop {
    pub(crate) fn new(events: WeakSender) -> Self {
        Self { events, is_told: AtomicBool::new(false) }
    }

    /// Tells the request, if somebody may still tell it anything: once, however often a client asks.
    pub(crate) fn tell(&self) {
        if !self.is_told.swap(true, Ordering::Relaxed) {
            self.events.send(RequestEvent::Stop);
        }
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

type Events = mailbox::Receiver;

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
    /// Held until the request has ended.
    pub(crate) _logits: Option<LogitsCharge>,
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
                Some(RequestEvent::Stop) = events.receive() => return Waited::Stopped,
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
                return self.hear(event, at.into(), sender).map(Ok);
            }
            Some(RequestEvent::Tokens(event, at)) => return self.hear(*event, at.into(), sender).map(Ok),
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

    /// The sequence whose next token only repeats the last response, if one does.
    fn steady(&self) -> Option<Steady> {
        let is_plain = self.text_stops.is_empty() && self.ended.len() <= self.sequences.len();
        if is_plain { self.responses.steady(&self.sequences, self.timing.shared()) } else { None }
    }

    /// Takes over what has come of a sequence in short.
    fn catch_up(&mut self, steady: Option<Steady>) {
        if let Some(steady) = steady.filter(|steady| steady.num_new > 0) {
            self.responses.catch_up(&steady);
            self.timing.catch_up(&steady);
        }
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
    near: Near,
    task: RequestTask,
    sender: ResponseSender,
}

/// What nearly all news need.
struct Near {
    events: Events,
    /// Where the next token only repeats the last response.
    steady: Option<Steady>,
}

impl Following {
    fn new(task: RequestTask, events: Events, sender: ResponseSender) -> Self {
        let near = Near { events, steady: None };
        Self { request: Some(Heard { near, task, sender }), runtime: Handle::current() }
    }
}

impl Respond for Following {
    fn poll_respond(
        &mut self,
        takes_updates: bool,
        told: &mut Changes,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Update, InferError>>> {
        while let Some(Heard { near: Near { events, steady }, task, sender }) = &mut self.request {
            let (event, rests) = ready!(events.poll_receive(context)).map(|it| (it.event, it.rests)).unzip();
            if let (Some(RequestEvent::Token(token)), Some(steady), true) = (&event, steady.as_mut(), takes_updates)
                && token.sequence == steady.sequence
            {
                steady.take(token);
                task.responses.repeat(steady, token, told);
                let rests = rests == Some(true); // Then who asked need not ask again.
                return Poll::Ready(Some(Ok(Update::Again(Repeat::new(token.at, rests)))));
            }
            task.catch_up(steady.take());
            let response = task.take(event, sender);
            if takes_updates {
                *steady = task.steady();
            }
            if matches!(response, Some(Err(_))) || task.has_ended() {
                self.request = None;
            }
            if let Some(response) = response {
                return Poll::Ready(Some(response.map(Update::from)));
            }
        }
        Poll::Ready(None)
    }

    fn fetch(&self, depth: usize) {
        if let (Some(heard), 0) = (&self.request, depth) {
            heard.near.events.fetch();
        }
    }
}

impl Drop for Following {
    /// The client has left, if anything is to come.
    fn drop(&mut self) {
        let Some(Heard { near, mut task, sender }) = self.request.take() else { return };
        let Near { mut events, steady } = near;
        task.catch_up(steady);
        sender.report(task.timing.generation()); // What was told in short is not reported token by token.
        task.cancel();
        self.runtime.spawn(async move {
            while !task.has_ended() {
                let event = events.receive().await;
                if let Some(Err(_)) = task.take(event, &sender) {
                    break;
                }
            }
        });
    }
}

impl Drop for RequestTask {
    fn drop(&mut self) {
        let mut by_id = ipc::lock(&self.by_id);
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

#[cfg(test)]
mod tests {
    use std::task::Waker;

    use engine::{DraftUsage, TokenId};
    use serving::{Moment, ResponseStream};

    use super::super::inbox::Inbox;
    use super::super::mailbox::tests::Count;
    use super::super::outputs;
    use super::super::router::{Replica, Router};
    use super::super::step_thread::Shared;
    use super::*;

    const SEQUENCE: SequenceId = SequenceId(7);

    fn token(id: u32, finished: Option<FinishReason>) -> RequestEvent {
        let token = SampledToken { row: RowId(0), token: TokenId(id), logprob: None, top: Vec::new() };
        let (blocks, drafts) = (BlockUsage::default(), DraftUsage::default());
        let tokens = [token].into_iter().collect();
        let event = TokenEvent { sequence: SEQUENCE, tokens, finished, blocks, drafts, beams: Vec::new() };
        RequestEvent::of(event, Moment::now())
    }

    /// A request of one sequence that a replica has taken, what it hears, and the stream of its sender.
    fn following() -> (Following, mailbox::Sender, ResponseStream, Arc<Shared>) {
        let shared = Arc::new(Shared::default());
        shared.ready.store(true, Ordering::Release);
        shared.stats.lock().unwrap().num_blocks = 100;
        let replica = Replica { inbox: Inbox::new().0, shared: Arc::clone(&shared) };
        let router = Arc::new(Router::new(vec![replica], 4, 4, 16));
        let admission = router.admit(&[TokenId(1)], 1, 0).unwrap();
        let (events, receiver) = mailbox::mailbox();
        let (sender, stream) = ResponseStream::channel(1);
        let task = RequestTask {
            client_id: Name::default(),
            pending: Pending { admission, submit: None, timeout: None },
            by_id: ById::default(),
            stop: Arc::new(Stop::new(events.downgrade())),
            in_flight: Arc::new(watch::Sender::new(1)),
            responses: outputs::tests::repeatable(),
            _logits: None,
            timing: Timing::new(&shared, 16, 1, 1),
            text_stops: Vec::new(),
            sequences: Vec::new(),
            ended: vec![false],
            is_cancelled: false,
        };
        events.send(RequestEvent::Accepted(vec![SEQUENCE]));
        events.send(RequestEvent::Joined { sequence: SEQUENCE, at: Instant::now(), start: 0 });
        (Following::new(task, receiver, sender), events, stream, shared)
    }

    #[tokio::test]
    async fn a_token_says_that_nothing_follows_it_and_the_next_one_wakes_who_did_not_ask_again() {
        let (mut following, events, stream, shared) = following();
        let woken = Arc::<Count>::default();
        let waker = Waker::from(Arc::clone(&woken));
        let mut told = Changes::default();
        let mut poll = || following.poll_respond(true, &mut told, &mut Context::from_waker(&waker));
        let num_woken = || woken.0.load(Ordering::SeqCst);
        assert!(poll().is_pending());
        events.send(token(10, None));
        assert_eq!(num_woken(), 1);
        assert!(matches!(poll(), Poll::Ready(Some(Ok(Update::Response(_))))));
        assert!(poll().is_pending());
        for id in 11..20 {
            events.send(token(id, None));
            assert_eq!(num_woken(), id as usize - 9, "a wake-up was lost");
            let Poll::Ready(Some(Ok(Update::Again(repeat)))) = poll() else { panic!("{id}") };
            assert!(repeat.rests, "{id}");
        }
        for id in 20..23 {
            events.send(token(id, None));
        }
        assert_eq!(num_woken(), 11);
        for rests in [false, false, true] {
            let Poll::Ready(Some(Ok(Update::Again(repeat)))) = poll() else { panic!("three have come") };
            assert_eq!(repeat.rests, rests);
        }
        events.send(token(23, None));
        events.send(token(24, Some(FinishReason::Length)));
        assert_eq!(num_woken(), 12);
        let Poll::Ready(Some(Ok(Update::Again(repeat)))) = poll() else { panic!("one and the last have come") };
        assert!(!repeat.rests);
        assert!(matches!(poll(), Poll::Ready(Some(Ok(Update::Response(response)))) if response.is_final));
        assert!(matches!(poll(), Poll::Ready(None)));
        let generation = stream.generation().unwrap();
        assert_eq!(generation.output_tokens, 15);
        assert!(generation.decode > std::time::Duration::ZERO);
        let values = shared.figures.read();
        assert_eq!((values.inter_token.count, values.output_tokens.sum), (14, 15.0));
    }

    #[tokio::test]
    async fn what_was_looked_at_and_not_asked_for_is_not_lost_when_the_client_leaves() {
        let (mut following, events, stream, shared) = following();
        let mut told = Changes::default();
        let mut poll = || following.poll_respond(true, &mut told, &mut Context::from_waker(Waker::noop()));
        events.send(token(10, None));
        events.send(token(11, None));
        events.send(token(12, Some(FinishReason::Length)));
        assert!(matches!(poll(), Poll::Ready(Some(Ok(Update::Response(_))))));
        assert!(matches!(poll(), Poll::Ready(Some(Ok(Update::Again(_))))));
        drop(following);
        assert_eq!(stream.generation().unwrap().output_tokens, 2, "what was told in short is told on leaving");
        while !events.is_closed() {
            tokio::task::yield_now().await;
        }
        assert_eq!(stream.generation().unwrap().output_tokens, 3);
        assert_eq!(shared.figures.read().ends.iter().sum::<u64>(), 1);
    }
}
