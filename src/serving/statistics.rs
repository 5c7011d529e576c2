//! Counters of one model version, and the snapshots others read.

use std::collections::{BTreeMap, VecDeque};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use repository::ModelConfig;

use crate::MemoryUsage;
use crate::histogram::{Histogram, HistogramValues, Tally};

/// Responses of a decoupled request are counted one by one up to this index; those behind it count together.
const MAX_RESPONSE_INDEX: usize = 4096;

/// Upper bounds of the first-response histogram in milliseconds, where `model_metrics` does not name others.
const FIRST_RESPONSE_BUCKETS_MS: [f64; 4] = [100.0, 500.0, 2000.0, 5000.0];

/// How `model_metrics` names that histogram.
const FIRST_RESPONSE_FAMILY: &str = "nv_inference_first_response_histogram_ms";

/// Quantiles are of durations no older than this, and of at most so many.
const RECENT: Duration = Duration::from_secs(60);
const MAX_RECENT: usize = 4096;

/// How often, and how long together.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
#[allow(missing_docs)] // Said above.
pub struct StatisticDuration {
    pub count: u64,
    pub ns: u64,
}

impl StatisticDuration {
    fn add(&mut self, duration: Duration) {
        self.add_many(duration, 1);
    }

    /// Counts `count` durations that have this sum.
    fn add_many(&mut self, sum: Duration, count: u64) {
        self.count += count;
        self.ns += nanoseconds(sum);
    }

    fn add_ns(&mut self, ns: u64) {
        self.count += 1;
        self.ns += ns;
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

/// Durations of the last minute in nanoseconds, ascending, of requests that succeeded. Quantiles are taken from them.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
#[allow(missing_docs)] // As in `InferStatistics`.
pub struct RecentDurations {
    pub request: Vec<u64>,
    pub queue: Vec<u64>,
    pub compute_input: Vec<u64>,
    pub compute_infer: Vec<u64>,
    pub compute_output: Vec<u64>,
    pub cache_hit: Vec<u64>,
    pub cache_miss: Vec<u64>,
}

/// One model version's statistics at one moment.
#[derive(Debug, Clone, Default, PartialEq)]
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
    /// Time to first response in milliseconds.
    pub first_response: HistogramValues,
    /// What quantiles are taken from, where [`ServerConfig::keeps_recent_durations`](crate::ServerConfig) says so.
    pub recent: Option<RecentDurations>,
    /// Whether a request may have any number of responses.
    pub is_decoupled: bool,
    /// Whether answers may come from the response cache.
    pub is_cached: bool,
    /// How long it took to load.
    pub load_time: Duration,
    /// What it holds of which memory, as far as it knows.
    pub memory: Vec<MemoryUsage>,
    /// `metric_tags` of its configuration.
    pub tags: Vec<(String, String)>,
    /// Failed requests.
    pub failures: FailureCounts,
    /// Requests that wait for an execution; for a model that queues them itself, all that have not ended.
    pub pending: u64,
}

/// How one request ended.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Outcome {
    pub total: Duration,
    pub queued: Duration,
    /// Of the rest, what it took to bring the inputs to the model, and its outputs back.
    pub input: Duration,
    pub output: Duration,
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

/// How a response of a decoupled request came out that did not bring something.
#[derive(Debug, Clone, Copy)]
pub(crate) enum OtherResponse {
    Empty,
    Fail,
    Cancel,
}

/// One response of a decoupled request that went well: so long after the one before, and of that so long since it was
/// computed, in nanoseconds. `N` is `u64`, or, where a stream keeps some of them, `u32`.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Came<N> {
    pub after_ns: N,
    pub output_ns: N,
}

impl Came<u64> {
    /// In half the place, where it fits.
    pub fn short(self) -> Option<Came<u32>> {
        Some(Came { after_ns: self.after_ns.try_into().ok()?, output_ns: self.output_ns.try_into().ok()? })
    }
}

#[derive(Debug, Default)]
struct Counter {
    count: AtomicU64,
    ns: AtomicU64,
}

impl Counter {
    fn add(&self, duration: Duration) {
        self.add_many(duration, 1);
    }

    /// Counts `count` durations that have this sum.
    fn add_many(&self, sum: Duration, count: u64) {
        self.count.fetch_add(count, Relaxed);
        self.ns.fetch_add(nanoseconds(sum), Relaxed);
    }

    fn read(&self) -> StatisticDuration {
        StatisticDuration { count: self.count.load(Relaxed), ns: self.ns.load(Relaxed) }
    }
}

