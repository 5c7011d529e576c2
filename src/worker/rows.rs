//! The rows of a worker: each plan's changes are checked against them and packed into device inputs.

use std::iter::repeat;

use engine::{
    BlockId, CopiedBlock, CopiedState, GrownTable, JoinedRow, RestoredRow, RevisedRow, RowId, RowWork, SavedState,
    SequenceId, StateId, StepPlan,
};
use ops::{HostSlots, NO_ADAPTER, StepInputs, TOKEN_ON_DEVICE};
use supervision::LogitsPlace;

use self::row::{Row, Table};
use crate::PlanMismatch;

mod host;
mod row;

/// All rows of a worker, and the number of the next plan.
#[derive(Debug)]
pub struct RowTable {
    rows: Vec<Option<Row>>,
    /// For each KV group.
    windows: Vec<Option<usize>>,
    block_size: usize,
    num_blocks: usize,
    /// Slots for recurrent states; 0 if the model has none.
    num_states: usize,
    /// Slots in host memory.
    host: HostSlots,
    /// Whether each token of a prompt is computed in a prefill chunk, and each generated token in a decode.
    keeps_prompts_whole: bool,
    /// Slots for adapters.
    num_adapters: usize,
    next_step: u64,
    /// The sequence and position of each of [`StepInputs::logits`] of the last plan.
    reported: Vec<(SequenceId, LogitsPlace)>,
}

impl RowTable {
    /// An empty table of `max_rows` rows over `num_blocks` KV blocks; the first plan is number `next_step`. `windows` are
    /// those of the KV groups.
    pub fn new(
        max_rows: usize,
        windows: Vec<Option<usize>>,
        block_size: usize,
        num_blocks: usize,
        next_step: u64,
    ) -> Self {
        let rows = (0..max_rows).map(|_| None).collect();
        Self {
            rows,
            windows,
            block_size,
            num_blocks,
            num_states: 0,
            host: HostSlots::default(),
            num_adapters: 0,
            keeps_prompts_whole: false,
            next_step,
            reported: Vec::new(),
        }
    }

    /// The same for a model with recurrent states, which have `num_states` slots.
    pub fn with_states(self, num_states: usize) -> Self {
        Self { num_states, ..self }
    }

    /// The same with slots in host memory.
    pub fn with_host(self, host: HostSlots) -> Self {
        Self { host, ..self }
    }

    /// The same for a device on which prefill chunks and decodes of the same token have different bits, if they may not.
    pub fn keeping_prompts_whole(self, keeps_prompts_whole: bool) -> Self {
        Self { keeps_prompts_whole, ..self }
    }

    /// The same for a device with `num_adapters` slots for adapters.
    pub fn with_adapters(self, num_adapters: usize) -> Self {
        Self { num_adapters, ..self }
    }

    /// Takes the sequence and position of each of [`StepInputs::logits`] of the last plan.
    pub fn take_reported(&mut self) -> Vec<(SequenceId, LogitsPlace)> {
        std::mem::take(&mut self.reported)
    }

    /// The copies of recurrent states for the restored rows of a plan that was applied. They come first: other copies of the plan may
    /// read the restored states, or fill the slots that they came from.
    pub fn restored_states(&self, plan: &StepPlan) -> Vec<CopiedState> {
        let to = |restored: &RestoredRow| self.packed(restored.row).state;
        plan.restored.iter().filter_map(|row| Some(CopiedState { from: row.from, to: to(row)? })).collect()
    }

    /// Applies the plan's changes and packs its work into `inputs`.
    ///
    /// # Errors
    /// When the plan does not fit this table. The table is then unusable.
    pub fn apply(&mut self, plan: &StepPlan, inputs: &mut StepInputs) -> Result<(), PlanMismatch> {
        if plan.step != self.next_step {
            return Err(PlanMismatch::StepGap { expected: self.next_step, found: plan.step });
        }
        self.next_step += 1;
        for &row in &plan.left {
            self.slot(plan.step, row)?.take().ok_or(PlanMismatch::RowEmpty { step: plan.step, row: row.0 })?;
        }
        let adapters = plan.adapters.iter().map(|filled| filled.slot);
        let mut adapters = adapters.chain(plan.joined.iter().filter_map(|joined| joined.adapter));
        if let Some(slot) = adapters.find(|slot| slot.0 as usize >= self.num_adapters) {
            return Err(PlanMismatch::Adapter { step: plan.step, found: slot.0, num_slots: self.num_adapters });
        }
        self.check_host(plan.step, &plan.host)?;
        self.join(plan)?;
        self.revise(plan.step, &plan.revised)?;
        self.copy(plan.step, &plan.copied)?;
        let states = plan.copied_states.iter().flat_map(|copied| [copied.from, copied.to]);
        states.into_iter().try_for_each(|state| self.check_state(plan.step, Some(state)))?;
        self.restore(plan.step, &plan.restored)?;
        for &GrownTable { row, group, block } in &plan.grown {
            self.check_block(plan.step, row, block)?;
            self.table(plan.step, row, group)?.blocks.push(block);
        }
        self.pack(plan, inputs)
    }

