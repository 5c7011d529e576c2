//! Counters of one model version, and snapshots of them.

use std::collections::{BTreeMap, VecDeque};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use repository::ModelConfig;

use crate::MemoryUsage;
use crate::histogram::{Histogram, HistogramValues, Tally};

/// Responses of a decoupled request are counted separately up to this index. Later ones count under this index.
const MAX_RESPONSE_INDEX: usize = 4096;

/// Default upper bounds of the first-response histogram, in milliseconds. `model_metrics` can name others.
const FIRST_RESPONSE_BUCKETS_MS: [f64; 4] = [100.0, 500.0, 2000.0, 5000.0];

/// The histogram's name in `model_metrics`.
const FIRST_RESPONSE_FAMILY: &str = "nv_inference_first_response_histogram_ms";

/// Quantiles are taken over durations that are not older than this.
const RECENT: Duration = Duration::from_secs(60);
/// Quantiles are taken over at most this many durations.
const MAX_RECENT: usize = 4096;

/// A count of durations and their sum.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct StatisticDuration {
    /// Number of durations.
    pub count: u64,
    /// Their sum in nanoseconds.
    pub ns: u64,
}

impl StatisticDuration {
    fn add(&mut self, duration: Duration) {
        self.add_many(duration, 1);
    }

    /// Adds `count` durations with this sum.
    fn add_many(&mut self, sum: Duration, count: u64) {
        self.count += count;
        self.ns += nanoseconds(sum);
    }

    fn add_ns(&mut self, ns: u64) {
        self.count += 1;
        self.ns += ns;
    }
}

/// Durations of requests. A successful request's duration is the sum of its queue and compute parts.
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

/// Responses with one index, over all requests of a decoupled model. A duration runs from the previous response.
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
    /// Refused before execution: the queue was full, or the request timed out in it.
    pub rejected: u64,
    /// The client left or cancelled.
    pub canceled: u64,
    /// The model returned an error.
    pub backend: u64,
    /// Invalid requests.
    pub other: u64,
}

/// Durations of successful requests in the last minute, in nanoseconds, ascending. Quantiles are taken from them.
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

/// A snapshot of one model version's statistics.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct ModelStatistics {
    /// Model name.
    pub name: String,
    /// Model version.
    pub version: String,
    /// When the last request succeeded, in milliseconds since 1970; 0 for never.
    pub last_inference_ms: u64,
    /// Successful inferences; a request of batch size n counts n.
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
    /// Recent durations, for quantiles; `None` without [`ServerConfig::keeps_recent_durations`](crate::ServerConfig).
    pub recent: Option<RecentDurations>,
    /// Whether a request may have any number of responses.
    pub is_decoupled: bool,
    /// Whether the model uses the response cache.
    pub is_cached: bool,
    /// How long loading took.
    pub load_time: Duration,
    /// Memory that the model holds, as far as it reports it.
    pub memory: Vec<MemoryUsage>,
    /// `metric_tags` of its configuration.
    pub tags: Vec<(String, String)>,
    /// Failed requests.
    pub failures: FailureCounts,
    /// Requests in the queue; for a backend that queues requests itself, all requests in flight.
    pub pending: u64,
}

/// How one request ended.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Outcome {
    pub total: Duration,
    pub queued: Duration,
    /// Time for checking and copying the inputs.
    pub input: Duration,
    /// Time from computing the final response until it was read.
    pub output: Duration,
    pub batch_size: u64,
    /// Rows of the execution that the request was part of. Set for the first successful request of each execution.
    pub executed: Option<u64>,
    /// How the response cache was used; `None` where the model uses none.
    pub cache: Option<CacheUse>,
}

/// Result of using the response cache for a request, with the time that it took.
#[derive(Debug, Clone, Copy)]
pub(crate) enum CacheUse {
    Hit(Duration),
    Miss(Duration),
}

/// One call of [`crate::Backend::execute`]. It is counted once, with the first of its requests that succeeds.
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

    /// Number of rows; `None` from the second call on.
    pub fn count_once(&self) -> Option<u64> {
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
    /// The word in a request's log line.
    pub fn name(self) -> &'static str {
        match self {
            Failure::Rejected => "rejected",
            Failure::Canceled => "cancelled",
            Failure::Backend => "failed",
            Failure::Other => "invalid",
        }
    }
}

/// A response of a decoupled request that is not a success.
#[derive(Debug, Clone, Copy)]
pub(crate) enum OtherResponse {
    Empty,
    Fail,
    Cancel,
}

/// Times of one successful response of a decoupled request, in nanoseconds. `N` is `u64`, or `u32` where timings are stored.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct ResponseTiming<N> {
    /// Since the previous response.
    pub interval_ns: N,
    /// Since the response was computed; a part of `interval_ns`.
    pub output_ns: N,
}

