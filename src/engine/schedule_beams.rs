//! Plans the next step of a beam search: each beam continues its parent and shares blocks with it where possible.

use std::iter::repeat;

use crate::Policy;
use crate::engine::Engine;
use crate::plan::{CopiedBlock, GrownTable, RevisedRow, RowWork};
use crate::plan_builder::PlanBuilder;
use crate::sequence::Sequence;
use crate::slot::{Sample, Slot};
use crate::tables::{Table, Tables};

impl Engine {
    /// Plans one token for each beam. Returns false if there were too few blocks and the sequence itself was preempted.
    pub(crate) fn plan_beams(&mut self, slot: Slot, builder: &mut PlanBuilder) -> bool {
        let held_before = self.sequences[slot].num_held(0..self.num_full_groups);
        self.follow_choices(slot);
        self.slide(slot);
        let is_block_full = self.sequences[slot].num_computed.is_multiple_of(self.config.block_size);
        let num_needed = self.num_blocks_for_beams(slot, is_block_full);
        while self.pool.num_available() < num_needed {
            if self.preempt_last() == slot {
                return false;
            }
        }
        let num_groups = self.config.num_groups();
        self.unshare_last_blocks(slot, is_block_full, builder);
        let sequence = &mut self.sequences[slot];
        sequence.usage.num_allocated += (num_needed / num_groups) as u32;
        self.totals.allocated_blocks += num_needed as u64;
        if self.config.policy == Policy::GuaranteedNoEvict {
            self.num_reserved = self.num_reserved + held_before - sequence.num_held(0..self.num_full_groups);
        }
        let num_positions = self.config.positions_read(sequence.num_computed);
        let num_beams = plan_work(sequence, slot, builder);
        builder.load.decode_positions += num_beams * num_positions;
        true
    }

    /// Copies the block table of its parent to each beam.
    fn follow_choices(&mut self, slot: Slot) {
        let block_size = self.config.block_size;
        let sequence = &mut self.sequences[slot];
        let beams = sequence.beams.as_mut().expect("a beam search has beams");
        if beams.tails.is_empty() {
            let num_shared = sequence.num_prompt_tokens / block_size;
            beams.tails.push(sequence.tables.iter_mut().map(|table| table.split_off(num_shared)).collect());
        }
        let tails: Vec<_> = beams.choices.iter().map(|choice| beams.tails[choice.parent].clone()).collect();
        let held = |tails: &[Tables]| tails.iter().flatten().flat_map(Table::held).copied().collect::<Vec<_>>();
        held(&tails).into_iter().for_each(|block| self.pool.share(block));
        held(&beams.tails).into_iter().for_each(|block| self.pool.release(block));
        beams.tails = tails;
    }

    /// Number of blocks needed in all KV groups before the beams can write their next position. If the last block is
    /// full, each beam needs a new one; otherwise all but one of those that share it need a copy.
    fn num_blocks_for_beams(&self, slot: Slot, is_block_full: bool) -> usize {
        let tails = &self.sequences[slot].beams.as_ref().expect("a beam search has beams").tails;
        let num_groups = self.config.num_groups();
        if is_block_full {
            return num_groups * tails.len();
        }
        // No block belongs to two groups.
        let mut last: Vec<_> = tails.iter().flatten().map(Table::last).collect();
        last.sort_unstable();
        last.dedup();
        num_groups * tails.len() - last.len()
    }

    /// Gives every beam a last block that it does not share.
    fn unshare_last_blocks(&mut self, slot: Slot, is_block_full: bool, builder: &mut PlanBuilder) {
        let beams = self.sequences[slot].beams.as_mut().expect("a beam search has beams");
        let tails = beams.tails.iter_mut().zip(&beams.rows);
        for ((table, group), &row) in tails.flat_map(|(tail, row)| tail.iter_mut().zip(0..).zip(repeat(row))) {
            match table.last_mut() {
                Some(last) if !is_block_full => {
                    if self.pool.num_users(*last) > 1 {
                        let to = self.pool.allocate(group).expect("room was made for the beams");
                        let from = std::mem::replace(last, to);
                        self.pool.release(from);
                        builder.copied.push(CopiedBlock { row, group: group as u32, from, to });
                    }
                }
                _ => {
                    let block = self.pool.allocate(group).expect("room was made for the beams");
                    table.push(block);
                    builder.grown.push(GrownTable { row, group: group as u32, block });
                }
            }
        }
    }
}

/// Sends the parent of each beam to the workers, and plans its work. Returns the number of beams.
fn plan_work(sequence: &mut Sequence, slot: Slot, builder: &mut PlanBuilder) -> usize {
    let (start, id) = (sequence.num_computed as u32, sequence.id);
    let beams = sequence.beams.as_mut().expect("a beam search has beams");
    let choices = std::mem::take(&mut beams.choices);
    builder.revised.extend(choices.iter().zip(&beams.rows).map(|(choice, &row)| {
        let parent = beams.rows[choice.parent];
        RevisedRow { row, parent, num_kept: start, tokens: vec![choice.token] }
    }));
    beams.num_live_rows = beams.num_live_rows.max(choices.len());
    let rows = &beams.rows[..beams.tails.len()];
    builder.decodes.extend(rows.iter().map(|&row| RowWork {
        row,
        start,
        num_tokens: 1,
        samples: true,
        num_guesses: 0,
    }));
    builder.decode_samples.extend(rows.iter().map(|&row| Sample {
        slot,
        sequence: id,
        row,
        is_constrained: false,
        is_void: false,
    }));
    sequence.num_in_flight += rows.len();
    sequence.num_computed += 1;
    rows.len()
}