    fn join(&mut self, plan: &StepPlan) -> Result<(), PlanMismatch> {
        for joined in &plan.joined {
            let tables = self.joined_tables(plan.step, joined)?;
            if self.num_states > 0 || joined.state.is_some() {
                self.check_state(plan.step, joined.state)?;
            }
            let slot = self.slot(plan.step, joined.row)?;
            if let Some(row) = slot {
                return Err(PlanMismatch::RowTaken { step: plan.step, row: joined.row.0, sequence: row.sequence.0 });
            }
            *slot = Some(Row {
                sequence: joined.sequence,
                tokens: bytemuck::cast_slice(&joined.tokens).to_vec(),
                num_prompt_tokens: joined.num_prompt_tokens,
                num_computed: joined.num_computed,
                num_sampled: 0,
                tables,
                state: joined.state,
                adapter: joined.adapter,
                is_beam: joined.sampling.beam_candidates > 0,
                is_constrained: joined.sampling.is_constrained,
                reports_context: joined.sampling.context_logits,
                reports_generation: joined.sampling.generation_logits,
            });
        }
        Ok(())
    }

    fn joined_tables(&self, step: u64, joined: &JoinedRow) -> Result<Vec<Table>, PlanMismatch> {
        let (found, groups, row) = (joined.tables.len(), self.windows.len(), joined.row.0);
        if found != groups {
            return Err(PlanMismatch::Tables { step, row, found, groups });
        }
        let mut tables = Vec::with_capacity(groups);
        for table in &joined.tables {
            table.blocks.iter().try_for_each(|&block| self.check_block(step, joined.row, block))?;
            let first = table.first as usize;
            let most = joined.tokens.len() / self.block_size;
            if first > most {
                return Err(PlanMismatch::Blocks { step, row, needed: most, found: first });
            }
            let mut blocks = vec![BlockId::default(); first];
            blocks.extend_from_slice(&table.blocks);
            tables.push(Table { first, blocks });
        }
        Ok(tables)
    }

    /// Each revised row reads its parent in the state before all revisions.
    fn revise(&mut self, step: u64, revised: &[RevisedRow]) -> Result<(), PlanMismatch> {
        let mut rows = Vec::with_capacity(revised.len());
        for revision in revised {
            let mut row = self.occupied(step, revision.parent)?.clone();
            let (kept, known) = (revision.num_kept, row.tokens.len() as u32);
            if kept > known {
                let (row, parent) = (revision.row.0, revision.parent.0);
                return Err(PlanMismatch::Kept { step, row, parent, kept, known });
            }
            row.tokens.truncate(kept as usize);
            row.tokens.extend(revision.tokens.iter().map(|token| token.0));
            (row.num_sampled, row.num_computed) = (0, (row.tokens.len() as u32).saturating_sub(1));
            rows.push(row);
        }
        for (revision, row) in revised.iter().zip(rows) {
            *self.slot(step, revision.row)? = Some(row);
        }
        Ok(())
    }

    fn copy(&mut self, step: u64, copied: &[CopiedBlock]) -> Result<(), PlanMismatch> {
        for copied in copied {
            self.check_block(step, copied.row, copied.to)?;
            match self.table(step, copied.row, copied.group)?.blocks.last_mut() {
                Some(last) if *last == copied.from => *last = copied.to,
                last => {
                    let (found, last) = (copied.from.0, last.map(|last| last.0));
                    return Err(PlanMismatch::Copied { step, row: copied.row.0, found, last });
                }
            }
        }
        Ok(())
    }

    fn restore(&mut self, step: u64, restored: &[RestoredRow]) -> Result<(), PlanMismatch> {
        for &RestoredRow { row, from, position } in restored {
            self.check_state(step, Some(from))?;
            let restored = self.occupied(step, row)?;
            let computed = restored.num_computed;
            if position > computed || restored.state.is_none() {
                return Err(PlanMismatch::Restored { step, row: row.0, found: position, computed });
            }
            restored.num_computed = position;
        }
        Ok(())
    }

