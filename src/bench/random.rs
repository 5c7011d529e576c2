//! Repeatable random numbers: splitmix64 (Steele, Lea, Flood 2014).
//!
//! Own code: a seed stands for one workload in every release, but fastrand and rand change their sequences between versions.

use std::time::Duration;

/// A sequence of random numbers that depends only on its seed.
#[derive(Debug, Clone)]
pub(crate) struct Random(u64);

impl Random {
    pub(crate) fn new(seed: u64) -> Self {
        Self(seed)
    }

    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut mixed = self.0;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ (mixed >> 31)
    }

    /// In [0, 1).
    pub(crate) fn unit(&mut self) -> f64 {
        (self.next() >> 11) as f64 / (1u64 << 53) as f64
    }

    /// In `0..bound`; `bound` must not be 0.
    pub(crate) fn below(&mut self, bound: usize) -> usize {
        ((self.unit() * bound as f64) as usize).min(bound - 1)
    }

    /// Normally distributed (Box and Muller 1958).
    pub(crate) fn normal(&mut self, mean: f64, deviation: f64) -> f64 {
        let (radius, angle) = ((-2.0 * (1.0 - self.unit()).ln()).sqrt(), std::f64::consts::TAU * self.unit());
        mean + deviation * radius * angle.cos()
    }

    /// `count` of the items in random order, or all items if there are fewer.
    pub(crate) fn sample<T>(&mut self, mut items: Vec<T>, count: usize) -> Vec<T> {
        let count = count.min(items.len());
        for index in 0..count {
            let other = index + self.below(items.len() - index);
            items.swap(index, other);
        }
        items.truncate(count);
        items
    }
}

/// Intervals between requests.
#[derive(Debug, Clone)]
pub(crate) struct Arrivals {
    rate: Option<f64>,
    is_constant: bool,
    random: Random,
}

impl Arrivals {
    /// `rate` requests per second: a Poisson process, or equal intervals if `is_constant`. Without a rate all requests arrive at once.
    pub(crate) fn new(rate: Option<f64>, is_constant: bool, seed: u64) -> Self {
        let rate = rate.filter(|rate| rate.is_finite() && *rate > 0.0);
        Self { rate, is_constant, random: Random::new(seed) }
    }

    /// Time until the next request.
    pub(crate) fn gap(&mut self) -> Duration {
        let Some(rate) = self.rate else { return Duration::ZERO };
        let gap = if self.is_constant { 1.0 } else { -(1.0 - self.random.unit()).ln() };
        Duration::from_secs_f64(gap / rate)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn arrivals_keep_their_rate_and_repeat() {
        let mean = |seed| {
            let mut arrivals = Arrivals::new(Some(100.0), false, seed);
            (0..10_000).map(|_| arrivals.gap().as_secs_f64()).sum::<f64>() / 10_000.0
        };
        assert!((mean(1) - 0.01).abs() < 0.0005, "{}", mean(1));
        assert_eq!(mean(1), mean(1));
        assert_ne!(mean(1), mean(2));
    }

    #[test]
    fn normal_numbers_have_their_mean_and_deviation() {
        let mut random = Random::new(3);
        let numbers: Vec<f64> = (0..10_000).map(|_| random.normal(50.0, 5.0)).collect();
        let mean = numbers.iter().sum::<f64>() / 1e4;
        let variance = numbers.iter().map(|number| (number - mean).powi(2)).sum::<f64>() / 1e4;
        assert!((mean - 50.0).abs() < 0.2 && (variance.sqrt() - 5.0).abs() < 0.2, "{mean} {variance}");
    }

    #[test]
    fn a_sample_repeats_nothing() {
        let mut sample = Random::new(1).sample((0..100).collect(), 50);
        sample.sort_unstable();
        sample.dedup();
        assert_eq!(sample.len(), 50);
    }
}
