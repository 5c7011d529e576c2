//! Queues and batches for backends that leave them to `serving`.
//!
//! Requests wait in a [`Queue`]; a task per instance takes the next batch when its instance is free, and one more task
//! minds what may wait too long. The queue decides without a clock or a task of its own.

mod batch_policy;
mod control_inputs;
mod priority_queue;
mod response_order;
mod sequence_queue;
mod sequence_state;

use std::fmt;
use std::panic::AssertUnwindSafe;
use std::sync::atomic::{AtomicBool, Ordering::SeqCst};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::{Duration, Instant};

use futures::future::FutureExt as _;
use repository::ModelConfig;
use tokio::sync::Notify;

pub(crate) use control_inputs::Controls;
pub(crate) use response_order::Turn;

use crate::statistics::Execution;
use crate::{Backend, BatchedRequest, InferError, InferRequest, Repeated, ResponseSender, ResponseStream, Tensor};
use priority_queue::Priorities;
use response_order::Order;
use sequence_queue::{SequenceId, Sequences};
pub(crate) use sequence_state::{StateSpec, initial, read as read_states};

/// Responses of one request that may wait for a slow reader before the model waits too.
const STREAM_CAPACITY: usize = 64;

/// Requests that a backend cannot bear may come again and again.
static BROKEN_EXECUTIONS: Repeated = Repeated::new(8);

/// A request that waits for its execution.
#[derive(Debug)]
pub(crate) struct Waiting {
    pub request: InferRequest,
    pub responses: ResponseSender,
    /// Rows it adds to a batch.
    pub num_rows: u64,
    pub since: Instant,
    /// Set by the queue.
    pub deadline: Option<Instant>,
    /// Set by the queue where the sequence keeps a state for the model.
    pub stateful: Option<SequenceId>,
    /// Where the answers of a request go that only fills a slot: nobody reads them.
    unread: Option<ResponseStream>,
}

impl Waiting {
    fn new(request: InferRequest, responses: ResponseSender, num_rows: u64) -> Self {
        let since = Instant::now();
        Self { request, responses, num_rows, since, deadline: None, stateful: None, unread: None }
    }

    /// A request that only fills a slot of a batch.
    fn null(request: InferRequest) -> Self {
        let (responses, unread) = ResponseStream::channel(STREAM_CAPACITY);
        Self { unread: Some(unread), ..Self::new(request, responses, 0) }
    }
}

/// What an instance that is free does next.
#[derive(Debug)]
pub(crate) enum Take {
    Nothing,
    WaitUntil(Instant),
    Batch(Vec<Waiting>),
}

/// Requests that wait, and the order they are served in.
trait Queue: Send {
    /// Lets a request wait.
    ///
    /// # Errors
    /// When it may not: the queue is full, or the request does not fit its sequence.
    fn push(&mut self, waiting: Waiting) -> Result<(), InferError>;

    /// The next batch of an instance that is free.
    fn take(&mut self, instance: usize, now: Instant) -> Take;

    /// The last batch of this instance has run.
    fn done(&mut self, _instance: usize, _now: Instant) {}

    /// Lets a request wait again that was executed.
    fn take_back(&mut self, _waiting: Waiting) {}

    /// Keeps what a model gave back as the state of a sequence.
    fn keep_state(&mut self, _sequence: &SequenceId, _state: Vec<Tensor>) {}

    /// Requests that wait.
    fn len(&self) -> usize;

    /// Whether [`Queue::expire`] may ever have something to do.
    fn has_timeouts(&self) -> bool;

    /// When it may have something to do next.
    fn first_deadline(&self) -> Option<Instant>;

    /// Ends what has waited too long, and gives back the requests to refuse.
    fn expire(&mut self, now: Instant) -> Vec<Waiting>;
}

/// Where requests go that a model wants to execute again.
#[derive(Clone)]
pub(crate) struct Again {
    queue: Weak<Shared>,
    /// Who hears the model's answers, where the model itself talks to one that keeps the state in them.
    client: Option<Box<ResponseSender>>,
}

impl Again {
    pub fn take_back(
        self,
        request: InferRequest,
        responses: ResponseSender,
    ) -> Result<(), Box<(InferRequest, ResponseSender)>> {
        let Some(shared) = self.queue.upgrade() else { return Err(Box::new((request, responses))) };
        // Dropping the model's sender ends who listens to it, when all of its answers have been passed on.
        let responses = self.client.map_or(responses, |client| *client);
        shared.queue().take_back(Waiting::new(request, responses, 1));
        shared.wake();
        Ok(())
    }
}

