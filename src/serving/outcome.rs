//! How requests and their responses end, as the statistics count them.

use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::time::{Duration, Instant};

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
