//! Makes the plan of the next step: decodes first, then prefill in the remaining token budget.

use crate::engine::{Engine, InFlight, Masks};
use crate::plan::{GrownTable, RowWork, StepPlan};
use crate::plan_builder::PlanBuilder;
use crate::prefix;
use crate::sequence::{Sequence, SequenceState};
use crate::slot::Slot;
use crate::weigh_drafts::Drafting;
use crate::{Policy, RowId};

impl Engine {
    /// Makes the next plan. Returns `None` if there is nothing to compute, or if the maximum number of plans is in
    /// flight.
    ///
    /// A plan always has work. It assumes that every plan in flight succeeds and that sequences end only by length;
    /// [`settle`](Self::settle) corrects what turns out otherwise.
    pub fn plan(&mut self) -> Option<StepPlan> {
        if self.in_flight.len() >= self.config.max_in_flight || self.awaits_output() {
            return None;
        }
        let drafting = self.weigh_drafts();
        if matches!(drafting, Drafting::On(_))
            && !self.config.guesses_on_device
            && self.plans_ahead()
            && let Some(last) = self.in_flight.back_mut()
        {
            last.is_awaited = true; // The drafter needs the last token.
            return None;
        }
        self.pool.begin_plan(self.next_step);
        let mut builder = PlanBuilder {
            decodes: Vec::with_capacity(self.running.len()),
            draft_budget: self.draft_budget(),
            decode_samples: std::mem::take(&mut self.spare_samples),
            drafting,
            ..PlanBuilder::default()
        };
        builder.load.after_gap = self.in_flight.is_empty() && !self.is_waiting;
        self.plan_decodes(&mut builder);
        self.size_step(&mut builder);
        self.plan_chunks(&mut builder);
        self.admit(&mut builder);
        let plan = self.finish_plan(builder);
        self.is_waiting = plan.is_none() && self.in_flight.is_empty();
        plan
    }

    /// Whether the next plan depends on the output of the last one.
    fn awaits_output(&self) -> bool {
        self.in_flight.back().is_some_and(|step| step.is_awaited)
    }

    fn plan_decodes(&mut self, builder: &mut PlanBuilder) {
        let mut index = 0;
        let reads_all = self.config.windows == [None];
        // Sequences with a step in flight are in the other micro-batches.
        let most = self.running.len().div_ceil(self.config.num_stages);
        while let Some(&(_, slot)) = self.running.get(index).filter(|_| builder.decodes.len() < most) {
            let sequence = &self.sequences[slot];
            let waits = sequence.waits_for_settle() && sequence.num_in_flight > 0;
            if sequence.is_prefilling()
                || waits
                || sequence.waits_for_mask()
                || !self.has_room_for(slot, builder)
                || !self.can_revise(slot, builder)
            {
                index += 1;
                continue;
            }
            if sequence.beams.is_some() {
                index += usize::from(self.plan_beams(slot, builder));
                continue;
            }
            let is_block_full = sequence.needs_block(self.config.block_size);
            if is_block_full && !self.grow(slot, builder) {
                continue; // It was the last one and was preempted.
            }
            if is_block_full && self.has_states() {
                self.snapshot_output(slot, builder);
            }
            index += 1;
            let sequence = &self.sequences[slot];
            if sequence.max_drafts > 0 || sequence.needs_token_feedback {
                self.plan_drafts(slot, builder);
                continue;
            }
            self.revise(slot, builder);
            let sequence = &mut self.sequences[slot];
            let row = running_row(sequence);
            let start = sequence.num_computed as u32;
            builder.decodes.push(RowWork { row, start, num_tokens: 1, samples: true, num_guesses: 0 });
            builder.decode_samples.push(sequence.sample(slot, row));
            builder.load.decode_positions += match reads_all {
                true => sequence.num_computed + 1,
                false => self.config.positions_read(sequence.num_computed),
            };
            sequence.num_computed += 1;
            sequence.num_in_flight += 1;
            if sequence.is_fully_planned() {
                builder.completed.push(slot);
            }
        }
    }

