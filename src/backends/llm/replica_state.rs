//! The state of a replica that its step thread writes and others read.

use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use engine::EngineStats;

use super::metrics::Metrics;

/// The state of one replica of a model that other threads read.
#[derive(Debug, Default)]
pub(crate) struct ReplicaState {
    /// A step can run now.
    pub(crate) ready: AtomicBool,
    /// Starts of the workers after the first.
    pub(crate) restarts: AtomicU64,
    /// The engine's metrics after the last step.
    pub(crate) stats: Mutex<EngineStats>,
    /// Why the model was given up.
    pub(crate) failure: Mutex<Option<String>>,
    /// What is counted for metrics.
    pub(crate) metrics: Metrics,
}

impl ReplicaState {
    /// Whether a step can run now.
    pub(crate) fn is_ready(&self) -> bool {
        self.ready.load(Ordering::Acquire)
    }

    /// Why it was given up, if it was.
    pub(crate) fn failure(&self) -> Option<String> {
        ipc::lock(&self.failure).clone()
    }

    /// More is better: 0 when given up, 1 while workers load, 2 when a step can run.
    pub(crate) fn health(&self) -> u8 {
        if self.is_ready() { 2 } else { u8::from(ipc::lock(&self.failure).is_none()) }
    }
}
