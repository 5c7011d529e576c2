//! Snapshots of a model version's statistics.

use std::time::Duration;

use crate::histogram::HistogramValues;

/// A count of durations and their sum.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct StatisticDuration {
    /// Number of durations.
    pub count: u64,
    /// Their sum in nanoseconds.
    pub ns: u64,
}

impl StatisticDuration {
    pub(crate) fn add(&mut self, duration: Duration) {
        self.add_many(duration, 1);
    }

    /// Adds `count` durations with this sum.
    pub(crate) fn add_many(&mut self, sum: Duration, count: u64) {
        self.count += count;
        self.ns += nanoseconds(sum);
    }

    pub(crate) fn add_ns(&mut self, ns: u64) {
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

/// An amount of memory that a model holds.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MemoryUsage {
    /// `CPU` or `GPU`, as the statistics name them.
    pub kind: &'static str,
    /// Number of the GPU on its node; 0 for `CPU`.
    pub id: i64,
    /// Size in bytes.
    pub num_bytes: u64,
}

/// Nanoseconds of a duration, at most [`u64::MAX`].
pub(crate) fn nanoseconds(duration: Duration) -> u64 {
    u64::try_from(duration.as_nanos()).unwrap_or(u64::MAX)
}
