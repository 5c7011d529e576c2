//! The way to one worker.

use std::collections::VecDeque;

use ipc::{Backlog, RingReceiver, RingSender};
use supervision::{RelayedWorker, ShmName};

/// The way to a worker.
pub(super) enum Link {
    /// On rank 0's node: its rings.
    Rings { plans: RingSender, outputs: RingReceiver },
    /// On another: its rings there, and what came of its messages.
    Relayed { rings: RelayedWorker, received: VecDeque<Vec<u8>> },
}

impl Link {
    /// Plans that wait in the worker's ring, where it lies on this node.
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
