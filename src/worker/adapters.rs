//! Adapters: their weights arrive in pieces, and fill the slots that a plan names.

use std::collections::VecDeque;
use std::panic::resume_unwind;
use std::thread::{Builder, JoinHandle};

use engine::{AdapterId, FilledSlot};
use models::{Adapter, AdapterError, Model};
use ops::{Device, DeviceError, Feature};
use supervision::AdapterPiece;

use crate::error::WorkerError;

/// Adapters that have arrived and whose plan has not been carried out, in the order of their plans.
pub(crate) struct ArrivingAdapters<D: Device> {
    pieces: Pieces,
    complete: VecDeque<(AdapterId, JoinHandle<Made<D>>)>,
}

/// The products of an adapter.
type Made<D> = Result<Vec<Vec<<D as Device>::Product>>, AdapterError>;

impl<D: Device> Default for ArrivingAdapters<D> {
    fn default() -> Self {
        Self { pieces: Pieces::default(), complete: VecDeque::new() }
    }
}

impl<D: Device + 'static> ArrivingAdapters<D> {
    /// Takes a piece. When an adapter is complete, a thread makes its products while steps run.
    pub(crate) fn push(&mut self, piece: &AdapterPiece, model: &dyn Model<D>) -> Result<(), WorkerError> {
        let Some((adapter, bytes)) = self.pieces.join(piece) else { return Ok(()) };
        let layers = model.adapter_layers();
        let make = move || Ok(Adapter::from_bytes(&bytes)?.products::<D>(&layers));
        let thread = Builder::new().name("adapter".into()).spawn(make).map_err(WorkerError::Thread)?;
        self.complete.push_back((adapter, thread));
        Ok(())
    }

    /// Fills the slots of a plan.
    pub(crate) fn fill(
        &mut self,
        filled: &[FilledSlot],
        model: &dyn Model<D>,
        device: &mut D,
    ) -> Result<(), WorkerError> {
        for &FilledSlot { slot, adapter } in filled {
            let arrived = self.complete.pop_front().filter(|(arrived, _)| *arrived == adapter);
            let (_, thread) = arrived.ok_or(WorkerError::Protocol { expected: "Adapter", found: "Step" })?;
            let products = thread.join().unwrap_or_else(|panic| resume_unwind(panic))?;
            model.set_products(device, slot.0, products)?;
        }
        Ok(())
    }
}

/// The pieces of the adapter that arrives, which follow each other.
#[derive(Debug, Default)]
struct Pieces(Vec<u8>);

impl Pieces {
    /// Adds a piece, and returns the bytes of its adapter if they are complete.
    fn join(&mut self, piece: &AdapterPiece) -> Option<(AdapterId, Vec<u8>)> {
        self.0.extend(&piece.bytes);
        (self.0.len() as u64 >= piece.len).then(|| (piece.adapter, std::mem::take(&mut self.0)))
    }
}

/// Bytes of the slots for adapters.
pub(crate) fn slot_bytes<D: Device>(model: &dyn Model<D>, device: &D, num_slots: usize, max_rank: usize) -> u64 {
    if num_slots == 0 { 0 } else { model.adapter_bytes(device, num_slots, max_rank) }
}

/// Refuses slots for adapters on a device that has none.
pub(crate) fn check<D: Device>(device: &D, num_slots: usize) -> Result<(), DeviceError> {
    match num_slots == 0 || !device.lacks().contains(&Feature::Adapters) {
        true => Ok(()),
        false => Err(DeviceError::lacks(Feature::Adapters)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pieces_are_joined_in_the_order_of_their_adapters() {
        let mut pieces = Pieces::default();
        let piece = |adapter, bytes: &[u8]| AdapterPiece { adapter: AdapterId(adapter), len: 3, bytes: bytes.to_vec() };
        assert_eq!(pieces.join(&piece(4, &[1, 2])), None);
        assert_eq!(pieces.join(&piece(4, &[3])), Some((AdapterId(4), vec![1, 2, 3])));
        assert_eq!(pieces.join(&piece(5, &[4, 5, 6])), Some((AdapterId(5), vec![4, 5, 6])));
        assert_eq!(pieces.join(&piece(4, &[1])), None);
    }
}
