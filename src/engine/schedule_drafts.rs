//! Plans a sequence's next token together with draft tokens after it.

use crate::TokenId;
use crate::draft::InStep;
use crate::engine::Engine;
use crate::plan::{RestoredRow, RevisedRow, RowWork, SavedState};
use crate::plan_builder::PlanBuilder;
use crate::schedule::running_row;
use crate::slot::Slot;
use crate::weigh_drafts::Drafting;

impl Engine {
    /// Plans a decode whose block is allocated. Draft tokens use only free blocks; no sequence is preempted for
    /// them.
    pub(crate) fn plan_drafts(&mut self, slot: Slot, builder: &mut PlanBuilder) {
        let most = if self.config.shares_output { usize::MAX } else { 1 + self.num_free_rows(builder) };
        if self.sequences[slot].num_known() > most {
            return self.plan_known(slot, most, builder);
        }
        let may_draft = matches!(builder.drafting, Drafting::On(_)) && self.may_draft(slot);
        let drafts = if may_draft { self.drafts(slot, builder) } else { Vec::new() };
        self.sequences[slot].has_verified |= !drafts.is_empty();
        let is_trial = builder.drafting == Drafting::Trial;
        let num_guesses = if may_draft || is_trial { self.num_guesses(slot, builder.drafting) } else { 0 };
        self.reserve_guesses(slot, drafts.len() + num_guesses as usize, builder);
        self.revise(slot, builder);
        self.restore(slot, builder);
        let sequence = &mut self.sequences[slot];
        let row = running_row(sequence);
        let num_known = sequence.num_known();
        let num_tokens = num_known + drafts.len();
        let start = sequence.num_computed as u32;
        let work = RowWork { row, start, num_tokens: num_tokens as u32, samples: true, num_guesses };
        let sample = sequence.sample(slot, row);
        builder.load.guesses = builder.load.guesses.max(num_guesses as usize);
        builder.load.decode_positions += num_tokens * self.config.positions_read(sequence.num_computed);
        sequence.num_computed += num_tokens;
        sequence.num_in_flight += 1 + drafts.len();
        builder.draft_budget = builder.draft_budget.saturating_sub(num_tokens - 1);
        if num_tokens == 1 {
            builder.decodes.push(work);
            builder.decode_samples.push(sample);
            if self.sequences[slot].is_fully_planned() {
                builder.completed.push(slot);
            }
            return;
        }
        builder.verifies.push(work);
        builder.num_verified += num_tokens;
        builder.verify_samples.extend(std::iter::repeat_n(sample, 1 + drafts.len()));
        if !drafts.is_empty() {
            self.send_drafts(slot, num_known, drafts, builder);
        } else if self.sequences[slot].is_fully_planned() {
            builder.completed.push(slot);
        }
    }

    /// Plans the first `num_tokens` of the tokens that a sequence computes again, of which there are more. The next plan goes on.
    fn plan_known(&mut self, slot: Slot, num_tokens: usize, builder: &mut PlanBuilder) {
        self.revise(slot, builder);
        self.restore(slot, builder);
        let sequence = &mut self.sequences[slot];
        let (row, start) = (running_row(sequence), sequence.num_computed as u32);
        let work = RowWork { row, start, num_tokens: num_tokens as u32, samples: false, num_guesses: 0 };
        builder.load.decode_positions += num_tokens * self.config.positions_read(sequence.num_computed);
        sequence.num_computed += num_tokens;
        builder.draft_budget = builder.draft_budget.saturating_sub(num_tokens - 1);
        match num_tokens {
            1 => builder.decodes.push(work),
            _ => {
                builder.verifies.push(work);
                builder.num_verified += num_tokens;
            }
        }
    }

    fn send_drafts(&mut self, slot: Slot, num_known: usize, drafts: Vec<TokenId>, builder: &mut PlanBuilder) {
        let sequence = &mut self.sequences[slot];
        let row = running_row(sequence);
        sequence.draft_usage.num_drafted += drafts.len() as u32;
        self.totals.drafted_tokens += drafts.len() as u64;
        if let Some(to) = sequence.recurrent.before_drafts {
            builder.saved_states.push(SavedState { row, num_tokens: num_known as u32, to });
        }
        builder.drafts.push((row, drafts.clone()));
        sequence.has_verified = true;
        sequence.drafting = Some(Box::new(InStep { drafts, verified: Vec::new() }));
    }

    /// A recurrent state that has seen a rejected draft becomes the one before the drafts.
    fn restore(&mut self, slot: Slot, builder: &mut PlanBuilder) {
        let sequence = &mut self.sequences[slot];
        if std::mem::take(&mut sequence.recurrent.must_restore) {
            let from = sequence.recurrent.before_drafts.expect("the state was saved before the drafts");
            let row = running_row(sequence);
            builder.restored.push(RestoredRow { row, from, position: sequence.num_computed as u32 });
        }
    }

