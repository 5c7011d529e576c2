//! Block tables: which KV blocks hold the positions of a sequence.

use smallvec::SmallVec;

use crate::BlockId;
use crate::blocks::BlockPool;
use crate::plan::JoinedTable;

/// The tables of a sequence, one for each KV group.
pub(crate) type Tables = SmallVec<[Table; 1]>;

/// The block table of one KV group. In a group with a window, the sequence has released the first blocks.
#[derive(Debug, Clone, Default)]
pub(crate) struct Table {
    /// Those before `first` are not held; their ids mean nothing.
    blocks: Vec<BlockId>,
    first: usize,
}

impl Table {
    /// Number of blocks, released ones included.
    #[inline]
    pub(crate) fn len(&self) -> usize {
        self.blocks.len()
    }

    /// The blocks that the sequence uses.
    pub(crate) fn held(&self) -> &[BlockId] {
        &self.blocks[self.first..]
    }

    /// Block `index`, if it is held.
    pub(crate) fn get(&self, index: usize) -> Option<BlockId> {
        self.blocks.get(index).copied().filter(|_| index >= self.first)
    }

    pub(crate) fn push(&mut self, block: BlockId) {
        self.blocks.push(block);
    }

    /// The last block, if it is held.
    pub(crate) fn last_mut(&mut self) -> Option<&mut BlockId> {
        self.blocks[self.first..].last_mut()
    }

    /// The last block, if it is held.
    pub(crate) fn last(&self) -> Option<BlockId> {
        self.held().last().copied()
    }

    /// An empty table becomes `blocks`, which follow `first` blocks that are not held.
    pub(crate) fn set(&mut self, first: usize, blocks: &[BlockId]) {
        self.blocks.resize(first, BlockId::default());
        self.blocks.extend_from_slice(blocks);
        self.first = first;
    }

    /// Releases the blocks before block `end`.
    pub(crate) fn release_before(&mut self, end: usize, pool: &mut BlockPool) {
        let end = end.min(self.blocks.len());
        if end > self.first {
            self.blocks[self.first..end].iter().for_each(|&block| pool.release(block));
            self.first = end;
        }
    }

    /// Moves the blocks from `at` on to a table of their own.
    pub(crate) fn split_off(&mut self, at: usize) -> Self {
        let tail = Self { blocks: self.blocks.split_off(at), first: self.first.saturating_sub(at) };
        self.first = self.first.min(at);
        tail
    }

    pub(crate) fn clear(&mut self) {
        self.blocks.clear();
        self.first = 0;
    }

    /// What the workers need of it when the sequence joins.
    pub(crate) fn joined(&self) -> JoinedTable {
        JoinedTable { first: self.first as u32, blocks: self.held().to_vec() }
    }
}

/// Index of the first block that a query at `position`, or a later one, can see.
pub(crate) fn first_visible(window: Option<usize>, position: usize, block_size: usize) -> usize {
    window.map_or(0, |window| (position + 1).saturating_sub(window) / block_size)
}
