//! Slots for the recurrent states of sequences: which sequence uses which, and which hold snapshots that others can start from.
//!
//! A running sequence has a slot, in which its state advances. A snapshot is a copy of it at the end of a KV block. It is named by
//! the content of that block, so it stands for the same tokens as the blocks up to there, and it is dropped together with that
//! block. Sequences take unused slots first, then that of the snapshot that is least useful. That snapshot goes to the host, if there
//! are slots, and sequences start from it there, too.
//!
//! A snapshot is as useful as the number of blocks after the snapshot before it, times how often it was used (`usefulness.rs`). So one
//! that many conversations start from outlives one that none did since, and of a conversation those stay that are far apart.

use std::collections::{BTreeMap, HashMap};

use crate::StateId;
use crate::content::ContentId;
use crate::disk::{DiskSlots, SlotKind};
use crate::host::HostSlots;
use crate::plan::CopiedState;
use crate::usefulness::{Rank, Ranking, Usefulness};

/// Share of the memory for KV blocks and states that is left for snapshots when each row has two slots: 1 / 4.
const SNAPSHOT_DIVISOR: u64 = 4;

/// The numbers of KV blocks and of slots for recurrent states in `room_bytes` of memory. `sizes` are the bytes of a block and of a
/// slot, 0 if there are no states. If `max_blocks` is set, there are not more blocks, and states take no more memory than these.
pub fn divide_memory(room_bytes: u64, sizes: [u64; 2], max_rows: usize, max_blocks: Option<u64>) -> (u64, usize) {
    let [block_bytes, state_bytes] = sizes;
    let shared = max_blocks.map_or(room_bytes, |max| room_bytes.min(max.saturating_mul(2 * block_bytes)));
    let states = num_states(shared, state_bytes, max_rows);
    let fitting = room_bytes.saturating_sub(states as u64 * state_bytes) / block_bytes.max(1);
    (max_blocks.map_or(fitting, |max| fitting.min(max)), states)
}

/// The numbers of slots for evicted KV blocks and for evicted snapshots of recurrent states in `bytes` of host memory. `sizes` are
/// the bytes of a block and of a state, 0 if there are no states. A snapshot is useless without the blocks before it and the
/// reverse, so each kind has half of the memory, and there are none of either if one kind does not fit.
pub fn divide_host_memory(bytes: u64, sizes: [u64; 2]) -> [usize; 2] {
    let [block_bytes, state_bytes] = sizes;
    let states = (bytes / 2).checked_div(state_bytes).unwrap_or(0);
    let blocks = (bytes - states * state_bytes) / block_bytes.max(1);
    let count = |slots: u64| usize::try_from(slots.min(i32::MAX as u64)).expect("the bound fits");
    if state_bytes > 0 && states == 0 { [0, 0] } else { [count(blocks), count(states)] }
}

/// The number of slots in `room_bytes` of memory, which KV blocks and states share: two for each row, one for its sequence and one
/// for a snapshot of its output, and some for other snapshots; at most half of the memory, and at least one. 0 if a state has no
/// bytes.
fn num_states(room_bytes: u64, state_bytes: u64, max_rows: usize) -> usize {
    if state_bytes == 0 {
        return 0;
    }
    let of_rows = 2 * max_rows as u64;
    let others = room_bytes.saturating_sub(of_rows * state_bytes) / SNAPSHOT_DIVISOR / state_bytes;
    let count = (of_rows + others).min(room_bytes / 2 / state_bytes).max(1);
    usize::try_from(count.min(i32::MAX as u64)).expect("the bound fits")
}

/// The number of KV blocks between snapshots of a prompt, such that they take no more memory than its blocks.
pub fn state_interval(block_bytes: u64, state_bytes: u64) -> usize {
    let interval = state_bytes.div_ceil(block_bytes.max(1)).clamp(1, i32::MAX as u64);
    usize::try_from(interval).expect("the bound fits")
}

#[derive(Debug, Clone, Copy)]
struct Snapshot {
    state: StateId,
    usefulness: Usefulness,
    /// The plan that was made last when it was taken; later plans can copy it.
    step: u64,
}

