use std::sync::atomic::AtomicBool;
use std::sync::{Mutex, Weak};
use std::task::{Context, Wake, Waker};

use engine::{Request, RowId, SampledToken, StepOutput, TokenId, plan};
use ipc::{Received, Ring, RingReceiver, RingSender};
use supervision::{FromAgent, Nodes, ShmName, ToAgent, ToWorker, WorkerId};
use tokio::runtime::Handle;

use super::super::config::tests::llm_config;
use super::super::event_queue;
use super::super::host_share::HostShare;
use super::super::router::Replica;
use super::*;

/// Panics when it is woken.
struct Panics;

impl Wake for Panics {
    fn wake(self: Arc<Self>) {
        panic!("a waker broke");
    }
}

/// What the workers say of their host memory, and the slots there that they get at each start.
#[derive(Default)]
struct HostRoom {
    has_room: bool,
    num_blocks: Mutex<Vec<usize>>,
}

/// A worker that chooses token 7 for every row, until it gets the message to end.
fn work(agents: &Weak<Agents>, prefix: &Prefix, worker: WorkerId, is_over: &AtomicBool, host: &HostRoom) {
    let name = |kind: &str| format!("{kind}_{}", worker.instance);
    let rings = ["plans", "outputs"].map(|kind| Ring::create(prefix, &name(kind), 1 << 20).unwrap());
    let mut plans = RingReceiver::open(prefix, &name("plans")).unwrap();
    let mut outputs = RingSender::open(prefix, &name("outputs")).unwrap();
    let ring = |kind: &str| ShmName { prefix: prefix.to_string(), name: name(kind) };
    let (plan_ring, output_ring, pid) = (ring("plans"), ring("outputs"), std::process::id());
    let started = FromAgent::Started { worker, pid, rank_pid: pid, node: String::new(), plan_ring, output_ring };
    agents.upgrade().unwrap().deliver(started);
    let mut bytes = Vec::new();
    let mut send = |message: &FromWorker| {
        let mut bytes = Vec::new();
        plan::encode(message, &mut bytes);
        outputs.send(&bytes, Duration::from_secs(10)).unwrap();
    };
    let sizes = (1, 1, 1);
    send(&FromWorker::Loaded {
        weights_bytes: sizes.0,
        workspace_bytes: sizes.1,
        block_bytes: sizes.2,
        fits: [64, 0],
        fits_again: [64, 0],
        state_bytes: 0,
        has_host_room: host.has_room,
        has_host_copies: false,
        phases: Vec::new(),
    });
    while !is_over.load(Ordering::Acquire) {
        match plans.recv(&mut bytes, Duration::from_millis(5)) {
            Ok(Received::Message) => {}
            Ok(_) => continue,
            Err(_) => break,
        }
        match plan::decode(&bytes).unwrap() {
            ToWorker::Configure { num_host_blocks, .. } => {
                host.num_blocks.lock().unwrap().push(num_host_blocks);
                send(&FromWorker::Ready { slot_bytes: [0; 2] });
            }
            ToWorker::Step(StepPlan { step, work, .. }) => {
                let sampled = |row: RowId| SampledToken { row, token: TokenId(7), logprob: None, top: Vec::new() };
                let tokens = work.iter().filter(|work| work.samples).map(|work| sampled(work.row)).collect();
                send(&FromWorker::Output(StepOutput { step, tokens, guesses: vec![] }));
            }
            ToWorker::Stop => break,
            ToWorker::Sleep => send(&FromWorker::Slept { refused: None }),
            ToWorker::Wake { .. } => send(&FromWorker::Ready { slot_bytes: [0; 2] }),
            ToWorker::Adapter(_) | ToWorker::Exchanged { .. } | ToWorker::Masks(_) => {}
        }
    }
    drop(rings);
}

/// Agents of a world of one rank, whose workers are threads of this process.
fn agents(prefix: Prefix, host: &Arc<HostRoom>) -> Arc<Agents> {
    let host = Arc::clone(host);
    Arc::new_cyclic(move |agents: &Weak<Agents>| {
        let (agents, over) = (agents.clone(), Mutex::new(BTreeMap::<u64, Arc<AtomicBool>>::new()));
        Agents::new(1, Nodes::one(1), move |_, message| match message {
            ToAgent::Start(worker, _) => {
                let is_over = Arc::<AtomicBool>::default();
                over.lock().unwrap().insert(worker.instance, Arc::clone(&is_over));
                let (agents, prefix, host) = (agents.clone(), prefix.clone(), Arc::clone(&host));
                std::thread::spawn(move || work(&agents, &prefix, worker, &is_over, &host));
            }
            ToAgent::Kill(worker) | ToAgent::Stop(worker) => {
                over.lock().unwrap().get(&worker.instance).unwrap().store(true, Ordering::Release);
            }
            _ => {}
        })
    })
}

fn request(prompt: &[u32], max_tokens: u32) -> Request {
    Request { prompt: prompt.iter().copied().map(TokenId).collect(), max_tokens, ..Request::default() }
}

async fn next(events: &mut event_queue::Receiver) -> Option<RequestEvent> {
    tokio::time::timeout(Duration::from_secs(60), events.receive()).await.expect("no event came")
}

