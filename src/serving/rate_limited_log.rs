//! Rate limit for log lines that clients can cause without limit.

use std::fmt;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

/// The rate limit applies to intervals of this length.
const INTERVAL: Duration = Duration::from_secs(10);

/// Limits the rate of log lines of one kind.
#[derive(Debug)]
pub struct RateLimitedLog {
    max_lines: u32,
    state: Mutex<State>,
}

#[derive(Debug)]
struct State {
    interval_start: Option<Instant>,
    num_logged: u32,
    num_suppressed: u64,
}

/// Number of suppressed lines since the last logged one. Its text is appended to the next logged line.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SuppressedCount(u64);

impl fmt::Display for SuppressedCount {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0 {
            0 => Ok(()),
            count => write!(formatter, " ({count} more like this were not logged)"),
        }
    }
}

impl RateLimitedLog {
    /// Allows at most `max_lines` lines in ten seconds.
    pub const fn new(max_lines: u32) -> Self {
        Self { max_lines, state: Mutex::new(State { interval_start: None, num_logged: 0, num_suppressed: 0 }) }
    }

    /// Counts a line. `None` where it must not be logged.
    pub fn allow(&self) -> Option<SuppressedCount> {
        self.allow_at(Instant::now())
    }

    fn allow_at(&self, now: Instant) -> Option<SuppressedCount> {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        if state.interval_start.is_none_or(|start| now.saturating_duration_since(start) >= INTERVAL) {
            (state.interval_start, state.num_logged) = (Some(now), 0);
        }
        if state.num_logged == self.max_lines {
            state.num_suppressed += 1;
            return None;
        }
        state.num_logged += 1;
        Some(SuppressedCount(std::mem::take(&mut state.num_suppressed)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_above_the_limit_are_counted_and_not_logged() {
        let (log, start) = (RateLimitedLog::new(2), Instant::now());
        let suffix = |after: Duration| log.allow_at(start + after).map(|suppressed| suppressed.to_string());
        assert_eq!(suffix(Duration::ZERO), Some(String::new()));
        assert_eq!(suffix(Duration::from_secs(1)), Some(String::new()));
        assert!((0..46).all(|_| suffix(Duration::from_secs(2)).is_none()));
        assert_eq!(suffix(INTERVAL), Some(" (46 more like this were not logged)".to_owned()));
        assert_eq!(suffix(INTERVAL), Some(String::new()));
        assert_eq!(suffix(INTERVAL), None);
    }
}