/// The slots that a sequence uses.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct RecurrentSlots {
    /// Its slot while it runs.
    pub(crate) own: Option<StateId>,
    /// Number of blocks before the last snapshot of its prompt, or before the one that it started from.
    pub(crate) last_snapshot: usize,
    /// A snapshot of its output, and the position; its content is not registered yet.
    pub(crate) output: Option<(StateId, usize)>,
    /// The content of the snapshot of its output before that.
    pub(crate) kept_output: Option<ContentId>,
    /// The slot of the state before the drafts of its last step, if it has had any.
    pub(crate) before_drafts: Option<StateId>,
    /// Whether the state must be restored from there, because a draft was rejected.
    pub(crate) must_restore: bool,
}

impl RecurrentSlots {
    /// Number of slots that the sequence uses.
    pub(crate) fn num_held(&self) -> usize {
        let held = [self.own.is_some(), self.output.is_some(), self.before_drafts.is_some()];
        held.into_iter().filter(|is_held| *is_held).count()
    }

    /// Gives all slots back, because the sequence leaves its row.
    pub(crate) fn release(&mut self, pool: &mut StatePool) {
        let Self { own, output, before_drafts, .. } = std::mem::take(self);
        let output = output.map(|(state, _)| state);
        [output, own, before_drafts].into_iter().flatten().for_each(|state| pool.release(state));
    }
}

/// All slots.
#[derive(Debug, Default)]
pub(crate) struct StatePool {
    num_slots: usize,
    unused: Vec<StateId>,
    snapshots: HashMap<ContentId, Snapshot>,
    /// The same by rank, the first to be evicted first.
    by_rank: BTreeMap<Rank, ContentId>,
    ranking: Ranking,
    /// `[num_slots]`: the last plan that copies the slot, or copies to it.
    copied_step: Vec<u64>,
    /// Copies of evicted snapshots.
    pub(crate) hosted: HostSlots<ContentId, StateId>,
}

impl StatePool {
    pub(crate) fn new(num_slots: usize) -> Self {
        let mut pool = Self { num_slots, copied_step: vec![u64::MAX; num_slots], ..Self::default() };
        pool.lose_device(None);
        pool
    }

    /// The same with slots in host memory and on disk for evicted snapshots.
    pub(crate) fn with_host(self, num_slots: usize, num_disk_slots: usize) -> Self {
        let disk = DiskSlots::new(SlotKind::State, num_disk_slots);
        Self { hosted: HostSlots::new(num_slots, disk), ..self }
    }

    /// Removes all users and snapshots, because the workers' memory is new. The host keeps those that plans up to `last` stored there.
    pub(crate) fn lose_device(&mut self, last: Option<u64>) {
        self.hosted.keep_until(last);
        self.unused.clear();
        self.unused.extend((0..self.num_slots as u32).rev().map(StateId));
        self.snapshots.clear();
        self.by_rank.clear();
    }

    /// Number of slots that can be allocated: unused ones and snapshots.
    pub(crate) fn num_available(&self) -> usize {
        self.unused.len() + self.snapshots.len()
    }

    pub(crate) fn num_snapshots(&self) -> usize {
        self.snapshots.len()
    }

    pub(crate) fn num_used(&self) -> usize {
        self.num_slots - self.num_available()
    }

    /// Takes a slot. `None` if sequences use all.
    pub(crate) fn allocate(&mut self) -> Option<StateId> {
        self.unused.pop().or_else(|| {
            let (_, &first) = self.by_rank.first_key_value()?;
            Some(self.evict(first))
        })
    }

    /// Copies a slot to another in this plan.
    pub(crate) fn copy(&mut self, from: StateId, to: StateId) -> CopiedState {
        for slot in [from, to] {
            self.copied_step[slot.0 as usize] = self.hosted.step();
        }
        CopiedState { from, to }
    }

    /// Whether this plan has a slot for a state of the host.
    pub(crate) fn can_load(&self) -> bool {
        self.unused.iter().any(|&slot| self.is_loadable(slot))
            || self.snapshots.values().any(|snapshot| self.is_loadable(snapshot.state))
    }

