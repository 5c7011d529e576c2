//! The pool of KV blocks: their users, the free blocks, and the contents of unused ones.
//!
//! Every block is in one of three states: *used* by one sequence or shared by several, *cached* (used by none,
//! but its content can be found again), or *unused*. Allocation takes unused blocks first, then the cached
//! block that was released longest ago.

use std::collections::HashMap;
use std::hash::{BuildHasherDefault, DefaultHasher, Hasher};

use crate::{BlockId, TokenId};

/// Identifies the content of a filled block: its tokens and, through its parent, all tokens before them. Never reused.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub(crate) struct ContentId(u64);

impl ContentId {
    /// The parent of a sequence's first block.
    pub(crate) const ROOT: Self = Self(0);

    /// The parent of the first block of sequences with this salt: they share blocks with each other only.
    pub(crate) fn salted(salt: Option<u64>) -> Self {
        // Contents are counted from 1, so they never have the highest bit.
        salt.map_or(Self::ROOT, |salt| Self(salt | 1 << 63))
    }
}

/// Result of a search for a content.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Lookup {
    /// This block holds it.
    Ready(BlockId),
    /// A running sequence computes it.
    BeingComputed,
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
    /// Maps the hash of parent and tokens to the block that holds them. A collision counts as a miss.
    contents: HashMap<u64, BlockId, BuildHasherDefault<AlreadyHashed>>,
    last_content: u64,
}

#[derive(Debug, Clone, Copy, Default)]
struct Block {
    num_users: u32,
    /// `None` if the block cannot be found by its content.
    content: Option<ContentId>,
    parent: ContentId,
    /// Key in `contents` while there is a content.
    hash: u64,
    /// First step that may read the content; `u64::MAX` while no plan fills the block.
    ready_step: u64,
    older: Option<BlockId>,
    newer: Option<BlockId>,
}

impl BlockPool {
    pub(crate) fn new(num_blocks: usize, block_size: usize) -> Self {
        let mut pool = Self {
            block_size,
            blocks: vec![Block::default(); num_blocks],
            tokens: vec![TokenId::default(); num_blocks * block_size],
            unused: Vec::with_capacity(num_blocks),
            oldest: None,
            newest: None,
            num_cached: 0,
            contents: HashMap::default(),
            last_content: 0,
        };
        pool.reset();
        pool
    }

