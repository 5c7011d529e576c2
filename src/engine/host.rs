//! The host tier of the prefix cache: slots in host memory that keep what is evicted from the device.
//!
//! A block with a content, or a snapshot of a recurrent state, is copied to a slot of the host when its place on the device is
//! needed for something else. A sequence that finds it there gets a new place on the device, into which the slot is copied before
//! the first step of the sequence. The slot keeps its copy, so that the content is evicted without another copy the next time. If
//! there is no unused slot, the one that was used longest ago is taken; what it held may be on disk by then (`disk.rs`).
//!
//! Both directions are entries of a plan ([`HostCopies`]). Workers carry out the stores of a plan before its loads. No slot is in
//! two entries of a plan: a slot that the plan fills can be read by later plans only, and one that it reads is not filled by it.
//!
//! The memory outlives a worker. After a loss of workers those copies count that are known to be complete
//! ([`STORES_COMPLETE_AFTER`](crate::STORES_COMPLETE_AFTER)); what a slot of another copy holds is not known.

use std::collections::{BTreeMap, HashMap};
use std::hash::Hash;

#[cfg(doc)]
use crate::HostCopies;
use crate::HostSlot;
use crate::disk::DiskSlots;

/// Slots of the host for copies of places on the device, `D`. A copy is named by `K`.
#[derive(Debug, Clone)]
pub(crate) struct HostSlots<K, D> {
    num_slots: usize,
    pub(crate) unused: Vec<HostSlot>,
    pub(crate) entries: HashMap<K, Entry>,
    /// The names by last use, oldest first.
    pub(crate) by_last_use: BTreeMap<u64, K>,
    /// Counts uses.
    clock: u64,
    /// The plan that is being made.
    step: u64,
    /// `[num_slots]`: the last plan that fills or reads the slot.
    pub(crate) used_steps: Vec<Option<u64>>,
    /// Copies to the host in this plan.
    stored: Vec<(D, HostSlot)>,
    /// Copies from the host in this plan.
    loaded: Vec<(D, HostSlot)>,
    /// Copies to and from the host in all plans.
    pub(crate) totals: [u64; 2],
    /// The tier below.
    pub(crate) disk: DiskSlots<K>,
}

#[derive(Debug, Clone, Copy)]
pub(crate) struct Entry {
    pub(crate) slot: HostSlot,
    pub(crate) last_use: u64,
    /// The plan that fills the slot; later plans may read it. `None` for a copy that came from the disk.
    pub(crate) stored_step: Option<u64>,
    /// Whether it came from the disk and no sequence has used it since.
    pub(crate) is_from_disk: bool,
}

impl<K, D> Default for HostSlots<K, D> {
    fn default() -> Self {
        Self {
            num_slots: 0,
            unused: Vec::new(),
            entries: HashMap::new(),
            by_last_use: BTreeMap::new(),
            clock: 0,
            step: 0,
            used_steps: Vec::new(),
            stored: Vec::new(),
            loaded: Vec::new(),
            totals: [0; 2],
            disk: DiskSlots::default(),
        }
    }
}

impl<K: Copy + Eq + Hash, D> HostSlots<K, D> {
    /// `num_slots` of the host, with those of the disk below.
    pub(crate) fn new(num_slots: usize, disk: DiskSlots<K>) -> Self {
        let mut slots = Self { num_slots, used_steps: vec![None; num_slots], disk, ..Self::default() };
        slots.reset();
        slots
    }

    /// Forgets the copies in host memory that plans after `last` fill, or all if it is `None`, and returns their names. No plan is
    /// in flight.
    pub(crate) fn keep_until(&mut self, last: Option<u64>) -> Vec<K> {
        self.stored.clear();
        self.loaded.clear();
        let is_lost = |entry: &Entry| entry.stored_step.is_some_and(|step| last.is_none_or(|last| step > last));
        let lost: Vec<K> = self.entries.iter().filter(|(_, entry)| is_lost(entry)).map(|(&name, _)| name).collect();
        for &name in &lost {
            let slot = self.take(name);
            self.unused.extend(slot);
        }
        lost
    }

    /// Forgets all copies, on disk too: they must not be found any more.
    pub(crate) fn reset(&mut self) {
        self.disk.reset();
        self.lose_host();
    }

    /// Forgets the copies in host memory, because it is new. Those on disk stay.
    pub(crate) fn lose_host(&mut self) {
        self.disk.lose_host();
        self.unused.clear();
        let is_free = |slot: &HostSlot| !self.disk.is_filling(*slot);
        self.unused.extend((0..self.num_slots as u32).rev().map(HostSlot).filter(is_free));
        self.entries.clear();
        self.by_last_use.clear();
        self.stored.clear();
        self.loaded.clear();
    }

