//! The pool of KV blocks: their users, the free blocks, and the contents of unused ones.
//!
//! Every block is in one of three states: *used* by one sequence or shared by several, *cached* (used by none,
//! but its content can be found again), or *unused*. Allocation takes unused blocks first, then the cached
//! block that was released longest ago, whose content then goes to the host, if there are slots (`hosted.rs`).

use std::collections::hash_map::Entry;
use std::collections::{HashMap, VecDeque};
use std::hash::{BuildHasherDefault, DefaultHasher, Hasher};
use std::ops::Range;

use crate::content::ContentId;
use crate::states::StatePool;
use crate::usefulness::Usefulness;
use crate::{BlockId, TokenId};

mod hosted;

pub(crate) use hosted::HostedBlocks;

/// Number of contents of evicted blocks that are known, for each block.
const EVICTED_PER_BLOCK: usize = 8;

/// Result of a search for a content.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Lookup {
    /// This block holds it.
    Ready(BlockId),
    /// A running sequence computes it.
    BeingComputed(ContentId),
    /// Host memory has it.
    Hosted(ContentId),
    /// It is on disk alone.
    OnDisk(ContentId),
    /// Its block was evicted. Blocks after it may still be there.
    Evicted(ContentId),
    /// No block holds it.
    Missing,
}

/// All KV blocks. The pool knows blocks and tokens, but no sequences.
#[derive(Debug)]
pub(crate) struct BlockPool {
    block_size: usize,
    blocks: Vec<Block>,
    /// `[num_blocks, block_size]`: the tokens of blocks that have a content.
    tokens: Vec<TokenId>,
    unused: Vec<BlockId>,
    /// Ends of the list of cached blocks, linked through `Block::older` and `Block::newer`.
    oldest: Option<BlockId>,
    newest: Option<BlockId>,
    num_cached: usize,
    /// Maps the hash of parent and tokens to the block of the first KV group that holds them. A collision counts as a
    /// miss.
    contents: HashMap<u64, BlockId, BuildHasherDefault<AlreadyHashed>>,
    /// Contents of evicted blocks of the first KV group, by the same hash, if it has a window, and of blocks that were lost with
    /// their workers.
    evicted: HashMap<u64, Evicted, BuildHasherDefault<AlreadyHashed>>,
    /// Hashes of `evicted`, oldest first.
    eviction_order: VecDeque<u64>,
    /// Number of contents of evicted blocks that are known.
    max_evicted: usize,
    /// Blocks of the other KV groups, by the content that the first group has for the same tokens.
    others: HashMap<(ContentId, usize), BlockId>,
    /// `[groups]`: number of used blocks.
    num_used_of: Vec<usize>,
    last_content: u64,
    /// Copies of evicted blocks.
    pub(crate) hosted: HostedBlocks,
    /// The plan that is being made.
    step: u64,
    /// Recurrent states, whose snapshots are named by contents of the first KV group.
    pub(crate) states: StatePool,
    /// Whether blocks that hold generated tokens are shared.
    pub(crate) shares_output: bool,
}

/// The content of an evicted block.
#[derive(Debug)]
struct Evicted {
    content: ContentId,
    parent: ContentId,
    tokens: Box<[TokenId]>,
}

#[derive(Debug, Clone, Copy, Default)]
struct Block {
    num_users: u32,
    /// KV group of its users or content.
    group: u32,
    /// `None` if the block cannot be found by its content.
    content: Option<ContentId>,
    parent: ContentId,
    /// Key in `contents` while there is a content.
    hash: u64,
    /// How useful the content is; it has no rank on the device.
    usefulness: Usefulness,
    /// First step that may read the content; `u64::MAX` while no plan fills the block.
    ready_step: u64,
    older: Option<BlockId>,
    newer: Option<BlockId>,
}

impl BlockPool {
    /// With `keeps_evicted`, contents of the first KV group are known for some time after their blocks were evicted. It is
    /// for groups with a window: later blocks are found through earlier ones, which are evicted first.
    pub(crate) fn new(num_blocks: usize, block_size: usize, num_groups: usize, keeps_evicted: bool) -> Self {
        let mut pool = Self {
            block_size,
            blocks: vec![Block::default(); num_blocks],
            tokens: vec![TokenId::default(); num_blocks * block_size],
            unused: Vec::with_capacity(num_blocks),
            oldest: None,
            newest: None,
            num_cached: 0,
            contents: HashMap::default(),
            evicted: HashMap::default(),
            eviction_order: VecDeque::new(),
            max_evicted: if keeps_evicted { EVICTED_PER_BLOCK * num_blocks } else { 0 },
            others: HashMap::new(),
            num_used_of: vec![0; num_groups],
            last_content: 0,
            hosted: HostedBlocks::default(),
            step: 0,
            states: StatePool::default(),
            shares_output: true,
        };
        pool.clear_device();
        pool
    }

    /// The same with slots for recurrent states.
    pub(crate) fn with_states(self, num_states: usize) -> Self {
        Self { states: StatePool::new(num_states), ..self }
    }

