//! Histograms that any thread can add to without a lock.
//!
//! `prometheus-client` locks a mutex for each observation, of which a token makes several.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

/// Counts values by upper bounds. Adding a value takes two relaxed atomic additions.
#[derive(Debug)]
pub struct Histogram {
    bounds: Box<[f64]>,
    /// One count for each bound, and one for larger values; not cumulative.
    counts: Box<[AtomicU64]>,
    sum: AtomicU64,
    /// `sum` is in units of `1 / ticks`.
    ticks: f64,
}

/// Values of one bucket that are not added to the histogram yet. Adding several together saves writes to a cache line that
/// threads contend for.
#[derive(Debug, Clone, Copy, Default)]
pub struct Tally {
    bucket: u32,
    count: u32,
    sum: u64,
}

impl Tally {
    /// Number of values that are not added yet.
    pub fn count(&self) -> u32 {
        self.count
    }
}

/// A snapshot of a [`Histogram`].
#[derive(Debug, Clone, Default, PartialEq)]
pub struct HistogramValues {
    /// Upper bounds, ascending.
    pub bounds: Vec<f64>,
    /// For each bound, the number of values at or below it; cumulative.
    pub counts: Vec<u64>,
    /// Number of values.
    pub count: u64,
    /// Their sum.
    pub sum: f64,
}

impl Histogram {
    /// A histogram of durations in seconds or milliseconds. Their sum has a resolution of a billionth of the unit.
    pub fn of_times(bounds: &[f64]) -> Self {
        Self::new(bounds, 1e9)
    }

    /// A histogram of whole numbers.
    pub fn of_numbers(bounds: &[f64]) -> Self {
        Self::new(bounds, 1.0)
    }

    fn new(bounds: &[f64], ticks: f64) -> Self {
        let counts = (0..=bounds.len()).map(|_| AtomicU64::new(0)).collect();
        Self { bounds: bounds.into(), counts, sum: AtomicU64::new(0), ticks }
    }

    /// Counts one value, which must not be negative.
    pub fn observe(&self, value: f64) {
        self.observe_many(value, 1);
    }

    /// Counts `count` equal values.
    pub fn observe_many(&self, value: f64, count: u64) {
        self.add(self.bucket(value), count, (value * self.ticks) as u64 * count);
    }

    /// Adds a value to `tally`, which [`Histogram::flush`] counts. Values of another bucket in `tally` are counted first.
    pub fn tally(&self, value: f64, tally: &mut Tally) {
        let bucket = self.bucket(value) as u32;
        if bucket != tally.bucket {
            self.flush(tally);
            tally.bucket = bucket;
        }
        tally.count += 1;
        tally.sum += (value * self.ticks) as u64;
    }

    /// Counts the values of `tally` and clears it.
    pub fn flush(&self, tally: &mut Tally) {
        let Tally { bucket, count, sum } = std::mem::take(tally);
        if count > 0 {
            self.add(bucket as usize, count.into(), sum);
        }
    }

    fn bucket(&self, value: f64) -> usize {
        self.bounds.iter().position(|&bound| value <= bound).unwrap_or(self.bounds.len())
    }

    fn add(&self, bucket: usize, count: u64, sum: u64) {
        self.counts[bucket].fetch_add(count, Relaxed);
        self.sum.fetch_add(sum, Relaxed);
    }

    /// A snapshot. A value that is added at the same time may be in the counts and not in the sum, or the reverse.
    pub fn read(&self) -> HistogramValues {
        let mut total = 0;
        let mut counts: Vec<u64> = self.counts.iter().map(|count| count.load(Relaxed)).collect();
        counts.iter_mut().for_each(|count| {
            total += *count;
            *count = total;
        });
        counts.pop();
        let sum = self.sum.load(Relaxed) as f64 / self.ticks;
        HistogramValues { bounds: self.bounds.to_vec(), counts, count: total, sum }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_value_counts_for_every_bound_at_or_above_it() {
        let histogram = Histogram::of_times(&[0.1, 1.0, 10.0]);
        [0.05, 0.1, 20.0].into_iter().for_each(|value| histogram.observe(value));
        let mut tally = Tally::default();
        histogram.tally(0.5, &mut tally); // Another bucket than that of the next values.
        [2.0, 2.0, 2.0].into_iter().for_each(|value| histogram.tally(value, &mut tally));
        assert_eq!((histogram.read().count, tally.count()), (4, 3));
        histogram.flush(&mut tally);
        assert_eq!(tally.count(), 0);
        let values = histogram.read();
        assert_eq!((values.counts, values.count), (vec![2, 3, 6], 7));
        assert!((values.sum - 26.65).abs() < 1e-6, "{}", values.sum);
    }
}