    /// Starts the plan `step`.
    pub(crate) fn begin_plan(&mut self, step: u64) {
        self.step = step;
    }

    /// The plan that is being made, or was made last.
    pub(crate) fn step(&self) -> u64 {
        self.step
    }

    /// Takes the copies of the plan: those to the host, and those from it.
    pub(crate) fn take_copies(&mut self) -> [Vec<(D, HostSlot)>; 2] {
        let copies = [std::mem::take(&mut self.stored), std::mem::take(&mut self.loaded)];
        self.totals.iter_mut().zip(&copies).for_each(|(total, copies)| *total += copies.len() as u64);
        copies
    }

    pub(crate) fn num_slots(&self) -> usize {
        self.num_slots
    }

    pub(crate) fn num_used(&self) -> usize {
        self.entries.len()
    }

    /// Whether host memory has the copy.
    pub(crate) fn contains(&self, name: K) -> bool {
        self.entries.contains_key(&name)
    }

    /// Whether host memory or the disk has the copy.
    pub(crate) fn knows(&self, name: K) -> bool {
        self.contains(name) || self.disk.contains(name)
    }

    /// Whether this plan may read the copy: it neither fills nor reads it already.
    pub(crate) fn is_readable(&self, name: K) -> bool {
        self.entries.get(&name).is_some_and(|entry| !self.is_in_plan(entry.slot))
    }

    fn is_in_plan(&self, slot: HostSlot) -> bool {
        self.used_steps[slot.0 as usize] == Some(self.step)
    }

    /// Keeps what `place` holds, which will be overwritten. Returns whether the host has it, and the name that had to make room.
    /// A copy that exists already only counts as used.
    pub(crate) fn store(&mut self, name: K, place: D) -> (bool, Option<K>) {
        if self.contains(name) {
            self.touch(name);
            return (true, None);
        }
        let mut dropped = None;
        let slot = self.unused.pop().or_else(|| {
            // If the plan uses the oldest slot, it uses all.
            let oldest = self.oldest_idle().filter(|name| !self.is_in_plan(self.entries[name].slot))?;
            dropped = Some(oldest);
            self.take(oldest)
        });
        let Some(slot) = slot else { return (false, None) };
        self.insert(name, slot, Some(self.step));
        self.used_steps[slot.0 as usize] = Some(self.step);
        self.stored.push((place, slot));
        (true, dropped)
    }

    /// The copy that was used longest ago, without those that are being written to the disk.
    pub(crate) fn oldest_idle(&self) -> Option<K> {
        self.by_last_use.values().copied().find(|&name| !self.disk.is_storing(name))
    }

    /// Enters a copy as the one that was used last.
    pub(crate) fn insert(&mut self, name: K, slot: HostSlot, stored_step: Option<u64>) {
        self.clock += 1;
        let is_from_disk = stored_step.is_none();
        self.entries.insert(name, Entry { slot, last_use: self.clock, stored_step, is_from_disk });
        self.by_last_use.insert(self.clock, name);
        self.disk.host_has(name, self.clock);
    }

    /// Keeps a copy that was found from being overwritten by this plan.
    pub(crate) fn reserve(&mut self, name: K) {
        self.touch(name);
        let slot = self.entries[&name].slot;
        self.used_steps[slot.0 as usize] = Some(self.step);
    }

    /// Copies a reserved copy to `place`. Returns whether it came from the disk since the last time.
    pub(crate) fn load(&mut self, name: K, place: D) -> bool {
        let entry = self.entries.get_mut(&name).expect("a reserved copy exists");
        debug_assert!(
            self.used_steps[entry.slot.0 as usize] == Some(self.step) && entry.stored_step != Some(self.step),
            "a copy is read once it is there"
        );
        self.loaded.push((place, entry.slot));
        std::mem::take(&mut entry.is_from_disk)
    }

    /// Drops a copy, unless this plan uses its slot.
    pub(crate) fn forget(&mut self, name: K) {
        if self.entries.get(&name).is_none_or(|entry| !self.is_in_plan(entry.slot)) {
            let slot = self.take(name);
            self.unused.extend(slot);
            self.disk.forget(name);
        }
    }

    /// A copy of the host counts as used.
    pub(crate) fn touch(&mut self, name: K) {
        let entry = self.entries.get_mut(&name).expect("a copy that is used exists");
        self.clock += 1;
        self.by_last_use.remove(&entry.last_use);
        self.by_last_use.insert(self.clock, name);
        self.disk.host_uses(name, entry.last_use, self.clock);
        entry.last_use = self.clock;
    }