impl ResponseTiming<u64> {
    /// The same times in half the memory; `None` above 4.29 seconds.
    pub fn to_u32(self) -> Option<ResponseTiming<u32>> {
        Some(ResponseTiming {
            interval_ns: self.interval_ns.try_into().ok()?,
            output_ns: self.output_ns.try_into().ok()?,
        })
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

    /// Adds `count` durations with this sum.
    fn add_many(&self, sum: Duration, count: u64) {
        self.count.fetch_add(count, Relaxed);
        self.ns.fetch_add(nanoseconds(sum), Relaxed);
    }

    fn read(&self) -> StatisticDuration {
        StatisticDuration { count: self.count.load(Relaxed), ns: self.ns.load(Relaxed) }
    }
}

/// Durations that are not older than [`RECENT`].
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

/// Recent durations, for the metrics of type summary.
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
            Some(CacheUse::Hit(duration)) => return self.cache_hit.add(duration),
            Some(CacheUse::Miss(duration)) => self.cache_miss.add(duration),
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

/// Bounds of the first-response histogram that `model_metrics` names; else the defaults.
fn first_response_bounds(config: &ModelConfig) -> Vec<f64> {
    use repository::proto::model_metrics::metric_control::MetricOptions;
    let controls = config.model_metrics.iter().flat_map(|metrics| &metrics.metric_control);
    let of_histogram = controls.filter(|control| {
        control.metric_identifier.as_ref().is_some_and(|metric| metric.family == FIRST_RESPONSE_FAMILY)
    });
    let mut named = of_histogram.filter_map(|control| match &control.metric_options {
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
    /// Counters at zero. With `keeps_recent`, recent durations are kept for quantiles.
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

    /// Counts `count` successful requests. The durations in `all` are sums over them, its other fields hold for each of them.
    pub fn all_succeeded(&self, all: &Outcome, count: u64) {
        let computed = all.total.saturating_sub(all.queued + all.input + all.output);
        self.last_inference_ms.store(now_ms(), Relaxed);
        if let Some(summaries) = &self.summaries {
            summaries.add(all, computed);
        }
        self.success.add_many(all.total, count);
        match all.cache {
            // The request did not queue, and nothing was computed.
            Some(CacheUse::Hit(duration)) => {
                self.queue.add_many(Duration::ZERO, count);
                return self.cache_hit.add_many(duration, count);
            }
            Some(CacheUse::Miss(duration)) => self.cache_miss.add_many(duration, count),
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

    /// Whether quantiles need each request to be counted by itself.
    pub fn has_summaries(&self) -> bool {
        self.summaries.is_some()
    }

    pub fn failed(&self, failure: Failure, total: Duration) {
        self.fail.add(total);
        self.failures[failure as usize].fetch_add(1, Relaxed);
    }

    pub fn first_response(&self, latency: Duration) {
        self.first_response.observe(latency.as_secs_f64() * 1e3);
    }

    /// Adds a first response to `tally`, which [`Statistics::flush_first_responses`] counts.
    pub fn tally_first_response(&self, latency_ns: u64, tally: &mut Tally) {
        self.first_response.tally(latency_ns as f64 / 1e6, tally);
    }

    /// Counts the values of `tally` and clears it.
    pub fn flush_first_responses(&self, tally: &mut Tally) {
        self.first_response.flush(tally);
    }

    /// Counts successive successful responses of a decoupled request, from index `first` on.
    pub fn responses<N: Copy + Into<u64>>(&self, first: usize, timings: &[ResponseTiming<N>]) {
        let mut responses = lock(&self.responses);
        for (offset, timing) in timings.iter().enumerate() {
            let (interval_ns, output_ns) = (timing.interval_ns.into(), timing.output_ns.into());
            let counters = response_counters(&mut responses, first + offset);
            counters.compute_infer.add_ns(interval_ns.saturating_sub(output_ns));
            counters.compute_output.add_ns(output_ns);
            counters.success.add_ns(interval_ns);
        }
    }

    /// Counts the response at `index`, which followed the previous one after `interval`.
    pub fn other_response(&self, index: usize, outcome: OtherResponse, interval: Duration) {
        let mut responses = lock(&self.responses);
        let counters = response_counters(&mut responses, index);
        match outcome {
            OtherResponse::Empty => counters.empty_response.add(interval),
            OtherResponse::Fail => counters.fail.add(interval),
            OtherResponse::Cancel => counters.cancel.add(interval),
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

/// The counters of the response at `index`.
fn response_counters(responses: &mut Vec<ResponseStatistics>, index: usize) -> &mut ResponseStatistics {
    let index = index.min(MAX_RESPONSE_INDEX);
    if responses.len() <= index {
        responses.resize(index + 1, ResponseStatistics::default());
    }
    &mut responses[index]
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
