//! Sliding windows: a sequence holds only the blocks that its next positions can see.
//!
//! The layers of a model belong to KV groups (see [`EngineConfig::windows`]), and a sequence has a block table for each.
//! Groups without a window keep all blocks, which are allocated when the sequence joins and whenever it reaches the end
//! of a block. In groups with a window, the blocks of a prompt are allocated chunk by chunk, and blocks before the
//! window are released as the sequence advances. Other sequences can still find a released block in the prefix cache
//! until it is evicted.
//!
//! A block is released while a plan is made, when all positions that this plan and later ones compute lie behind the
//! window. Another sequence may take it in the same plan: workers carry out plans in order, and no position of this
//! plan sees it.

use crate::engine::Engine;
use crate::plan_builder::PlanBuilder;
use crate::sequence::Sequence;
use crate::slot::Slot;
use crate::tables::first_visible;
use crate::{EngineConfig, Policy};

impl EngineConfig {
    /// Number of KV groups.
    #[inline]
    pub(crate) fn num_groups(&self) -> usize {
        self.windows.len()
    }

    /// Number of KV groups without a window; they come first.
    pub(crate) fn num_full_groups(&self) -> usize {
        self.windows.iter().take_while(|window| window.is_none()).count()
    }

    /// Number of blocks that a sequence of `len` positions holds in all KV groups while it decodes.
    pub fn num_blocks_of(&self, len: usize) -> usize {
        let each = len.div_ceil(self.block_size);
        self.num_full_groups() * each + self.window_blocks(each, 1, 1)
    }

    /// Number of blocks with which a sequence of `len` positions can run alone: those that it holds while its prompt is
    /// computed.
    pub fn num_blocks_for(&self, len: usize) -> usize {
        let each = len.div_ceil(self.block_size);
        self.num_full_groups() * each + self.window_blocks(each, 1, self.max_step_tokens)
    }

    /// The length of the longest sequence that can run alone on `num_blocks` blocks, up to `max_sequence_len` rounded up
    /// to whole blocks.
    pub fn max_positions(&self, num_blocks: usize) -> usize {
        let (mut fits, mut too_long) = (0, self.max_sequence_len.div_ceil(self.block_size) + 1);
        while fits + 1 < too_long {
            let each = fits.midpoint(too_long);
            match self.num_blocks_for(each * self.block_size) <= num_blocks {
                true => fits = each,
                false => too_long = each,
            }
        }
        fits * self.block_size
    }

    /// Upper bound of the blocks that a sequence holds in all groups with a window, while its steps compute at most
    /// `num_new` positions. `max_num_blocks` is the number of its blocks in a group without a window.
    pub(crate) fn window_blocks(&self, max_num_blocks: usize, num_beams: usize, num_new: usize) -> usize {
        let blocks = |positions: usize| positions.div_ceil(self.block_size) + 1;
        let held = |window: usize| {
            let one = blocks(window.saturating_add(num_new));
            let beams = if num_beams > 1 { num_beams.saturating_mul(blocks(window.saturating_add(1))) } else { 0 };
            one.saturating_add(beams).min(max_num_blocks)
        };
        self.windows.iter().flatten().map(|&window| held(window)).sum()
    }

    /// The same for a sequence that waits for its row or runs.
    pub(crate) fn window_blocks_of(&self, sequence: &Sequence) -> usize {
        if self.num_full_groups() == self.num_groups() {
            return 0;
        }
        let num_beams = sequence.num_rows();
        let is_decoding = sequence.join_len > 0 && !sequence.is_prefilling() && num_beams == 1;
        // After drafts were rejected, a recurrent state goes back to before them, and the positions since are computed again.
        let num_again = if self.num_states > 0 { self.max_drafts } else { 0 };
        let num_decoded = 1 + num_again + self.max_drafts;
        let num_new = if is_decoding { num_decoded.min(self.max_step_tokens) } else { self.max_step_tokens };
        let num_unsettled = if sequence.guided.is_some() { self.max_in_flight } else { 0 };
        self.window_blocks(sequence.max_num_blocks(self.block_size), num_beams, num_new + num_unsettled)
    }
}

