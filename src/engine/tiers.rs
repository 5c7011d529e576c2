//! The prefix cache below the device: host memory and disk, as the engine and its caller use them.

use crate::costs::StepLoad;
use crate::disk::DiskCopy;
use crate::disk::Fetch;
use crate::engine::Engine;
use crate::plan::STORES_COMPLETE_AFTER;
use crate::prefix::{self, Found};
use crate::slot::Slot;

impl Engine {
    /// The last plan whose copies to and from host memory are known to be complete.
    pub(crate) fn last_complete(&self) -> Option<u64> {
        self.last_computed?.checked_sub(STORES_COMPLETE_AFTER)
    }

    /// Forgets the copies in host memory, after [`recover`](Self::recover): the memory is new, too. Those on disk stay.
    pub fn forget_host(&mut self) {
        self.pool.lose_host();
    }

    /// Forgets the copies in host memory and on disk, after [`recover`](Self::recover): the weights may be others.
    pub fn forget_copies(&mut self) {
        self.pool.forget_copies();
    }

    /// Whether blocks that leave host memory go to the disk.
    pub(crate) fn has_disk(&self) -> bool {
        self.pool.hosted.slots.disk.num_slots() > 0
    }

    /// The copies between host memory and disk that ranks have to carry out, in this order; each ends with
    /// [`finish_disk_copy`](Self::finish_disk_copy). Call it after plans were made and sent.
    pub fn take_disk_copies(&mut self) -> Vec<DiskCopy> {
        if !self.has_disk() {
            return Vec::new();
        }
        let complete = self.last_complete();
        self.pool.take_disk_copies(complete)
    }

    /// Ends a copy: all ranks have carried it out, or one has failed at least.
    pub fn finish_disk_copy(&mut self, copy: DiskCopy, is_done: bool) {
        self.pool.finish_disk_copy(copy, is_done);
    }

    /// Forgets what is on disk, and stores and loads nothing there from now on. Copies under way end as before.
    pub fn close_disk(&mut self) {
        self.pool.close_disk();
    }

    /// Writes the prefix with which a sequence can start to `found`. Returns false if a part of it is computed, or copied from the
    /// disk, at present.
    pub(crate) fn find_prefix(&mut self, slot: Slot, found: &mut Found) -> bool {
        let fetch = self.sequences[slot].fetch;
        if fetch == Fetch::UnderWay && self.has_disk() && self.pool.is_loading() {
            return false;
        }
        let with_disk = fetch == Fetch::NotBegun && self.has_disk();
        let search = (self.next_step, with_disk);
        if !prefix::find_prefix(&self.pool, &self.sequences[slot], &self.config, search, found) {
            return false;
        }
        if !with_disk || !prefix::is_on_disk(&self.pool, found) {
            return true;
        }
        let complete = self.last_complete();
        let is_under_way = prefix::fetch(&mut self.pool, found, complete);
        self.sequences[slot].fetch = if is_under_way { Fetch::UnderWay } else { Fetch::Done };
        found.reset(self.config.num_groups());
        !is_under_way && self.find_prefix(slot, found)
    }

    /// Counts the prefix with which a sequence begins.
    pub(crate) fn count_hits(&mut self, found: &Found, num_from_disk: u64) {
        if found.len == 0 {
            return;
        }
        let num_hosted = (found.num_hosted() as u64).max(num_from_disk);
        self.totals.host_hit_blocks += num_hosted;
        self.totals.disk_hit_blocks += num_from_disk;
        let load = self.config.with_chunk(&StepLoad::default(), 0, found.len * self.config.block_size);
        let seconds = self.costs.costs().map_or(0.0, |costs| costs.of_prompt(&load));
        let all = found.len as u64;
        let of_tiers = [all - num_hosted, num_hosted - num_from_disk, num_from_disk];
        for (total, num_blocks) in self.totals.saved_seconds.iter_mut().zip(of_tiers) {
            *total += seconds * num_blocks as f64 / all as f64;
        }
    }
}
