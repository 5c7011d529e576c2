//! Adapters: their weights arrive in pieces, and fill the slots that a plan names.

use std::collections::VecDeque;

use engine::{AdapterId, FilledSlot};
use models::{Adapter, Model};
use ops::{Device, DeviceError, Feature};
use supervision::AdapterPiece;

use crate::error::WorkerError;

/// Adapters that have arrived and whose plan has not been carried out, in the order of their plans.
#[derive(Debug, Default)]
pub(crate) struct ArrivingAdapters(VecDeque<Arriving>);

#[derive(Debug)]
struct Arriving {
    adapter: AdapterId,
    len: usize,
    bytes: Vec<u8>,
}

impl ArrivingAdapters {
    pub(crate) fn push(&mut self, piece: &AdapterPiece) {
        match self.0.back_mut() {
            Some(last) if last.bytes.len() < last.len => last.bytes.extend(&piece.bytes),
            _ => {
                let (adapter, len, bytes) = (piece.adapter, piece.len as usize, piece.bytes.clone());
                self.0.push_back(Arriving { adapter, len, bytes });
            }
        }
    }

    /// Fills the slots of a plan.
    pub(crate) fn fill<D: Device>(
        &mut self,
        filled: &[FilledSlot],
        model: &dyn Model<D>,
        device: &mut D,
    ) -> Result<(), WorkerError> {
        for &FilledSlot { slot, adapter } in filled {
            let arrived = self.0.pop_front().filter(|it| it.adapter == adapter && it.bytes.len() == it.len);
            let arrived = arrived.ok_or(WorkerError::Protocol { expected: "Adapter", found: "Step" })?;
            let weights = Adapter::from_bytes(&arrived.bytes)?;
            model.set_adapter(device, slot.0, &weights)?;
        }
        Ok(())
    }
}

/// Bytes of the slots for adapters.
pub(crate) fn slot_bytes<D: Device>(model: &dyn Model<D>, device: &D, num_slots: usize, max_rank: usize) -> u64 {
    if num_slots == 0 { 0 } else { model.adapter_bytes(device, num_slots, max_rank) }
}

/// Refuses slots for adapters on a device that has none.
pub(crate) fn check<D: Device>(device: &D, num_slots: usize) -> Result<(), DeviceError> {
    match num_slots == 0 || device.features().contains(&Feature::Adapters) {
        true => Ok(()),
        false => Err(DeviceError::lacks(Feature::Adapters)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pieces_are_joined_in_the_order_of_their_adapters() {
        let mut arriving = ArrivingAdapters::default();
        let piece = |adapter, bytes: &[u8]| AdapterPiece { adapter: AdapterId(adapter), len: 3, bytes: bytes.to_vec() };
        for piece in [piece(4, &[1, 2]), piece(4, &[3]), piece(5, &[4, 5, 6]), piece(4, &[1])] {
            arriving.push(&piece);
        }
        let found: Vec<_> = arriving.0.iter().map(|it| (it.adapter.0, it.bytes.as_slice())).collect();
        assert_eq!(found, [(4, &[1, 2, 3][..]), (5, &[4, 5, 6]), (4, &[1])]);
    }
}
