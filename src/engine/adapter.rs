//! Adapters (LoRA): those of requests, and the slots of the workers that hold their weights.
//!
//! Workers have a bounded number of slots. A request with an adapter joins when its adapter is in a slot, or when a slot
//! is free whose adapter no running sequence uses. The weights are opaque to this crate: the caller takes them by
//! [`Engine::take_filled`] and sends them to the workers before the plan that fills their slots.

use std::fmt;
use std::sync::Arc;

use serde::{Deserialize, Serialize};

use crate::Engine;

/// An adapter. Never reused: an adapter that is loaded again has another id.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default, Serialize, Deserialize)]
pub struct AdapterId(pub u64);

/// One of the workers' slots for the weights of an adapter, in `0..max_adapters`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default, Serialize, Deserialize)]
pub struct AdapterSlot(pub u32);

/// An adapter that requests may use.
#[derive(Clone, PartialEq, Eq)]
pub struct Adapter {
    /// Its id. Sequences share cached blocks only with sequences of the same adapter.
    pub id: AdapterId,
    /// Its weights, in the form that workers expect.
    pub weights: Vec<u8>,
}

impl fmt::Debug for Adapter {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Adapter({}, {} bytes)", self.id.0, self.weights.len())
    }
}

/// A slot that receives the weights of an adapter before a step.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct FilledSlot {
    /// The slot. No row of the step used its last adapter.
    pub slot: AdapterSlot,
    /// The adapter.
    pub adapter: AdapterId,
}

/// What each slot holds, and how many running sequences use it.
#[derive(Debug, Default)]
pub(crate) struct AdapterSlots {
    slots: Vec<SlotState>,
    /// Number of times that a slot was taken.
    clock: u64,
    /// Slots filled since they were last taken by the caller.
    filled: Vec<(AdapterSlot, Arc<Adapter>)>,
}

#[derive(Debug, Clone, Copy, Default)]
struct SlotState {
    adapter: Option<AdapterId>,
    num_users: u32,
    last_used: u64,
}

impl AdapterSlots {
    pub(crate) fn new(num_slots: usize) -> Self {
        Self { slots: vec![SlotState::default(); num_slots], ..Self::default() }
    }

    /// Empties all slots, because the workers' memory is new.
    pub(crate) fn reset(&mut self) {
        self.slots.fill(SlotState::default());
        self.filled.clear();
    }

    /// Whether a sequence with this adapter can run now.
    pub(crate) fn has_room(&self, adapter: AdapterId) -> bool {
        self.slots.iter().any(|slot| slot.adapter == Some(adapter) || slot.num_users == 0)
    }

    /// The slot for one more sequence with this adapter: the one that holds it, or the unused one that was taken longest ago, which
    /// is filled.
    ///
    /// # Panics
    /// Panics if there is no room.
    pub(crate) fn take(&mut self, adapter: &Arc<Adapter>) -> AdapterSlot {
        let resident = self.slots.iter().position(|slot| slot.adapter == Some(adapter.id));
        let index = resident.unwrap_or_else(|| {
            let unused = self.slots.iter().enumerate().filter(|(_, slot)| slot.num_users == 0);
            let (index, _) = unused.min_by_key(|(_, slot)| slot.last_used).expect("there is a slot for the adapter");
            self.filled.push((AdapterSlot(index as u32), Arc::clone(adapter)));
            index
        });
        self.clock += 1;
        let slot = &mut self.slots[index];
        (slot.adapter, slot.last_used) = (Some(adapter.id), self.clock);
        slot.num_users += 1;
        AdapterSlot(index as u32)
    }

    pub(crate) fn release(&mut self, slot: AdapterSlot) {
        self.slots[slot.0 as usize].num_users -= 1;
    }

    /// The slots that were filled since [`Engine::take_filled`].
    pub(crate) fn filled(&self) -> Vec<FilledSlot> {
        self.filled.iter().map(|&(slot, ref adapter)| FilledSlot { slot, adapter: adapter.id }).collect()
    }
}

impl Engine {
    /// The adapters of the last plan's [`adapters`](crate::StepPlan::adapters), in that order. The caller sends their weights to the
    /// workers before the plan.
    pub fn take_filled(&mut self) -> Vec<(AdapterSlot, Arc<Adapter>)> {
        std::mem::take(&mut self.adapters.filled)
    }

    /// The adapters of running sequences, and how many sequences use each.
    pub fn running_adapters(&self) -> impl Iterator<Item = (AdapterId, u32)> + '_ {
        let used = |slot: &SlotState| slot.adapter.map(|adapter| (adapter, slot.num_users));
        self.adapters.slots.iter().filter(|slot| slot.num_users > 0).filter_map(used)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn adapter(id: u64) -> Arc<Adapter> {
        Arc::new(Adapter { id: AdapterId(id), weights: Vec::new() })
    }

    #[test]
    fn an_adapter_replaces_the_unused_one_that_was_taken_longest_ago() {
        let mut slots = AdapterSlots::new(2);
        let (first, second) = (slots.take(&adapter(1)), slots.take(&adapter(2)));
        assert!(slots.has_room(AdapterId(1)) && !slots.has_room(AdapterId(3)));
        slots.release(second);
        slots.release(first);
        assert_eq!(slots.take(&adapter(2)), second, "it was still there");
        slots.release(second);
        assert_eq!(slots.take(&adapter(3)), first);
        let filled: Vec<u64> = slots.filled().iter().map(|filled| filled.adapter.0).collect();
        assert_eq!(filled, [1, 2, 3]);
        slots.reset();
        assert!(slots.filled().is_empty() && slots.has_room(AdapterId(4)));
    }
}
