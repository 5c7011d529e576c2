//! Queues and batches for backends that leave them to `serving`.
//!
//! Requests wait in a [`Queue`]; a task per instance takes the next batch when its instance is free, and one more task
//! ends requests that wait too long. The queue decides without a clock or a task of its own.

mod grouping;
mod order;
mod queue;

use std::panic::AssertUnwindSafe;
use std::sync::atomic::{AtomicBool, Ordering::SeqCst};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use futures::future::FutureExt as _;
use repository::ModelConfig;
use tokio::sync::Notify;

pub(crate) use order::Turn;

use crate::statistics::Execution;
use crate::{Backend, BatchedRequest, InferError, InferRequest, ResponseSender, ResponseStream};
use order::Order;
use queue::Queue;

/// Responses of one request that may wait for a slow reader before the model waits too.
const STREAM_CAPACITY: usize = 64;

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
}

/// What an instance that is free does next.
#[derive(Debug)]
pub(crate) enum Take {
    Nothing,
    WaitUntil(Instant),
    Batch(Vec<Waiting>),
}

/// The queue of one model and the tasks that serve it. They end when this is dropped.
pub(crate) struct Scheduler {
    shared: Arc<Shared>,
    order: Option<Order>,
}

struct Shared {
    queue: Mutex<Queue>,
    /// Something changed for who looks for a batch.
    arrived: Notify,
    /// Something changed for who looks at timeouts.
    timed: Notify,
    has_timeouts: bool,
    is_closed: AtomicBool,
    backend: Arc<dyn Backend>,
}

impl Scheduler {
    /// A scheduler for `backend`, if it wants one.
    pub fn new(config: &ModelConfig, backend: &Arc<dyn Backend>) -> Option<Self> {
        let num_instances = backend.num_instances();
        if num_instances == 0 {
            return None;
        }
        let queue = Queue::new(config);
        let shared = Arc::new(Shared {
            has_timeouts: queue.has_timeouts(),
            queue: Mutex::new(queue),
            arrived: Notify::new(),
            timed: Notify::new(),
            is_closed: AtomicBool::new(false),
            backend: backend.clone(),
        });
        for instance in 0..num_instances {
            tokio::spawn(work(shared.clone(), instance));
        }
        if shared.has_timeouts {
            tokio::spawn(keep_time(shared.clone()));
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
        let waiting = Waiting { request, responses, num_rows: num_rows.max(1), since: Instant::now(), deadline: None };
        queue.push(waiting)?;
        drop(queue);
        self.shared.arrived.notify_one();
        if self.shared.has_timeouts {
            self.shared.timed.notify_one();
        }
        Ok(stream)
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
    fn queue(&self) -> MutexGuard<'_, Queue> {
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits for a batch; `None` when the model goes.
    async fn next_batch(&self) -> Option<Vec<Waiting>> {
        loop {
            let arrived = self.arrived.notified();
            tokio::pin!(arrived);
            arrived.as_mut().enable();
            if self.is_closed.load(SeqCst) {
                return None;
            }
            let take = self.take();
            match take {
                Take::Batch(batch) => return Some(batch),
                Take::Nothing => arrived.await,
                Take::WaitUntil(until) => {
                    let _ = tokio::time::timeout_at(until.into(), arrived).await;
                }
            }
        }
    }

    fn take(&self) -> Take {
        let mut queue = self.queue();
        let take = queue.take(Instant::now());
        // What is left may be a batch for another instance.
        if matches!(take, Take::Batch(_)) && !queue.is_empty() {
            self.arrived.notify_one();
        }
        take
    }

    async fn execute(&self, instance: usize, batch: Vec<Waiting>) {
        let batch: Vec<Waiting> = batch.into_iter().filter(|waiting| !waiting.responses.is_cancelled()).collect();
        if batch.is_empty() {
            return;
        }
        let execution = Arc::new(Execution::new(batch.iter().map(|waiting| waiting.num_rows).sum()));
        let begin = |waiting: Waiting| {
            waiting.responses.begin_execution(&execution);
            BatchedRequest { request: waiting.request, responses: waiting.responses }
        };
        let run = self.backend.execute(instance, batch.into_iter().map(begin).collect());
        if AssertUnwindSafe(run).catch_unwind().await.is_err() {
            tracing::error!("an execution on instance {instance} broke off; its requests get an error");
        }
    }
}

/// Serves one instance.
async fn work(shared: Arc<Shared>, instance: usize) {
    while let Some(batch) = shared.next_batch().await {
        shared.execute(instance, batch).await;
    }
}

/// Ends requests that have waited too long.
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
        for waiting in expired {
            waiting.responses.refuse(InferError::unavailable("Request timeout expired"));
        }
        match next {
            Some(next) => drop(tokio::time::timeout_at(next.into(), timed).await),
            None => timed.await,
        }
    }
}