    /// Appends a block to each table of a decoding sequence, preempting sequences after it if necessary. Returns false if no block
    /// was left and the sequence itself was preempted.
    fn grow(&mut self, slot: Slot, builder: &mut PlanBuilder) -> bool {
        self.slide(slot);
        while self.pool.num_available() < self.config.num_groups() {
            if self.preempt_last() == slot {
                return false;
            }
        }
        self.append_all(slot, builder);
        true
    }

    /// Appends a block to each table of a sequence. The caller has made room.
    pub(crate) fn append_all(&mut self, slot: Slot, builder: &mut PlanBuilder) {
        (0..self.config.num_groups()).for_each(|group| self.append(slot, group, builder));
    }

    /// Appends a block to one table of a sequence. The caller has made room.
    pub(crate) fn append(&mut self, slot: Slot, group: usize, builder: &mut PlanBuilder) {
        let block = self.pool.allocate(group).expect("room was made for the sequence");
        let sequence = &mut self.sequences[slot];
        sequence.tables[group].push(block);
        sequence.usage.num_allocated += u32::from(group == 0);
        self.totals.allocated_blocks += 1;
        if self.config.policy == Policy::GuaranteedNoEvict && group < self.num_full_groups {
            self.num_reserved -= 1;
        }
        builder.grown.push(GrownTable { row: running_row(sequence), group: group as u32, block });
    }

    /// Preempts the last sequence in the order of service, and returns it.
    pub(crate) fn preempt_last(&mut self) -> Slot {
        let &(_, slot) = self.running.last().expect("a sequence that needs blocks is running");
        self.requeue(slot);
        self.totals.preempted += 1;
        slot
    }

    /// Takes a running sequence from its row. It joins again later.
    pub(crate) fn requeue(&mut self, slot: Slot) {
        self.release_row(slot, SequenceState::Queued);
        self.queue.insert(&self.sequences[slot], slot);
    }

    /// Continues prefills that have begun.
    fn plan_chunks(&mut self, builder: &mut PlanBuilder) {
        let mut index = 0;
        while let Some(&(_, slot)) = self.running.get(index).filter(|_| builder.prefill_budget > 0) {
            if self.sequences[slot].is_prefilling() {
                self.plan_chunk(slot, builder);
            }
            index += 1;
        }
    }

    pub(crate) fn plan_chunk(&mut self, slot: Slot, builder: &mut PlanBuilder) {
        let sequence = &self.sequences[slot];
        let until_output = sequence.num_prompt_tokens.saturating_sub(sequence.num_computed);
        let is_replay = !self.config.shares_output && until_output == 0;
        let most = match self.config.shares_output {
            true => usize::MAX,
            false if is_replay => 1 + self.num_free_rows(builder),
            false => until_output,
        };
        let remaining = (sequence.join_len - sequence.num_computed).min(most);
        let num_tokens =
            self.until_prompt_snapshot(slot).min(self.chunk_len(sequence.num_computed, remaining, builder));
        let num_tokens =
            if is_replay { num_tokens } else { sequence.in_prompt_tiles(num_tokens, self.config.prompt_tile) };
        if num_tokens == 0 {
            builder.prefill_budget = 0; // What is left of the step is too little for the next tile.
            return;
        }
        let end = sequence.num_computed + num_tokens;
        if self.num_full_groups < self.config.num_groups() && !self.extend_windows(slot, end, builder) {
            return;
        }
        self.snapshot_prompt(slot, builder);
        let samples = end == self.sequences[slot].join_len;
        let num_guesses = if samples { self.num_guesses(slot, builder.drafting) } else { 0 };
        let sequence = &mut self.sequences[slot];
        let (row, start) = (running_row(sequence), sequence.num_computed as u32);
        let works = if is_replay { &mut builder.replays } else { &mut builder.prefills };
        works.push(RowWork { row, start, num_tokens: num_tokens as u32, samples, num_guesses });
        builder.prefill_budget -= num_tokens;
        builder.load = self.config.with_chunk(&builder.load, sequence.num_computed, num_tokens);
        builder.load.guesses = builder.load.guesses.max(num_guesses as usize);
        sequence.num_computed += num_tokens;
        if self.config.prefix_cache {
            prefix::publish_prompt(&mut self.pool, sequence, self.config.block_size, self.next_step + 1);
        }
        if samples {
            sequence.num_in_flight += 1;
            let samples = if is_replay { &mut builder.replay_samples } else { &mut builder.prefill_samples };
            samples.push(sequence.sample(slot, row));
            if sequence.is_fully_planned() {
                builder.completed.push(slot);
            }
        }
        if builder.max_seconds.is_some() && (num_tokens < remaining || !self.has_time(builder)) {
            builder.prefill_budget = 0;
        }
    }