    /// States of the host are loaded before slots are copied, so not into slots that the plan copies.
    fn is_loadable(&self, slot: StateId) -> bool {
        self.copied_step[slot.0 as usize] != self.hosted.step()
    }

    /// Like [`StatePool::allocate`], for a state of the host.
    fn allocate_loadable(&mut self) -> Option<StateId> {
        if let Some(index) = self.unused.iter().rposition(|&slot| self.is_loadable(slot)) {
            return Some(self.unused.swap_remove(index));
        }
        let is_loadable = |content: &&ContentId| self.is_loadable(self.snapshots[*content].state);
        let first = *self.by_rank.values().find(is_loadable)?;
        Some(self.evict(first))
    }

    /// Removes a snapshot, which the host keeps if it has room. What the plan itself copies to it is not there yet.
    fn evict(&mut self, content: ContentId) -> StateId {
        let Snapshot { state, step, usefulness } = self.remove(content).expect("the evicted snapshot exists");
        self.ranking.evict(usefulness);
        if step != self.hosted.step() {
            self.hosted.store(content, state, usefulness);
        }
        state
    }

    /// Gives back a slot that was allocated.
    pub(crate) fn release(&mut self, state: StateId) {
        self.unused.push(state);
    }

    pub(crate) fn has_snapshot(&self, content: ContentId) -> bool {
        self.snapshots.contains_key(&content)
    }

    /// Whether a sequence can start from a snapshot of `content`, on the device, on the host, or `with_disk` on disk.
    pub(crate) fn can_start_from(&self, content: ContentId, with_disk: bool) -> bool {
        self.has_snapshot(content) || self.hosted.contains(content) || with_disk && self.hosted.disk.is_stored(content)
    }

    /// Takes a slot for a sequence that starts with the snapshot of `content`, which exists. Returns the slot and where the state
    /// must be copied from. If there is no other slot, it is the snapshot's own. A snapshot that only the host has was reserved;
    /// the plan copies it to the slot.
    pub(crate) fn start_from(&mut self, content: ContentId) -> (StateId, Option<StateId>) {
        let Some(snapshot) = self.remove(content) else {
            let own = self.allocate_loadable().expect("room was found for the joining sequence");
            self.hosted.load(content, own);
            return (own, None);
        };
        match self.allocate() {
            None => (snapshot.state, None),
            Some(own) => {
                self.insert(content, Snapshot { usefulness: snapshot.usefulness.used(), ..snapshot });
                (own, Some(snapshot.state))
            }
        }
    }

    /// An allocated slot becomes the snapshot of `content`, unless there is one. It is `num_saved` blocks after the one before it.
    pub(crate) fn keep(&mut self, state: StateId, content: ContentId, num_saved: usize) {
        let snapshot = Snapshot { state, usefulness: Usefulness::new(num_saved), step: self.hosted.step() };
        match self.has_snapshot(content) {
            true => self.release(state),
            false => self.insert(content, snapshot),
        }
    }

    /// Inserts a snapshot that was taken or used.
    fn insert(&mut self, content: ContentId, snapshot: Snapshot) {
        let usefulness = self.ranking.rank(snapshot.usefulness);
        self.snapshots.insert(content, Snapshot { usefulness, ..snapshot });
        self.by_rank.insert(usefulness.rank, content);
    }

    fn remove(&mut self, content: ContentId) -> Option<Snapshot> {
        let snapshot = self.snapshots.remove(&content)?;
        self.by_rank.remove(&snapshot.usefulness.rank);
        Some(snapshot)
    }

    /// Drops the snapshot of a content from the device, if there is one.
    pub(crate) fn forget(&mut self, content: ContentId) {
        let snapshot = self.remove(content);
        self.unused.extend(snapshot.map(|snapshot| snapshot.state));
    }

    /// The same on the host, too.
    pub(crate) fn drop_snapshot(&mut self, content: ContentId) {
        self.forget(content);
        self.hosted.forget(content);
    }

