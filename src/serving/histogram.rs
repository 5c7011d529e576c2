//! Values counted by size, from any thread and without a lock.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

/// Counts of values up to each of some bounds. Adding one is two or three relaxed additions.
#[derive(Debug)]
pub struct Histogram {
    bounds: Box<[f64]>,
    /// One for each bound, and one for what is larger than all of them; not cumulative.
    counts: Box<[AtomicU64]>,
    sum: AtomicU64,
    /// Of the sum, in one of the values' unit.
    ticks: f64,
}

/// Values of one bucket that are not counted yet, for who counts several together: a histogram is shared, and dear to touch
/// from several threads.
#[derive(Debug, Clone, Copy, Default)]
pub struct Tally {
    bucket: u32,
    count: u32,
    sum: u64,
}

impl Tally {
    /// Values that are not counted yet.
    pub fn count(&self) -> u32 {
        self.count
    }
}

/// A [`Histogram`] at one moment.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct HistogramValues {
    /// Upper bounds, ascending.
    pub bounds: Vec<f64>,
    /// How many values were at most so large as the bound; cumulative.
    pub counts: Vec<u64>,
    /// How many values there were.
    pub count: u64,
    /// Their sum.
    pub sum: f64,
}

impl Histogram {
    /// Of durations in seconds or milliseconds, summed up to a billionth.
    pub fn of_times(bounds: &[f64]) -> Self {
        Self::new(bounds, 1e9)
    }

    /// Of whole numbers.
    pub fn of_numbers(bounds: &[f64]) -> Self {
        Self::new(bounds, 1.0)
    }

    fn new(bounds: &[f64], ticks: f64) -> Self {
        let counts = (0..=bounds.len()).map(|_| AtomicU64::new(0)).collect();
        Self { bounds: bounds.into(), counts, sum: AtomicU64::new(0), ticks }
    }

    /// Counts one value, not negative.
    pub fn observe(&self, value: f64) {
        self.observe_many(value, 1);
    }

    /// Counts `count` values of this size.
    pub fn observe_many(&self, value: f64, count: u64) {
        self.add(self.bucket(value), count, (value * self.ticks) as u64 * count);
    }

    /// Takes a value into `tally`, which counts when it is settled; those of another bucket there count now.
    pub fn gather(&self, value: f64, tally: &mut Tally) {
        let bucket = self.bucket(value) as u32;
        if bucket != tally.bucket {
            self.settle(tally);
            tally.bucket = bucket;
        }
        tally.count += 1;
        tally.sum += (value * self.ticks) as u64;
    }

    /// Counts what was gathered.
    pub fn settle(&self, tally: &mut Tally) {
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

    /// As of now; values that are added meanwhile may be missing in parts.
    pub fn read(&self) -> HistogramValues {
        let mut so_far = 0;
        let mut counts: Vec<u64> = self.counts.iter().map(|count| count.load(Relaxed)).collect();
        counts.iter_mut().for_each(|count| {
            so_far += *count;
            *count = so_far;
        });
        counts.pop();
        let sum = self.sum.load(Relaxed) as f64 / self.ticks;
        HistogramValues { bounds: self.bounds.to_vec(), counts, count: so_far, sum }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_value_counts_for_every_bound_that_it_does_not_exceed() {
        let histogram = Histogram::of_times(&[0.1, 1.0, 10.0]);
        [0.05, 0.1, 20.0].into_iter().for_each(|value| histogram.observe(value));
        let mut tally = Tally::default();
        histogram.gather(0.5, &mut tally); // Of another bucket than what follows.
        [2.0, 2.0, 2.0].into_iter().for_each(|value| histogram.gather(value, &mut tally));
        assert_eq!((histogram.read().count, tally.count()), (4, 3));
        histogram.settle(&mut tally);
        assert_eq!(tally.count(), 0);
        let values = histogram.read();
        assert_eq!((values.counts, values.count), (vec![2, 3, 6], 7));
        assert!((values.sum - 26.65).abs() < 1e-6, "{}", values.sum);
    }
}