/// Durations no older than [`RECENT`].
#[derive(Debug, Default)]
struct Recent(Mutex<VecDeque<(Instant, u64)>>);

impl Recent {
    fn add(&self, duration: Duration) {
        let now = Instant::now();
        let mut durations = lock(&self.0);
        while durations.len() >= MAX_RECENT || durations.front().is_some_and(|(at, _)| now - *at > RECENT) {
            durations.pop_front();
        }
        durations.push_back((now, nanoseconds(duration)));
    }

    fn read(&self) -> Vec<u64> {
        let now = Instant::now();
        let durations = lock(&self.0);
        let recent = durations.iter().filter(|(at, _)| now - *at <= RECENT);
        let mut sorted: Vec<u64> = recent.map(|&(_, ns)| ns).collect();
        sorted.sort_unstable();
        sorted
    }
}

/// What summaries are made of.
#[derive(Debug, Default)]
struct Summaries {
    request: Recent,
    queue: Recent,
    input: Recent,
    compute: Recent,
    output: Recent,
    cache_hit: Recent,
    cache_miss: Recent,
}

impl Summaries {
    fn add(&self, outcome: &Outcome, computed: Duration) {
        self.request.add(outcome.total);
        match outcome.cache {
            Some(CacheUse::Hit(took)) => return self.cache_hit.add(took),
            Some(CacheUse::Miss(took)) => self.cache_miss.add(took),
            None => {}
        }
        self.queue.add(outcome.queued);
        self.input.add(outcome.input);
        self.compute.add(computed);
        self.output.add(outcome.output);
    }

    fn read(&self) -> RecentDurations {
        RecentDurations {
            request: self.request.read(),
            queue: self.queue.read(),
            compute_input: self.input.read(),
            compute_infer: self.compute.read(),
            compute_output: self.output.read(),
            cache_hit: self.cache_hit.read(),
            cache_miss: self.cache_miss.read(),
        }
    }
}

/// The live counters of one model version.
#[derive(Debug)]
pub(crate) struct Statistics {
    last_inference_ms: AtomicU64,
    inference_count: AtomicU64,
    execution_count: AtomicU64,
    success: Counter,
    fail: Counter,
    queue: Counter,
    input: Counter,
    compute: Counter,
    output: Counter,
    cache_hit: Counter,
    cache_miss: Counter,
    first_response: Histogram,
    failures: [AtomicU64; 4],
    summaries: Option<Summaries>,
    batches: Mutex<BTreeMap<u64, BatchStatistics>>,
    responses: Mutex<Vec<ResponseStatistics>>,
}

/// Bounds that `model_metrics` of the configuration names for the first response; else the usual ones.
fn first_response_bounds(config: &ModelConfig) -> Vec<f64> {
    use repository::proto::model_metrics::metric_control::MetricOptions;
    let controls = config.model_metrics.iter().flat_map(|metrics| &metrics.metric_control);
    let own = controls.filter(|control| {
        control.metric_identifier.as_ref().is_some_and(|metric| metric.family == FIRST_RESPONSE_FAMILY)
    });
    let mut named = own.filter_map(|control| match &control.metric_options {
        Some(MetricOptions::HistogramOptions(options)) if !options.buckets.is_empty() => Some(options.buckets.clone()),
        _ => None,
    });
    let mut bounds = named.next_back().unwrap_or_else(|| FIRST_RESPONSE_BUCKETS_MS.to_vec());
    bounds.retain(|bound| bound.is_finite());
    bounds.sort_by(f64::total_cmp);
    bounds.dedup();
    bounds
}

impl Statistics {
    /// No request yet. `keeps_recent` durations, for quantiles.
    pub fn new(config: &ModelConfig, keeps_recent: bool) -> Self {
        Self {
            first_response: Histogram::of_times(&first_response_bounds(config)),
            summaries: keeps_recent.then(Summaries::default),
            last_inference_ms: AtomicU64::default(),
            inference_count: AtomicU64::default(),
            execution_count: AtomicU64::default(),
            success: Counter::default(),
            fail: Counter::default(),
            queue: Counter::default(),
            input: Counter::default(),
            compute: Counter::default(),
            output: Counter::default(),
            cache_hit: Counter::default(),
            cache_miss: Counter::default(),
            failures: Default::default(),
            batches: Mutex::default(),
            responses: Mutex::default(),
        }
    }

    pub fn succeeded(&self, outcome: Outcome) {
        self.all_succeeded(&outcome, 1);
    }

