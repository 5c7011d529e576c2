//! Which copies are made between host memory and disk, and what their ends change.

use std::hash::Hash;

use super::{DiskCopy, DiskDirection, Entry, Room, State};
use crate::HostSlot;
use crate::host::HostSlots;
use crate::usefulness::Rank;

/// At most one of so many slots of the host is being written to the file at once.
const STORING_DIVISOR: usize = 8;
/// Most slots that are being written to the file at once.
const MAX_STORING: usize = 256;

impl<K: Copy + Eq + Hash, D> HostSlots<K, D> {
    /// Begins to write copies that are not on disk to the file, the least useful first, if host memory is more than half full. Plans up
    /// to `complete` are complete. Returns names that are in neither tier any more.
    pub(crate) fn save(&mut self, complete: Option<u64>) -> Vec<K> {
        let mut gone = Vec::new();
        let max_storing = match self.entries.len() > self.num_slots() / 2 {
            true => (self.num_slots() / STORING_DIVISOR).clamp(1, MAX_STORING),
            false => 0,
        };
        while self.disk.num_storing < max_storing
            && let Some((&rank, &name)) = self.disk.unsaved.first_key_value()
        {
            let entry = self.entries[&name];
            if entry.stored_step.is_some_and(|step| complete.is_none_or(|complete| step > complete)) {
                break;
            }
            let Some((disk, evicted)) = self.disk.take_slot(rank) else { break };
            match evicted {
                Some((rank, evicted)) if self.contains(evicted) => drop(self.disk.unsaved.insert(rank, evicted)),
                Some((_, evicted)) => gone.push(evicted),
                None => {}
            }
            self.disk.unsaved.remove(&rank);
            let usefulness = entry.usefulness;
            self.disk.entries.insert(name, Entry { slot: disk, usefulness, state: State::Storing });
            self.disk.by_rank.insert(rank, name);
            self.disk.begin(DiskDirection::Store, name, entry.slot, disk);
        }
        gone
    }

    /// Copies of the host that are used from now on do not make room.
    pub(crate) fn room(&self) -> Room {
        Room { before: self.ranking.last_use(), first: (0, 0) }
    }

    /// Begins to copy from the file what is only there. Plans up to `complete` are complete. A copy in host memory makes room that was
    /// not used since `room` was made. Returns whether the copy is under way, and the name that is in neither tier any more.
    pub(crate) fn fetch(&mut self, name: K, complete: Option<u64>, room: &mut Room) -> (bool, Option<K>) {
        match self.disk.entries.get(&name).map(|entry| entry.state) {
            Some(State::Stored) if !self.contains(name) => {}
            state => return (state == Some(State::Loading), None),
        }
        let used_steps = &self.used_steps;
        let is_idle = |slot: HostSlot| {
            used_steps[slot.0 as usize].is_none_or(|used| complete.is_some_and(|complete| used <= complete))
        };
        let mut gone = None;
        let host = match self.unused.iter().rposition(|&slot| is_idle(slot)) {
            Some(index) => self.unused.swap_remove(index),
            None => {
                let may_go = |&(rank, name): &(&Rank, &K)| {
                    rank.1 <= room.before && is_idle(self.entries[name].slot) && !self.disk.is_storing(*name)
                };
                let Some((&rank, &least)) = self.by_rank.range(room.first..).find(may_go) else { return (false, None) };
                room.first = rank;
                gone = Some(least).filter(|&least| !self.disk.contains(least));
                self.evict(least).expect("what has a rank exists")
            }
        };
        let entry = self.disk.entries.get_mut(&name).expect("it was found");
        entry.state = State::Loading;
        let disk = entry.slot;
        self.disk.begin(DiskDirection::Load, name, host, disk);
        (true, gone)
    }

    /// The copies that ranks have to carry out.
    pub(crate) fn take_disk_copies(&mut self) -> impl Iterator<Item = DiskCopy> {
        self.disk.queued.drain(..)
    }

    /// Ends a copy: all ranks have carried it out, or at least one has failed. Returns a name that is in neither tier any more.
    pub(crate) fn finish_disk_copy(&mut self, number: u64, is_done: bool) -> Option<K> {
        let copy = self.disk.end(number)?;
        match (copy.direction, copy.name) {
            (DiskDirection::Store, None) => None,
            (DiskDirection::Load, None) => {
                self.unused.push(copy.host);
                None
            }
            (DiskDirection::Store, Some(name)) => {
                match is_done {
                    true => {
                        self.disk.set_stored(name);
                        self.disk.totals[0] += 1;
                    }
                    false => self.drop_from_disk(name),
                }
                None
            }
            (DiskDirection::Load, Some(name)) => {
                let usefulness = self.disk.set_stored(name);
                if !is_done {
                    self.disk.num_failed += 1;
                    self.drop_from_disk(name);
                    self.unused.push(copy.host);
                    return Some(name).filter(|&name| !self.contains(name));
                }
                self.disk.totals[1] += 1;
                match self.contains(name) {
                    true => self.unused.push(copy.host),
                    false => self.insert(name, copy.host, None, usefulness),
                }
                None
            }
        }
    }

    /// Removes a copy from the disk. If host memory has it, it counts as one that is not on disk.
    fn drop_from_disk(&mut self, name: K) {
        self.disk.forget(name);
        if let Some(entry) = self.entries.get(&name) {
            self.disk.host_has(name, entry.usefulness);
        }
    }

    /// Stops using the file. Returns names that are in neither tier any more.
    pub(crate) fn close_disk(&mut self) -> Vec<K> {
        let names: Vec<K> = self.disk.entries.keys().copied().collect();
        self.disk.reset();
        self.disk.num_slots = 0;
        self.disk.unused.clear();
        let unsent: Vec<DiskCopy> = self.disk.queued.drain(..).collect();
        for copy in unsent {
            self.finish_disk_copy(copy.number, false);
        }
        names.into_iter().filter(|&name| !self.contains(name)).collect()
    }
}
