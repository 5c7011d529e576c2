//! The state of a replica that its step thread writes and other threads read.

use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use engine::{AdapterId, EngineStats};

use super::metrics::Metrics;
use super::responsiveness::Responsiveness;

/// The state of one replica of a model that other threads read.
#[derive(Debug, Default)]
pub(crate) struct ReplicaState {
    /// Whether the workers have loaded and none is lost.
    pub(crate) ready: AtomicBool,
    /// Whether the replica sleeps: it can serve once it is woken.
    pub(crate) sleeps: AtomicBool,
    /// Whether a rank of it is lost. It will not serve again, and its requests go to other replicas.
    pub(crate) is_lost: AtomicBool,
    /// Whether step thread and workers respond.
    pub(crate) responsiveness: Responsiveness,
    /// Number of times that the workers were started again.
    pub(crate) restarts: AtomicU64,
    /// The engine's statistics after the last step.
    pub(crate) stats: Mutex<EngineStats>,
    /// The adapters of running sequences after the last step, and the number of sequences of each.
    pub(crate) adapters: Mutex<Vec<(AdapterId, u32)>>,
    /// The error of all requests after too many losses; `None` while the replica is in service.
    pub(crate) failure: Mutex<Option<String>>,
    /// Counters and histograms.
    pub(crate) metrics: Metrics,
}

impl ReplicaState {
    /// Whether a step can run now, or once the replica is woken.
    pub(crate) fn is_ready(&self) -> bool {
        (self.ready.load(Ordering::Acquire) || self.is_sleeping()) && self.responsiveness.responds()
    }

    /// Whether the replica sleeps.
    pub(crate) fn is_sleeping(&self) -> bool {
        self.sleeps.load(Ordering::Acquire)
    }

    /// The error of all requests after too many losses, if any.
    pub(crate) fn failure(&self) -> Option<String> {
        ipc::lock(&self.failure).clone()
    }

    /// 0 if a rank is lost, 1 after too many losses of workers, 2 while workers load or do not respond, 3 when a step can run.
    pub(crate) fn health(&self) -> u8 {
        match () {
            () if self.is_lost.load(Ordering::Acquire) => 0,
            () if self.is_ready() => 3,
            () => 1 + u8::from(ipc::lock(&self.failure).is_none()),
        }
    }
}
