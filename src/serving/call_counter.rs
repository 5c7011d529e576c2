//! Counts requests to a model that another model serves in its place.

use std::sync::Arc;
use std::time::Duration;

use crate::counters::Statistics;
use crate::histogram::Tally;
use crate::outcome::Outcome;

/// Calls that are counted together, at most. All threads share the statistics, and writing a contended cache line is costly.
const MAX_UNCOUNTED: u64 = 16;

/// Counts calls as requests to one model, each with one response and a batch size of 1. Dropping it counts the remaining
/// calls.
#[derive(Debug)]
pub struct CallCounter {
    statistics: Arc<Statistics>,
    num_uncounted: u64,
    total_ns: u64,
    first_responses: Tally,
}

impl CallCounter {
    /// Counts calls in the statistics of a model.
    pub(crate) fn new(statistics: Arc<Statistics>) -> Self {
        Self { statistics, num_uncounted: 0, total_ns: 0, first_responses: Tally::default() }
    }

    /// Counts a call that took `total_ns` nanoseconds.
    pub fn count(&mut self, total_ns: u64) {
        self.statistics.tally_first_response(total_ns, &mut self.first_responses);
        self.total_ns += total_ns;
        self.num_uncounted += 1;
        if self.num_uncounted == MAX_UNCOUNTED || self.statistics.has_summaries() {
            self.flush();
        }
    }

    /// Adds the uncounted calls to the model's statistics.
    pub fn flush(&mut self) {
        let statistics = &self.statistics;
        statistics.flush_first_responses(&mut self.first_responses);
        let (count, total) = (std::mem::take(&mut self.num_uncounted), std::mem::take(&mut self.total_ns));
        if count > 0 {
            let total = Duration::from_nanos(total);
            statistics.all_succeeded(&Outcome { total, batch_size: 1, executed: Some(1), ..Outcome::default() }, count);
        }
    }
}

impl Drop for CallCounter {
    fn drop(&mut self) {
        self.flush();
    }
}
