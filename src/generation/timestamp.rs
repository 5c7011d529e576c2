//! Points in time as numbers, which are cheap to read and subtract for each token.

use std::num::NonZeroU64;
use std::sync::LazyLock;
use std::time::{Duration, Instant};

/// A monotonic point in time, in nanoseconds.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Timestamp(NonZeroU64);

/// The origin, earlier than every instant of interest.
static BEGIN: LazyLock<Instant> = LazyLock::new(|| {
    let now = Instant::now();
    now.checked_sub(Duration::from_secs(3600)).unwrap_or(now)
});

impl Timestamp {
    /// The current time.
    #[inline]
    pub fn now() -> Self {
        Instant::now().into()
    }

    /// Nanoseconds since `earlier`; 0 when that is later.
    #[inline]
    pub fn ns_since(self, earlier: Timestamp) -> u64 {
        self.0.get().saturating_sub(earlier.0.get())
    }
}

impl From<Instant> for Timestamp {
    fn from(at: Instant) -> Self {
        let ns = at.saturating_duration_since(*BEGIN).as_nanos();
        Self(u64::try_from(ns).ok().and_then(NonZeroU64::new).unwrap_or(NonZeroU64::MIN))
    }
}

impl From<Timestamp> for Instant {
    fn from(Timestamp(at): Timestamp) -> Self {
        *BEGIN + Duration::from_nanos(at.get())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_timestamp_converts_to_the_instant_it_was_made_of() {
        let (earlier, later) = (Instant::now(), Instant::now() + Duration::from_nanos(1_234_567_891));
        let [first, second] = [earlier, later].map(Timestamp::from);
        assert_eq!([first, second].map(Instant::from), [earlier, later]);
        assert_eq!(second.ns_since(first), (later - earlier).as_nanos() as u64);
        assert_eq!(first.ns_since(second), 0);
    }
}