    /// Drops all snapshots, on the device, on the host and on disk.
    pub(crate) fn forget_all(&mut self) {
        self.unused.extend(self.snapshots.drain().map(|(_, snapshot)| snapshot.state));
        self.by_rank.clear();
        self.hosted.reset();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn content(salt: u64) -> ContentId {
        ContentId::salted(Some(salt))
    }

    #[test]
    fn of_snapshots_that_save_as_much_the_one_that_was_used_longest_ago_is_replaced_first() {
        let [a, b, c] = [1, 2, 3].map(content);
        let mut pool = StatePool::new(3);
        for content in [a, b] {
            let slot = pool.allocate().unwrap();
            pool.keep(slot, content, 1);
        }
        let (own, from) = pool.start_from(a);
        assert!(from.is_some_and(|from| from != own));
        assert_eq!((pool.num_available(), pool.num_used()), (2, 1));
        let slot = pool.allocate().unwrap();
        assert!(pool.has_snapshot(a) && !pool.has_snapshot(b));
        pool.keep(slot, c, 1);
        pool.forget(a);
        let (last, from) = pool.start_from(c);
        assert_eq!(from, Some(slot), "the slot of `a` is free");
        pool.forget(c);
        assert_eq!((pool.allocate(), pool.allocate()), (Some(slot), None));
        assert_ne!(last, own);
    }

    #[test]
    fn the_snapshot_that_saves_least_is_replaced_first_and_all_of_them_age() {
        let mut pool = StatePool::new(3);
        for num_saved in [4, 6, 2] {
            let slot = pool.allocate().unwrap();
            pool.keep(slot, content(num_saved), num_saved as usize);
        }
        let mut slot = pool.allocate().unwrap();
        let has = |pool: &StatePool| [2, 4, 6].map(|salt| pool.has_snapshot(content(salt)));
        assert_eq!(has(&pool), [false, true, true]);
        // Others that save three blocks each count from the two of the one that was replaced.
        for (others, expected) in [(1, [false, false, true]), (2, [false, false, true]), (3, [false, false, false])] {
            pool.keep(slot, content(100 + others), 3);
            slot = pool.allocate().unwrap();
            assert_eq!(has(&pool), expected, "after {others} others");
        }
    }

    #[test]
    fn a_snapshot_that_is_used_often_outlives_others_that_save_more() {
        let mut pool = StatePool::new(3);
        for (salt, num_saved) in [(1, 2), (2, 5)] {
            let slot = pool.allocate().unwrap();
            pool.keep(slot, content(salt), num_saved);
        }
        for _ in 0..2 {
            let (own, _) = pool.start_from(content(1));
            pool.release(own);
        }
        assert!(pool.allocate().is_some() && pool.allocate().is_some());
        assert!(pool.has_snapshot(content(1)) && !pool.has_snapshot(content(2)));
    }

    #[test]
    fn a_sequence_takes_the_slot_of_its_snapshot_if_there_is_no_other() {
        let content = content(1);
        let mut pool = StatePool::new(1);
        let slot = pool.allocate().unwrap();
        pool.keep(slot, content, 1);
        assert_eq!(pool.start_from(content), (slot, None));
        assert_eq!((pool.num_available(), pool.has_snapshot(content)), (0, false));
    }

    #[test]
    fn states_take_at_most_half_of_the_memory() {
        assert_eq!(num_states(1000, 0, 8), 0);
        assert_eq!(num_states(1000, 10, 8), 16 + 21);
        assert_eq!(num_states(1000, 100, 8), 5);
        assert_eq!(num_states(1000, 2000, 8), 1);
        assert_eq!(divide_memory(1000, [10, 0], 8, None), (100, 0));
        assert_eq!(divide_memory(1000, [10, 10], 8, None), (63, 37));
        assert_eq!(divide_memory(1000, [10, 10], 8, Some(12)), (12, 12));
        assert_eq!(divide_host_memory(1000, [10, 0]), [100, 0]);
        assert_eq!(divide_host_memory(1000, [10, 90]), [55, 5]);
        assert_eq!(divide_host_memory(1000, [10, 501]), [0, 0]);
        assert_eq!([(64, 1), (64, 64), (64, 65)].map(|(block, state)| state_interval(block, state)), [1, 1, 2]);
    }
}
