use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::task::Waker;

use engine::{BlockUsage, DraftUsage, RowId, SampledToken, SequenceId, TokenEvent, TokenId};
use serving::{Name, OutputDelta, ResponseStream, StreamItem, Timestamp};
use smallvec::{SmallVec, smallvec};
use tokio::sync::watch;

use super::super::event_queue::tests::Count;
use super::super::inbox::Inbox;
use super::super::llm_stream::LlmStream;
use super::super::outputs;
use super::super::replica_state::ReplicaState;
use super::super::router::{Replica, Router};
use super::super::submission::{StopHandle, StopHandles, Submission};
use super::super::timing::Timing;
use super::*;

const SEQUENCE: SequenceId = SequenceId(7);

fn token(id: u32, finished: Option<FinishReason>) -> RequestEvent {
    let token = SampledToken { row: RowId(0), token: TokenId(id), logprob: None, top: Vec::new() };
    let (blocks, drafts) = (BlockUsage::default(), DraftUsage::default());
    let tokens = [token].into_iter().collect();
    let event = TokenEvent { sequence: SEQUENCE, tokens, finished, blocks, drafts, beams: Vec::new(), error: None };
    RequestEvent::of(event, Timestamp::now())
}

/// A request of one sequence that a replica has taken: its responses, with deltas accepted, and where its events go.
fn running() -> (ResponseStream, event_queue::Sender, Arc<ReplicaState>) {
    let shared = Arc::new(ReplicaState::default());
    shared.ready.store(true, Ordering::Release);
    shared.stats.lock().unwrap().num_blocks = 100;
    let replica = Replica { inbox: Inbox::new().0, shared: Arc::clone(&shared) };
    let router = Arc::new(Router::new(vec![replica], 4, 4, 16));
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
    (stream, events, shared)
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
