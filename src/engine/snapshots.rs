//! Recurrent states of running sequences: their slots, and when snapshots are taken.
//!
//! A sequence can start from a prefix only where a snapshot exists. Snapshots of a prompt are taken at the last full blocks
//!
//! - of the prompt,
//! - of every [`state_interval`](EngineConfig::state_interval) blocks,
//! - before the ends of some of its messages: of the first two, with the system prompt and the tools, which some templates write as
//!   two messages, of the last one and of the one before it. Another conversation or another continuation of this one may begin
//!   to differ there,
//! - before it differs from what was computed before, if that goes on behind the last snapshot. This finds beginnings that many
//!   prompts share and that no message ends.
//!
//! A chunk ends there, and the plan after it copies the state before the next chunk. While a sequence decodes, the end of each
//! full block is copied, and the newest copies replace the ones before; so when it ends, or is preempted, the state at the last
//! full block of its output remains. Where output is not shared, there are snapshots of prompts alone.

use smallvec::SmallVec;

use crate::engine::Engine;
use crate::plan_builder::PlanBuilder;
use crate::prefix::{self, Found};
use crate::sequence::Sequence;
use crate::slot::Slot;
use crate::{EngineConfig, TokenId};

/// Ends of messages and of shared beginnings have snapshots of their own where at least a part of this many of
/// [`state_interval`](EngineConfig::state_interval) blocks lies before them: a snapshot that saves few tokens is not worth its memory.
const INTERVAL_DIVISOR: usize = 8;

/// Where snapshots are due in a prompt, in numbers of blocks before them, in order.
#[derive(Debug, Default)]
pub(crate) struct PromptSnapshots {
    /// Ends of messages at which others may begin to differ.
    pub(crate) message_ends: SmallVec<[usize; 4]>,
    /// All of them, while the sequence runs.
    pub(crate) due: Vec<usize>,
}

/// Numbers of blocks before the ends of the first two messages of a prompt, the last one, and the one before it.
pub(crate) fn message_ends(prompt: &[TokenId], config: &EngineConfig) -> SmallVec<[usize; 4]> {
    let is_end = |(_, token): &(usize, &TokenId)| config.message_ends.contains(token);
    let ends = || prompt.iter().enumerate().filter(is_end).map(|(index, _)| (index + 1) / config.block_size);
    let mut chosen: SmallVec<[usize; 4]> = ends().take(2).chain(ends().rev().take(2)).collect();
    chosen.sort_unstable();
    chosen.dedup();
    chosen
}

/// Number of blocks that lie at least between a snapshot and one that is taken for others.
fn min_distance(config: &EngineConfig) -> usize {
    config.state_interval.div_ceil(INTERVAL_DIVISOR)
}

/// Whether all prompts with the first `len` blocks of this one leave a snapshot there, whatever follows.
pub(crate) fn is_due_in_all(sequence: &Sequence, config: &EngineConfig, len: usize) -> bool {
    let before = len % config.state_interval;
    before == 0 || sequence.prompt_snapshots.message_ends.first() == Some(&len) && before >= min_distance(config)
}

/// Numbers of blocks of a joining sequence after which snapshots of its prompt are due, in order.
pub(crate) fn due(sequence: &Sequence, config: &EngineConfig, found: &Found) -> Vec<usize> {
    let &EngineConfig { state_interval, block_size, shares_output, .. } = config;
    let last = sequence.num_shareable(sequence.join_len - 1, shares_output) / block_size;
    let mut due: Vec<usize> =
        (found.len / state_interval + 1..).map(|n| n * state_interval).take_while(|&at| at < last).collect();
    let mut others: SmallVec<[usize; 5]> =
        sequence.prompt_snapshots.message_ends.iter().copied().chain([found.num_known]).collect();
    others.sort_unstable();
    let mut before = found.len;
    for at in others {
        before = before.max(at / state_interval * state_interval);
        if at < last && at >= before + min_distance(config) {
            due.push(at);
            before = at;
        }
    }
    due.extend((last > found.len).then_some(last));
    due.sort_unstable();
    due
}

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
        let recurrent = &mut self.sequences[slot].recurrent;
        (recurrent.own, recurrent.last_snapshot) = (Some(own), found.len);
    }

    /// How many tokens of a prompt may be computed until a snapshot is due.
    pub(crate) fn until_prompt_snapshot(&self, slot: Slot) -> usize {
        let Sequence { num_computed, join_len, prompt_snapshots, .. } = &self.sequences[slot];
        let block_size = self.config.block_size;
        let next = prompt_snapshots.due.iter().map(|len| len * block_size).find(|end| end > num_computed);
        next.unwrap_or(*join_len) - num_computed
    }

    /// Takes a snapshot of a prompt if one is due at the positions computed so far. The plan has work for the sequence: a plan
    /// without any is not sent.
    pub(crate) fn snapshot_prompt(&mut self, slot: Slot, builder: &mut PlanBuilder) {
        let (sequence, block_size) = (&self.sequences[slot], self.config.block_size);
        let (len, is_block_full) =
            (sequence.num_computed / block_size, sequence.num_computed.is_multiple_of(block_size));
        let is_due = is_block_full && sequence.prompt_snapshots.due.binary_search(&len).is_ok();
        let content = len.checked_sub(1).filter(|_| is_due).and_then(|index| sequence.contents.get(index).copied());
        let (Some(content), Some(own)) = (content, sequence.recurrent.own) else { return };
        let num_saved = len - std::mem::replace(&mut self.sequences[slot].recurrent.last_snapshot, len);
        if !self.pool.states.has_snapshot(content)
            && let Some(to) = self.pool.states.allocate()
        {
            builder.copied_states.push(self.pool.states.copy(own, to));
            self.pool.states.keep(to, content, num_saved);
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
        if !self.has_state_for_drafts(slot) {
            return false;
        }
        self.sequences[slot].recurrent.before_drafts = self.pool.states.allocate();
        self.sequences[slot].recurrent.before_drafts.is_some()
    }

    /// Whether [`may_draft`](Self::may_draft) finds a slot for one of the sequences that have none yet.
    pub(crate) fn has_state_for_drafts(&self, slot: Slot) -> bool {
        let has_own = !self.has_states() || self.sequences[slot].recurrent.before_drafts.is_some();
        has_own || self.pool.states.num_available() > self.free_rows.len().min(self.queue.len())
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
