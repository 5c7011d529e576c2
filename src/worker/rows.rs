//! The rows of a worker: each plan's changes are checked against them and packed into device inputs.

use engine::{BlockId, CopiedBlock, RevisedRow, RowId, RowWork, SequenceId, StepPlan, TokenId};
use ops::{SampleInput, StepInputs, TOKEN_ON_DEVICE};
use supervision::LogitsPlace;

/// Why a plan does not fit the rows of this worker. Rank 0 and the worker no longer agree, so the worker must end.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
#[allow(missing_docs)] // Fields are named by their messages.
pub enum PlanMismatch {
    #[error("plan {found} came where plan {expected} was due")]
    StepGap { expected: u64, found: u64 },
    #[error("plan {step} names row {row}, but this worker has {max_rows} rows")]
    RowRange { step: u64, row: u32, max_rows: usize },
    #[error("plan {step}: row {row} is taken by sequence {sequence} and cannot be joined")]
    RowTaken { step: u64, row: u32, sequence: u64 },
    #[error("plan {step}: row {row} is empty")]
    RowEmpty { step: u64, row: u32 },
    #[error("plan {step}: row {row} starts at position {found}, but {computed} are computed")]
    Start { step: u64, row: u32, found: u32, computed: u32 },
    #[error("plan {step}: row {row} has no token at position {position}; it has {known}")]
    NoToken { step: u64, row: u32, position: u32, known: u32 },
    #[error("plan {step}: row {row} needs {needed} blocks but has {found}")]
    Blocks { step: u64, row: u32, needed: usize, found: usize },
    #[error("plan {step}: row {row} names KV block {block}, but there are {num_blocks}")]
    BlockRange { step: u64, row: u32, block: u32, num_blocks: usize },
    #[error("plan {step}: row {row} keeps {kept} tokens of row {parent}, which has {known}")]
    Kept { step: u64, row: u32, parent: u32, kept: u32, known: u32 },
    #[error("plan {step}: row {row} stops sharing block {found}, but its last is {last:?}")]
    Copied { step: u64, row: u32, found: u32, last: Option<u32> },
    #[error("plan {step}: row {row} computes no position, or samples before its last known token")]
    Work { step: u64, row: u32 },
}

/// The state of one sequence on the host.
#[derive(Debug, Clone)]
struct Row {
    sequence: SequenceId,
    /// Tokens that the host knows. Those sampled since the row joined are only on the device.
    tokens: Vec<u32>,
    num_prompt_tokens: u32,
    /// Positions that are in the KV blocks once all queued steps have ended.
    num_computed: u32,
    /// Tokens sampled since the row joined, queued steps included.
    num_sampled: u32,
    blocks: Vec<BlockId>,
    /// Whether the sequence is a beam: rank 0 chooses its next token in a later plan.
    is_beam: bool,
    /// Whether its tokens are chosen among those of masks.
    is_constrained: bool,
    /// Whether its request asked for the logits of the prompt.
    reports_context: bool,
    /// Whether its request asked for the logits of the output.
    reports_generation: bool,
}

/// All rows of a worker, and the number of the next plan.
#[derive(Debug)]
pub struct RowTable {
    rows: Vec<Option<Row>>,
    block_size: usize,
    num_blocks: usize,
    next_step: u64,
    /// The sequence and position of each of [`StepInputs::logits`] of the last plan.
    reported: Vec<(SequenceId, LogitsPlace)>,
}

impl RowTable {
    /// An empty table of `max_rows` rows over `num_blocks` KV blocks; the first plan is number `next_step`.
    pub fn new(max_rows: usize, block_size: usize, num_blocks: usize, next_step: u64) -> Self {
        let rows = (0..max_rows).map(|_| None).collect();
        Self { rows, block_size, num_blocks, next_step, reported: Vec::new() }
    }