    fn pack(&mut self, plan: &StepPlan, inputs: &mut StepInputs) -> Result<(), PlanMismatch> {
        inputs.clear(plan.step);
        (inputs.num_prompt_rows, inputs.runs_drafter) = (self.keeps_prompts_whole.then_some(0), plan.runs_drafter);
        let mut reported = self.take_reported();
        reported.clear();
        let mut drafts = plan.drafts.iter().peekable();
        let mut saved = plan.saved_states.iter().peekable();
        let (is_whole, num_states) = (self.keeps_prompts_whole, self.num_states);
        for work in &plan.work {
            let row = self.occupied(plan.step, work.row)?;
            let drafted = drafts.next_if(|(row, _)| *row == work.row).map_or(&[][..], |(_, tokens)| tokens);
            let end = work.start + work.num_tokens;
            row.check(plan.step, work, drafted.len() as u32)?;
            self.check_blocks(plan.step, work)?;
            let row = self.occupied(plan.step, work.row)?;
            let first_draft = end - drafted.len() as u32;
            for position in work.start..end {
                let known = || row.tokens.get(position as usize).copied().unwrap_or(TOKEN_ON_DEVICE);
                let draft = position.checked_sub(first_draft).map(|index| drafted[index as usize].0);
                inputs.token_ids.push(draft.unwrap_or_else(known));
                inputs.positions.push(position);
            }
            // Rows with a recurrent state compute their tokens in order; the device divides the others.
            let is_divided = is_whole && num_states == 0 && work.start >= row.num_prompt_tokens && drafted.is_empty();
            for row_end in if is_divided { work.start + 1..=end } else { end..=end } {
                inputs.rows.push(work.row);
                inputs.row_starts.push(inputs.token_ids.len() as u32 - (end - row_end));
                inputs.context_lens.push(row_end);
                inputs.states.extend(row.state.map(|state| state.0));
                inputs.adapters.push(row.adapter.map_or(NO_ADAPTER, |slot| slot.0));
                inputs.guesses.push(if work.samples && row_end == end { work.num_guesses } else { 0 });
            }
            if let Some(saved) = saved.next_if(|saved| saved.row == work.row) {
                inputs.saved_states.push(saved_state(plan.step, saved, work, inputs.rows.len() - 1, num_states)?);
            }
            let is_prompt = is_whole && end <= row.num_prompt_tokens;
            if work.num_tokens > 1 && !is_divided || is_prompt {
                inputs.num_prefill_rows = inputs.rows.len();
            }
            inputs.num_prompt_rows = is_prompt.then_some(inputs.rows.len()).or(inputs.num_prompt_rows);
            row.num_computed = end;
            row.report_context(work, inputs, &mut reported);
            if work.samples {
                row.sample(plan.step, work, drafted, inputs, &mut reported)?;
            }
        }
        if let Some(row) = drafts.next().map(|(row, _)| row).or(saved.next().map(|saved| &saved.row)) {
            return Err(PlanMismatch::Work { step: plan.step, row: row.0 });
        }
        if inputs.adapters.iter().all(|&slot| slot == NO_ADAPTER) {
            inputs.adapters.clear();
        }
        if inputs.guesses.iter().all(|&count| count == 0) {
            inputs.guesses.clear();
        }
        inputs.reach = self.reach(inputs);
        self.reported = reported;
        self.pack_slots(inputs);
        self.pack_block_tables(inputs);
        Ok(())
    }

    /// The positions of the blocks that each row has for its work and for guesses behind it; none if nothing is guessed.
    fn reach(&self, inputs: &StepInputs) -> Vec<u32> {
        let reach = |((row, &len), &num_guesses): ((&RowId, &u32), &u32)| {
            let tables = self.packed(*row).tables.iter();
            let held = tables.map(|table| table.blocks.len() * self.block_size).min().unwrap_or(0);
            let wanted = (len as usize + num_guesses as usize).next_multiple_of(self.block_size);
            wanted.min(held) as u32
        };
        inputs.rows.iter().zip(&inputs.context_lens).zip(&inputs.guesses).map(reach).collect()
    }

