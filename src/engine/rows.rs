//! Which sequences have a row: when they get one with its blocks, and what its release frees.

use crate::blocks::BlockPool;
use crate::engine::Engine;
use crate::plan::JoinedRow;
use crate::plan_builder::PlanBuilder;
use crate::prefix::{self, Found, Place};
use crate::queue::service_key;
use crate::sequence::{Sequence, SequenceState};
use crate::slot::Slot;
use crate::snapshots;
use crate::tables::Table;
use crate::{BlockId, Policy, RowId, SamplingParams};

/// Under [`Policy::MaxUtilization`] an admission leaves one block free for this number of running rows, because a
/// sequence admitted into the last blocks is soon preempted again. Measured with `tests/soak.rs`, steps and preemptions
/// for 100 000 requests: 107 347 and 4 with one block for each row, 94 954 and 3 484 with one for four rows, 93 900 and
/// 26 914 with none.
const ROWS_PER_KEPT_BLOCK: usize = 4;

impl Engine {
    /// Admits sequences from the front of the queue while rows, blocks and budget last. They are never reordered: one
    /// that does not fit blocks those behind it.
    pub(crate) fn admit(&mut self, builder: &mut PlanBuilder) {
        let mut found = Found::default();
        while builder.prefill_budget > 0
            && let Some(&row) = self.free_rows.last()
            && let Some(slot) = self.queue.first()
            && (self.sequences[slot].started || !self.holds_new)
            && self.may_join(slot, builder)
            && self.find_room(slot, &mut found)
        {
            self.free_rows.pop();
            self.join(slot, row, &found, builder);
            self.plan_chunk(slot, builder);
        }
    }

    fn may_join(&self, slot: Slot, builder: &PlanBuilder) -> bool {
        let sequence = &self.sequences[slot];
        let carries = builder.num_joined_tokens == 0
            || builder.num_joined_tokens + joined_tokens(sequence) <= self.config.max_joined_tokens;
        let has_slot = sequence.adapter.as_ref().is_none_or(|adapter| self.adapters.has_room(adapter.id));
        sequence.num_in_flight == 0 && carries && has_slot && sequence.num_rows() <= self.num_free_rows(builder)
    }

    /// Number of rows that no sequence has, and no further token of this plan that takes one.
    pub(crate) fn num_free_rows(&self, builder: &PlanBuilder) -> usize {
        let num_taken = if self.config.shares_output { 0 } else { builder.num_further_rows() };
        self.free_rows.len().saturating_sub(num_taken)
    }

    /// Whether there are enough blocks for the sequence. Blocks found in the prefix cache are written to `found`.
    fn find_room(&mut self, slot: Slot, found: &mut Found) -> bool {
        if self.has_states() && !self.has_free_state() {
            return false;
        }
        let sequence = &self.sequences[slot];
        let (block_size, num_groups) = (self.config.block_size, self.config.num_groups());
        let windows = self.config.window_blocks_of(sequence);
        let (needed, kept_back) = match self.config.policy {
            Policy::GuaranteedNoEvict => {
                (self.num_full_groups * sequence.max_num_blocks(block_size) + windows, self.num_reserved())
            }
            Policy::MaxUtilization => {
                let num_first = sequence.beams.as_ref().map_or(0, |beams| beams.width());
                let needed = self.num_full_groups * sequence.tokens.len().div_ceil(block_size) + windows;
                let needed = needed + num_groups * num_first;
                (needed.min(self.config.num_blocks), num_groups * self.num_rows() / ROWS_PER_KEPT_BLOCK)
            }
        };
        let room = self.pool.num_available().saturating_sub(kept_back);
        if self.blocked_head.is_some_and(|(head, too_few)| head == sequence.id && room <= too_few) {
            return false;
        }
        found.reset(num_groups);
        // The logits of reused positions would be missing.
        let may_reuse = self.config.prefix_cache && !sequence.sampling.context_logits;
        if may_reuse && !self.find_prefix(slot, found) {
            return false;
        }
        let sequence = &self.sequences[slot];
        // Blocks of windows count as if they were not found: they may be released before others that share them do so.
        let full = found.tables[..self.num_full_groups].iter().flatten();
        let is_used = |&place: &Place| match place {
            Place::Device(block) => Some(self.pool.num_users(block) > 0),
            Place::Host(_) | Place::Disk(_) | Place::Nowhere => None,
        };
        // Blocks in use are there already; the others, and copies of the host, take a free one.
        let num_used = full.filter_map(is_used).filter(|&is_used| is_used).count();
        let fits = needed - num_used <= room;
        self.blocked_head = (!fits).then_some((sequence.id, room));
        fits
    }

