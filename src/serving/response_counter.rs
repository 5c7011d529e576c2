//! Counts the responses of one request, several at a time.

use std::time::{Duration, Instant};

use crate::Timestamp;
use crate::counters::Statistics;
use crate::outcome::{OtherResponse, ResponseTiming};

/// Responses of a request that are counted together, at most. All requests to the model share the counters, and writing a
/// contended cache line is costly.
const MAX_UNCOUNTED: usize = 6;

/// Responses of a request so far. It is updated for each token and fits one cache line.
#[derive(Debug)]
#[repr(align(64))]
pub(crate) struct ResponseCounter {
    /// When the last response was observed.
    last: Timestamp,
    count: u32,
    num_uncounted: u8,
    /// Whether responses are counted by their indices.
    is_decoupled: bool,
    /// Timings of the last `num_uncounted` responses, which are not counted yet.
    uncounted: [ResponseTiming<u32>; MAX_UNCOUNTED],
}

const _: () = assert!(size_of::<ResponseCounter>() == 64);

impl ResponseCounter {
    /// The counter of a request that arrived at `started`, without responses.
    pub fn new(started: Instant, is_decoupled: bool) -> Self {
        Self { last: started.into(), count: 0, num_uncounted: 0, is_decoupled, uncounted: Default::default() }
    }

    /// Number of responses so far.
    pub fn count(&self) -> u32 {
        self.count
    }

    /// Counts a response. Responses of a decoupled model are also counted by their indices.
    #[inline]
    pub fn response(&mut self, statistics: &Statistics, now: Timestamp, output_ns: u64) {
        let number = self.count;
        self.count = number.saturating_add(1);
        if !self.is_decoupled {
            return;
        }
        let timing = ResponseTiming { interval_ns: now.ns_since(self.last), output_ns };
        self.last = now;
        let compact = timing.to_u32();
        if compact.is_none() || usize::from(self.num_uncounted) == MAX_UNCOUNTED {
            self.flush_before(statistics, number);
        }
        match compact {
            Some(timing) => {
                self.uncounted[usize::from(self.num_uncounted)] = timing;
                self.num_uncounted += 1;
            }
            None => statistics.responses(number as usize, &[timing]),
        }
    }

    /// Counts a response without outputs, an error or a cancellation.
    pub fn other(&mut self, statistics: &Statistics, outcome: OtherResponse, now: Timestamp) {
        self.flush(statistics);
        if self.is_decoupled {
            let after = Duration::from_nanos(now.ns_since(self.last));
            statistics.other_response(self.count as usize, outcome, after);
            self.last = now;
        }
        self.count = self.count.saturating_add(1);
    }

    /// Counts all uncounted responses.
    pub fn flush(&mut self, statistics: &Statistics) {
        self.flush_before(statistics, self.count);
    }

    /// Counts all uncounted responses, which end before response `number`.
    fn flush_before(&mut self, statistics: &Statistics, number: u32) {
        let uncounted = &self.uncounted[..usize::from(std::mem::take(&mut self.num_uncounted))];
        if !uncounted.is_empty() {
            statistics.responses(number as usize - uncounted.len(), uncounted);
        }
    }
}
