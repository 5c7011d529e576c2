//! One request in flight: turns its sequences' events into responses, and its client's leaving into cancels.

use std::collections::{HashMap, VecDeque};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::task::{Context, Poll, ready};
use std::time::Instant;

use engine::{BlockUsage, FinishReason, RowId, SampledToken, SequenceId, TokenEvent};
use futures::FutureExt as _;
use futures::future::BoxFuture;
use serving::{
    DeltaInfo, ErrorKind, InferError, Name, OutputDelta, ProgressReporter, ResponseSource, StreamItem, Timestamp,
};
use tokio::runtime::Handle;
use tokio::sync::watch;

use super::event_queue::{self, WeakSender};
use super::inbox::{Message, RequestEvent};
use super::logits::LogitsCharge;
use super::outputs::{Answer, News, Responses, Tokens};
use super::router::Admission;
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
    /// The client asked to end it.
    Stopped,
    Failed(InferError),
}

type Events = event_queue::Receiver;

type Item = Result<StreamItem, InferError>;

/// What the task of a request is made of.
pub(crate) struct RequestTask {
    pub(crate) client_id: Name,
    pub(crate) pending: Pending,
    pub(crate) by_id: ById,
    /// The client asks to end it.
    pub(crate) stop: Arc<Stop>,
    pub(crate) in_flight: Arc<watch::Sender<usize>>,
    pub(crate) responses: Responses,
    pub(crate) progress: ProgressReporter,
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
    /// Waits until a replica takes the request.
    async fn wait(mut self: Box<Self>, mut events: Events) -> (Box<Self>, Events, Waited) {
        let waited = self.wait_for_replica(&mut events).await;
        (self, events, waited)
    }

