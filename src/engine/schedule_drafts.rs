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
        let sequence = &mut self.sequences[slot];
        let row = running_row(sequence);
        if sequence.num_sent < sequence.tokens.len() {
            let tokens = sequence.tokens[sequence.num_sent..].to_vec();
            builder.revised.push(RevisedRow { row, parent: row, num_kept: sequence.num_sent as u32, tokens });
            sequence.num_sent = sequence.tokens.len();
        }
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

    /// As many draft tokens as budget, length and blocks allow.
    fn guess(&mut self, slot: Slot, builder: &mut PlanBuilder) -> Vec<TokenId> {
        let sequence = &mut self.sequences[slot];
        let room = sequence.max_len - sequence.tokens.len() - 1;
        let max = sequence.max_drafts.min(builder.draft_budget).min(room);
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