impl fmt::Debug for Again {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str("Again")
    }
}

/// The queue of one model and the tasks that serve it. They end when this is dropped.
pub(crate) struct Scheduler {
    shared: Arc<Shared>,
    order: Option<Order>,
}

pub(crate) struct Shared {
    queue: Mutex<Box<dyn Queue>>,
    /// Something changed for who looks for a batch.
    arrived: Notify,
    /// Something changed for who looks at timeouts.
    timed: Notify,
    has_timeouts: bool,
    /// What instance serves a request is settled before it runs.
    is_bound: bool,
    states: Vec<StateSpec>,
    /// Whether a model may have requests executed again.
    is_iterative: bool,
    is_closed: AtomicBool,
    backend: Arc<dyn Backend>,
}

impl Scheduler {
    /// A scheduler for `backend`, if it wants one.
    pub fn new(config: &ModelConfig, backend: &Arc<dyn Backend>, states: Vec<StateSpec>) -> Option<Self> {
        let num_instances = backend.num_instances();
        if num_instances == 0 {
            return None;
        }
        let queue: Box<dyn Queue> = match config.sequences() {
            Some(sequences) => Box::new(Sequences::new(config, sequences, num_instances, states.clone())),
            None => Box::new(Priorities::new(config)),
        };
        let shared = Arc::new(Shared {
            has_timeouts: queue.has_timeouts(),
            is_bound: config.sequences().is_some(),
            states,
            is_iterative: config.sequences().is_some_and(|sequences| sequences.iterative_sequence),
            queue: Mutex::new(queue),
            arrived: Notify::new(),
            timed: Notify::new(),
            is_closed: AtomicBool::new(false),
            backend: backend.clone(),
        });
        for instance in 0..num_instances {
            let shared = shared.clone();
            tokio::spawn(async move { keep_on("a queue's instance", || work(shared.clone(), instance)).await });
        }
        if shared.has_timeouts {
            let shared = shared.clone();
            tokio::spawn(async move { keep_on("a queue's clock", || keep_time(shared.clone())).await });
        }
        let order = config.batching().is_some_and(|batching| batching.preserve_ordering).then(Order::default);
        Some(Self { shared, order })
    }

    /// Lets a request wait for its turn.
    pub fn infer(&self, request: InferRequest, num_rows: u64) -> Result<ResponseStream, InferError> {
        let (mut responses, mut stream) = ResponseStream::channel(STREAM_CAPACITY);
        let mut queue = self.shared.queue();
        if let Some(order) = &self.order {
            (responses, stream) = stream.in_turn(responses, order.turn());
        }
        queue.push(Waiting::new(request, responses, num_rows.max(1)))?;
        drop(queue);
        self.shared.wake();
        if self.shared.has_timeouts {
            self.shared.timed.notify_one();
        }
        Ok(stream)
    }

    /// Requests that wait for an instance.
    pub fn num_waiting(&self) -> usize {
        self.shared.queue().len()
    }
}

impl Drop for Scheduler {
    fn drop(&mut self) {
        self.shared.is_closed.store(true, SeqCst);
        self.shared.arrived.notify_waiters();
        self.shared.timed.notify_waiters();
    }
}

impl Shared {
    fn queue(&self) -> MutexGuard<'_, Box<dyn Queue>> {
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Has a free instance look at the queue: any, or all where only one of them can serve what waits.
    fn wake(&self) {
        if self.is_bound { self.arrived.notify_waiters() } else { self.arrived.notify_one() }
    }

    /// Waits for a batch; `None` when the model goes.
    async fn next_batch(&self, instance: usize) -> Option<Vec<Waiting>> {
        loop {
            let arrived = self.arrived.notified();
            tokio::pin!(arrived);
            arrived.as_mut().enable();
            if self.is_closed.load(SeqCst) {
                return None;
            }
            let take = self.take(instance);
            match take {
                Take::Batch(batch) => return Some(batch),
                Take::Nothing => arrived.await,
                Take::WaitUntil(until) => {
                    let _ = tokio::time::timeout_at(until.into(), arrived).await;
                }
            }
        }
    }

    fn take(&self, instance: usize) -> Take {
        let mut queue = self.queue();
        let take = queue.take(instance, Instant::now());
        // What is left may be a batch for another instance.
        if matches!(take, Take::Batch(_)) && queue.len() > 0 {
            self.wake();
        }
        take
    }

