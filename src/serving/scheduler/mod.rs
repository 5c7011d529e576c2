//! Queues and batches, for backends without a queue of their own.
//!
//! Requests wait in a [`Queue`]. One task for each instance takes the next batch when its instance is free, and one more task
//! expires requests that time out. The queue itself has neither a clock nor a task.

mod batch_policy;
mod control_inputs;
mod priority_queue;
mod queue;
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

pub(crate) use control_inputs::ControlInputs;

use crate::outcome::Execution;
use crate::response_order::ResponseOrder;
use crate::sender::Reschedule;
use crate::{
    Backend, BatchedRequest, CorrelationId, InferError, InferRequest, RateLimitedLog, ResponseSender, ResponseStream,
};
use priority_queue::PriorityQueue;
use queue::{NextBatch, Queue, QueuedRequest, STREAM_CAPACITY};
use sequence_queue::SequenceQueue;
pub(crate) use sequence_state::{StateSpec, initial_states, read as read_states};

/// Log of executions that panic. Clients may repeat a request that makes a backend panic.
static EXECUTION_PANICS: RateLimitedLog = RateLimitedLog::new(8);

/// Returns requests to their queue that a model wants to execute again.
struct Rescheduler {
    queue: Weak<Shared>,
    /// The sender to the client, where the model's own sender leads to the task that removes states from responses.
    client: Option<ResponseSender>,
}

impl Reschedule for Rescheduler {
    fn reschedule(
        &self,
        request: InferRequest,
        responses: ResponseSender,
    ) -> Result<(), Box<(InferRequest, ResponseSender)>> {
        let Some(shared) = self.queue.upgrade() else { return Err(Box::new((request, responses))) };
        // Dropping the model's sender ends the forwarding of its responses, after the last of them was forwarded.
        let responses = self.client.clone().unwrap_or(responses);
        shared.queue().push_again(QueuedRequest::new(request, responses, 1));
        shared.wake();
        Ok(())
    }
}

impl fmt::Debug for Rescheduler {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str("Rescheduler")
    }
}

/// The queue of one model and the tasks that serve it. Dropping it ends the tasks.
pub(crate) struct Scheduler {
    shared: Arc<Shared>,
    /// Set where the model preserves the order of responses.
    order: Option<ResponseOrder>,
}

pub(crate) struct Shared {
    queue: Mutex<Box<dyn Queue>>,
    /// Wakes instances: the next batch may have changed.
    batch_changed: Notify,
    /// Wakes the timeout task: the first deadline may have changed.
    deadline_changed: Notify,
    has_timeouts: bool,
    /// Whether each request can be served by one instance only, that of its sequence.
    has_sequences: bool,
    states: Vec<StateSpec>,
    /// Whether the model may reschedule requests.
    is_iterative: bool,
    is_closed: AtomicBool,
    backend: Arc<dyn Backend>,
}

impl Scheduler {
    /// A scheduler for `backend`; `None` if the backend has a queue of its own.
    pub fn new(config: &ModelConfig, backend: &Arc<dyn Backend>, states: Vec<StateSpec>) -> Option<Self> {
        let num_instances = backend.num_instances();
        if num_instances == 0 {
            return None;
        }
        let queue: Box<dyn Queue> = match config.sequences() {
            Some(sequences) => Box::new(SequenceQueue::new(config, sequences, num_instances, states.clone())),
            None => Box::new(PriorityQueue::new(config)),
        };
        let shared = Arc::new(Shared {
            has_timeouts: queue.has_timeouts(),
            has_sequences: config.sequences().is_some(),
            states,
            is_iterative: config.sequences().is_some_and(|sequences| sequences.iterative_sequence),
            queue: Mutex::new(queue),
            batch_changed: Notify::new(),
            deadline_changed: Notify::new(),
            is_closed: AtomicBool::new(false),
            backend: backend.clone(),
        });
        for instance in 0..num_instances {
            let shared = shared.clone();
            tokio::spawn(async move {
                restart_on_panic("the task of an instance", || serve_instance(shared.clone(), instance)).await
            });
        }
        if shared.has_timeouts {
            let shared = shared.clone();
            tokio::spawn(async move {
                restart_on_panic("the timeout task of a queue", || run_timeouts(shared.clone())).await
            });
        }
        let order = config.batching().is_some_and(|batching| batching.preserve_ordering).then(ResponseOrder::default);
        Some(Self { shared, order })
    }

    /// Queues a request.
    ///
    /// # Errors
    /// When the queue is full, or the request does not fit its sequence.
    pub fn infer(&self, request: InferRequest, num_rows: u64) -> Result<ResponseStream, InferError> {
        let (mut responses, mut stream) = ResponseStream::channel(STREAM_CAPACITY);
        let mut queue = self.shared.queue();
        if let Some(order) = &self.order {
            (responses, stream) = stream.in_order(responses, order.ticket());
        }
        queue.push(QueuedRequest::new(request, responses, num_rows.max(1)))?;
        drop(queue);
        self.shared.wake();
        if self.shared.has_timeouts {
            self.shared.deadline_changed.notify_one();
        }
        Ok(stream)
    }

    /// Number of requests that wait for an instance.
    pub fn num_waiting(&self) -> usize {
        self.shared.queue().len()
    }
}

impl Drop for Scheduler {
    fn drop(&mut self) {
        self.shared.is_closed.store(true, SeqCst);
        self.shared.batch_changed.notify_waiters();
        self.shared.deadline_changed.notify_waiters();
    }
}

