//! Recurrent states of running sequences: their slots, and when snapshots are taken.
//!
//! A sequence can start from a prefix only where a snapshot exists. Snapshots of a prompt are taken at its last full block and
//! every [`crate::EngineConfig::state_interval`] blocks: a chunk ends there, and the plan after it copies the state before the
//! next chunk. While a sequence decodes, the end of each full block is copied, and the newest copies replace the ones before; so
//! when it ends, or is preempted, the state at the last full block of its output remains. Where output is not shared, there are
//! snapshots of prompts alone.

use crate::engine::Engine;
use crate::plan_builder::PlanBuilder;
use crate::prefix::{self, Found};
use crate::sequence::Sequence;
use crate::slot::Slot;

impl Engine {
    /// Whether sequences have recurrent states.
    #[inline]
    pub(crate) fn has_states(&self) -> bool {
        self.config.num_states > 0
    }

    /// Gives a joining sequence its slot, with the state that belongs to the prefix that was found.
    pub(crate) fn start_state(&mut self, slot: Slot, found: &Found, builder: &mut PlanBuilder) {
        let states = &mut self.pool.states;
        let (own, from) = match found.snapshot() {
            Some(content) => states.start_from(content),
            None => (states.allocate().expect("room was found for the joining sequence"), None),
        };
        builder.copied_states.extend(from.map(|from| states.copy(from, own)));
        self.sequences[slot].recurrent.own = Some(own);
    }

    /// How many tokens of a prompt may be computed until a snapshot is due.
    pub(crate) fn until_prompt_snapshot(&self, slot: Slot) -> usize {
        let sequence = &self.sequences[slot];
        let computed = sequence.num_computed;
        let [interval, last] = self.prompt_snapshots(sequence);
        let next = last.min((computed / interval + 1) * interval);
        if self.has_states() && self.config.prefix_cache && next > computed {
            next - computed
        } else {
            sequence.join_len - computed
        }
    }

    /// Positions of the snapshots of a prompt: every so many, and the last one.
    fn prompt_snapshots(&self, sequence: &Sequence) -> [usize; 2] {
        let block_size = self.config.block_size;
        let last = sequence.num_shareable(sequence.join_len - 1, self.config.shares_output);
        [self.config.state_interval * block_size, last / block_size * block_size]
    }

    /// Takes a snapshot of a prompt if one is due at the positions computed so far. The plan has work for the sequence: a plan
    /// without any is not sent.
    pub(crate) fn snapshot_prompt(&mut self, slot: Slot, builder: &mut PlanBuilder) {
        if !self.has_states() || !self.config.prefix_cache {
            return;
        }
        let sequence = &self.sequences[slot];
        let (computed, block_size) = (sequence.num_computed, self.config.block_size);
        let [interval, last] = self.prompt_snapshots(sequence);
        let is_due = computed > 0 && (computed == last || computed.is_multiple_of(interval));
        let content = (computed / block_size).checked_sub(1).and_then(|index| sequence.contents.get(index));
        if let Some(&content) = content.filter(|_| is_due)
            && let Some(own) = sequence.recurrent.own
            && !self.pool.states.has_snapshot(content)
            && let Some(to) = self.pool.states.allocate()
        {
            builder.copied_states.push(self.pool.states.copy(own, to));
            self.pool.states.keep(to, content);
        }
    }

    /// Takes a snapshot of the output of a decoding sequence, which is at the end of a block.
    pub(crate) fn snapshot_output(&mut self, slot: Slot, builder: &mut PlanBuilder) {
        if !self.config.prefix_cache || !self.config.shares_output {
            return;
        }
        let (block_size, step) = (self.config.block_size, self.next_step);
        prefix::keep_output(&mut self.pool, &mut self.sequences[slot], block_size, step);
        let sequence = &mut self.sequences[slot];
        if let Some(own) = sequence.recurrent.own
            && let Some(to) = self.pool.states.allocate()
        {
            builder.copied_states.push(self.pool.states.copy(own, to));
            sequence.recurrent.output = Some((to, sequence.num_computed));
        }
    }

    /// Whether drafts of a sequence may be rejected: it has no recurrent state, or there is a slot to save it. Slots that
    /// waiting sequences can take are left for them.
    pub(crate) fn may_draft(&mut self, slot: Slot) -> bool {
        if !self.has_states() || self.sequences[slot].recurrent.before_drafts.is_some() {
            return true;
        }
        if self.pool.states.num_available() <= self.free_rows.len().min(self.queue.len()) {
            return false;
        }
        self.sequences[slot].recurrent.before_drafts = self.pool.states.allocate();
        self.sequences[slot].recurrent.before_drafts.is_some()
    }

    /// Number of drafts after which the state is at the end of a block, where a snapshot is due.
    pub(crate) fn until_snapshot(&self, slot: Slot) -> usize {
        let block_size = self.config.block_size;
        match self.has_states() && self.config.prefix_cache && self.config.shares_output {
            true => self.sequences[slot].tokens.len().next_multiple_of(block_size) - self.sequences[slot].tokens.len(),
            false => usize::MAX,
        }
    }

    /// Whether a joining sequence finds a slot. If all are in use, snapshots of outputs that are still growing make room, and then
    /// states that were saved before drafts and are not needed.
    pub(crate) fn has_free_state(&mut self) -> bool {
        if self.pool.states.num_available() > 0 {
            return true;
        }
        let mut running = self.running.iter().rev();
        let taken = running.find_map(|&(_, slot)| self.sequences[slot].recurrent.output.take());
        let taken = taken.map(|(state, _)| state).or_else(|| {
            let mut running = self.running.iter().rev();
            running.find_map(|&(_, slot)| self.sequences[slot].take_unneeded_state())
        });
        taken.inspect(|&state| self.pool.states.release(state)).is_some()
    }
}
