//! Counters of one model version, and the snapshots others read.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

/// Responses of a decoupled request are counted one by one up to this index; those behind it count together.
const MAX_RESPONSE_INDEX: usize = 4096;

/// Upper bounds of the first-response histogram, in milliseconds.
pub const FIRST_RESPONSE_BUCKETS_MS: [u64; 10] = [5, 10, 25, 50, 100, 250, 500, 1000, 2000, 5000];

/// How often, and how long together.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
#[allow(missing_docs)] // Said above.
pub struct StatisticDuration {
    pub count: u64,
    pub ns: u64,
}

impl StatisticDuration {
    fn add(&mut self, duration: Duration) {
        self.count += 1;
        self.ns += nanoseconds(duration);
    }
}

/// Durations of requests. The parts of a successful one are its queueing and its computing.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
#[allow(missing_docs)] // The protocol's own names.
pub struct InferStatistics {
    pub success: StatisticDuration,
    pub fail: StatisticDuration,
    pub queue: StatisticDuration,
    pub compute_input: StatisticDuration,
    pub compute_infer: StatisticDuration,
    pub compute_output: StatisticDuration,
    pub cache_hit: StatisticDuration,
    pub cache_miss: StatisticDuration,
}

/// Executions of one batch size.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
#[allow(missing_docs)] // The protocol's own names.
pub struct BatchStatistics {
    pub batch_size: u64,
    pub compute_input: StatisticDuration,
    pub compute_infer: StatisticDuration,
    pub compute_output: StatisticDuration,
}

/// Responses with one index, over all requests of a decoupled model. A duration runs from the response before.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
#[allow(missing_docs)] // The protocol's own names.
pub struct ResponseStatistics {
    pub compute_infer: StatisticDuration,
    pub compute_output: StatisticDuration,
    pub success: StatisticDuration,
    pub fail: StatisticDuration,
    pub empty_response: StatisticDuration,
    pub cancel: StatisticDuration,
}

/// Failed requests by reason.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct FailureCounts {
    /// Refused before they ran: queue full, timed out in the queue.
    pub rejected: u64,
    /// The client left or cancelled.
    pub canceled: u64,
    /// The model answered with an error.
    pub backend: u64,
    /// Wrong requests.
    pub other: u64,
}

/// Time from request to first response.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct FirstResponse {
    /// All of them together.
    pub total: StatisticDuration,
    /// How many took at most so long as [`FIRST_RESPONSE_BUCKETS_MS`] says; not cumulative.
    pub buckets: [u64; FIRST_RESPONSE_BUCKETS_MS.len()],
}

/// One model version's statistics at one moment.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct ModelStatistics {
    /// Model name.
    pub name: String,
    /// Model version.
    pub version: String,
    /// When the last request was answered, in milliseconds since 1970; 0 for never.
    pub last_inference_ms: u64,
    /// Successful inferences; a batch of n counts n.
    pub inference_count: u64,
    /// Executions by the model.
    pub execution_count: u64,
    /// Durations of requests.
    pub inference: InferStatistics,
    /// By batch size, ascending.
    pub batches: Vec<BatchStatistics>,
    /// By response index, from 0; empty for models that are not decoupled.
    pub responses: Vec<ResponseStatistics>,
    /// Time to first response.
    pub first_response: FirstResponse,
    /// Failed requests.
    pub failures: FailureCounts,
    /// Requests that wait for an execution; for a model that queues them itself, all that have not ended.
    pub pending: u64,
}

/// How one request ended.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Outcome {
    pub total: Duration,
    pub queued: Duration,
    pub batch_size: u64,
    /// Rows of the execution it was part of, for the first of its requests to succeed.
    pub executed: Option<u64>,
    /// What the response cache took, where the model has one.
    pub cache: Option<CacheUse>,
}

/// What the response cache did for a request, and the time it took.
#[derive(Debug, Clone, Copy)]
pub(crate) enum CacheUse {
    Hit(Duration),
    Miss(Duration),
}

/// One call of a backend with one or more requests. It counts once, with the first of them that succeeds.
#[derive(Debug)]
pub(crate) struct Execution {
    pub started: Instant,
    num_rows: u64,
    is_counted: AtomicBool,
}

impl Execution {
    pub fn new(num_rows: u64) -> Self {
        Self { started: Instant::now(), num_rows, is_counted: AtomicBool::new(false) }
    }

    /// Its rows, for the first who asks.
    pub fn count(&self) -> Option<u64> {
        (!self.is_counted.swap(true, Relaxed)).then_some(self.num_rows)
    }
}

/// Why a request failed.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Failure {
    Rejected,
    Canceled,
    Backend,
    Other,
}

impl Failure {
    /// In a line of the log.
    pub fn name(self) -> &'static str {
        match self {
            Failure::Rejected => "rejected",
            Failure::Canceled => "cancelled",
            Failure::Backend => "failed",
            Failure::Other => "invalid",
        }
    }
}

/// How one response of a decoupled request came out.
#[derive(Debug, Clone, Copy)]
pub(crate) enum ResponseOutcome {
    Success,
    Empty,
    Fail,
    Cancel,
}

#[derive(Debug, Default)]
struct Counter {
    count: AtomicU64,
    ns: AtomicU64,
}