    /// Removes all users of blocks, and their contents.
    fn clear_device(&mut self) {
        self.blocks.fill(Block::default());
        self.unused.clear();
        self.unused.extend((0..self.blocks.len() as u32).rev().map(BlockId));
        (self.oldest, self.newest, self.num_cached) = (None, None, 0);
        self.contents.clear();
        self.others.clear();
        self.num_used_of.fill(0);
    }

    fn forget_evicted(&mut self) {
        self.evicted.clear();
        self.eviction_order.clear();
    }

    /// Number of blocks that can be allocated: unused and cached ones.
    pub(crate) fn num_available(&self) -> usize {
        self.unused.len() + self.num_cached
    }

    pub(crate) fn num_cached(&self) -> usize {
        self.num_cached
    }

    pub(crate) fn num_unused(&self) -> usize {
        self.unused.len()
    }

    pub(crate) fn num_used(&self) -> usize {
        self.blocks.len() - self.num_available()
    }

    /// Number of blocks that sequences use in some KV groups.
    pub(crate) fn num_used_by(&self, groups: Range<usize>) -> usize {
        self.num_used_of[groups].iter().sum()
    }

    pub(crate) fn num_users(&self, block: BlockId) -> u32 {
        self.blocks[block.0 as usize].num_users
    }

    /// Allocates a block for one user in a KV group and drops its content. Returns `None` if all blocks are in use.
    pub(crate) fn allocate(&mut self, group: usize) -> Option<BlockId> {
        let block = self.unused.pop().or_else(|| {
            let oldest = self.oldest?;
            self.unlink(oldest);
            self.store(oldest);
            self.keep_content(oldest);
            self.forget(oldest);
            Some(oldest)
        })?;
        let entry = &mut self.blocks[block.0 as usize];
        (entry.num_users, entry.group) = (1, group as u32);
        self.num_used_of[group] += 1;
        Some(block)
    }

    /// Adds a user to a block whose content was found.
    pub(crate) fn share(&mut self, block: BlockId) {
        if self.num_users(block) == 0 {
            self.unlink(block);
            self.num_used_of[self.blocks[block.0 as usize].group as usize] += 1;
        }
        let entry = &mut self.blocks[block.0 as usize];
        entry.num_users += 1;
        entry.usefulness = entry.usefulness.used();
    }

    /// Removes a user. A sequence releases its last block first, so that a content is evicted before its parent.
    pub(crate) fn release(&mut self, block: BlockId) {
        let entry = &mut self.blocks[block.0 as usize];
        assert!(entry.num_users > 0, "block {} is released but nobody uses it", block.0);
        entry.num_users -= 1;
        if entry.num_users > 0 {
            return;
        }
        self.num_used_of[entry.group as usize] -= 1;
        if entry.content.is_some() {
            self.link_newest(block);
        } else {
            self.unused.push(block);
        }
    }

    /// Searches for the block that holds `tokens` (one block) after `parent`, for a reader in step `step`.
    pub(crate) fn find(&self, parent: ContentId, tokens: &[TokenId], step: u64) -> Lookup {
        let hash = hash(parent, tokens);
        match self.contents.get(&hash) {
            Some(&block) if self.holds(block, parent, tokens) => {
                let Block { ready_step, content, .. } = self.blocks[block.0 as usize];
                match content.filter(|_| ready_step > step) {
                    None => Lookup::Ready(block),
                    Some(content) => Lookup::BeingComputed(content),
                }
            }
            _ => match (self.hosted.find(hash, parent, tokens), self.evicted.get(&hash)) {
                (Some(content), _) if self.hosted.contains(content, 0) => Lookup::Hosted(content),
                (Some(content), _) => Lookup::OnDisk(content),
                (None, Some(evicted)) if evicted.is(parent, tokens) => Lookup::Evicted(evicted.content),
                (None, _) => Lookup::Missing,
            },
        }
    }

    /// Registers the content that `block` will have once a plan fills it, and returns it. If another block already
    /// holds the same content, it stays registered there and `block` has none. Returns `None` if another content has
    /// the same hash.
    pub(crate) fn register(&mut self, block: BlockId, parent: ContentId, tokens: &[TokenId]) -> Option<ContentId> {
        let hash = hash(parent, tokens);
        if let Some(&other) = self.contents.get(&hash) {
            let same = self.holds(other, parent, tokens);
            return self.content(other).filter(|_| same);
        }
        let evicted = self.evicted.remove(&hash).filter(|evicted| evicted.is(parent, tokens));
        let known = evicted.map(|evicted| evicted.content).or_else(|| self.hosted.find(hash, parent, tokens));
        let content = known.unwrap_or_else(|| self.new_content());
        self.contents.insert(hash, block);
        let start = block.0 as usize * self.block_size;
        self.tokens[start..start + self.block_size].copy_from_slice(tokens);
        let entry = &mut self.blocks[block.0 as usize];
        (entry.content, entry.parent, entry.hash, entry.ready_step) = (Some(content), parent, hash, u64::MAX);
        entry.usefulness = Usefulness::new(1);
        Some(content)
    }

