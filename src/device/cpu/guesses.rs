//! Guesses at the tokens behind those of a step, by a head of the model or by a model of its own.
//!
//! The first pass runs over all positions of the step, so that keys and values are there for every position whose tokens are known.
//! Each further pass has one position of each row that needs another guess.

use std::collections::VecDeque;

use engine::{RowId, TokenId};
use kernels::cpu as k;
use ops::{DeviceError, StepInputs};

use super::weights::num_outputs;
use super::{CpuDevice, CpuTensor, CpuWeight, Linear, sampler};

/// The guesses of the current step, and those of steps that are complete.
#[derive(Debug, Default)]
pub(super) struct Guesses {
    rows: Vec<Guessing>,
    /// Of each step whose guesses are complete and that is not collected yet.
    pub(super) done: VecDeque<Vec<(RowId, Vec<TokenId>)>>,
    /// `[R, Vd]`: outputs of a drafter's own head.
    outputs: Vec<f32>,
}

impl Guesses {
    /// Allocates the outputs of a drafter's head; returns their bytes.
    pub(super) fn fit(&mut self, num_outputs: usize) -> usize {
        self.outputs = vec![0.0; num_outputs];
        size_of_val(&*self.outputs)
    }
}

/// A row whose next tokens are guessed.
#[derive(Debug)]
struct Guessing {
    row: RowId,
    /// Its index in `0..R` of the current step.
    index: usize,
    /// The index in `0..T` of the position whose logits give its next guess.
    token_index: usize,
    /// The output position of the next guess.
    num_generated: u32,
    /// How many guesses it lacks.
    num_left: usize,
    tokens: Vec<TokenId>,
}

/// What is known of a row once the tokens of the step are chosen.
#[derive(Debug, Clone, Copy)]
struct Known {
    /// Index in `0..T` behind the last of its tokens that is right: rejected drafts are not.
    end: usize,
    /// The token behind that one and its output position, if the step has chosen it.
    newest: Option<(u32, u32)>,
}

impl CpuDevice {
    /// For each row of the step, in order.
    fn known(&self) -> Vec<Known> {
        let (chosen, _) = self.results.back().expect("the tokens of the step are chosen before others are guessed");
        let mut samples = self.inputs.samples.iter().zip(chosen).peekable();
        let row = |starts: &[u32]| {
            let mut known = Known { end: starts[1] as usize, newest: None };
            while let Some((sample, token)) = samples.next_if(|(sample, _)| sample.token_index < starts[1]) {
                let index = sample.token_index as usize;
                if index >= known.end {
                    continue; // Behind a rejected draft.
                }
                known.newest = Some((token.token.0, sample.num_generated));
                if index + 1 < known.end && self.token_ids[index + 1] != token.token.0 {
                    known.end = index + 1;
                }
            }
            known
        };
        self.inputs.row_starts.windows(2).map(row).collect()
    }

    pub(super) fn follow_tokens(&mut self) {
        let known = self.known();
        let Self { inputs, token_ids, rows, guesses, .. } = self;
        guesses.rows.clear();
        for (index, (&row, &Known { end, newest })) in inputs.rows.iter().zip(&known).enumerate() {
            let first = inputs.row_starts[index] as usize;
            token_ids.copy_within(first + 1..end, first);
            // Behind the end of a chunk comes the next token of the prompt.
            let next_position = inputs.positions[end - 1] as usize + 1;
            let in_prompt = || rows[row.0 as usize].tokens().get(next_position).copied().unwrap_or(0);
            token_ids[end - 1] = newest.map_or_else(in_prompt, |(token, _)| token);
            let num_left = inputs.guesses.get(index).copied().unwrap_or(0) as usize;
            if let Some((_, num_generated)) = newest.filter(|_| num_left > 0) {
                let (token_index, num_generated, tokens) = (end - 1, num_generated + 1, Vec::new());
                guesses.rows.push(Guessing { row, index, token_index, num_generated, num_left, tokens });
            }
        }
    }

    pub(super) fn extend_tokens(&mut self) {
        let known = self.known();
        self.guesses.rows.clear();
        let step = std::mem::take(&mut self.inputs);
        let spec = &self.cache().spec;
        let (block_size, max_positions) = (spec.block_size as u32, spec.max_positions as u32);
        let num_groups = spec.kv_windows.len();
        let mut next = StepInputs { step: step.step, row_starts: vec![0], ..StepInputs::default() };
        let mut newest_slots = vec![Vec::new(); num_groups];
        let mut room = self.config.limits.max_tokens
            - known.iter().zip(&step.row_starts).map(|(known, first)| known.end - *first as usize).sum::<usize>();
        for (index, (&row, &Known { end, newest })) in step.rows.iter().zip(&known).enumerate() {
            let first = step.row_starts[index] as usize;
            next.token_ids.extend_from_slice(&self.token_ids[first..end]);
            next.positions.extend_from_slice(&step.positions[first..end]);
            let position = step.positions[end - 1] + 1;
            let num_left = step.guesses.get(index).copied().unwrap_or(0) as usize;
            let fits = step.reach.get(index).is_some_and(|&reach| position < reach.min(max_positions));
            let newest = newest.filter(|_| num_left > 0 && fits && room > 0);
            for (group, slots) in newest_slots.iter_mut().enumerate() {
                let table = step.block_table(group, index);
                slots
                    .push(newest.map(|_| table[(position / block_size) as usize] * block_size + position % block_size));
            }
            if let Some((token, num_generated)) = newest {
                room -= 1;
                let (token_index, num_generated, tokens) = (next.token_ids.len(), num_generated + 1, Vec::new());
                self.guesses.rows.push(Guessing { row, index, token_index, num_generated, num_left, tokens });
                next.token_ids.push(token);
                next.positions.push(position);
            }
            next.row_starts.push(next.token_ids.len() as u32);
            next.context_lens.push(next.positions.last().map_or(0, |last| last + 1));
        }
        for (group, newest) in newest_slots.into_iter().enumerate() {
            let slots = step.slots_of(group);
            for (index, (known, newest)) in known.iter().zip(newest).enumerate() {
                next.slots.extend_from_slice(&slots[step.row_starts[index] as usize..known.end]);
                next.slots.extend(newest);
            }
        }
        self.token_ids.clone_from(&next.token_ids);
        let StepInputs { rows, block_tables, max_blocks, reach, .. } = step;
        self.inputs = StepInputs { rows, block_tables, max_blocks, reach, ..next };
    }

