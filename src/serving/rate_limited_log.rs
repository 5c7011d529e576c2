//! Warnings that clients can cause as often as they like, logged at a limited rate.

use std::fmt;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

/// Time in which a number of warnings of one kind is logged.
const INTERVAL: Duration = Duration::from_secs(10);

/// Counts warnings of one kind, and says which of them are logged.
#[derive(Debug)]
pub struct Repeated {
    most: u32,
    state: Mutex<State>,
}

#[derive(Debug)]
struct State {
    /// Begin of the interval.
    since: Option<Instant>,
    num_logged: u32,
    num_unlogged: u64,
}

/// How many warnings of one kind were not logged before the one that is; stands behind its text.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Unlogged(u64);

impl fmt::Display for Unlogged {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0 {
            0 => Ok(()),
            count => write!(formatter, " ({count} more like this were not logged)"),
        }
    }
}

impl Repeated {
    /// At most `most` warnings in ten seconds.
    pub const fn new(most: u32) -> Self {
        Self { most, state: Mutex::new(State { since: None, num_logged: 0, num_unlogged: 0 }) }
    }

    /// Counts a warning. `None` where it is not to be logged.
    pub fn due(&self) -> Option<Unlogged> {
        self.due_at(Instant::now())
    }

    fn due_at(&self, now: Instant) -> Option<Unlogged> {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        if state.since.is_none_or(|since| now.saturating_duration_since(since) >= INTERVAL) {
            (state.since, state.num_logged) = (Some(now), 0);
        }
        if state.num_logged == self.most {
            state.num_unlogged += 1;
            return None;
        }
        state.num_logged += 1;
        Some(Unlogged(std::mem::take(&mut state.num_unlogged)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_repeats_is_logged_a_few_times_and_then_counted() {
        let (warnings, start) = (Repeated::new(2), Instant::now());
        let words = |after: Duration| warnings.due_at(start + after).map(|unlogged| unlogged.to_string());
        assert_eq!(words(Duration::ZERO), Some(String::new()));
        assert_eq!(words(Duration::from_secs(1)), Some(String::new()));
        assert!((0..46).all(|_| words(Duration::from_secs(2)).is_none()));
        assert_eq!(words(INTERVAL), Some(" (46 more like this were not logged)".to_owned()));
        assert_eq!(words(INTERVAL), Some(String::new()));
        assert_eq!(words(INTERVAL), None);
    }
}
