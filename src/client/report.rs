//! Percentiles and how figures are printed.

use std::time::Duration;

use serde::Serialize;

/// Latencies in milliseconds.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize)]
pub struct Percentiles {
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
    /// Of any durations, in any order.
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
        let Self { mean, p50, p90, p99, max } = self;
        write!(formatter, "mean {mean:.3} ms   p50 {p50:.3}   p90 {p90:.3}   p99 {p99:.3}   max {max:.3}")
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
        assert_eq!((percentiles.mean, percentiles.max), (50.5, 100.0));
        assert_eq!(Percentiles::of(&mut []), Percentiles::default());
        assert_eq!(Percentiles::of(&mut [Duration::from_millis(7)]).p99, 7.0);
    }
}
