//! One row of a worker.

use engine::{AdapterSlot, BlockId, RowWork, SequenceId, StateId, TokenId};
use ops::{SampleInput, StepInputs};
use supervision::LogitsPlace;

use crate::PlanMismatch;

/// The state of one sequence on the host.
#[derive(Debug, Clone)]
pub(super) struct Row {
    pub(super) sequence: SequenceId,
    /// Tokens that the host knows. Those sampled since the row joined are only on the device.
    pub(super) tokens: Vec<u32>,
    pub(super) num_prompt_tokens: u32,
    /// Positions that are in the KV blocks once all queued steps have ended.
    pub(super) num_computed: u32,
    /// Tokens sampled since the row joined, queued steps included.
    pub(super) num_sampled: u32,
    /// For each KV group.
    pub(super) tables: Vec<Table>,
    /// The slot of its recurrent state.
    pub(super) state: Option<StateId>,
    /// The slot of its adapter.
    pub(super) adapter: Option<AdapterSlot>,
    /// Whether the sequence is a beam: rank 0 chooses its next token in a later plan.
    pub(super) is_beam: bool,
    /// Whether its tokens are chosen among those of masks.
    pub(super) is_constrained: bool,
    /// Whether its request wants the logits of the prompt.
    pub(super) reports_context: bool,
    /// Whether its request wants the logits of the output.
    pub(super) reports_generation: bool,
}

/// A block table of a row.
#[derive(Debug, Clone)]
pub(super) struct Table {
    /// Index of the first block that rank 0 sent.
    pub(super) first: usize,
    /// Those before `first` are block 0.
    pub(super) blocks: Vec<BlockId>,
}

impl Row {
    /// Number of tokens of the sequence, those on the device included.
    pub(super) fn num_tokens(&self) -> u32 {
        self.tokens.len() as u32 + self.num_sampled
    }

    /// Requests the logits of the prompt positions that this step computes, if the request wants them.
    pub(super) fn report_context(
        &self,
        work: &RowWork,
        inputs: &mut StepInputs,
        reported: &mut Vec<(SequenceId, LogitsPlace)>,
    ) {
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
    pub(super) fn sample(
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

    /// Checks that the row's state fits what `work` computes.
    pub(super) fn check(&self, step: u64, work: &RowWork, num_drafts: u32) -> Result<(), PlanMismatch> {
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
        Ok(())
    }
}
