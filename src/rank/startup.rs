//! How long rank 0 took until it served.

use std::sync::Mutex;
use std::time::Instant;

use ipc::lock;

/// Points of a start, each with the seconds since the process began to run.
pub(crate) struct Startup {
    began: Instant,
    points: Mutex<Vec<(&'static str, f64)>>,
}

impl Startup {
    /// The start begins now.
    pub(crate) fn begin() -> Self {
        Self { began: Instant::now(), points: Mutex::default() }
    }

    /// This point is reached now.
    pub(crate) fn reached(&self, point: &'static str) {
        lock(&self.points).push((point, self.began.elapsed().as_secs_f64()));
    }

    /// The points reached so far, in order.
    pub(crate) fn read(&self) -> Vec<(&'static str, f64)> {
        lock(&self.points).clone()
    }
}
