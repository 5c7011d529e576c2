//! The connection to one worker.

use std::collections::VecDeque;

use ipc::{Backlog, RingReceiver, RingSender};
use supervision::{RelayedWorker, ShmName};

/// The connection to a worker.
pub(super) enum Link {
    /// A worker on rank 0's node: its rings.
    Rings { plans: RingSender, outputs: RingReceiver },
    /// A worker on another node: the names of its rings, and its messages that are not read yet.
    Relayed { rings: RelayedWorker, received: VecDeque<Vec<u8>> },
}

impl Link {
    /// The backlog of plans; `None` for a worker on another node.
    pub(super) fn backlog(&self) -> Option<Backlog> {
        match self {
            Link::Rings { plans, .. } => Some(plans.backlog()),
            Link::Relayed { .. } => None,
        }
    }

    pub(super) fn open(plan_ring: &ShmName, output_ring: &ShmName) -> Result<Self, ipc::IpcError> {
        Ok(Self::Rings {
            plans: RingSender::open(&plan_ring.prefix.parse()?, &plan_ring.name)?,
            outputs: RingReceiver::open(&output_ring.prefix.parse()?, &output_ring.name)?,
        })
    }
}
