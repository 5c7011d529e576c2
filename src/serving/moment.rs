//! Points in time as numbers, for what each token asks.

use std::num::NonZeroU64;
use std::sync::LazyLock;
use std::time::{Duration, Instant};

/// A point in time, in nanoseconds: from one to another is one subtraction.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Moment(NonZeroU64);

/// What is counted from: before all that is asked for.
static BEGIN: LazyLock<Instant> = LazyLock::new(|| {
    let now = Instant::now();
    now.checked_sub(Duration::from_secs(3600)).unwrap_or(now)
});

impl Moment {
    /// As of now.
    #[inline]
    pub fn now() -> Self {
        Instant::now().into()
    }

    /// Nanoseconds from `earlier` until this; 0 when that is later.
    #[inline]
    pub fn ns_since(self, earlier: Moment) -> u64 {
        self.0.get().saturating_sub(earlier.0.get())
    }
}

impl From<Instant> for Moment {
    fn from(at: Instant) -> Self {
        let ns = at.saturating_duration_since(*BEGIN).as_nanos();
        Self(u64::try_from(ns).ok().and_then(NonZeroU64::new).unwrap_or(NonZeroU64::MIN))
    }
}

impl From<Moment> for Instant {
    fn from(Moment(at): Moment) -> Self {
        *BEGIN + Duration::from_nanos(at.get())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_moment_is_the_instant_that_it_was_made_of() {
        let (earlier, later) = (Instant::now(), Instant::now() + Duration::from_nanos(1_234_567_891));
        let [first, second] = [earlier, later].map(Moment::from);
        assert_eq!([first, second].map(Instant::from), [earlier, later]);
        assert_eq!(second.ns_since(first), (later - earlier).as_nanos() as u64);
        assert_eq!(first.ns_since(second), 0);
    }
}
