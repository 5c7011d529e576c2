//! Durations of the last minute, for the metrics of type summary.

use std::collections::VecDeque;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use crate::outcome::{CacheUse, Outcome};
use crate::statistics::{RecentDurations, nanoseconds};

/// Quantiles are taken over durations that are not older than this.
const RECENT: Duration = Duration::from_secs(60);
/// Quantiles are taken over at most this many durations.
const MAX_RECENT: usize = 4096;

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
pub(crate) struct Summaries {
    request: Recent,
    queue: Recent,
    input: Recent,
    compute: Recent,
    output: Recent,
    cache_hit: Recent,
    cache_miss: Recent,
}

impl Summaries {
    pub fn add(&self, outcome: &Outcome, computed: Duration) {
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

    pub fn read(&self) -> RecentDurations {
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

fn lock<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