impl Counter {
    fn add(&self, duration: Duration) {
        self.count.fetch_add(1, Relaxed);
        self.ns.fetch_add(nanoseconds(duration), Relaxed);
    }

    fn read(&self) -> StatisticDuration {
        StatisticDuration { count: self.count.load(Relaxed), ns: self.ns.load(Relaxed) }
    }
}

/// The live counters of one model version.
#[derive(Debug, Default)]
pub(crate) struct Statistics {
    last_inference_ms: AtomicU64,
    inference_count: AtomicU64,
    execution_count: AtomicU64,
    success: Counter,
    fail: Counter,
    queue: Counter,
    compute: Counter,
    cache_hit: Counter,
    cache_miss: Counter,
    first_response: Counter,
    first_response_buckets: [AtomicU64; FIRST_RESPONSE_BUCKETS_MS.len()],
    failures: [AtomicU64; 4],
    batches: Mutex<BTreeMap<u64, StatisticDuration>>,
    responses: Mutex<Vec<ResponseStatistics>>,
}

impl Statistics {
    pub fn succeeded(&self, outcome: Outcome) {
        let computed = outcome.total.saturating_sub(outcome.queued);
        self.success.add(outcome.total);
        self.last_inference_ms.store(now_ms(), Relaxed);
        match outcome.cache {
            // Nothing was queued and nothing computed.
            Some(CacheUse::Hit(took)) => return self.cache_hit.add(took),
            Some(CacheUse::Miss(took)) => self.cache_miss.add(took),
            None => {}
        }
        self.queue.add(outcome.queued);
        self.compute.add(computed);
        self.inference_count.fetch_add(outcome.batch_size, Relaxed);
        if let Some(num_rows) = outcome.executed {
            self.execution_count.fetch_add(1, Relaxed);
            lock(&self.batches).entry(num_rows).or_default().add(computed);
        }
    }

    pub fn failed(&self, failure: Failure, total: Duration) {
        self.fail.add(total);
        self.failures[failure as usize].fetch_add(1, Relaxed);
    }

    pub fn first_response(&self, after: Duration) {
        self.first_response.add(after);
        let after_ms = u64::try_from(after.as_micros().div_ceil(1000)).unwrap_or(u64::MAX);
        if let Some(bucket) = FIRST_RESPONSE_BUCKETS_MS.iter().position(|&bound| after_ms <= bound) {
            self.first_response_buckets[bucket].fetch_add(1, Relaxed);
        }
    }

    /// Counts response `index` of a decoupled request, which came `after` the one before.
    pub fn response(&self, index: usize, outcome: ResponseOutcome, after: Duration) {
        let mut responses = lock(&self.responses);
        let index = index.min(MAX_RESPONSE_INDEX);
        if responses.len() <= index {
            responses.resize(index + 1, ResponseStatistics::default());
        }
        let counted = &mut responses[index];
        match outcome {
            ResponseOutcome::Success => {
                counted.compute_infer.add(after);
                counted.compute_output.add(Duration::ZERO);
                counted.success.add(after);
            }
            ResponseOutcome::Empty => counted.empty_response.add(after),
            ResponseOutcome::Fail => counted.fail.add(after),
            ResponseOutcome::Cancel => counted.cancel.add(after),
        }
    }

    pub fn snapshot(&self, name: &str, version: &str, pending: u64) -> ModelStatistics {
        let without_time = |counter: &Counter| StatisticDuration { count: counter.read().count, ns: 0 };
        let [rejected, canceled, backend, other] = self.failures.each_ref().map(|count| count.load(Relaxed));
        let executed = |count| StatisticDuration { count, ns: 0 };
        ModelStatistics {
            name: name.to_owned(),
            version: version.to_owned(),
            last_inference_ms: self.last_inference_ms.load(Relaxed),
            inference_count: self.inference_count.load(Relaxed),
            execution_count: self.execution_count.load(Relaxed),
            inference: InferStatistics {
                success: self.success.read(),
                fail: self.fail.read(),
                queue: self.queue.read(),
                compute_input: without_time(&self.compute),
                compute_infer: self.compute.read(),
                compute_output: without_time(&self.compute),
                cache_hit: self.cache_hit.read(),
                cache_miss: self.cache_miss.read(),
            },
            batches: lock(&self.batches)
                .iter()
                .map(|(&batch_size, &compute_infer)| BatchStatistics {
                    batch_size,
                    compute_input: executed(compute_infer.count),
                    compute_infer,
                    compute_output: executed(compute_infer.count),
                })
                .collect(),
            responses: lock(&self.responses).clone(),
            first_response: FirstResponse {
                total: self.first_response.read(),
                buckets: self.first_response_buckets.each_ref().map(|count| count.load(Relaxed)),
            },
            failures: FailureCounts { rejected, canceled, backend, other },
            pending,
        }
    }
}

fn lock<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

fn nanoseconds(duration: Duration) -> u64 {
    u64::try_from(duration.as_nanos()).unwrap_or(u64::MAX)
}

fn now_ms() -> u64 {
    let since_1970 = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    u64::try_from(since_1970.as_millis()).unwrap_or(u64::MAX)
}
