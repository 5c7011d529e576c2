//! Contents of blocks that host memory or the disk keeps.

use std::collections::HashMap;

use super::{BlockPool, Evicted};
use crate::content::ContentId;
use crate::disk::{DiskCopy, DiskSlots, Room, SlotKind};
use crate::host::HostSlots;
use crate::plan::HostCopies;
use crate::{BlockId, TokenId};

/// Number of contents of lost blocks that are known, for each block.
const LOST_PER_BLOCK: usize = 2;

/// Copies of blocks in host memory and on disk. Those of the first KV group are found by their tokens, like blocks of the device; those of
/// other groups are named by the content that the first group has for the same tokens.
#[derive(Debug, Default)]
pub(crate) struct HostedBlocks {
    /// Copies, by content and KV group.
    pub(crate) slots: HostSlots<(ContentId, u32), BlockId>,
    /// Contents of the first KV group.
    contents: HashMap<ContentId, Hosted>,
    by_hash: HashMap<u64, ContentId>,
    /// Copies that sequences have used and that came from the disk for them.
    pub(crate) num_from_disk: u64,
}

#[derive(Debug)]
struct Hosted {
    hash: u64,
    parent: ContentId,
    tokens: Box<[TokenId]>,
}

impl HostedBlocks {
    pub(super) fn new(num_slots: usize, num_disk_slots: usize) -> Self {
        let disk = DiskSlots::new(SlotKind::Block, num_disk_slots);
        Self { slots: HostSlots::new(num_slots, disk), ..Self::default() }
    }

    pub(super) fn reset(&mut self) {
        self.slots.reset();
        self.contents.clear();
        self.by_hash.clear();
    }

    /// The content of `tokens` after `parent`, which have this hash, if host memory or the disk has it.
    pub(super) fn find(&self, hash: u64, parent: ContentId, tokens: &[TokenId]) -> Option<ContentId> {
        let content = *self.by_hash.get(&hash)?;
        let hosted = &self.contents[&content];
        (hosted.parent == parent && *hosted.tokens == *tokens).then_some(content)
    }

    /// Whether host memory has a block.
    pub(crate) fn contains(&self, content: ContentId, group: usize) -> bool {
        self.slots.contains((content, group as u32))
    }

    /// Whether the file has a block.
    pub(crate) fn is_on_disk(&self, content: ContentId, group: usize) -> bool {
        self.slots.disk.is_stored((content, group as u32))
    }

    /// Whether host memory or the disk has a block.
    pub(super) fn knows(&self, content: ContentId, group: usize) -> bool {
        self.slots.knows((content, group as u32))
    }

    /// Keeps the copies that plans up to `last` filled, and those on disk. Returns the contents of the first KV group that it drops,
    /// with hash, parent and tokens.
    fn keep_until(&mut self, last: Option<u64>) -> Vec<(u64, Evicted)> {
        let lost = self.slots.keep_until(last);
        let mut dropped = Vec::new();
        for (content, _) in lost.into_iter().filter(|&name| name.1 == 0 && !self.slots.knows(name)) {
            let Some(Hosted { hash, parent, tokens }) = self.contents.remove(&content) else { continue };
            if self.by_hash.get(&hash) == Some(&content) {
                self.by_hash.remove(&hash);
            }
            dropped.push((hash, Evicted { content, parent, tokens }));
        }
        dropped
    }

    /// Drops what is known of a content whose copy is gone. Returns its hash.
    fn drop_content(&mut self, content: ContentId) -> Option<u64> {
        let Hosted { hash, .. } = self.contents.remove(&content)?;
        if self.by_hash.get(&hash) == Some(&content) {
            self.by_hash.remove(&hash);
        }
        Some(hash)
    }
}

impl BlockPool {
    /// The same with slots in host memory and on disk for evicted blocks and snapshots.
    pub(crate) fn with_host(mut self, [blocks, states]: [usize; 2], [disk_blocks, disk_states]: [usize; 2]) -> Self {
        self.hosted = HostedBlocks::new(blocks, disk_blocks);
        self.states = self.states.with_host(states, disk_states);
        self
    }

    /// An unused pool like this one, without copies. Copies to and from the disk that are under way keep their slots.
    pub(crate) fn take_host_of(&mut self, before: &BlockPool) {
        self.hosted.slots = before.hosted.slots.clone();
        self.hosted.slots.reset();
        self.states.hosted = before.states.hosted.clone();
        self.states.hosted.reset();
    }

    /// Starts the plan `step`.
    pub(crate) fn begin_plan(&mut self, step: u64) {
        self.step = step;
        self.hosted.slots.begin_plan(step);
        self.states.hosted.begin_plan(step);
    }

    /// Takes the copies of the plan.
    pub(crate) fn take_copies(&mut self) -> HostCopies {
        let [stored, loaded] = self.hosted.slots.take_copies();
        let [stored_states, loaded_states] = self.states.hosted.take_copies();
        HostCopies { stored, loaded, stored_states, loaded_states }
    }

    /// Keeps the content of a block that is evicted on the host, if there is room. What the plan itself fills is not there yet.
    pub(super) fn store(&mut self, block: BlockId) {
        let entry = self.blocks[block.0 as usize];
        let Some(content) = entry.content.filter(|_| entry.ready_step <= self.step) else { return };
        let (is_kept, dropped) = self.hosted.slots.store((content, entry.group), block, entry.usefulness);
        if let Some(dropped) = dropped {
            self.note_gone(dropped);
        }
        if is_kept && entry.group == 0 && !self.hosted.contents.contains_key(&content) {
            let start = block.0 as usize * self.block_size;
            let tokens = self.tokens[start..start + self.block_size].into();
            let hosted = Hosted { hash: entry.hash, parent: entry.parent, tokens };
            self.hosted.by_hash.insert(entry.hash, content);
            self.hosted.contents.insert(content, hosted);
        }
    }

