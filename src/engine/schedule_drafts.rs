//! Plans a sequence's next token together with draft tokens after it.

use crate::TokenId;
use crate::engine::Engine;
use crate::plan::{RevisedRow, RowWork};
use crate::schedule::{PlanBuilder, running_row};
use crate::sequence::Drafting;
use crate::slot::Slot;

impl Engine {
    /// Plans a decode whose block is allocated. Draft tokens use only free blocks; no sequence is preempted for
    /// them.
    pub(crate) fn plan_drafts(&mut self, slot: Slot, builder: &mut PlanBuilder) {
        let drafts = self.guess(slot, builder);
        self.revise(slot, builder);
        let sequence = &mut self.sequences[slot];
        let row = running_row(sequence);
        let num_tokens = 1 + drafts.len();
        let work = RowWork { row, start: sequence.num_computed as u32, num_tokens: num_tokens as u32, samples: true };
        let sample = sequence.sample(slot, row);
        builder.load.decode_positions += num_tokens * self.config.positions_read(sequence.num_computed);
        sequence.num_computed += num_tokens;
        sequence.num_in_flight += num_tokens;
        if drafts.is_empty() {
            builder.decodes.push(work);
            builder.decode_samples.push(sample);
            return;
        }
        sequence.draft_usage.num_drafted += drafts.len() as u32;
        self.totals.drafted_tokens += drafts.len() as u64;
        builder.draft_budget -= drafts.len();
        builder.verifies.push(work);
        builder.verify_samples.extend(std::iter::repeat_n(sample, num_tokens));
        builder.drafts.push((row, drafts.clone()));
        sequence.drafting = Some(Box::new(Drafting { drafts, verified: Vec::new() }));
    }

    /// Whether the plan has room for the tokens that the workers lack. After a late mask these are all that the row has sampled
    /// since it joined.
    pub(crate) fn can_revise(&self, slot: Slot, builder: &PlanBuilder) -> bool {
        let sequence = &self.sequences[slot];
        let is_late = sequence.guided.as_ref().is_some_and(|guided| guided.needs_revision);
        let num_tokens = builder.num_joined_tokens + sequence.tokens.len() - sequence.num_sent;
        !is_late || builder.num_joined_tokens == 0 || num_tokens <= self.config.max_joined_tokens
    }

    /// Sends the tokens that the workers lack, or replaces those of a row that are discarded.
    pub(crate) fn revise(&mut self, slot: Slot, builder: &mut PlanBuilder) {
        let sequence = &mut self.sequences[slot];
        let is_late = sequence.guided.as_mut().is_some_and(|guided| std::mem::take(&mut guided.needs_revision));
        if !is_late && (!sequence.waits_for_settle() || sequence.num_sent == sequence.tokens.len()) {
            return;
        }
        let (row, num_kept) = (running_row(sequence), sequence.num_sent as u32);
        let tokens = sequence.tokens[sequence.num_sent..].to_vec();
        builder.num_joined_tokens += if is_late { tokens.len() } else { 0 };
        builder.revised.push(RevisedRow { row, parent: row, num_kept, tokens });
        sequence.num_sent = sequence.tokens.len();
    }

    /// As many draft tokens as budget, length and blocks allow.
    fn guess(&mut self, slot: Slot, builder: &mut PlanBuilder) -> Vec<TokenId> {
        let sequence = &mut self.sequences[slot];
        let room = sequence.max_len - sequence.tokens.len() - 1;
        let has_masks = sequence.guided.as_ref().is_some_and(|guided| guided.masks.is_some());
        let max = if has_masks { 0 } else { sequence.max_drafts.min(builder.draft_budget).min(room) };
        let mut drafts = Vec::new();
        if max > 0 {
            self.drafter.draft(&sequence.tokens, max, &mut drafts);
            drafts.truncate(max);
            sequence.keep_valid(&mut drafts);
        }
        let (block_size, start) = (self.config.block_size, sequence.num_computed);
        let num_positions = |engine: &Self| engine.sequences[slot].tables[0].len() * block_size;
        if num_positions(self) < start + 1 + drafts.len() {
            self.slide(slot);
        }
        while num_positions(self) < start + 1 + drafts.len() {
            match self.pool.num_available() >= self.config.num_groups() {
                true => self.append_all(slot, builder),
                false => drafts.truncate(num_positions(self) - start - 1),
            }
        }
        drafts
    }
}