    /// Takes the sequence and position of each of [`StepInputs::logits`] of the last plan.
    pub fn take_reported(&mut self) -> Vec<(SequenceId, LogitsPlace)> {
        std::mem::take(&mut self.reported)
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
        self.join(plan)?;
        self.revise(plan.step, &plan.revised)?;
        self.copy(plan.step, &plan.copied)?;
        for &(row, block) in &plan.grown {
            self.check_block(plan.step, row, block)?;
            self.occupied(plan.step, row)?.blocks.push(block);
        }
        self.pack(plan, inputs)
    }

    fn join(&mut self, plan: &StepPlan) -> Result<(), PlanMismatch> {
        for joined in &plan.joined {
            for &block in &joined.blocks {
                self.check_block(plan.step, joined.row, block)?;
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
                blocks: joined.blocks.clone(),
                is_beam: joined.sampling.beam_candidates > 0,
                is_constrained: joined.sampling.is_constrained,
                reports_context: joined.sampling.context_logits,
                reports_generation: joined.sampling.generation_logits,
            });
        }
        Ok(())
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
            match self.occupied(step, copied.row)?.blocks.last_mut() {
                Some(last) if *last == copied.from => *last = copied.to,
                last => {
                    let (found, last) = (copied.from.0, last.map(|last| last.0));
                    return Err(PlanMismatch::Copied { step, row: copied.row.0, found, last });
                }
            }
        }
        Ok(())
    }

    fn pack(&mut self, plan: &StepPlan, inputs: &mut StepInputs) -> Result<(), PlanMismatch> {
        inputs.clear(plan.step);
        let mut reported = self.take_reported();
        reported.clear();
        let mut drafts = plan.drafts.iter().peekable();
        for work in &plan.work {
            let block_size = self.block_size as u32;
            let row = self.occupied(plan.step, work.row)?;
            let drafted = drafts.next_if(|(row, _)| *row == work.row).map_or(&[][..], |(_, tokens)| tokens);
            let end = work.start + work.num_tokens;
            row.check(plan.step, work, drafted.len() as u32, block_size)?;
            let first_draft = end - drafted.len() as u32;
            for position in work.start..end {
                let known = || row.tokens.get(position as usize).copied().unwrap_or(TOKEN_ON_DEVICE);
                let draft = position.checked_sub(first_draft).map(|index| drafted[index as usize].0);
                inputs.token_ids.push(draft.unwrap_or_else(known));
                inputs.positions.push(position);
                inputs.slots.push(row.blocks[(position / block_size) as usize].0 * block_size + position % block_size);
            }
            inputs.rows.push(work.row);
            inputs.row_starts.push(inputs.token_ids.len() as u32);
            inputs.context_lens.push(end);
            if work.num_tokens > 1 {
                inputs.num_prefill_rows = inputs.rows.len();
            }
            row.num_computed = end;
            row.report_context(work, inputs, &mut reported);
            if work.samples {
                row.sample(plan.step, work, drafted, inputs, &mut reported)?;
            }
        }
        if let Some((row, _)) = drafts.next() {
            return Err(PlanMismatch::Work { step: plan.step, row: row.0 });
        }
        self.reported = reported;
        self.pack_block_tables(inputs);
        Ok(())
    }

    fn pack_block_tables(&self, inputs: &mut StepInputs) {
        let num_blocks = |context_len: u32| (context_len as usize).div_ceil(self.block_size);
        inputs.max_blocks = inputs.context_lens.iter().map(|&len| num_blocks(len)).max().unwrap_or(0);
        inputs.block_tables.resize(inputs.rows.len() * inputs.max_blocks, 0);
        for (index, (row, &context_len)) in inputs.rows.iter().zip(&inputs.context_lens).enumerate() {
            let blocks = &self.rows[row.0 as usize].as_ref().expect("packed rows are occupied").blocks;
            let table = &mut inputs.block_tables[index * inputs.max_blocks..][..num_blocks(context_len)];
            table.copy_from_slice(bytemuck::cast_slice(&blocks[..table.len()]));
        }
    }

    fn slot(&mut self, step: u64, row: RowId) -> Result<&mut Option<Row>, PlanMismatch> {
        let max_rows = self.rows.len();
        self.rows.get_mut(row.0 as usize).ok_or(PlanMismatch::RowRange { step, row: row.0, max_rows })
    }

    fn occupied(&mut self, step: u64, row: RowId) -> Result<&mut Row, PlanMismatch> {
        self.slot(step, row)?.as_mut().ok_or(PlanMismatch::RowEmpty { step, row: row.0 })
    }

    fn check_block(&self, step: u64, row: RowId, block: BlockId) -> Result<(), PlanMismatch> {
        if block.0 as usize >= self.num_blocks {
            let num_blocks = self.num_blocks;
            return Err(PlanMismatch::BlockRange { step, row: row.0, block: block.0, num_blocks });
        }
        Ok(())
    }
}

