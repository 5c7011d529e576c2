//! Checks of copies between the device and slots in host memory.

use engine::HostCopies;

use super::RowTable;
use crate::PlanMismatch;

impl RowTable {
    /// Refuses copies of blocks, states or slots that do not exist.
    pub(super) fn check_host(&self, step: u64, copies: &HostCopies) -> Result<(), PlanMismatch> {
        let blocks = || copies.stored.iter().chain(&copies.loaded).map(|copy| (copy.0.0, copy.1.0));
        let states = || copies.stored_states.iter().chain(&copies.loaded_states).map(|copy| (copy.0.0, copy.1.0));
        let kinds = [
            ("block", blocks().unzip::<_, _, Vec<_>, Vec<_>>(), self.num_blocks, self.host.num_blocks),
            ("state", states().unzip(), self.num_states, self.host.num_states),
        ];
        for (kind, (places, slots), num_places, num_slots) in kinds {
            let (place, slot) = (places.into_iter().max(), slots.into_iter().max());
            if place.is_some_and(|it| it as usize >= num_places) || slot.is_some_and(|it| it as usize >= num_slots) {
                return Err(PlanMismatch::Host { step, kind, place, num_places, slot, num_slots });
            }
        }
        Ok(())
    }
}
