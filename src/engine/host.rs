//! The host tier of the prefix cache: slots in host memory that keep what is evicted from the device.
//!
//! A block with a content, or a snapshot of a recurrent state, is copied to a slot of the host when its place on the device is
//! needed for something else. A sequence that finds it there gets a new place on the device, into which the slot is copied before
//! the first step of the sequence. The slot keeps its copy, so that the content is evicted without another copy the next time. If
//! there is no unused slot, that of the least useful copy is taken (`usefulness.rs`); what it held may be on disk by then (`disk.rs`).
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
use crate::usefulness::{Rank, Ranking, Usefulness};

/// Number of uses of a copy that count. The tiers below the device keep conversations that have ended for long, and the turns of one
/// conversation use its first blocks again and again.
const MAX_USES: u64 = 3;

/// Slots of the host for copies of places on the device, `D`. A copy is named by `K`.
#[derive(Debug, Clone)]
pub(crate) struct HostSlots<K, D> {
    num_slots: usize,
    pub(crate) unused: Vec<HostSlot>,
    pub(crate) entries: HashMap<K, Entry>,
    /// The names by rank, the first to be evicted first.
    pub(crate) by_rank: BTreeMap<Rank, K>,
    pub(crate) ranking: Ranking,
    /// Copies with lower ranks cannot make room in this plan.
    first_idle: Rank,
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
    pub(crate) usefulness: Usefulness,
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
            by_rank: BTreeMap::new(),
            ranking: Ranking::with_max_uses(MAX_USES),
            first_idle: (0, 0),
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
        self.by_rank.clear();
        self.stored.clear();
        self.loaded.clear();
    }

    /// Starts the plan `step`.
    pub(crate) fn begin_plan(&mut self, step: u64) {
        self.step = step;
        self.first_idle = (0, 0);
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
    /// A copy that exists already gets a new rank.
    pub(crate) fn store(&mut self, name: K, place: D, usefulness: Usefulness) -> (bool, Option<K>) {
        if let Some(entry) = self.entries.get(&name) {
            self.rank(name, entry.usefulness.or_used_as(usefulness));
            return (true, None);
        }
        let mut dropped = None;
        let slot = self.unused.pop().or_else(|| {
            let (&rank, &name) = self.by_rank.range(self.first_idle..).find(|&(_, &name)| self.is_idle(name))?;
            (self.first_idle, dropped) = (rank, Some(name));
            self.evict(name)
        });
        let Some(slot) = slot else { return (false, None) };
        self.insert(name, slot, Some(self.step), usefulness);
        self.used_steps[slot.0 as usize] = Some(self.step);
        self.stored.push((place, slot));
        (true, dropped)
    }

    /// Whether a copy can make room in this plan: the plan does not use it, and it is not being written to the disk.
    fn is_idle(&self, name: K) -> bool {
        !self.is_in_plan(self.entries[&name].slot) && !self.disk.is_storing(name)
    }

    /// Enters a copy as the one that was used last.
    pub(crate) fn insert(&mut self, name: K, slot: HostSlot, stored_step: Option<u64>, usefulness: Usefulness) {
        let usefulness = self.ranking.rank(usefulness);
        let is_from_disk = stored_step.is_none();
        self.entries.insert(name, Entry { slot, usefulness, stored_step, is_from_disk });
        self.by_rank.insert(usefulness.rank, name);
        self.disk.host_has(name, usefulness);
    }

    /// Keeps a copy that was found from being overwritten by this plan.
    pub(crate) fn reserve(&mut self, name: K) {
        let Entry { slot, usefulness, .. } = self.entries[&name];
        self.rank(name, usefulness.used());
        self.used_steps[slot.0 as usize] = Some(self.step);
    }

    /// Copies a reserved copy to `place`. Returns how useful it is, and whether it came from the disk since the last time.
    pub(crate) fn load(&mut self, name: K, place: D) -> (Usefulness, bool) {
        let entry = self.entries.get_mut(&name).expect("a reserved copy exists");
        debug_assert!(
            self.used_steps[entry.slot.0 as usize] == Some(self.step) && entry.stored_step != Some(self.step),
            "a copy is read once it is there"
        );
        self.loaded.push((place, entry.slot));
        (entry.usefulness, std::mem::take(&mut entry.is_from_disk))
    }

    /// Drops a copy, unless this plan uses its slot.
    pub(crate) fn forget(&mut self, name: K) {
        if self.entries.get(&name).is_none_or(|entry| !self.is_in_plan(entry.slot)) {
            let slot = self.take(name);
            self.unused.extend(slot);
            self.disk.forget(name);
        }
    }

    /// A copy of the host is needed soon.
    pub(crate) fn touch(&mut self, name: K) {
        self.rank(name, self.entries[&name].usefulness);
    }

    /// Gives a copy of the host a new rank, as the one that was used last.
    fn rank(&mut self, name: K, usefulness: Usefulness) {
        let entry = self.entries.get_mut(&name).expect("a copy that is used exists");
        let before = std::mem::replace(&mut entry.usefulness, self.ranking.rank(usefulness)).rank;
        self.by_rank.remove(&before);
        self.by_rank.insert(entry.usefulness.rank, name);
        self.disk.host_uses(name, before, entry.usefulness);
    }

    /// Removes a copy from host memory to make room, and returns its slot.
    pub(crate) fn evict(&mut self, name: K) -> Option<HostSlot> {
        self.ranking.evict(self.entries.get(&name)?.usefulness);
        self.take(name)
    }

    /// Removes a copy from host memory, and returns its slot.
    fn take(&mut self, name: K) -> Option<HostSlot> {
        let Entry { slot, usefulness, .. } = self.entries.remove(&name)?;
        self.by_rank.remove(&usefulness.rank);
        self.disk.host_lacks(usefulness.rank);
        Some(slot)
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
        let is_named = |(&rank, name): (&Rank, &K)| self.entries.get(name).is_some_and(|it| it.usefulness.rank == rank);
        let is_named = self.by_rank.len() == self.entries.len() && self.by_rank.iter().all(is_named);
        if !slots.iter().copied().eq(0..self.num_slots as u32) || !is_named {
            return Err(format!("{} slots of the host: {slots:?} are used or unused", self.num_slots));
        }
        self.disk.audit(self.entries.iter().map(|(&name, entry)| (name, entry.usefulness.rank)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn stored(slots: &mut HostSlots<u32, u32>, step: u64, names: &[u32]) -> Vec<(bool, Option<u32>)> {
        slots.begin_plan(step);
        let found = names.iter().map(|&name| slots.store(name, name, Usefulness::new(1))).collect();
        slots.take_copies();
        found
    }

    #[test]
    fn of_copies_that_were_used_as_often_the_one_that_was_used_longest_ago_makes_room() {
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
    fn a_copy_that_is_used_again_outlives_others_for_a_time() {
        let mut slots = HostSlots::new(3, DiskSlots::default());
        stored(&mut slots, 1, &[7, 8, 9]);
        for step in [2, 3] {
            slots.begin_plan(step);
            slots.reserve(7);
        }
        // It counts as much as the third copy that comes after another one in the same slot.
        for (step, [new, expected]) in (4..).zip([[10, 8], [11, 9], [12, 10], [13, 11], [14, 7]]) {
            assert_eq!(stored(&mut slots, step, &[new]), [(true, Some(expected))]);
        }
        slots.audit().unwrap();
    }

    #[test]
    fn what_a_plan_uses_is_neither_overwritten_nor_read_by_it() {
        let mut slots = HostSlots::new(2, DiskSlots::default());
        stored(&mut slots, 1, &[7]);
        slots.begin_plan(2);
        slots.reserve(7);
        assert_eq!(slots.store(8, 8, Usefulness::new(1)), (true, None));
        assert!(!slots.is_readable(7) && !slots.is_readable(8));
        assert_eq!(slots.store(9, 9, Usefulness::new(1)), (false, None));
        slots.forget(7);
        assert!(slots.contains(7));
        slots.take_copies();
        assert_eq!(stored(&mut slots, 3, &[8, 9]), [(true, None), (true, Some(8))]);
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
        assert_eq!([5, 6].map(|name| slots.store(name, name, Usefulness::new(1))), [(true, None); 2]);
        assert_eq!(slots.keep_until(None).len(), 3);
        slots.audit().unwrap();
    }

    #[test]
    fn what_the_host_has_is_not_stored_again() {
        let mut slots = HostSlots::new(2, DiskSlots::default());
        stored(&mut slots, 1, &[7]);
        slots.begin_plan(2);
        assert_eq!(slots.store(7, 7, Usefulness::new(1)), (true, None));
        assert_eq!(slots.take_copies(), [vec![], vec![]]);
    }

    #[test]
    fn without_slots_nothing_is_kept() {
        let mut slots = HostSlots::new(0, DiskSlots::default());
        assert_eq!(stored(&mut slots, 1, &[7]), [(false, None)]);
        slots.audit().unwrap();
    }
}