    pub(super) fn guess_tokens(&mut self, x: &CpuTensor, head: &CpuWeight) -> Result<(), DeviceError> {
        let mut guessing = std::mem::take(&mut self.guesses.rows);
        let mut active: Vec<&mut Guessing> = guessing.iter_mut().filter(|row| row.num_left > 0).collect();
        // A token that the head lacks is never guessed.
        let vocab = match head {
            CpuWeight::Head { offsets, .. } => num_outputs(offsets),
            _ => self.config.limits.vocab_size,
        };
        for chunk in active.chunks_mut(self.config.limits.max_rows) {
            let positions = chunk.iter().map(|row| row.token_index as u32);
            match head {
                CpuWeight::DraftHead { linear, token_ids } => {
                    self.compute_draft_logits(x, linear, token_ids, positions)
                }
                head => self.compute_logits(x, head, positions)?,
            }
            let (rows, logits) = (&self.rows, &mut self.logits[..chunk.len() * vocab]);
            let guessed = k::map_rows(&mut self.pool, logits, vocab, |index, logits| {
                let Guessing { row, num_generated, .. } = *chunk[index];
                sampler::guess(&rows[row.0 as usize], num_generated, logits)
            });
            for (row, token) in chunk.iter_mut().zip(guessed) {
                row.tokens.push(TokenId(token));
                row.num_left -= 1;
                row.num_generated += 1;
            }
        }
        self.guesses.rows = guessing;
        Ok(())
    }

    /// Logits `[len, V]` of some tokens of `x` by a drafter's own head. Tokens that it lacks are never guessed.
    fn compute_draft_logits(
        &mut self,
        x: &CpuTensor,
        head: &Linear,
        token_ids: &[u32],
        positions: impl ExactSizeIterator<Item = u32>,
    ) {
        let len = positions.len();
        self.gather_rows(x, positions);
        let outputs = &mut self.guesses.outputs[..len * token_ids.len()];
        self.projection.project(&mut self.pool, self.isa, outputs, &self.sampled, len, head);
        let vocab = self.config.limits.vocab_size;
        for (logits, outputs) in self.logits.chunks_exact_mut(vocab).zip(outputs.chunks_exact(token_ids.len())) {
            logits.fill(f32::NEG_INFINITY);
            token_ids.iter().zip(outputs).for_each(|(&token, &output)| logits[token as usize] = output);
        }
    }

    pub(super) fn go_on_guessing(&mut self, mut hidden: Option<&mut CpuTensor>) -> bool {
        let mut guessing = std::mem::take(&mut self.guesses.rows);
        let spec = &self.cache().spec;
        let (block_size, max_positions) = (spec.block_size as u32, spec.max_positions as u32);
        let num_groups = spec.kv_windows.len();
        let step = std::mem::take(&mut self.inputs);
        let mut next =
            StepInputs { step: step.step, max_blocks: step.max_blocks, row_starts: vec![0], ..StepInputs::default() };
        self.token_ids.clear();
        for row in guessing.iter_mut().filter(|row| row.num_left > 0) {
            let (position, reach) = (step.positions[row.token_index] + 1, step.reach[row.index]);
            if position >= reach.min(max_positions) {
                row.num_left = 0;
                continue;
            }
            let last = row.tokens.last().expect("a row has a guess before it goes on");
            let (from, to) = (row.token_index, next.rows.len());
            if let Some(hidden) = &mut hidden {
                let width = hidden.cols;
                hidden.data.copy_within(from * width..(from + 1) * width, to * width);
            }
            self.token_ids.push(last.0);
            next.rows.push(row.row);
            next.positions.push(position);
            next.row_starts.push(to as u32 + 1);
            next.context_lens.push(position + 1);
            next.reach.push(reach);
        }
        if next.rows.is_empty() {
            self.guesses.done.push_back(guessing.into_iter().map(|row| (row.row, row.tokens)).collect());
            return false;
        }
        for group in 0..num_groups {
            let active = guessing.iter().filter(|row| row.num_left > 0);
            for (row, position) in active.zip(&next.positions) {
                let table = step.block_table(group, row.index);
                next.slots.push(table[(position / block_size) as usize] * block_size + position % block_size);
                next.block_tables.extend_from_slice(table);
            }
        }
        for (index, row) in guessing.iter_mut().filter(|row| row.num_left > 0).enumerate() {
            (row.index, row.token_index) = (index, index);
        }
        next.token_ids.clone_from(&self.token_ids);
        self.inputs = next;
        self.guesses.rows = guessing;
        true
    }
}
