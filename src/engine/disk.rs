//! The disk tier of the prefix cache: slots of a file that keep what leaves host memory.
//!
//! Once host memory is more than half full, the copies there are written to the file while they are still in memory, the least useful
//! first (`usefulness.rs`), so that a slot of the host can be taken at once when a plan needs it. A sequence that finds a copy on disk waits in the
//! queue until it is in host memory again, and takes it from there like any other. Steps neither write nor read the file.
//!
//! Copies between both tiers are carried out beside the steps, by the rank of each worker ([`DiskCopy`]), which says when one has
//! ended. A slot of the host is written to the file when the plan that filled it is complete, and is not taken for something else
//! meanwhile. A slot is filled from the file when all plans that used it are complete, and belongs to no copy until then.

use std::collections::{BTreeMap, HashMap};
use std::hash::Hash;

use serde::{Deserialize, Serialize};

use crate::usefulness::{Rank, Usefulness};
use crate::{DiskSlot, HostSlot};

/// What a waiting sequence has got from the disk.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) enum Fetch {
    /// Its prefix was not searched for there.
    #[default]
    NotBegun,
    /// A part of its prefix is being copied to host memory.
    UnderWay,
    /// The rest is computed.
    Done,
}

mod copies;

/// What a slot holds.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default, Serialize, Deserialize)]
pub enum SlotKind {
    /// A KV block.
    #[default]
    Block,
    /// A recurrent state.
    State,
}

/// The direction of a [`DiskCopy`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum DiskDirection {
    /// From host memory to the file.
    Store,
    /// From the file to host memory.
    Load,
}

/// A copy between a slot of the host and one of the file, by every rank for its worker. Ranks carry copies out in order.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct DiskCopy {
    /// Counts the copies of a kind.
    pub number: u64,
    /// What the slots hold.
    pub kind: SlotKind,
    /// Which of them is written.
    pub direction: DiskDirection,
    /// The slot in host memory.
    pub host: HostSlot,
    /// The slot in the file.
    pub disk: DiskSlot,
}

/// Slots of the file for copies that are named by `K`.
#[derive(Debug, Clone)]
pub(crate) struct DiskSlots<K> {
    kind: SlotKind,
    num_slots: usize,
    unused: Vec<DiskSlot>,
    entries: HashMap<K, Entry>,
    /// The names by rank, the first to be evicted first. While host memory has a copy, too, the rank is the same.
    by_rank: BTreeMap<Rank, K>,
    /// Copies in host memory that are not on disk, by rank.
    unsaved: BTreeMap<Rank, K>,
    /// Copies that have begun and not ended, by number.
    in_flight: HashMap<u64, InFlight<K>>,
    next_number: u64,
    /// Those that were not sent yet.
    queued: Vec<DiskCopy>,
    num_storing: usize,
    /// Copies to and from the file that have ended well.
    pub(crate) totals: [u64; 2],
    /// Copies from the file that failed.
    pub(crate) num_failed: u64,
}

#[derive(Debug, Clone, Copy)]
struct Entry {
    slot: DiskSlot,
    usefulness: Usefulness,
    state: State,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum State {
    Storing,
    Stored,
    Loading,
}

/// Which copies of the host make room for those from the disk that a sequence needs.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Room {
    /// Those with a last use up to this one.
    before: u64,
    /// None of those with a lower rank.
    first: Rank,
}

#[derive(Debug, Clone, Copy)]
struct InFlight<K> {
    /// `None` if the copy is not wanted any more.
    name: Option<K>,
    host: HostSlot,
    disk: DiskSlot,
    direction: DiskDirection,
    /// Whether no entry has the slot of the file any more.
    frees_disk: bool,
}

impl<K> Default for DiskSlots<K> {
    fn default() -> Self {
        Self {
            kind: SlotKind::default(),
            num_slots: 0,
            unused: Vec::new(),
            entries: HashMap::new(),
            by_rank: BTreeMap::new(),
            unsaved: BTreeMap::new(),
            in_flight: HashMap::new(),
            next_number: 0,
            queued: Vec::new(),
            num_storing: 0,
            totals: [0; 2],
            num_failed: 0,
        }
    }
}