    fn join(&mut self, slot: Slot, row: RowId, found: &Found, builder: &mut PlanBuilder) {
        self.queue.take(&self.sequences[slot]);
        let block_size = self.config.block_size;
        let sequence = &mut self.sequences[slot];
        let num_from_disk = self.pool.hosted.num_from_disk;
        // Before a block is allocated, which may evict others.
        prefix::reserve(&mut self.pool, found);
        for place in found.tables.iter().flatten() {
            if let &Place::Device(block) = place {
                self.pool.share(block);
            }
        }
        for (group, (table, places)) in sequence.tables.iter_mut().zip(&found.tables).enumerate() {
            table.set(found.len - places.len(), &take_blocks(&mut self.pool, group, places));
            self.totals.reused_blocks += places.len() as u64;
        }
        for (group, table) in sequence.tables[..self.num_full_groups].iter_mut().enumerate() {
            while table.len() < sequence.tokens.len().div_ceil(block_size) {
                table.push(self.pool.allocate(group).expect("room was found for the joining sequence"));
                self.totals.allocated_blocks += 1;
                sequence.usage.num_allocated += u32::from(group == 0);
            }
        }
        if self.config.num_states > 0 {
            self.start_state(slot, found, builder);
        }
        let sequence = &mut self.sequences[slot];
        sequence.adapter_slot = sequence.adapter.as_ref().map(|adapter| self.adapters.take(adapter));
        sequence.num_computed = found.len * block_size;
        sequence.join_len = sequence.tokens.len();
        sequence.num_sent = sequence.tokens.len();
        if self.config.num_states > 0 && self.config.prefix_cache {
            sequence.prompt_snapshots.due = snapshots::due(sequence, &self.config, found);
        }
        if let Some(beams) = &mut sequence.beams {
            beams.rows.push(row);
            beams.rows.extend(self.free_rows.drain(self.free_rows.len() + 1 - beams.width()..).rev());
            beams.num_live_rows = 1;
        }
        if self.config.prefix_cache {
            prefix::register_prompt(&mut self.pool, sequence, block_size, found);
        }
        if self.config.policy == Policy::GuaranteedNoEvict {
            let full = 0..self.num_full_groups;
            self.num_reserved += full.len() * sequence.max_num_blocks(block_size) - sequence.num_held(full);
            sequence.num_claimed = self.config.window_blocks_of(sequence);
            self.num_claimed += sequence.num_claimed;
        }
        if !std::mem::replace(&mut sequence.started, true) {
            sequence.usage.num_reused = found.len as u32;
            self.count_hits(found, self.pool.hosted.num_from_disk - num_from_disk);
        }
        let sequence = &mut self.sequences[slot];
        sequence.state = SequenceState::Running(row);
        let key = service_key(sequence);
        let index = self.running.partition_point(|&(other, _)| other < key);
        self.running.insert(index, (key, slot));
        builder.num_joined_tokens += joined_tokens(sequence);
        builder.joined.push(joined_row(sequence, row));
    }

    /// Removes a running sequence from its row. Its row and blocks are free for the next plan.
    pub(crate) fn release_row(&mut self, slot: Slot, state: SequenceState) {
        let (block_size, step) = (self.config.block_size, self.next_step);
        let index = self.running.binary_search_by_key(&service_key(&self.sequences[slot]), |&(key, _)| key);
        self.running.remove(index.expect("a running sequence is in the running list"));
        let sequence = &mut self.sequences[slot];
        let SequenceState::Running(row) = sequence.state else { panic!("only a running sequence leaves its row") };
        match &sequence.beams {
            None => {
                self.left.push(row);
                self.free_rows.push(row);
            }
            Some(beams) => {
                self.left.extend_from_slice(&beams.rows[..beams.num_live_rows]);
                self.free_rows.extend_from_slice(&beams.rows);
            }
        }
        if self.config.policy == Policy::GuaranteedNoEvict {
            let full = 0..self.num_full_groups;
            self.num_reserved -= full.len() * sequence.max_num_blocks(block_size) - sequence.num_held(full);
            self.num_claimed -= sequence.num_claimed;
        }
        if self.config.prefix_cache {
            let unfilled = sequence.num_ready.min(sequence.num_registered)..sequence.num_registered;
            unfilled.filter_map(|index| sequence.tables[0].get(index)).for_each(|block| self.pool.forget(block));
            crate::prefix::register_output(&mut self.pool, sequence, block_size, step);
            crate::prefix::keep_output(&mut self.pool, sequence, block_size, step);
        }
        sequence.adapter_slot.into_iter().for_each(|slot| self.adapters.release(slot));
        sequence.recurrent.release(&mut self.pool.states);
        for table in sequence.beams.iter().flat_map(|beams| &beams.tails).flatten() {
            table.held().iter().for_each(|&block| self.pool.release(block));
        }
        for index in (0..sequence.tables[0].len()).rev() {
            for block in sequence.tables.iter().filter_map(|table| table.get(index)) {
                self.pool.release(block);
            }
        }
        sequence.reset_row();
        sequence.state = state;
    }
}

/// The blocks of a prefix in one KV group. Those of the device are shared already; those of the host are loaded.
fn take_blocks(pool: &mut BlockPool, group: usize, places: &[Place]) -> Vec<BlockId> {
    let take = |&place: &Place| match place {
        Place::Device(block) => block,
        Place::Host(content) => pool.load(content, group).expect("room was found for the joining sequence"),
        Place::Disk(_) | Place::Nowhere => panic!("a prefix has all blocks that its next position sees"),
    };
    places.iter().map(take).collect()
}

fn joined_tokens(sequence: &Sequence) -> usize {
    sequence.tokens.len() + sequence.sampling.list_len()
}

fn joined_row(sequence: &Sequence, row: RowId) -> JoinedRow {
    JoinedRow {
        row,
        sequence: sequence.id,
        tokens: sequence.tokens.clone(),
        num_prompt_tokens: sequence.num_prompt_tokens as u32,
        num_computed: sequence.num_computed as u32,
        tables: sequence.tables.iter().map(Table::joined).collect(),
        state: sequence.recurrent.own,
        adapter: sequence.adapter_slot,
        sampling: SamplingParams::clone(&sequence.sampling),
    }
}