impl Shared {
    fn queue(&self) -> MutexGuard<'_, Box<dyn Queue>> {
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Wakes one free instance; with sequences all of them, because one instance only can serve a request.
    fn wake(&self) {
        if self.has_sequences { self.batch_changed.notify_waiters() } else { self.batch_changed.notify_one() }
    }

    /// Waits for a batch; `None` when the scheduler is dropped.
    async fn next_batch(&self, instance: usize) -> Option<Vec<QueuedRequest>> {
        loop {
            let changed = self.batch_changed.notified();
            tokio::pin!(changed);
            changed.as_mut().enable();
            if self.is_closed.load(SeqCst) {
                return None;
            }
            match self.take(instance) {
                NextBatch::Run(batch) => return Some(batch),
                NextBatch::Empty => changed.await,
                NextBatch::WaitUntil(until) => {
                    let _ = tokio::time::timeout_at(until.into(), changed).await;
                }
            }
        }
    }

    fn take(&self, instance: usize) -> NextBatch {
        let mut queue = self.queue();
        let next = queue.take(instance, Instant::now());
        // The remaining requests may be a batch for another instance.
        if matches!(next, NextBatch::Run(_)) && queue.len() > 0 {
            self.wake();
        }
        next
    }

    async fn execute(self: &Arc<Self>, instance: usize, batch: Vec<QueuedRequest>) {
        let execution = Arc::new(Execution::new(batch.iter().map(|queued| queued.num_rows).sum()));
        let (mut forwards, mut ignored) = (Vec::new(), Vec::new());
        let begin = |queued: QueuedRequest| {
            queued.responses.begin_execution(&execution);
            let QueuedRequest { request, mut responses, stateful, ignored_responses, .. } = queued;
            ignored.extend(ignored_responses);
            let mut client = None;
            if let Some(sequence) = stateful {
                let (inner, stream) = ResponseStream::channel(STREAM_CAPACITY);
                let outer = std::mem::replace(&mut responses, inner);
                client = self.is_iterative.then(|| outer.clone());
                forwards.push(self.forward_without_state(sequence, stream, outer));
            }
            if self.is_iterative {
                responses = responses.with_rescheduler(Arc::new(Rescheduler { queue: Arc::downgrade(self), client }));
            }
            BatchedRequest { request, responses }
        };
        let batch = batch.into_iter().map(begin).collect();
        let run = AssertUnwindSafe(self.backend.execute(instance, batch)).catch_unwind();
        let (result, _) = futures::join!(run, futures::future::join_all(forwards));
        drop(ignored);
        if result.is_err()
            && let Some(suppressed) = EXECUTION_PANICS.allow()
        {
            tracing::error!("an execution on instance {instance} panicked; its requests get an error{suppressed}");
        }
        self.queue().finish_batch(instance, Instant::now());
        if self.has_sequences {
            self.wake();
            self.deadline_changed.notify_one();
        }
    }

    /// Forwards responses to the client without the states in them, and stores the states for the next request of the
    /// sequence.
    async fn forward_without_state(&self, sequence: CorrelationId, mut stream: ResponseStream, client: ResponseSender) {
        loop {
            let item = tokio::select! {
                biased;
                item = stream.next_response() => item,
                () = client.cancelled() => None,
            };
            let Some(mut item) = item else { return };
            if let Ok(response) = &mut item {
                let state = sequence_state::take_states(&self.states, &mut response.outputs);
                let has_more = state.is_empty() || !response.outputs.is_empty() || response.is_final;
                self.queue().update_state(&sequence, state);
                if !has_more {
                    continue; // The response held states only.
                }
            }
            if !client.send(item).await {
                return;
            }
        }
    }
}

/// Pause before a task of the scheduler restarts after a panic, so that repeated panics do not occupy a core.
const RESTART_DELAY: Duration = Duration::from_millis(100);

/// Runs `work` again after each panic, until it ends without one. A panic fails only the requests of the current batch.
async fn restart_on_panic<W: Future<Output = ()>>(what: &str, work: impl Fn() -> W) {
    while AssertUnwindSafe(work()).catch_unwind().await.is_err() {
        tracing::error!("{what} panicked and restarts; its current requests get an error");
        tokio::time::sleep(RESTART_DELAY).await;
    }
}

/// Runs batches on one instance.
async fn serve_instance(shared: Arc<Shared>, instance: usize) {
    while let Some(batch) = shared.next_batch(instance).await {
        if !batch.is_empty() {
            shared.execute(instance, batch).await;
        }
    }
}

/// Expires requests at their deadlines.
async fn run_timeouts(shared: Arc<Shared>) {
    loop {
        let changed = shared.deadline_changed.notified();
        tokio::pin!(changed);
        changed.as_mut().enable();
        if shared.is_closed.load(SeqCst) {
            return;
        }
        let (expired, next) = {
            let mut queue = shared.queue();
            (queue.expire(Instant::now()), queue.first_deadline())
        };
        if shared.has_sequences {
            shared.wake();
        }
        for queued in expired {
            queued.responses.refuse(InferError::unavailable("Request timeout expired"));
        }
        match next {
            Some(next) => drop(tokio::time::timeout_at(next.into(), changed).await),
            None => changed.await,
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::AtomicUsize;

    use super::*;

    #[tokio::test]
    async fn work_that_panics_restarts() {
        let num_starts = AtomicUsize::new(0);
        let work = || async {
            assert!(num_starts.fetch_add(1, SeqCst) >= 2, "on purpose");
        };
        tokio::time::timeout(Duration::from_secs(60), restart_on_panic("a test", work)).await.expect("the work ends");
        assert_eq!(num_starts.load(SeqCst), 3);
    }
}