impl<K: Copy + Eq + Hash> DiskSlots<K> {
    pub(crate) fn new(kind: SlotKind, num_slots: usize) -> Self {
        let unused = (0..num_slots as u32).rev().map(DiskSlot).collect();
        Self { kind, num_slots, unused, ..Self::default() }
    }

    pub(crate) fn num_slots(&self) -> usize {
        self.num_slots
    }

    pub(crate) fn num_used(&self) -> usize {
        self.entries.len()
    }

    /// Whether the file has the copy, or will have it soon.
    pub(crate) fn contains(&self, name: K) -> bool {
        self.entries.contains_key(&name)
    }

    /// Whether the copy can be read from the file.
    pub(crate) fn is_stored(&self, name: K) -> bool {
        self.entries.get(&name).is_some_and(|entry| entry.state != State::Storing)
    }

    /// Whether the copy is being written to the file.
    pub(crate) fn is_storing(&self, name: K) -> bool {
        self.num_storing > 0 && self.entries.get(&name).is_some_and(|entry| entry.state == State::Storing)
    }

    /// Whether a copy from the file is under way.
    pub(crate) fn is_loading(&self) -> bool {
        self.in_flight.values().any(|copy| copy.direction == DiskDirection::Load)
    }

    /// Slots of the host that are being filled from the file.
    pub(crate) fn filling(&self) -> impl Iterator<Item = HostSlot> {
        self.in_flight.values().filter(|copy| copy.direction == DiskDirection::Load).map(|copy| copy.host)
    }

    pub(crate) fn is_filling(&self, slot: HostSlot) -> bool {
        self.filling().any(|filling| filling == slot)
    }

    /// Host memory has the copy now.
    pub(crate) fn host_has(&mut self, name: K, usefulness: Usefulness) {
        match self.entries.get_mut(&name) {
            Some(entry) => {
                self.by_rank.remove(&std::mem::replace(&mut entry.usefulness, usefulness).rank);
                self.by_rank.insert(usefulness.rank, name);
            }
            None if self.num_slots > 0 => drop(self.unsaved.insert(usefulness.rank, name)),
            None => {}
        }
    }

    /// A copy in host memory was used, and had this rank before.
    pub(crate) fn host_uses(&mut self, name: K, before: Rank, usefulness: Usefulness) {
        self.unsaved.remove(&before);
        self.host_has(name, usefulness);
    }

    /// Host memory no longer has the copy with this rank.
    pub(crate) fn host_lacks(&mut self, rank: Rank) {
        self.unsaved.remove(&rank);
    }

    /// Removes a copy. Its slot is free when nothing is copied to or from it any more.
    pub(crate) fn forget(&mut self, name: K) {
        let Some(Entry { slot, usefulness, state }) = self.entries.remove(&name) else { return };
        self.by_rank.remove(&usefulness.rank);
        let mut copies = self.in_flight.values_mut().filter(|_| state != State::Stored);
        match copies.find(|copy| copy.name == Some(name)) {
            Some(copy) => (copy.name, copy.frees_disk) = (None, true),
            None => self.unused.push(slot),
        }
    }

    /// Removes all copies.
    pub(crate) fn reset(&mut self) {
        let names: Vec<K> = self.entries.keys().copied().collect();
        names.into_iter().for_each(|name| self.forget(name));
        self.unsaved.clear();
    }

    /// What is copied to and from host memory is not wanted, and nothing is there.
    pub(crate) fn lose_host(&mut self) {
        self.unsaved.clear();
        for copy in self.in_flight.values_mut() {
            let Some(name) = copy.name.take() else { continue };
            match copy.direction {
                DiskDirection::Load => {
                    self.entries.get_mut(&name).expect("what is loaded is on disk").state = State::Stored;
                }
                DiskDirection::Store => {
                    let entry = self.entries.remove(&name).expect("what is stored has an entry");
                    self.by_rank.remove(&entry.usefulness.rank);
                    copy.frees_disk = true;
                }
            }
        }
    }

