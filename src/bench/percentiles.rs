//! Percentiles and histograms of latencies.
//!
//! Own code: hdrhistogram rounds each value to its buckets, and these figures are exact.

use std::time::Duration;

use serde::{Deserialize, Serialize};

/// Latencies in milliseconds.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize)]
pub struct Percentiles {
    /// The shortest.
    #[serde(default)]
    pub min: f64,
    /// Mean.
    pub mean: f64,
    /// Median.
    pub p50: f64,
    /// 90 of 100 are at most this.
    pub p90: f64,
    /// 99 of 100 are at most this.
    pub p99: f64,
    /// The longest.
    pub max: f64,
}

impl Percentiles {
    /// Summarizes durations in any order; sorts them. All values are 0 if there are none.
    pub fn of(durations: &mut [Duration]) -> Self {
        if durations.is_empty() {
            return Self::default();
        }
        durations.sort_unstable();
        let milliseconds = |duration: Duration| duration.as_secs_f64() * 1e3;
        // Nearest rank.
        let at = |share: f64| durations[((share * durations.len() as f64).ceil() as usize).max(1) - 1];
        let total: Duration = durations.iter().sum();
        Self {
            min: milliseconds(durations[0]),
            mean: milliseconds(total) / durations.len() as f64,
            p50: milliseconds(at(0.5)),
            p90: milliseconds(at(0.9)),
            p99: milliseconds(at(0.99)),
            max: milliseconds(at(1.0)),
        }
    }
}

impl std::fmt::Display for Percentiles {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self { mean, p50, p90, p99, max, .. } = self;
        write!(formatter, "mean {mean:.3} ms   p50 {p50:.3}   p90 {p90:.3}   p99 {p99:.3}   max {max:.3}")
    }
}

/// A histogram of latencies with ten bins per power of ten.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct Histogram {
    /// Upper edge of each bin, in milliseconds, ascending.
    pub edges_ms: Vec<f64>,
    /// Number of latencies in each bin.
    pub counts: Vec<u64>,
}

/// Bins per power of ten.
const BINS: f64 = 10.0;

impl Histogram {
    /// Counts durations in any order.
    pub fn of(durations: &[Duration]) -> Self {
        let bin = |duration: &Duration| ((duration.as_secs_f64() * 1e3).max(1e-3).log10() * BINS).ceil() as i32;
        let Some((first, last)) = durations.iter().map(bin).fold(None, |span: Option<(i32, i32)>, bin| {
            Some(span.map_or((bin, bin), |(first, last)| (first.min(bin), last.max(bin))))
        }) else {
            return Self::default();
        };
        let mut counts = vec![0; (last - first + 1) as usize];
        durations.iter().for_each(|duration| counts[(bin(duration) - first) as usize] += 1);
        let edges_ms = (first..=last).map(|bin| 10f64.powf(f64::from(bin) / BINS)).collect();
        Self { edges_ms, counts }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn percentiles_are_the_nearest_rank() {
        let mut durations: Vec<Duration> = (1..=100).rev().map(Duration::from_millis).collect();
        let percentiles = Percentiles::of(&mut durations);
        assert_eq!((percentiles.p50, percentiles.p90, percentiles.p99), (50.0, 90.0, 99.0));
        assert_eq!((percentiles.min, percentiles.mean, percentiles.max), (1.0, 50.5, 100.0));
        assert_eq!(Percentiles::of(&mut []), Percentiles::default());
        assert_eq!(Percentiles::of(&mut [Duration::from_millis(7)]).p99, 7.0);
    }

    #[test]
    fn a_latency_is_counted_in_the_bin_with_the_next_higher_edge() {
        let histogram = Histogram::of(&[1, 9, 10, 100].map(Duration::from_millis));
        assert_eq!(histogram.counts.iter().sum::<u64>(), 4);
        assert_eq!(histogram.edges_ms.len(), 21);
        assert_eq!((histogram.counts[0], histogram.counts[10], histogram.counts[20]), (1, 2, 1));
        assert_eq!(Histogram::of(&[]), Histogram::default());
    }
}