    /// Devices may load blocks before the window of a row, though they must not use them. They are replaced by a block that
    /// the row has written.
    fn pack_block_tables(&self, inputs: &mut StepInputs) {
        let num_blocks = |context_len: u32| (context_len as usize).div_ceil(self.block_size);
        let lens = if inputs.reach.is_empty() { &inputs.context_lens } else { &inputs.reach };
        inputs.max_blocks = lens.iter().map(|&len| num_blocks(len)).max().unwrap_or(0);
        inputs.block_tables.resize(self.windows.len() * inputs.rows.len() * inputs.max_blocks, 0);
        let rows = (0..self.windows.len()).flat_map(|group| inputs.rows.iter().zip(repeat(group)));
        for (index, ((row, group), &len)) in rows.zip(lens.iter().cycle()).enumerate() {
            let blocks = &self.packed(*row).tables[group].blocks;
            let table = &mut inputs.block_tables[index * inputs.max_blocks..][..num_blocks(len)];
            table.copy_from_slice(bytemuck::cast_slice(&blocks[..table.len()]));
            if let Some(window) = self.windows[group] {
                let start = inputs.positions[inputs.row_starts[index % inputs.rows.len()] as usize] as usize;
                let first = (start + 1).saturating_sub(window) / self.block_size;
                let seen = table[first];
                table[..first].fill(seen);
            }
        }
    }

    fn pack_slots(&self, inputs: &mut StepInputs) {
        let block_size = self.block_size as u32;
        for group in 0..self.windows.len() {
            for (row, starts) in inputs.rows.iter().zip(inputs.row_starts.windows(2)) {
                let blocks = &self.packed(*row).tables[group].blocks;
                let positions = &inputs.positions[starts[0] as usize..starts[1] as usize];
                let slot = |p: &u32| blocks[(p / block_size) as usize].0 * block_size + p % block_size;
                inputs.slots.extend(positions.iter().map(slot));
            }
        }
    }

    fn packed(&self, row: RowId) -> &Row {
        self.rows[row.0 as usize].as_ref().expect("packed rows are occupied")
    }

    /// Refuses work on positions without blocks, or that sees positions without blocks.
    fn check_blocks(&self, step: u64, work: &RowWork) -> Result<(), PlanMismatch> {
        let (row, block_size) = (work.row.0, self.block_size);
        let windows = self.windows.iter().zip(&self.packed(work.row).tables);
        for (group, (window, &Table { first, ref blocks })) in windows.enumerate() {
            let seen = window.map_or(0, |window| (work.start as usize + 1).saturating_sub(window));
            let (needed, end) =
                (seen / block_size, (work.start as usize + work.num_tokens as usize).div_ceil(block_size));
            if first > needed {
                return Err(PlanMismatch::Released { step, row, group, needed, first });
            }
            if end > blocks.len() {
                return Err(PlanMismatch::Blocks { step, row, needed: end, found: blocks.len() });
            }
        }
        Ok(())
    }

    fn table(&mut self, step: u64, row: RowId, group: u32) -> Result<&mut Table, PlanMismatch> {
        let groups = self.windows.len();
        let mismatch = PlanMismatch::GroupRange { step, row: row.0, group, groups };
        self.occupied(step, row)?.tables.get_mut(group as usize).ok_or(mismatch)
    }

    fn slot(&mut self, step: u64, row: RowId) -> Result<&mut Option<Row>, PlanMismatch> {
        let max_rows = self.rows.len();
        self.rows.get_mut(row.0 as usize).ok_or(PlanMismatch::RowRange { step, row: row.0, max_rows })
    }

    fn occupied(&mut self, step: u64, row: RowId) -> Result<&mut Row, PlanMismatch> {
        self.slot(step, row)?.as_mut().ok_or(PlanMismatch::RowEmpty { step, row: row.0 })
    }

    fn check_state(&self, step: u64, state: Option<StateId>) -> Result<(), PlanMismatch> {
        let num_states = self.num_states;
        match state.filter(|state| (state.0 as usize) < num_states) {
            Some(_) => Ok(()),
            None => Err(PlanMismatch::State { step, found: state.map(|state| state.0), num_states }),
        }
    }

    fn check_block(&self, step: u64, row: RowId, block: BlockId) -> Result<(), PlanMismatch> {
        if block.0 as usize >= self.num_blocks {
            let num_blocks = self.num_blocks;
            return Err(PlanMismatch::BlockRange { step, row: row.0, block: block.0, num_blocks });
        }
        Ok(())
    }
}

/// An entry of [`StepInputs::saved_states`] for the row with number `index` in the step.
fn saved_state(
    step: u64,
    saved: &SavedState,
    work: &RowWork,
    index: usize,
    num_states: usize,
) -> Result<[u32; 3], PlanMismatch> {
    if saved.to.0 as usize >= num_states {
        return Err(PlanMismatch::State { step, found: Some(saved.to.0), num_states });
    }
    if saved.num_tokens == 0 || saved.num_tokens > work.num_tokens {
        let (row, found, computed) = (work.row.0, saved.num_tokens, work.num_tokens);
        return Err(PlanMismatch::Restored { step, row, found, computed });
    }
    Ok([index as u32, saved.num_tokens, saved.to.0])
}

#[cfg(test)]
mod tests;