    async fn wait_for_replica(&mut self, events: &mut Events) -> Waited {
        loop {
            let Pending { admission, timeout, .. } = &mut self.pending;
            let ticket = match admission {
                Admission::Queued(ticket) => ticket,
                Admission::Placed(_) => return Waited::Placed,
            };
            tokio::select! {
                place = ticket.place() => {
                    *admission = Admission::Placed(place);
                    if !self.pending.submit_if_placed() {
                        return Waited::Failed(InferError::new(ErrorKind::Unavailable, UNLOADED));
                    }
                }
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

    /// The replica that has the request counts it from now on.
    fn placed(&mut self) {
        if let Admission::Placed(place) = &self.pending.admission {
            self.timing.taken_by(&place.replica().shared);
        }
    }

    /// Counts the end of what no replica has seen.
    fn end_unplaced(&mut self, reason: Option<FinishReason>) {
        self.ended.iter_mut().for_each(|ended| *ended = true);
        self.ended.iter().for_each(|_| self.timing.ended(reason));
        self.progress.report(self.timing.generation());
    }

    /// The empty responses to a request that its client ended before a replica took it.
    fn stopped(&mut self) -> VecDeque<Item> {
        self.end_unplaced(Some(FinishReason::Cancelled));
        let end = |index| self.responses.push(News::end(index), false, &mut OutputDelta::default());
        let answers = (0..self.ended.len()).filter_map(end);
        answers.filter_map(|answer| answer.into_item(None)).map(Ok).collect()
    }

    /// What `event` leads to: an item of the stream, or the error that ends it.
    fn take(
        &mut self,
        event: Option<RequestEvent>,
        accepts_deltas: bool,
        delta: &mut OutputDelta,
    ) -> Option<Result<Answer, InferError>> {
        match event {
            Some(RequestEvent::Token(token)) => {
                let (event, at) = token.open();
                return self.hear(event, at.into(), accepts_deltas, delta).map(Ok);
            }
            Some(RequestEvent::Tokens(event, at)) => {
                return self.hear(*event, at.into(), accepts_deltas, delta).map(Ok);
            }
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
                self.progress.mark_scheduled();
                if let Some(index) = self.index_of(sequence) {
                    self.timing.joined(index, at, start);
                    self.responses.joined(index, at);
                }
                self.progress.report(self.timing.generation());
            }
            Some(RequestEvent::Stop) => self.cancel(),
            Some(RequestEvent::Failed(error)) => {
                self.ended.iter().filter(|ended| !**ended).for_each(|_| self.timing.ended(None));
                return Some(Err(error));
            }
            None => return Some(Err(InferError::new(ErrorKind::Unavailable, UNLOADED))),
        }
        None
    }

    fn has_ended(&self) -> bool {
        self.ended.iter().all(|&ended| ended)
    }

    fn index_of(&self, sequence: SequenceId) -> Option<usize> {
        self.sequences.iter().position(|&known| known == sequence)
    }

    /// Counts news of a sequence; the answer that they complete.
    fn hear(
        &mut self,
        event: TokenEvent,
        at: Instant,
        accepts_deltas: bool,
        delta: &mut OutputDelta,
    ) -> Option<Answer> {
        self.time(&event, at);
        let answer = self.answer(event, at, accepts_deltas, delta);
        if let Some(Answer::Response(_)) = answer {
            // Deltas are reported with the next complete response, and when the stream ends.
            self.progress.report(self.timing.generation());
            self.progress.computed_at(at);
        }
        answer
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

    /// The answer that news of a sequence complete.
    fn answer(
        &mut self,
        event: TokenEvent,
        at: Instant,
        accepts_deltas: bool,
        delta: &mut OutputDelta,
    ) -> Option<Answer> {
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
        let news = News { index, tokens, at, ends, blocks, drafts, cum_log_prob: None };
        self.responses.push(news, accepts_deltas, delta)
    }

    /// All beams at once, when their search has ended; empty ones when it was cancelled.
    fn hear_beams(&mut self, event: TokenEvent, at: Instant) -> Option<Answer> {
        event.finished?;
        let mut beams = event.beams.into_iter();
        let mut answer = None;
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
            answer = self.responses.push(news, false, &mut OutputDelta::default());
        }
        answer
    }

    /// Has the replica end what has not ended; what is not known yet, once it is.
    fn cancel(&mut self) {
        self.is_cancelled = true;
        for (&sequence, _) in self.sequences.iter().zip(&self.ended).filter(|(_, ended)| !**ended) {
            self.pending.send(Message::Cancel(sequence));
        }
    }
}

/// The responses to one request. When it is dropped before the end, its sequences are cancelled.
pub(crate) struct LlmStream {
    state: State,
    /// Where a request whose client leaves is followed to its end.
    runtime: Handle,
}

enum State {
    /// Until a replica takes the request.
    Waiting(BoxFuture<'static, (Box<RequestTask>, Events, Waited)>),
    Running(Box<RequestTask>, Events),
    /// Only these items are left.
    Ending(VecDeque<Item>),
}

impl LlmStream {
    /// The responses that come of `events`.
    pub(crate) fn new(mut task: Box<RequestTask>, events: Events) -> Self {
        let state = match task.pending.admission {
            Admission::Placed(_) => {
                task.placed();
                State::Running(task, events)
            }
            Admission::Queued(_) => State::Waiting(task.wait(events).boxed()),
        };
        Self { state, runtime: Handle::current() }
    }
}

impl Answer {
    /// The item of a stream; a delta needs the time when it was computed and whether nothing follows it now.
    fn into_item(self, computed: Option<(Timestamp, bool)>) -> Option<StreamItem> {
        match self {
            Answer::Response(response) => Some(StreamItem::Response(response)),
            Answer::Delta(observed) => {
                let (computed, is_drained) = computed?;
                Some(StreamItem::Delta(DeltaInfo { is_drained, computed, observed }))
            }
        }
    }
}

impl ResponseSource for LlmStream {
    fn poll_next(
        &mut self,
        accepts_deltas: bool,
        delta: &mut OutputDelta,
        context: &mut Context<'_>,
    ) -> Poll<Option<Item>> {
        loop {
            match &mut self.state {
                State::Waiting(waiting) => {
                    let (mut task, events, waited) = ready!(waiting.poll_unpin(context));
                    self.state = match waited {
                        Waited::Placed => {
                            task.placed();
                            State::Running(task, events)
                        }
                        Waited::Stopped => State::Ending(task.stopped()),
                        Waited::Failed(error) => {
                            task.end_unplaced(None);
                            State::Ending(VecDeque::from([Err(error)]))
                        }
                    };
                }
                State::Ending(items) => return Poll::Ready(items.pop_front()),
                State::Running(task, events) => {
                    let received = ready!(events.poll_receive(context));
                    let (event, is_drained) = received.map(|it| (it.event, it.is_drained)).unzip();
                    let computed = match &event {
                        Some(RequestEvent::Token(token)) => Some(token.at),
                        Some(RequestEvent::Tokens(_, at)) => Some(*at),
                        _ => None,
                    };
                    let answer = task.take(event, accepts_deltas, delta);
                    let item = match answer {
                        None => None,
                        Some(Ok(answer)) => answer.into_item(computed.zip(is_drained)).map(Ok),
                        Some(Err(error)) => Some(Err(error)),
                    };
                    if matches!(item, Some(Err(_))) || task.has_ended() {
                        task.progress.report(task.timing.generation());
                        self.state = State::Ending(VecDeque::new());
                    }
                    if item.is_some() {
                        return Poll::Ready(item);
                    }
                }
            }
        }
    }
}

impl Drop for LlmStream {
    /// The client has left, if anything is to come.
    fn drop(&mut self) {
        let State::Running(mut task, mut events) = std::mem::replace(&mut self.state, State::Ending(VecDeque::new()))
        else {
            return;
        };
        task.progress.report(task.timing.generation());
        task.cancel();
        self.runtime.spawn(async move {
            while !task.has_ended() {
                let event = events.receive().await;
                if let Some(Err(_)) = task.take(event, false, &mut OutputDelta::default()) {
                    break;
                }
            }
            task.progress.report(task.timing.generation());
        });
    }
}

impl Drop for RequestTask {
    fn drop(&mut self) {
        if let Admission::Queued(_) = self.pending.admission
            && !self.has_ended()
        {
            self.end_unplaced(Some(FinishReason::Cancelled)); // The client left before a replica took the request.
        }
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
    use serving::ResponseStream;

    use super::super::event_queue::tests::Count;
    use super::super::inbox::Inbox;
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
        RequestEvent::of(event, Timestamp::now())
    }

    /// A request of one sequence that a replica has taken: its responses, with deltas accepted, and where its events go.
    fn running() -> (ResponseStream, event_queue::Sender, Arc<Shared>) {
        let shared = Arc::new(Shared::default());
        shared.ready.store(true, Ordering::Release);
        shared.stats.lock().unwrap().num_blocks = 100;
        let replica = Replica { inbox: Inbox::new().0, shared: Arc::clone(&shared) };
        let router = Arc::new(Router::new(vec![replica], 4, 4, 16));
        let admission = router.admit(&[TokenId(1)], 1, 0).unwrap();
        let (events, receiver) = event_queue::event_queue();
        let mut stream = ResponseStream::from_source(|progress| {
            let task = RequestTask {
                client_id: Name::default(),
                pending: Pending { admission, submit: None, timeout: None },
                by_id: ById::default(),
                stop: Arc::new(Stop::new(events.downgrade())),
                in_flight: Arc::new(watch::Sender::new(1)),
                responses: outputs::tests::streaming(),
                progress,
                _logits: None,
                timing: Timing::new(&shared, 16, 1, 1),
                text_stops: Vec::new(),
                sequences: Vec::new(),
                ended: vec![false],
                is_cancelled: false,
            };
            Box::new(LlmStream::new(Box::new(task), receiver))
        });
        stream.accept_deltas();
        events.send(RequestEvent::Accepted(vec![SEQUENCE]));
        events.send(RequestEvent::Joined { sequence: SEQUENCE, at: Instant::now(), start: 0 });
        (stream, events, shared)
    }

    #[tokio::test]
    async fn a_delta_says_that_nothing_follows_it_and_the_next_token_wakes_the_reader() {
        let (mut stream, events, shared) = running();
        let woken = Arc::<Count>::default();
        let waker = Waker::from(Arc::clone(&woken));
        let mut delta = OutputDelta::default();
        let mut poll = || stream.poll_item(&mut delta, &mut Context::from_waker(&waker));
        let num_woken = || woken.0.load(Ordering::SeqCst);
        assert!(poll().is_pending());
        events.send(token(10, None));
        assert_eq!(num_woken(), 1);
        assert!(matches!(poll(), Poll::Ready(Some(Ok(StreamItem::Response(_))))));
        assert!(poll().is_pending());
        for id in 11..20 {
            events.send(token(id, None));
            assert_eq!(num_woken(), id as usize - 9, "a wake-up was lost");
            let Poll::Ready(Some(Ok(StreamItem::Delta(info)))) = poll() else { panic!("{id}") };
            assert!(info.is_drained, "{id}");
        }
        for id in 20..23 {
            events.send(token(id, None));
        }
        assert_eq!(num_woken(), 11);
        for is_drained in [false, false, true] {
            let Poll::Ready(Some(Ok(StreamItem::Delta(info)))) = poll() else { panic!("three have come") };
            assert_eq!(info.is_drained, is_drained);
        }
        events.send(token(23, None));
        events.send(token(24, Some(FinishReason::Length)));
        assert_eq!(num_woken(), 12);
        let Poll::Ready(Some(Ok(StreamItem::Delta(info)))) = poll() else { panic!("one and the last have come") };
        assert!(!info.is_drained);
        assert!(matches!(poll(), Poll::Ready(Some(Ok(StreamItem::Response(response)))) if response.is_final));
        assert!(matches!(poll(), Poll::Ready(None)));
        let generation = stream.generation().unwrap();
        assert_eq!(generation.output_tokens, 15);
        assert!(generation.decode > std::time::Duration::ZERO);
        drop(stream);
        let values = shared.figures.read();
        assert_eq!((values.inter_token.count, values.output_tokens.sum), (14, 15.0));
    }

    #[tokio::test]
    async fn what_was_not_read_is_counted_when_the_client_leaves() {
        let (mut stream, events, shared) = running();
        let mut delta = OutputDelta::default();
        let mut poll = || stream.poll_item(&mut delta, &mut Context::from_waker(Waker::noop()));
        events.send(token(10, None));
        events.send(token(11, None));
        events.send(token(12, Some(FinishReason::Length)));
        assert!(matches!(poll(), Poll::Ready(Some(Ok(StreamItem::Response(_))))));
        assert!(matches!(poll(), Poll::Ready(Some(Ok(StreamItem::Delta(_))))));
        drop(stream);
        while !events.is_closed() {
            tokio::task::yield_now().await;
        }
        let values = shared.figures.read();
        assert_eq!((values.ends.iter().sum::<u64>(), values.output_tokens.sum), (1, 3.0));
    }
}