impl Row {
    /// Number of tokens of the sequence, those on the device included.
    fn num_tokens(&self) -> u32 {
        self.tokens.len() as u32 + self.num_sampled
    }

    /// Requests the logits of the prompt positions that this step computes, if the request asked for them.
    fn report_context(&self, work: &RowWork, inputs: &mut StepInputs, reported: &mut Vec<(SequenceId, LogitsPlace)>) {
        if !self.reports_context {
            return;
        }
        let first = inputs.token_ids.len() as u32 - work.num_tokens;
        let end = (work.start + work.num_tokens).min(self.num_prompt_tokens);
        for position in work.start..end {
            inputs.logits.push(first + position - work.start);
            reported.push((self.sequence, LogitsPlace::Context(position)));
        }
    }

    /// Requests one sampled token for the last position, and one for each draft before it.
    fn sample(
        &mut self,
        step: u64,
        work: &RowWork,
        drafted: &[TokenId],
        inputs: &mut StepInputs,
        reported: &mut Vec<(SequenceId, LogitsPlace)>,
    ) -> Result<(), PlanMismatch> {
        let (num_known, num_drafts) = (self.num_tokens(), drafted.len() as u32);
        if work.start + work.num_tokens != num_known + num_drafts {
            return Err(PlanMismatch::Work { step, row: work.row.0 });
        }
        let first = inputs.token_ids.len() as u32 - 1 - num_drafts;
        if self.is_constrained {
            let first_sample = inputs.samples.len() as u32;
            inputs.masked.extend(first_sample..=first_sample + num_drafts);
        }
        inputs.samples.extend((0..=num_drafts).map(|index| SampleInput {
            row: work.row,
            token_index: first + index,
            num_generated: num_known - self.num_prompt_tokens + index,
        }));
        if self.reports_generation {
            let samples = inputs.samples.iter().rev().take(1 + drafted.len()).rev();
            inputs.logits.extend(samples.clone().map(|sample| sample.token_index));
            reported.extend(samples.map(|sample| (self.sequence, LogitsPlace::Generation(sample.num_generated))));
        }
        if drafted.is_empty() && !self.is_beam {
            self.num_sampled += 1;
        }
        Ok(())
    }

    fn check(&self, step: u64, work: &RowWork, num_drafts: u32, block_size: u32) -> Result<(), PlanMismatch> {
        let (row, start, end) = (work.row.0, work.start, work.start + work.num_tokens);
        if work.num_tokens <= num_drafts {
            return Err(PlanMismatch::Work { step, row });
        }
        if start != self.num_computed {
            return Err(PlanMismatch::Start { step, row, found: start, computed: self.num_computed });
        }
        let known = self.num_tokens();
        // The device keeps only the newest sampled token for the next step.
        let first_missing =
            (start.max(self.tokens.len() as u32)..end - num_drafts).find(|&position| position + 1 != known);
        if let Some(position) = first_missing {
            return Err(PlanMismatch::NoToken { step, row, position, known });
        }
        let needed = end.div_ceil(block_size) as usize;
        if needed > self.blocks.len() {
            return Err(PlanMismatch::Blocks { step, row, needed, found: self.blocks.len() });
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests;