    /// A slot for a copy with this rank: an unused one, or that of the copy that is least useful, which is returned with its rank.
    /// `None` if all copies on disk are more useful.
    fn take_slot(&mut self, rank: Rank) -> Option<(DiskSlot, Option<(Rank, K)>)> {
        if let Some(slot) = self.unused.pop() {
            return Some((slot, None));
        }
        let is_idle = |&(_, name): &(&Rank, &K)| self.entries[name].state == State::Stored;
        let (&least, &name) = self.by_rank.range(..rank).find(is_idle)?;
        let slot = self.entries.remove(&name).expect("a name has its entry").slot;
        self.by_rank.remove(&least);
        Some((slot, Some((least, name))))
    }

    fn begin(&mut self, direction: DiskDirection, name: K, host: HostSlot, disk: DiskSlot) {
        let number = self.next_number;
        self.next_number += 1;
        self.num_storing += usize::from(direction == DiskDirection::Store);
        self.in_flight.insert(number, InFlight { name: Some(name), host, disk, direction, frees_disk: false });
        self.queued.push(DiskCopy { number, kind: self.kind, direction, host, disk });
    }

    fn end(&mut self, number: u64) -> Option<InFlight<K>> {
        let copy = self.in_flight.remove(&number)?;
        self.num_storing -= usize::from(copy.direction == DiskDirection::Store);
        if copy.frees_disk && self.num_slots > 0 {
            self.unused.push(copy.disk);
        }
        Some(copy)
    }

    fn set_stored(&mut self, name: K) -> Usefulness {
        let entry = self.entries.get_mut(&name).expect("a copy that has ended has its entry");
        entry.state = State::Stored;
        entry.usefulness
    }

    /// Compares the slots with their copies. `in_host` are the names in host memory with their ranks.
    ///
    /// # Errors
    /// Says what is wrong.
    pub(crate) fn audit(&self, in_host: impl Iterator<Item = (K, Rank)>) -> Result<(), String> {
        let freed = self.in_flight.values().filter(|copy| copy.frees_disk).map(|copy| copy.disk);
        let used = self.entries.values().map(|entry| entry.slot);
        let mut slots: Vec<u32> = used.chain(self.unused.iter().copied()).chain(freed).map(|slot| slot.0).collect();
        slots.sort_unstable();
        if self.num_slots > 0 && !slots.iter().copied().eq(0..self.num_slots as u32) {
            return Err(format!("{} slots of the disk: {slots:?} are used or unused", self.num_slots));
        }
        let named = self
            .by_rank
            .iter()
            .all(|(rank, name)| self.entries.get(name).is_some_and(|it| it.usefulness.rank == *rank));
        if !named || self.by_rank.len() != self.entries.len() {
            return Err("copies on disk and their ranks differ".to_owned());
        }
        let mut num_unsaved = 0;
        for (name, rank) in in_host.filter(|_| self.num_slots > 0) {
            let is_right = match self.entries.get(&name) {
                Some(entry) => entry.usefulness.rank == rank,
                None => self.unsaved.get(&rank).is_some_and(|unsaved| *unsaved == name),
            };
            num_unsaved += usize::from(!self.contains(name));
            if !is_right {
                return Err(format!("a copy of the host with rank {rank:?} counts neither as saved nor as unsaved"));
            }
        }
        let storing = self.in_flight.values().filter(|copy| copy.direction == DiskDirection::Store).count();
        let recorded = (self.unsaved.len(), self.num_storing);
        match (num_unsaved, storing) == recorded {
            true => Ok(()),
            false => {
                Err(format!("copies not on disk and being written: {num_unsaved} and {storing}, recorded {recorded:?}"))
            }
        }
    }
}