    fn new_content(&mut self) -> ContentId {
        self.last_content += 1;
        ContentId(self.last_content)
    }

    /// Remembers the content of a block that is evicted, if blocks of other contents are found through it.
    fn keep_content(&mut self, block: BlockId) {
        if self.max_evicted > 0
            && let Some((hash, evicted)) = self.first_group_content(block)
        {
            self.remember(hash, evicted, self.max_evicted);
        }
    }

    /// The content of a block of the first KV group with its hash, if it has one.
    fn first_group_content(&self, block: BlockId) -> Option<(u64, Evicted)> {
        let Block { content, parent, hash, group, .. } = self.blocks[block.0 as usize];
        let content = content.filter(|_| group == 0)?;
        let start = block.0 as usize * self.block_size;
        Some((hash, Evicted { content, parent, tokens: self.tokens[start..start + self.block_size].into() }))
    }

    /// Remembers a content that is in no block any more, and at most `max` of them.
    fn remember(&mut self, hash: u64, evicted: Evicted, max: usize) {
        while self.eviction_order.len() >= max {
            let oldest = self.eviction_order.pop_front().expect("a full list has a first");
            self.evicted.remove(&oldest);
        }
        self.evicted.insert(hash, evicted);
        self.eviction_order.push_back(hash);
    }

    /// The block of another KV group that a reader in step `step` finds for a content of the first group.
    pub(crate) fn find_other(&self, content: ContentId, group: usize, step: u64) -> Option<BlockId> {
        let block = *self.others.get(&(content, group))?;
        (self.blocks[block.0 as usize].ready_step <= step).then_some(block)
    }

    /// Registers a filled block of another KV group under the content that the first group has for the same tokens, for
    /// steps from `step` on. If another block is registered there, this one is not.
    pub(crate) fn register_other(&mut self, block: BlockId, content: ContentId, step: u64) {
        let entry = &mut self.blocks[block.0 as usize];
        if let Entry::Vacant(vacant) = self.others.entry((content, entry.group as usize)) {
            vacant.insert(block);
            (entry.content, entry.ready_step) = (Some(content), step);
            entry.usefulness = Usefulness::new(1);
        }
    }

    /// The plan before `step` fills the block, so steps from `step` on may read it.
    pub(crate) fn set_ready(&mut self, block: BlockId, step: u64) {
        self.blocks[block.0 as usize].ready_step = step;
    }

    pub(crate) fn content(&self, block: BlockId) -> Option<ContentId> {
        self.blocks[block.0 as usize].content
    }

    /// Removes the content of the block, so that it is no longer found.
    pub(crate) fn forget(&mut self, block: BlockId) {
        let entry = &mut self.blocks[block.0 as usize];
        match (entry.content.take(), entry.group) {
            (None, _) => {}
            (Some(content), 0) => {
                self.contents.remove(&entry.hash);
                if !self.hosted.knows(content, 0) {
                    self.states.drop_snapshot(content);
                }
            }
            (Some(content), group) => drop(self.others.remove(&(content, group as usize))),
        }
    }

    fn holds(&self, block: BlockId, parent: ContentId, tokens: &[TokenId]) -> bool {
        let start = block.0 as usize * self.block_size;
        self.blocks[block.0 as usize].parent == parent && self.tokens[start..start + self.block_size] == *tokens
    }

    fn link_newest(&mut self, block: BlockId) {
        self.blocks[block.0 as usize].older = self.newest;
        self.blocks[block.0 as usize].newer = None;
        match self.newest {
            Some(newest) => self.blocks[newest.0 as usize].newer = Some(block),
            None => self.oldest = Some(block),
        }
        self.newest = Some(block);
        self.num_cached += 1;
    }

    fn unlink(&mut self, block: BlockId) {
        let Block { older, newer, .. } = self.blocks[block.0 as usize];
        match older {
            Some(older) => self.blocks[older.0 as usize].newer = newer,
            None => self.oldest = newer,
        }
        match newer {
            Some(newer) => self.blocks[newer.0 as usize].older = older,
            None => self.newest = older,
        }
        self.num_cached -= 1;
    }
}

impl Evicted {
    fn is(&self, parent: ContentId, tokens: &[TokenId]) -> bool {
        self.parent == parent && *self.tokens == *tokens
    }
}

/// Hasher for keys that are hashes themselves.
#[derive(Debug, Default)]
struct AlreadyHashed(u64);

impl Hasher for AlreadyHashed {
    fn finish(&self) -> u64 {
        self.0
    }

    fn write(&mut self, _: &[u8]) {
        unreachable!("keys are `u64`");
    }

    fn write_u64(&mut self, hash: u64) {
        self.0 = hash;
    }
}

fn hash(parent: ContentId, tokens: &[TokenId]) -> u64 {
    let mut hasher = DefaultHasher::new();
    hasher.write_u64(parent.0);
    hasher.write(bytemuck::cast_slice(tokens));
    hasher.finish()
}

#[cfg(test)]
mod tests;