    /// Number of draft tokens that a plan may have.
    pub(crate) fn draft_budget(&self) -> usize {
        // The other half of the budget is for prompts.
        let half = (self.config.max_step_tokens - self.num_rows()) / 2;
        if self.config.shares_output { half } else { half.min(self.free_rows.len()) }
    }

    /// Number of rows in use.
    pub(crate) fn num_rows(&self) -> usize {
        self.config.max_rows - self.free_rows.len()
    }

    /// Numbers the plan and removes the sequences that it completes.
    fn finish_plan(&mut self, builder: PlanBuilder) -> Option<StepPlan> {
        let runs_drafter = self.config.guesses_on_device && (builder.drafting != Drafting::Off || builder.has_chunks());
        let mut samples = builder.decode_samples;
        let mut work = builder.decodes;
        let others = [builder.prefills, builder.verifies, builder.replays];
        if work.is_empty() && others.iter().all(Vec::is_empty) {
            self.spare_samples = samples;
            return None;
        }
        work.splice(0..0, others.into_iter().flatten());
        let others = [builder.prefill_samples, builder.verify_samples, builder.replay_samples];
        samples.splice(0..0, others.into_iter().flatten());
        let has_work = !work.is_empty();
        let plan = StepPlan {
            step: self.next_step,
            left: std::mem::take(&mut self.left),
            adapters: self.adapters.filled(),
            joined: builder.joined,
            host: self.pool.take_copies(),
            revised: builder.revised,
            copied: builder.copied,
            copied_states: builder.copied_states,
            restored: builder.restored,
            grown: builder.grown,
            drafts: builder.drafts,
            saved_states: builder.saved_states,
            runs_drafter,
            work,
        };
        let needs_masks = samples.iter().any(|sample| sample.is_constrained);
        let masks = if needs_masks { Masks::Due } else { Masks::Sent };
        let (load, predicted) = (builder.load, self.costs.costs().map(|_| self.costs.predict(&builder.load)));
        let is_on = matches!(builder.drafting, Drafting::On(_));
        self.draft_history.num_steps = self.draft_history.num_steps.saturating_add(u32::from(is_on));
        let is_awaited = (is_on && load.guesses > 0 || !plan.drafts.is_empty()) && self.plans_ahead();
        let step = self.next_step;
        self.in_flight.push_back(InFlight { step, samples, masks, load, predicted, has_work, is_awaited });
        self.next_step += 1;
        self.totals.steps += 1;
        for slot in builder.completed {
            self.release_row(slot, SequenceState::Draining);
        }
        Some(plan)
    }
}

impl Sequence {
    /// The largest number of tokens of its next chunk, at most `most`, after which the chunk may end: 0 if there is none.
    fn in_prompt_tiles(&self, most: usize, tile: usize) -> usize {
        let end = self.num_computed + most;
        if end >= self.num_prompt_tokens { most } else { (end - end % tile).saturating_sub(self.num_computed) }
    }
}

#[inline]
pub(crate) fn running_row(sequence: &Sequence) -> RowId {
    match sequence.state {
        SequenceState::Running(row) => row,
        SequenceState::Queued | SequenceState::Draining => {
            panic!("sequence {} is planned but has no row", sequence.id.0)
        }
    }
}