    /// Removes a copy from host memory, and returns its slot.
    pub(crate) fn take(&mut self, name: K) -> Option<HostSlot> {
        let entry = self.entries.remove(&name)?;
        self.by_last_use.remove(&entry.last_use);
        self.disk.host_lacks(entry.last_use);
        Some(entry.slot)
    }

    /// Compares the slots with their copies.
    ///
    /// # Errors
    /// Says what is wrong.
    pub(crate) fn audit(&self) -> Result<(), String> {
        let filling = self.disk.filling();
        let used = self.entries.values().map(|entry| entry.slot);
        let mut slots: Vec<u32> = used.chain(self.unused.iter().copied()).chain(filling).map(|it| it.0).collect();
        slots.sort_unstable();
        let named =
            self.by_last_use.iter().all(|(&use_, name)| self.entries.get(name).is_some_and(|it| it.last_use == use_));
        if !slots.iter().copied().eq(0..self.num_slots as u32) || !named || self.by_last_use.len() != self.entries.len()
        {
            return Err(format!("{} slots of the host: {slots:?} are used or unused", self.num_slots));
        }
        self.disk.audit(self.entries.iter().map(|(&name, entry)| (name, entry.last_use)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn stored(slots: &mut HostSlots<u32, u32>, step: u64, names: &[u32]) -> Vec<(bool, Option<u32>)> {
        slots.begin_plan(step);
        let found = names.iter().map(|&name| slots.store(name, name)).collect();
        slots.take_copies();
        found
    }

    #[test]
    fn the_copy_that_was_used_longest_ago_makes_room() {
        let mut slots = HostSlots::new(2, DiskSlots::default());
        assert_eq!(stored(&mut slots, 1, &[7, 8]), [(true, None), (true, None)]);
        slots.begin_plan(2);
        slots.reserve(7);
        slots.load(7, 40);
        assert_eq!(slots.take_copies(), [vec![], vec![(40, HostSlot(0))]]);
        assert_eq!(stored(&mut slots, 3, &[9]), [(true, Some(8))]);
        assert!(slots.contains(7) && slots.contains(9) && !slots.contains(8));
        assert_eq!(slots.totals, [3, 1]);
        slots.audit().unwrap();
    }

    #[test]
    fn what_a_plan_uses_is_neither_overwritten_nor_read_by_it() {
        let mut slots = HostSlots::new(2, DiskSlots::default());
        stored(&mut slots, 1, &[7]);
        slots.begin_plan(2);
        slots.reserve(7);
        assert_eq!(slots.store(8, 8), (true, None));
        assert!(!slots.is_readable(7) && !slots.is_readable(8));
        assert_eq!(slots.store(9, 9), (false, None));
        slots.forget(7);
        assert!(slots.contains(7));
        slots.take_copies();
        assert_eq!(stored(&mut slots, 3, &[8, 9]), [(true, None), (true, Some(7))]);
        slots.audit().unwrap();
    }

    #[test]
    fn of_lost_workers_the_copies_of_plans_up_to_a_step_are_kept() {
        let mut slots = HostSlots::new(3, DiskSlots::default());
        (1..=3).for_each(|step| drop(stored(&mut slots, step, &[step as u32])));
        let mut lost = slots.keep_until(Some(1));
        lost.sort_unstable();
        assert_eq!((lost, slots.num_used()), (vec![2, 3], 1));
        slots.audit().unwrap();
        // What is kept can be read at once, and the slots of the others are free.
        slots.begin_plan(4);
        assert!(slots.is_readable(1));
        assert_eq!([5, 6].map(|name| slots.store(name, name)), [(true, None); 2]);
        assert_eq!(slots.keep_until(None).len(), 3);
        slots.audit().unwrap();
    }

    #[test]
    fn what_the_host_has_is_not_stored_again() {
        let mut slots = HostSlots::new(2, DiskSlots::default());
        stored(&mut slots, 1, &[7]);
        slots.begin_plan(2);
        assert_eq!(slots.store(7, 7), (true, None));
        assert_eq!(slots.take_copies(), [vec![], vec![]]);
    }

    #[test]
    fn without_slots_nothing_is_kept() {
        let mut slots = HostSlots::new(0, DiskSlots::default());
        assert_eq!(stored(&mut slots, 1, &[7]), [(false, None)]);
        slots.audit().unwrap();
    }
}