    /// Whether the step has room for a row. With a recurrent state, a row computes the tokens before rejected drafts again.
    pub(crate) fn has_room_for(&self, slot: Slot, builder: &PlanBuilder) -> bool {
        let num_known = self.sequences[slot].num_known();
        num_known <= 1 || builder.num_decode_tokens() + num_known <= self.config.max_step_tokens
    }

    /// Whether the plan has room for the tokens that the workers lack. After a late mask these are all that the row has sampled
    /// since it joined.
    pub(crate) fn can_revise(&self, slot: Slot, builder: &PlanBuilder) -> bool {
        let sequence = &self.sequences[slot];
        let is_late = sequence.guided.as_ref().is_some_and(|guided| guided.needs_revision);
        !is_late || self.has_room_to_send(sequence.num_unsent(), builder)
    }

    /// Whether the plan has room for so many tokens of a row.
    fn has_room_to_send(&self, num_tokens: usize, builder: &PlanBuilder) -> bool {
        builder.num_joined_tokens == 0 || builder.num_joined_tokens + num_tokens <= self.config.max_joined_tokens
    }

    /// Whether so many tokens are more than each row has room for.
    fn is_long(&self, num_tokens: usize) -> bool {
        num_tokens > 1 + self.config.max_drafts
    }

    /// Sends the tokens that the workers lack, or replaces those of a row that are discarded.
    pub(crate) fn revise(&mut self, slot: Slot, builder: &mut PlanBuilder) {
        let sequence = &mut self.sequences[slot];
        let is_late = sequence.guided.as_mut().is_some_and(|guided| std::mem::take(&mut guided.needs_revision));
        let lacks_tokens = (sequence.has_verified || sequence.needs_token_feedback) && sequence.num_unsent() > 0;
        if !is_late && !lacks_tokens {
            return;
        }
        sequence.has_verified = false;
        let (row, num_kept) = (running_row(sequence), sequence.num_sent as u32);
        let tokens = sequence.tokens[sequence.num_sent..].to_vec();
        sequence.num_sent = sequence.tokens.len();
        builder.num_joined_tokens += if is_late || self.is_long(tokens.len()) { tokens.len() } else { 0 };
        builder.revised.push(RevisedRow { row, parent: row, num_kept, tokens });
    }

    /// Appends the blocks of positions that guesses behind `num_tokens` further ones need, as far as blocks are free beside those
    /// that the running sequences may need next. The next plans need them anyway. With windows nothing is appended, because
    /// sequences claim no more blocks than drafts need there.
    fn reserve_guesses(&mut self, slot: Slot, num_tokens: usize, builder: &mut PlanBuilder) {
        let (block_size, has_windows) = (self.config.block_size, self.config.windows != [None]);
        let sequence = &self.sequences[slot];
        // The position of the last token is never computed.
        let needed = (sequence.num_planned() + num_tokens).min(sequence.max_len - 1);
        while !has_windows
            && self.sequences[slot].tables[0].len() * block_size < needed
            && self.pool.num_available() > self.running.len()
        {
            self.append_all(slot, builder);
        }
    }

    /// The guesses that become drafts: as many as budget, length and blocks allow.
    fn drafts(&mut self, slot: Slot, builder: &mut PlanBuilder) -> Vec<TokenId> {
        let sequence = &self.sequences[slot];
        // Devices made as many as are worth their time. Those of rank 0 may be for comparison.
        let most = if self.config.guesses_on_device { sequence.max_drafts } else { self.num_drafts(slot) };
        let num_unsent = sequence.num_unsent();
        let can_send = !self.is_long(num_unsent) || self.has_room_to_send(num_unsent, builder);
        if sequence.num_in_flight > 0 || !can_send {
            return Vec::new();
        }
        let mut drafts = std::mem::take(&mut self.sequences[slot].guesses);
        let sequence = &self.sequences[slot];
        let room = sequence.max_len - sequence.tokens.len() - 1;
        let has_masks = sequence.guided.as_ref().is_some_and(|guided| guided.masks.is_some());
        let num_known = sequence.num_known();
        let budget = builder.draft_budget.saturating_sub(num_known - 1);
        let max = if has_masks { 0 } else { most.min(budget).min(room) };
        let max = max.min(self.until_snapshot(slot));
        let sequence = &mut self.sequences[slot];
        drafts.truncate(max);
        if self.config.forced_acceptance.is_some() {
            // Any token stands for a guess that is missing.
            drafts.resize(max, sequence.tokens[0]);
        }
        if !drafts.is_empty() {
            sequence.keep_valid(&mut drafts);
        }
        let (block_size, num_known) = (self.config.block_size, sequence.tokens.len());
        let num_positions = |engine: &Self| engine.sequences[slot].tables[0].len() * block_size;
        if num_positions(self) < num_known + drafts.len() {
            self.slide(slot);
        }
        while num_positions(self) < num_known + drafts.len() {
            match self.pool.num_available() >= self.config.num_groups() {
                true => self.append_all(slot, builder),
                false => drafts.truncate(num_positions(self) - num_known),
            }
        }
        drafts
    }
}