    /// Removes all users and contents, because the workers' memory is new.
    pub(crate) fn reset(&mut self) {
        self.blocks.fill(Block::default());
        self.unused.clear();
        self.unused.extend((0..self.blocks.len() as u32).rev().map(BlockId));
        (self.oldest, self.newest, self.num_cached) = (None, None, 0);
        self.contents.clear();
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

    pub(crate) fn num_users(&self, block: BlockId) -> u32 {
        self.blocks[block.0 as usize].num_users
    }

    /// Allocates a block for one user and drops its content. Returns `None` if all blocks are in use.
    pub(crate) fn allocate(&mut self) -> Option<BlockId> {
        let block = self.unused.pop().or_else(|| {
            let oldest = self.oldest?;
            self.unlink(oldest);
            self.forget(oldest);
            Some(oldest)
        })?;
        self.blocks[block.0 as usize].num_users = 1;
        Some(block)
    }

    /// Adds a user to a block whose content was found.
    pub(crate) fn share(&mut self, block: BlockId) {
        if self.num_users(block) == 0 {
            self.unlink(block);
        }
        self.blocks[block.0 as usize].num_users += 1;
    }

    /// Removes a user. A sequence releases its last block first, so that a content is evicted before its parent.
    pub(crate) fn release(&mut self, block: BlockId) {
        let entry = &mut self.blocks[block.0 as usize];
        assert!(entry.num_users > 0, "block {} is released but nobody uses it", block.0);
        entry.num_users -= 1;
        if entry.num_users > 0 {
            return;
        }
        if entry.content.is_some() {
            self.link_newest(block);
        } else {
            self.unused.push(block);
        }
    }

    /// Searches for the block that holds `tokens` (one block) after `parent`, for a reader in step `step`.
    pub(crate) fn find(&self, parent: ContentId, tokens: &[TokenId], step: u64) -> Lookup {
        match self.contents.get(&hash(parent, tokens)) {
            Some(&block) if self.holds(block, parent, tokens) => {
                if self.blocks[block.0 as usize].ready_step <= step {
                    Lookup::Ready(block)
                } else {
                    Lookup::BeingComputed
                }
            }
            _ => Lookup::Missing,
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
        self.last_content += 1;
        let content = ContentId(self.last_content);
        self.contents.insert(hash, block);
        let start = block.0 as usize * self.block_size;
        self.tokens[start..start + self.block_size].copy_from_slice(tokens);
        let entry = &mut self.blocks[block.0 as usize];
        (entry.content, entry.parent, entry.hash, entry.ready_step) = (Some(content), parent, hash, u64::MAX);
        Some(content)
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
        if entry.content.take().is_some() {
            self.contents.remove(&entry.hash);
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
mod tests {
    use super::*;

    const A: [TokenId; 2] = [TokenId(1), TokenId(2)];
    const B: [TokenId; 2] = [TokenId(3), TokenId(4)];

    fn filled(pool: &mut BlockPool, parent: ContentId, tokens: &[TokenId]) -> (BlockId, ContentId) {
        let block = pool.allocate().unwrap();
        let content = pool.register(block, parent, tokens).unwrap();
        pool.set_ready(block, 0);
        (block, content)
    }

    #[test]
    fn content_is_found_only_after_the_same_parent_and_from_its_step_on() {
        let mut pool = BlockPool::new(4, 2);
        let (first, parent) = filled(&mut pool, ContentId::ROOT, &A);
        let second = pool.allocate().unwrap();
        pool.register(second, parent, &B);
        assert_eq!(pool.find(ContentId::ROOT, &A, 0), Lookup::Ready(first));
        assert_eq!(pool.find(ContentId::ROOT, &B, 9), Lookup::Missing);
        assert_eq!(pool.find(parent, &B, 9), Lookup::BeingComputed);
        pool.set_ready(second, 5);
        assert_eq!(pool.find(parent, &B, 4), Lookup::BeingComputed);
        assert_eq!(pool.find(parent, &B, 5), Lookup::Ready(second));
    }

    #[test]
    fn the_block_released_longest_ago_is_taken_first_and_its_content_is_gone() {
        let mut pool = BlockPool::new(2, 2);
        let (a, _) = filled(&mut pool, ContentId::ROOT, &A);
        let (b, _) = filled(&mut pool, ContentId::ROOT, &B);
        pool.release(b);
        pool.release(a);
        assert_eq!((pool.num_cached(), pool.num_available(), pool.num_used()), (2, 2, 0));
        assert_eq!(pool.allocate(), Some(b));
        assert_eq!(pool.find(ContentId::ROOT, &B, 0), Lookup::Missing);
        pool.share(a);
        assert_eq!(pool.allocate(), None);
        pool.release(a);
        assert_eq!(pool.find(ContentId::ROOT, &A, 0), Lookup::Ready(a));
    }

    #[test]
    fn content_under_a_colliding_hash_is_not_taken_for_another() {
        let mut pool = BlockPool::new(4, 2);
        let (first, parent) = filled(&mut pool, ContentId::ROOT, &A);
        pool.contents.insert(hash(parent, &A), first);
        pool.contents.insert(hash(ContentId::ROOT, &B), first);
        assert_eq!(pool.find(parent, &A, 0), Lookup::Missing);
        assert_eq!(pool.find(ContentId::ROOT, &B, 0), Lookup::Missing);
        let second = pool.allocate().unwrap();
        assert_eq!(pool.register(second, parent, &A), None);
        pool.release(second);
        assert_eq!((pool.num_cached(), pool.num_unused()), (0, 3));
    }

    #[test]
    fn equal_content_keeps_its_first_block() {
        let mut pool = BlockPool::new(2, 2);
        let (first, content) = filled(&mut pool, ContentId::ROOT, &A);
        let second = pool.allocate().unwrap();
        assert_eq!(pool.register(second, ContentId::ROOT, &A), Some(content));
        pool.release(second);
        assert_eq!((pool.num_cached(), pool.num_unused()), (0, 1));
        pool.release(first);
        assert_eq!((pool.num_cached(), pool.num_unused()), (1, 1));
    }
}
