//! All live sequences, stored in slots so that steps access them without hashing.

use std::collections::HashMap;
use std::ops::{Index, IndexMut};

use crate::SequenceId;
use crate::sequence::Sequence;
use crate::slot::Slot;

#[derive(Debug, Default)]
pub(crate) struct Sequences {
    slots: Vec<Option<Sequence>>,
    free: Vec<Slot>,
    by_id: HashMap<SequenceId, Slot>,
}

impl Sequences {
    pub(crate) fn len(&self) -> usize {
        self.by_id.len()
    }

    pub(crate) fn insert(&mut self, sequence: Sequence) -> Slot {
        let slot = self.free.pop().unwrap_or_else(|| {
            self.slots.push(None);
            Slot(self.slots.len() as u32 - 1)
        });
        self.by_id.insert(sequence.id, slot);
        self.slots[slot.0 as usize] = Some(sequence);
        slot
    }

    pub(crate) fn remove(&mut self, slot: Slot) -> Sequence {
        let sequence = self.slots[slot.0 as usize].take().expect("a removed slot holds a sequence");
        self.by_id.remove(&sequence.id);
        self.free.push(slot);
        sequence
    }

    pub(crate) fn find(&self, id: SequenceId) -> Option<Slot> {
        self.by_id.get(&id).copied()
    }

    /// The sequence `id`, if it is still in `slot`.
    #[inline]
    pub(crate) fn get_mut(&mut self, slot: Slot, id: SequenceId) -> Option<&mut Sequence> {
        self.slots[slot.0 as usize].as_mut().filter(|sequence| sequence.id == id)
    }

    /// In order of arrival.
    pub(crate) fn in_order(&self) -> Vec<(SequenceId, Slot)> {
        let mut all: Vec<_> = self.by_id.iter().map(|(&id, &slot)| (id, slot)).collect();
        all.sort_unstable_by_key(|&(id, _)| id);
        all
    }
}

impl Index<Slot> for Sequences {
    type Output = Sequence;

    #[inline]
    fn index(&self, slot: Slot) -> &Sequence {
        self.slots[slot.0 as usize].as_ref().expect("a slot in use holds a sequence")
    }
}

impl IndexMut<Slot> for Sequences {
    #[inline]
    fn index_mut(&mut self, slot: Slot) -> &mut Sequence {
        self.slots[slot.0 as usize].as_mut().expect("a slot in use holds a sequence")
    }
}