/// The sequence of an accepted request.
async fn accepted(events: &mut event_queue::Receiver) -> SequenceId {
    match next(events).await {
        Some(RequestEvent::Accepted(sequences)) => sequences[0],
        other => panic!("{other:?}"),
    }
}

/// A thread with these workers, and its inbox.
fn step_thread(config: LlmConfig, prefix: &str, host: &Arc<HostRoom>) -> (StepThread, Inbox) {
    let prefix: Prefix = format!("{prefix}{}_", std::process::id()).parse().unwrap();
    let (inbox, messages) = Inbox::new();
    let shared = Arc::<ReplicaState>::default();
    let replica = Replica { inbox: inbox.clone(), shared: Arc::clone(&shared) };
    let thread = StepThread {
        config,
        replica: 0,
        router: Arc::new(Router::new(vec![replica], 8, 8, 16)),
        agents: agents(prefix.clone(), host),
        prefix,
        inbox: inbox.clone(),
        messages,
        dispatcher: Dispatcher::start(&Handle::current()),
        shared,
        log: None,
    };
    (thread, inbox)
}

/// A worker has 64 blocks of a byte on its device.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_replica_takes_of_the_share_at_most_twice_its_cache_and_gives_it_back() {
    let started = async |share: &Arc<HostShare>, has_room: bool, name: &str| {
        let host = Arc::new(HostRoom { has_room, ..HostRoom::default() });
        let config = LlmConfig { host_share: Some(Arc::clone(share)), ..llm_config() }.of_replica(0);
        let (thread, inbox) = step_thread(config, name, &host);
        let (loaded, is_loaded) = oneshot::channel();
        let steps = std::thread::spawn(move || thread.run(loaded));
        assert_eq!(is_loaded.await.unwrap(), Ok(()));
        let left = share.left(0..1);
        let (done, is_done) = oneshot::channel();
        inbox.send(Message::Stop { done });
        is_done.await.unwrap();
        steps.join().unwrap();
        (host.num_blocks.lock().unwrap().clone(), left)
    };
    for (bytes, has_room, taken) in [(1000, true, 128), (100, true, 100), (1000, false, 0), (0, true, 0)] {
        let share = Arc::new(HostShare::new(4 * bytes, 1, 1));
        let (num_blocks, left) = started(&share, has_room, &format!("share{has_room}{bytes}_")).await;
        assert_eq!((num_blocks, left), (vec![taken], bytes - taken as u64), "{bytes} bytes");
        assert_eq!(share.left(0..1), bytes, "the replica has ended");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_panic_ends_the_requests_in_flight_with_an_error_and_the_model_serves_again() {
    let (thread, inbox) = step_thread(llm_config(), "steps", &Arc::default());
    let shared = Arc::clone(&thread.shared);
    let (loaded, is_loaded) = oneshot::channel();
    let steps = std::thread::spawn(move || thread.run(loaded));
    assert_eq!(is_loaded.await.unwrap(), Ok(()));
    let submit = |request: Request| {
        let (events, receiver) = event_queue::event_queue();
        assert!(inbox.send(Message::Submit { sequences: vec![request], timeout: None, events }));
        receiver
    };
    assert!(shared.is_ready());

    // The engine refuses an empty prompt, and the thread panics when it sends the refusal. The request before it has no time to end.
    let (events, mut broken) = event_queue::event_queue();
    assert!(broken.poll_receive(&mut Context::from_waker(&Waker::from(Arc::new(Panics)))).is_pending());
    let mut long = submit(request(&[1, 2, 3], 200));
    inbox.send(Message::Submit { sequences: vec![request(&[], 1)], timeout: None, events });
    let sequence = accepted(&mut long).await;
    let error = loop {
        match next(&mut long).await {
            Some(RequestEvent::Failed(error)) => break error,
            Some(RequestEvent::Tokens(event, _)) if event.finished.is_some() => {
                panic!("the sequence ended before the panic")
            }
            Some(_) => {}
            None => panic!("the sequence has no end"),
        }
    };
    let expected =
        "the step thread of model `llm` panicked: a waker broke; the model starts again, so send the request again";
    assert_eq!((error.kind, error.message.as_str()), (serving::ErrorKind::Internal, expected));

    let mut again = submit(request(&[1, 2, 3], 4));
    assert!(accepted(&mut again).await > sequence, "ids are unique");
    let mut num_tokens = 0;
    loop {
        match next(&mut again).await {
            Some(RequestEvent::Token(_)) => num_tokens += 1,
            Some(RequestEvent::Tokens(event, _)) => {
                num_tokens += event.tokens.len();
                if event.finished.is_some() {
                    break;
                }
            }
            Some(_) => {}
            None => panic!("the sequence has no end"),
        }
    }
    assert_eq!((num_tokens, shared.is_ready(), shared.restarts.load(Ordering::Relaxed)), (4, true, 1));
    let (done, is_done) = oneshot::channel();
    inbox.send(Message::Stop { done });
    is_done.await.unwrap();
    steps.join().unwrap();
    assert!(!shared.is_ready());
}
