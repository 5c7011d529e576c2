use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::sync::mpsc;
use std::task::Waker;

use engine::{
    BlockUsage, DraftUsage, Engine, EngineConfig, MovedSequence, Request, RowId, SampledToken, SequenceId, TokenEvent,
    TokenId,
};
use serving::{Name, OutputDelta, ResponseStream, StreamItem, Timestamp};
use smallvec::{SmallVec, smallvec};
use tokio::sync::watch;

use super::super::event_queue::tests::Count;
use super::super::inbox::{Inbox, Message};
use super::super::llm_stream::LlmStream;
use super::super::outputs;
use super::super::replica_state::ReplicaState;
use super::super::router::{Replica, Router};
use super::super::submission::{StopHandle, StopHandles, Submission};
use super::super::timing::Timing;
use super::*;

const SEQUENCE: SequenceId = SequenceId(7);

fn token(id: u32, finished: Option<FinishReason>) -> RequestEvent {
    token_of(SEQUENCE, id, finished)
}

fn token_of(sequence: SequenceId, id: u32, finished: Option<FinishReason>) -> RequestEvent {
    let token = SampledToken { row: RowId(0), token: TokenId(id), logprob: None, top: Vec::new() };
    let (blocks, drafts) = (BlockUsage::default(), DraftUsage::default());
    let tokens = [token].into_iter().collect();
    let event = TokenEvent { sequence, tokens, finished, blocks, drafts, beams: Vec::new(), error: None };
    RequestEvent::of(event, Timestamp::now())
}

/// A request of one sequence that a replica has taken: its responses, with deltas accepted, and where its events go.
fn running() -> (ResponseStream, event_queue::Sender, Arc<ReplicaState>) {
    let (stream, events, replicas) = running_on(1);
    (stream, events, Arc::clone(&replicas[0].0))
}

/// The state and the messages of each replica.
type Replicas = Vec<(Arc<ReplicaState>, mpsc::Receiver<Message>)>;

/// The same on several replicas. The first one has the request.
fn running_on(num_replicas: usize) -> (ResponseStream, event_queue::Sender, Replicas) {
    let replica = |_| {
        let shared = Arc::new(ReplicaState::default());
        shared.ready.store(true, Ordering::Release);
        shared.stats.lock().unwrap().num_blocks = 100;
        let (inbox, messages) = Inbox::new();
        (Replica { inbox, shared: Arc::clone(&shared) }, (shared, messages))
    };
    let (replicas, states): (Vec<_>, Vec<_>) = (0..num_replicas).map(replica).unzip();
    let shared = Arc::clone(&replicas[0].shared);
    let router = Arc::new(Router::new(replicas, 4, 4, 16));
    let admission = router.admit(&[TokenId(1)], 1, 0).unwrap();
    let (events, receiver) = event_queue::event_queue();
    let mut stream = ResponseStream::from_source(|progress| {
        let generating = ActiveRequest {
            client_id: Name::default(),
            submission: Submission { admission, submit: None, timeout: None },
            stop_handles: StopHandles::default(),
            stop: Arc::new(StopHandle::new(events.downgrade())),
            in_flight: Arc::new(watch::Sender::new(1)),
            _adapter: None,
            _logits: None,
            timing: Timing::new(&shared, 16, 1, 1),
            texts: SmallVec::new(),
            text_stops: Vec::new(),
            sequences: SmallVec::new(),
            moved: Vec::new(),
            ended: smallvec![false],
            is_cancelled: false,
            ready: VecDeque::new(),
        };
        let events = GenerateStream::new(generating, receiver);
        Box::new(LlmStream { events, responses: outputs::tests::streaming(), progress })
    });
    stream.accept_deltas();
    events.send(RequestEvent::Accepted(vec![SEQUENCE]));
    events.send(RequestEvent::Joined { sequence: SEQUENCE, at: Timestamp::now(), start: 0 });
    (stream, events, states)
}

/// A sequence that leaves its engine.
fn moved() -> MovedSequence {
    let mut engine = Engine::new(EngineConfig::default()).unwrap();
    engine.submit(Request { prompt: vec![TokenId(1)], max_tokens: 4, ..Request::default() }).unwrap();
    engine.take_sequences().pop().expect("it has one").1
}

#[tokio::test]
async fn a_drained_delta_is_marked_and_the_next_token_wakes_the_reader() {
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
    let values = shared.metrics.read();
    assert_eq!((values.inter_token.count, values.output_tokens.sum), (14, 15.0));
}

#[tokio::test]
async fn unread_tokens_are_counted_when_the_client_disconnects() {
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
    let values = shared.metrics.read();
    assert_eq!((values.ends.iter().sum::<u64>(), values.output_tokens.sum), (1, 3.0));
}

#[tokio::test]
async fn a_request_goes_on_at_another_replica_when_its_own_is_lost() {
    let (mut stream, events, replicas) = running_on(2);
    let mut delta = OutputDelta::default();
    let mut poll = || stream.poll_item(&mut delta, &mut Context::from_waker(Waker::noop()));
    events.send(token(10, None));
    assert!(matches!(poll(), Poll::Ready(Some(Ok(StreamItem::Response(_))))));
    replicas[0].0.is_lost.store(true, Ordering::Release);
    events.send(RequestEvent::Moved(SEQUENCE, moved()));
    drop(events); // The lost replica forgets it.
    assert!(poll().is_pending());
    let Ok(Message::Adopt { sequences, timeout: None, events }) = replicas[1].1.try_recv() else {
        panic!("it was not sent to the other replica")
    };
    assert_eq!(sequences.len(), 1);
    let sequence = SequenceId(3);
    events.send(RequestEvent::Accepted(vec![sequence]));
    events.send(RequestEvent::Joined { sequence, at: Timestamp::now(), start: 0 });
    events.send(token_of(sequence, 11, None));
    events.send(token_of(sequence, 12, Some(FinishReason::Length)));
    assert!(matches!(poll(), Poll::Ready(Some(Ok(StreamItem::Delta(_))))));
    assert!(matches!(poll(), Poll::Ready(Some(Ok(StreamItem::Response(response)))) if response.is_final));
    assert!(matches!(poll(), Poll::Ready(None)));
    let generation = stream.generation().unwrap();
    assert_eq!((generation.output_tokens, generation.preempted), (3, 0));
    drop(stream);
    let [first, second] = [0, 1].map(|index: usize| replicas[index].0.metrics.read());
    assert_eq!((first.input_tokens.count, first.ends.iter().sum::<u64>()), (1, 0));
    assert_eq!((second.input_tokens.count, second.ends.iter().sum::<u64>()), (0, 1));
}

#[tokio::test]
async fn a_request_whose_client_has_left_ends_with_its_replica() {
    let (mut stream, events, replicas) = running_on(2);
    let mut delta = OutputDelta::default();
    assert!(stream.poll_item(&mut delta, &mut Context::from_waker(Waker::noop())).is_pending());
    drop(stream);
    events.send(RequestEvent::Moved(SEQUENCE, moved()));
    while !events.is_closed() {
        tokio::task::yield_now().await;
    }
    assert!(replicas[1].1.try_recv().is_err(), "it was sent to the other replica");
    assert_eq!(replicas[0].0.metrics.read().ends.iter().sum::<u64>(), 1);
}
