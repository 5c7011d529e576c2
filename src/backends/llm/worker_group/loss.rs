//! The loss of workers.

/// Why the workers of a replica cannot go on. `reason` is for the log and for clients.
#[derive(Debug, Clone, thiserror::Error)]
#[error("{reason}")]
pub(crate) struct WorkerLoss {
    pub(crate) reason: String,
    pub(crate) kind: LossKind,
}

/// The kind of a loss, which determines the recovery.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum LossKind {
    /// A worker failed or hung.
    Failed,
    /// A signal ended a worker. Another start may succeed, even if this was the first load.
    BySignal,
    /// A rank is lost. Only a new world can serve the model.
    RankLost,
    /// A rank of the replica is lost, and the world goes on with the others.
    ReplicaLost,
}

impl LossKind {
    /// Whether no other workers can take the place of these.
    pub(crate) fn is_final(self) -> bool {
        matches!(self, Self::RankLost | Self::ReplicaLost)
    }
}

impl WorkerLoss {
    pub(crate) fn new(reason: String) -> Self {
        Self { reason, kind: LossKind::Failed }
    }
}