impl Engine {
    /// Blocks that running sequences may still allocate under [`Policy::GuaranteedNoEvict`].
    ///
    /// A sequence that releases a block of a window may allocate another, but the released one is not free if another
    /// sequence shares it. So every sequence counts with all blocks of windows that it may hold at once.
    pub(crate) fn num_reserved(&self) -> usize {
        let windows = self.num_full_groups..self.config.num_groups();
        match self.config.policy {
            Policy::GuaranteedNoEvict => self.num_reserved + self.num_claimed - self.pool.num_used_by(windows),
            Policy::MaxUtilization => 0,
        }
    }

    /// Releases the blocks that no position from the next one on can see.
    pub(crate) fn slide(&mut self, slot: Slot) {
        if self.num_full_groups == self.config.num_groups() {
            return;
        }
        let block_size = self.config.block_size;
        let sequence = &mut self.sequences[slot];
        if self.config.prefix_cache && self.num_full_groups == 0 {
            // Later blocks are found through the first group, so its blocks must be registered before they are released.
            crate::prefix::register_output(&mut self.pool, sequence, block_size, self.next_step);
        }
        let num_shared = sequence.num_prompt_tokens / block_size;
        for group in self.num_full_groups..self.config.num_groups() {
            let next = sequence.num_computed - sequence.num_unsettled();
            let end = first_visible(self.config.windows[group], next, block_size);
            sequence.tables[group].release_before(end, &mut self.pool);
            for tail in sequence.beams.iter_mut().flat_map(|beams| &mut beams.tails) {
                tail[group].release_before(end.saturating_sub(num_shared), &mut self.pool);
            }
        }
        if self.config.policy == Policy::GuaranteedNoEvict {
            let claim = self.config.window_blocks_of(sequence);
            self.num_claimed -= sequence.num_claimed - claim;
            sequence.num_claimed = claim;
        }
    }

    /// Allocates the blocks of windows for a chunk of a prompt that ends at position `end`, preempting sequences after
    /// it if necessary. Returns false if the chunk must wait, or if the sequence itself was preempted.
    pub(crate) fn extend_windows(&mut self, slot: Slot, end: usize, builder: &mut PlanBuilder) -> bool {
        self.slide(slot);
        let num_blocks = end.div_ceil(self.config.block_size);
        let groups = self.num_full_groups..self.config.num_groups();
        let tables = &self.sequences[slot].tables;
        let num_needed: usize = groups.clone().map(|group| num_blocks.saturating_sub(tables[group].len())).sum();
        while self.pool.num_available() < num_needed {
            // Decodes are planned before chunks, and what the work of this plan uses cannot be released.
            let &(_, last) = self.running.last().expect("a sequence that needs blocks is running");
            if !self.sequences[last].is_prefilling() || self.preempt_last() == slot {
                return false;
            }
        }
        for group in groups {
            while self.sequences[slot].tables[group].len() < num_blocks {
                self.append(slot, group, builder);
            }
        }
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn blocks_of_a_sequence_grow_with_its_length_until_its_windows_are_full() {
        let config = EngineConfig {
            windows: vec![None, Some(64), Some(64)],
            max_step_tokens: 128,
            max_sequence_len: 1000,
            ..EngineConfig::default()
        };
        // A token sees at most 5 blocks of 16 positions in part; with a chunk of 128 positions, 13.
        assert_eq!([16, 32, 1000].map(|len| config.num_blocks_of(len)), [3, 6, 63 + 2 * 6]);
        assert_eq!([16, 1000].map(|len| config.num_blocks_for(len)), [3, 63 + 2 * 13]);
        assert_eq!([0, 2, 3, 88, 89, 1000].map(|blocks| config.max_positions(blocks)), [0, 0, 16, 992, 1008, 1008]);
        let full = EngineConfig { windows: vec![None], ..config };
        assert_eq!([0, 1, 62, 63, 64].map(|blocks| full.max_positions(blocks)), [0, 16, 992, 1008, 1008]);
    }
}