    /// Counts `count` requests alike that have ended by now; `all` says what they took together.
    pub fn all_succeeded(&self, all: &Outcome, count: u64) {
        let computed = all.total.saturating_sub(all.queued + all.input + all.output);
        self.last_inference_ms.store(now_ms(), Relaxed);
        if let Some(summaries) = &self.summaries {
            summaries.add(all, computed);
        }
        self.success.add_many(all.total, count);
        match all.cache {
            // It did not wait, and nothing was computed.
            Some(CacheUse::Hit(took)) => {
                self.queue.add_many(Duration::ZERO, count);
                return self.cache_hit.add_many(took, count);
            }
            Some(CacheUse::Miss(took)) => self.cache_miss.add_many(took, count),
            None => {}
        }
        self.queue.add_many(all.queued, count);
        self.input.add_many(all.input, count);
        self.compute.add_many(computed, count);
        self.output.add_many(all.output, count);
        self.inference_count.fetch_add(all.batch_size * count, Relaxed);
        if let Some(num_rows) = all.executed {
            self.execution_count.fetch_add(count, Relaxed);
            let mut batches = lock(&self.batches);
            let batch = batches.entry(num_rows).or_default();
            batch.batch_size = num_rows;
            batch.compute_input.add_many(all.input, count);
            batch.compute_infer.add_many(computed, count);
            batch.compute_output.add_many(all.output, count);
        }
    }

    /// Whether each request is to be counted by itself, for quantiles.
    pub fn has_summaries(&self) -> bool {
        self.summaries.is_some()
    }

    pub fn failed(&self, failure: Failure, total: Duration) {
        self.fail.add(total);
        self.failures[failure as usize].fetch_add(1, Relaxed);
    }

    pub fn first_response(&self, after: Duration) {
        self.first_response.observe(after.as_secs_f64() * 1e3);
    }

    /// Takes a first response into `tally`, which [`Statistics::first_responses`] counts.
    pub fn gather_first_response(&self, after_ns: u64, tally: &mut Tally) {
        self.first_response.gather(after_ns as f64 / 1e6, tally);
    }

    /// Counts what was gathered.
    pub fn first_responses(&self, tally: &mut Tally) {
        self.first_response.settle(tally);
    }

    /// Counts responses of a decoupled request that went well, one behind the other, from number `first` on.
    pub fn responses<N: Copy + Into<u64>>(&self, first: usize, came: &[Came<N>]) {
        let mut responses = lock(&self.responses);
        for (place, came) in came.iter().enumerate() {
            let (after_ns, output_ns) = (came.after_ns.into(), came.output_ns.into());
            let counted = numbered(&mut responses, first + place);
            counted.compute_infer.add_ns(after_ns.saturating_sub(output_ns));
            counted.compute_output.add_ns(output_ns);
            counted.success.add_ns(after_ns);
        }
    }

    /// Counts the response of that number, which came so long after the one before and brought nothing.
    pub fn other_response(&self, number: usize, outcome: OtherResponse, after: Duration) {
        let mut responses = lock(&self.responses);
        let counted = numbered(&mut responses, number);
        match outcome {
            OtherResponse::Empty => counted.empty_response.add(after),
            OtherResponse::Fail => counted.fail.add(after),
            OtherResponse::Cancel => counted.cancel.add(after),
        }
    }

    pub fn snapshot(&self, name: &str, version: &str, pending: u64) -> ModelStatistics {
        let [rejected, canceled, backend, other] = self.failures.each_ref().map(|count| count.load(Relaxed));
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
                compute_input: self.input.read(),
                compute_infer: self.compute.read(),
                compute_output: self.output.read(),
                cache_hit: self.cache_hit.read(),
                cache_miss: self.cache_miss.read(),
            },
            batches: lock(&self.batches).values().copied().collect(),
            responses: lock(&self.responses).clone(),
            first_response: self.first_response.read(),
            recent: self.summaries.as_ref().map(Summaries::read),
            failures: FailureCounts { rejected, canceled, backend, other },
            pending,
            ..ModelStatistics::default()
        }
    }
}

/// Where the response of that number is counted.
fn numbered(responses: &mut Vec<ResponseStatistics>, number: usize) -> &mut ResponseStatistics {
    let place = number.min(MAX_RESPONSE_INDEX);
    if responses.len() <= place {
        responses.resize(place + 1, ResponseStatistics::default());
    }
    &mut responses[place]
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
