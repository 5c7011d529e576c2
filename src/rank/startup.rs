//! The duration of rank 0's start.

use std::sync::Mutex;
use std::time::Instant;

use ipc::lock;

/// Phases of the start, each with the seconds from the start of the process to its end.
pub(crate) struct Startup {
    began: Instant,
    phases: Mutex<Vec<(&'static str, f64)>>,
}

impl Startup {
    /// Starts the clock.
    pub(crate) fn begin() -> Self {
        Self { began: Instant::now(), phases: Mutex::default() }
    }

    /// Notes that `phase` has ended.
    pub(crate) fn reached(&self, phase: &'static str) {
        lock(&self.phases).push((phase, self.began.elapsed().as_secs_f64()));
    }

    /// The phases that have ended, in order.
    pub(crate) fn read(&self) -> Vec<(&'static str, f64)> {
        lock(&self.phases).clone()
    }
}
