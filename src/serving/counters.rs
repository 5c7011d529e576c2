//! The live counters of one model version.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use repository::ModelConfig;

use crate::histogram::{Histogram, Tally};
use crate::outcome::{CacheUse, Failure, OtherResponse, Outcome, ResponseTiming};
use crate::recent::Summaries;
use crate::statistics::{
    BatchStatistics, FailureCounts, InferStatistics, ModelStatistics, ResponseStatistics, StatisticDuration,
    nanoseconds,
};

/// Responses of a decoupled request are counted separately up to this index. Later ones count under this index.
const MAX_RESPONSE_INDEX: usize = 4096;

/// Default upper bounds of the first-response histogram, in milliseconds. `model_metrics` can name others.
const FIRST_RESPONSE_BUCKETS_MS: [f64; 4] = [100.0, 500.0, 2000.0, 5000.0];

/// The histogram's name in `model_metrics`.
const FIRST_RESPONSE_FAMILY: &str = "nv_inference_first_response_histogram_ms";

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

fn now_ms() -> u64 {
    let since_1970 = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    u64::try_from(since_1970.as_millis()).unwrap_or(u64::MAX)
}