    /// A copy of the host or of the disk is gone. Without another one, the content is unknown there, and a snapshot at its end is of
    /// no use unless the device has it.
    fn note_gone(&mut self, (content, group): (ContentId, u32)) {
        if group > 0 || self.hosted.knows(content, 0) {
            return;
        }
        let hash = self.hosted.drop_content(content);
        let is_on_device =
            hash.and_then(|hash| self.contents.get(&hash)).is_some_and(|&it| self.content(it) == Some(content));
        if !is_on_device {
            self.states.drop_snapshot(content);
        }
    }

    /// The copies between host memory and disk that ranks have to carry out. Plans up to `complete` are complete.
    pub(crate) fn take_disk_copies(&mut self, complete: Option<u64>) -> Vec<DiskCopy> {
        let gone = self.hosted.slots.save(complete);
        gone.into_iter().for_each(|name| self.note_gone(name));
        self.states.hosted.save(complete);
        self.hosted.slots.take_disk_copies().chain(self.states.hosted.take_disk_copies()).collect()
    }

    /// Ends a copy between host memory and disk: all ranks have carried it out, or at least one has failed.
    pub(crate) fn finish_disk_copy(&mut self, copy: DiskCopy, is_done: bool) {
        match copy.kind {
            SlotKind::Block => {
                let gone = self.hosted.slots.finish_disk_copy(copy.number, is_done);
                gone.into_iter().for_each(|name| self.note_gone(name));
            }
            SlotKind::State => drop(self.states.hosted.finish_disk_copy(copy.number, is_done)),
        }
    }

    /// Whether a copy from the disk is under way.
    pub(crate) fn is_loading(&self) -> bool {
        self.hosted.slots.disk.is_loading() || self.states.hosted.disk.is_loading()
    }

    /// Begins to copy a block from the disk to host memory; see [`HostSlots::fetch`].
    pub(crate) fn fetch(&mut self, name: (ContentId, u32), complete: Option<u64>, room: &mut Room) -> bool {
        let (is_under_way, gone) = self.hosted.slots.fetch(name, complete, room);
        gone.into_iter().for_each(|name| self.note_gone(name));
        is_under_way
    }

    /// Stops using the disk.
    pub(crate) fn close_disk(&mut self) {
        let gone = self.hosted.slots.close_disk();
        gone.into_iter().for_each(|name| self.note_gone(name));
        self.states.hosted.close_disk();
    }

    /// Allocates a block for one user in a KV group, into which the plan copies what the host has of a content. The copy was
    /// reserved. Steps from this one on may read the block.
    pub(crate) fn load(&mut self, content: ContentId, group: usize) -> Option<BlockId> {
        let block = self.allocate(group)?;
        let (usefulness, is_from_disk) = self.hosted.slots.load((content, group as u32), block);
        if group > 0 {
            self.register_other(block, content, self.step);
            self.blocks[block.0 as usize].usefulness = usefulness;
            return Some(block);
        }
        self.hosted.num_from_disk += u64::from(is_from_disk);
        let Hosted { hash, parent, tokens } = &self.hosted.contents[&content];
        self.contents.insert(*hash, block);
        let start = block.0 as usize * self.block_size;
        self.tokens[start..start + self.block_size].copy_from_slice(tokens);
        let entry = &mut self.blocks[block.0 as usize];
        (entry.content, entry.parent, entry.hash, entry.ready_step) = (Some(content), *parent, *hash, self.step);
        entry.usefulness = usefulness;
        Some(block)
    }

    /// The workers' memory is new: removes all users, and the contents of the device. The host keeps what plans up to `last` stored
    /// there. Contents of the device are remembered, because those of the host are found through them: once a block of them is
    /// computed again, the copies after it are found.
    pub(crate) fn lose_device(&mut self, last: Option<u64>) {
        match self.hosted.slots.num_slots() {
            0 => self.forget_evicted(),
            _ => {
                let max = self.max_evicted.max(LOST_PER_BLOCK * self.blocks.len());
                for (hash, evicted) in self.hosted.keep_until(last) {
                    self.remember(hash, evicted, max);
                }
                for block in (0..self.blocks.len() as u32).map(BlockId) {
                    if let Some((hash, evicted)) = self.first_group_content(block) {
                        self.remember(hash, evicted, max);
                    }
                }
            }
        }
        self.clear_device();
        self.states.lose_device(last);
    }

    /// Forgets what host memory has, because it is new. What is on disk stays. No plan is in flight.
    pub(crate) fn lose_host(&mut self) {
        let names: Vec<ContentId> = self.hosted.contents.keys().copied().collect();
        self.hosted.slots.lose_host();
        self.states.hosted.lose_host();
        names.into_iter().for_each(|content| self.note_gone((content, 0)));
    }

    /// Forgets what host memory and the disk have. No plan is in flight.
    pub(crate) fn forget_copies(&mut self) {
        self.hosted.reset();
        self.states.hosted.reset();
    }

    /// Removes all contents and snapshots, on the device, on the host and on disk. Blocks in use stay with their users.
    pub(crate) fn forget_all(&mut self) {
        while let Some(block) = self.oldest {
            self.unlink(block);
            self.forget(block);
            self.unused.push(block);
        }
        (0..self.blocks.len() as u32).for_each(|block| self.forget(BlockId(block)));
        self.forget_evicted();
        self.hosted.reset();
        self.states.forget_all();
    }
}
