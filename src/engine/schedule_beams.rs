//! Plans the next step of a beam search: each beam continues its parent and shares blocks with it where possible.

use crate::Policy;
use crate::engine::{Engine, Sample};
use crate::plan::{CopiedBlock, RevisedRow, RowWork};
use crate::schedule::PlanBuilder;
use crate::sequence::Sequence;
use crate::sequences::Slot;

impl Engine {
    /// Plans one token for each beam. Returns false if there were too few blocks and the sequence itself was preempted.
    pub(crate) fn plan_beams(&mut self, slot: Slot, builder: &mut PlanBuilder) -> bool {
        let held_before = self.sequences[slot].num_held();
        self.follow_choices(slot);
        let is_block_full = self.sequences[slot].num_computed.is_multiple_of(self.config.block_size);
        let num_needed = self.num_blocks_for_beams(slot, is_block_full);
        while self.pool.num_available() < num_needed {
            if self.preempt_last() == slot {
                return false;
            }
        }
        self.unshare_last_blocks(slot, is_block_full, builder);
        let sequence = &mut self.sequences[slot];
        sequence.usage.num_allocated += num_needed as u32;
        self.totals.allocated_blocks += num_needed as u64;
        if self.config.policy == Policy::GuaranteedNoEvict {
            self.num_reserved = self.num_reserved + held_before - sequence.num_held();
        }
        plan_work(sequence, slot, builder);
        true
    }

    /// Copies the block table of its parent to each beam.
    fn follow_choices(&mut self, slot: Slot) {
        let block_size = self.config.block_size;
        let sequence = &mut self.sequences[slot];
        let beams = sequence.beams.as_mut().expect("a beam search has beams");
        if beams.tails.is_empty() {
            beams.tails.push(sequence.blocks.split_off(sequence.num_prompt_tokens / block_size));
        }
        let tails: Vec<_> = beams.choices.iter().map(|choice| beams.tails[choice.parent].clone()).collect();
        tails.iter().flatten().for_each(|&block| self.pool.share(block));
        beams.tails.iter().flatten().for_each(|&block| self.pool.release(block));
        beams.tails = tails;
    }

    /// Number of blocks needed before the beams can write their next position. If the last block is full, each beam
    /// needs a new one; otherwise all but one of those that share it need a copy.
    fn num_blocks_for_beams(&self, slot: Slot, is_block_full: bool) -> usize {
        let tails = &self.sequences[slot].beams.as_ref().expect("a beam search has beams").tails;
        if is_block_full {
            return tails.len();
        }
        let mut last: Vec<_> = tails.iter().map(|tail| tail.last()).collect();
        last.sort_unstable();
        last.dedup();
        tails.len() - last.len()
    }

    /// Gives every beam a last block that it does not share.
    fn unshare_last_blocks(&mut self, slot: Slot, is_block_full: bool, builder: &mut PlanBuilder) {
        let beams = self.sequences[slot].beams.as_mut().expect("a beam search has beams");
        for (tail, &row) in beams.tails.iter_mut().zip(&beams.rows) {
            match tail.last_mut() {
                Some(last) if !is_block_full => {
                    if self.pool.num_users(*last) > 1 {
                        let (from, to) = (*last, self.pool.allocate().expect("room was made for the beams"));
                        self.pool.release(from);
                        *last = to;
                        builder.copied.push(CopiedBlock { row, from, to });
                    }
                }
                _ => {
                    let block = self.pool.allocate().expect("room was made for the beams");
                    tail.push(block);
                    builder.grown.push((row, block));
                }
            }
        }
    }
}

/// Sends the parent of each beam to the workers, and plans its work.
fn plan_work(sequence: &mut Sequence, slot: Slot, builder: &mut PlanBuilder) {
    let (start, id) = (sequence.num_computed as u32, sequence.id);
    let beams = sequence.beams.as_mut().expect("a beam search has beams");
    let choices = std::mem::take(&mut beams.choices);
    builder.revised.extend(choices.iter().zip(&beams.rows).map(|(choice, &row)| {
        let parent = beams.rows[choice.parent];
        RevisedRow { row, parent, num_kept: start, tokens: vec![choice.token] }
    }));
    beams.num_live_rows = beams.num_live_rows.max(choices.len());
    let rows = &beams.rows[..beams.tails.len()];
    builder.decodes.extend(rows.iter().map(|&row| RowWork { row, start, num_tokens: 1, samples: true }));
    builder.decode_samples.extend(rows.iter().map(|&row| Sample { slot, sequence: id, row, is_constrained: false }));
    sequence.num_in_flight += rows.len();
    sequence.num_computed += 1;
}