    async fn execute(self: &Arc<Self>, instance: usize, batch: Vec<Waiting>) {
        let execution = Arc::new(Execution::new(batch.iter().map(|waiting| waiting.num_rows).sum()));
        let (mut keepers, mut unread) = (Vec::new(), Vec::new());
        let begin = |waiting: Waiting| {
            waiting.responses.begin_execution(&execution);
            let Waiting { request, mut responses, stateful, unread: ignored, .. } = waiting;
            unread.extend(ignored);
            let mut client = None;
            if let Some(sequence) = stateful {
                let (inner, stream) = ResponseStream::channel(STREAM_CAPACITY);
                let outer = std::mem::replace(&mut responses, inner);
                client = self.is_iterative.then(|| Box::new(outer.clone()));
                keepers.push(self.keep_state(sequence, stream, outer));
            }
            if self.is_iterative {
                responses = responses.coming_back_through(Again { queue: Arc::downgrade(self), client });
            }
            BatchedRequest { request, responses }
        };
        let batch = batch.into_iter().map(begin).collect();
        let run = AssertUnwindSafe(self.backend.execute(instance, batch)).catch_unwind();
        let (result, _) = futures::join!(run, futures::future::join_all(keepers));
        drop(unread);
        if result.is_err()
            && let Some(unlogged) = BROKEN_EXECUTIONS.due()
        {
            tracing::error!("an execution on instance {instance} broke off; its requests get an error{unlogged}");
        }
        self.queue().done(instance, Instant::now());
        if self.is_bound {
            self.wake();
            self.timed.notify_one();
        }
    }

    /// Passes responses on, but for the state in them, which waits for the next request of the sequence.
    async fn keep_state(&self, sequence: SequenceId, mut stream: ResponseStream, client: ResponseSender) {
        loop {
            let item = tokio::select! {
                biased;
                item = stream.next_response() => item,
                () = client.cancelled() => None,
            };
            let Some(mut item) = item else { return };
            if let Ok(response) = &mut item {
                let state = sequence_state::split(&self.states, &mut response.outputs);
                let tells_more = state.is_empty() || !response.outputs.is_empty() || response.is_final;
                self.queue().keep_state(&sequence, state);
                if !tells_more {
                    continue; // It is for the next execution alone.
                }
            }
            if !client.send(item).await {
                return;
            }
        }
    }
}

/// How long after a panic of the scheduler itself it goes on, lest one that comes at once again takes a core.
const AFTER_PANIC: Duration = Duration::from_millis(100);

/// Does `work` until it ends by itself: a panic in it costs the requests it had, and no others.
async fn keep_on<W: Future<Output = ()>>(what: &str, work: impl Fn() -> W) {
    while AssertUnwindSafe(work()).catch_unwind().await.is_err() {
        tracing::error!("{what} broke off, and goes on; requests it had get an error");
        tokio::time::sleep(AFTER_PANIC).await;
    }
}

/// Serves one instance.
async fn work(shared: Arc<Shared>, instance: usize) {
    while let Some(batch) = shared.next_batch(instance).await {
        if !batch.is_empty() {
            shared.execute(instance, batch).await;
        }
    }
}

/// Ends what has waited too long.
async fn keep_time(shared: Arc<Shared>) {
    loop {
        let timed = shared.timed.notified();
        tokio::pin!(timed);
        timed.as_mut().enable();
        if shared.is_closed.load(SeqCst) {
            return;
        }
        let (expired, next) = {
            let mut queue = shared.queue();
            (queue.expire(Instant::now()), queue.first_deadline())
        };
        if shared.is_bound {
            shared.wake();
        }
        for waiting in expired {
            waiting.responses.refuse(InferError::unavailable("Request timeout expired"));
        }
        match next {
            Some(next) => drop(tokio::time::timeout_at(next.into(), timed).await),
            None => timed.await,
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::AtomicUsize;

    use super::*;

    #[tokio::test]
    async fn work_that_panics_goes_on() {
        let begun = AtomicUsize::new(0);
        let work = || async {
            assert!(begun.fetch_add(1, SeqCst) >= 2, "on purpose");
        };
        tokio::time::timeout(Duration::from_secs(60), keep_on("a test", work)).await.expect("it ends by itself");
        assert_eq!(begun.load(SeqCst), 3);
    }
}
