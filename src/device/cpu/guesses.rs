//! Guesses at the tokens behind those of a step, by a head of the model.
//!
//! The first pass of the head runs over all positions of the step, so that its keys and values are there for every position
//! whose hidden state and next token are known. Each further pass has one position of each row that needs another guess.

use std::collections::VecDeque;

use engine::{RowId, TokenId};
use kernels::cpu as k;
use ops::{DeviceError, StepInputs};

use super::{CpuDevice, CpuTensor, Linear, sampler};

/// The guesses of the current step, and those of steps that are complete.
#[derive(Debug, Default)]
pub(super) struct Guesses {
    rows: Vec<Guessing>,
    /// Of each step whose guesses are complete and that is not collected yet.
    pub(super) done: VecDeque<Vec<(RowId, Vec<TokenId>)>>,
}

/// A row whose next tokens are guessed.
#[derive(Debug)]
struct Guessing {
    row: RowId,
    /// Its index in `0..R` of the current step.
    index: usize,
    /// The index in `0..T` of its last position whose next token is known.
    token_index: usize,
    /// The output position of the next guess.
    num_generated: u32,
    /// How many guesses it lacks.
    num_left: usize,
    tokens: Vec<TokenId>,
}

impl CpuDevice {
    pub(super) fn follow_tokens(&mut self) {
        let chosen = self.results.back().expect("the tokens of the step are chosen before others are guessed");
        let Self { inputs, token_ids, rows, guesses, .. } = self;
        guesses.rows.clear();
        let mut samples = inputs.samples.iter().zip(chosen).peekable();
        for (index, (&row, starts)) in inputs.rows.iter().zip(inputs.row_starts.windows(2)).enumerate() {
            let (first, end) = (starts[0] as usize, starts[1] as usize);
            let (mut last_known, mut is_known) = (None, true);
            for token_index in first..end {
                let next_in_step = (token_index + 1 < end).then(|| token_ids[token_index + 1]);
                let chosen = samples.next_if(|(sample, _)| sample.token_index as usize == token_index);
                token_ids[token_index] = match (chosen, next_in_step) {
                    (Some((sample, token)), next) => {
                        if is_known {
                            last_known = Some((token_index, sample.num_generated + 1));
                        }
                        is_known &= next == Some(token.token.0);
                        token.token.0
                    }
                    (None, Some(next)) => next,
                    // The end of a chunk, which the next token of the prompt follows.
                    (None, None) => {
                        let position = inputs.positions[token_index] as usize + 1;
                        rows[row.0 as usize].tokens().get(position).copied().unwrap_or(0)
                    }
                };
            }
            if let Some(&num_left) = inputs.guesses.get(index).filter(|&&count| count > 0)
                && let Some((token_index, num_generated)) = last_known
            {
                let (num_left, tokens) = (num_left as usize, Vec::new());
                guesses.rows.push(Guessing { row, index, token_index, num_generated, num_left, tokens });
            }
        }
    }

    pub(super) fn guess_tokens(&mut self, x: &CpuTensor, head: &Linear) -> Result<(), DeviceError> {
        let mut guessing = std::mem::take(&mut self.guesses.rows);
        let mut active: Vec<&mut Guessing> = guessing.iter_mut().filter(|row| row.num_left > 0).collect();
        let vocab = self.config.limits.vocab_size;
        for chunk in active.chunks_mut(self.config.limits.max_rows) {
            self.compute_logits(x, head, chunk.iter().map(|row| row.token_index as u32))?;
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

    pub(super) fn go_on_guessing(&mut self, hidden: &mut CpuTensor) -> bool {
        let mut guessing = std::mem::take(&mut self.guesses.rows);
        let spec = &self.cache().spec;
        let (block_size, max_positions) = (spec.block_size as u32, spec.max_positions as u32);
        let num_groups = spec.kv_windows.len();
        let step = std::mem::take(&mut self.inputs);
        let mut next =
            StepInputs { step: step.step, max_blocks: step.max_blocks, row_starts: vec![0], ..StepInputs::default() };
        self.token_ids.clear();
        for row in guessing.iter_mut().filter(|row| row.num_left > 0) {
            let position = step.positions[row.token_index] + 1;
            let num_blocks = step.context_lens[row.index].div_ceil(block_size);
            if position >= (num_blocks * block_size).min(max_positions) {
                row.num_left = 0;
                continue;
            }
            let last = row.tokens.last().expect("a row has a guess before it goes on");
            let (from, to, width) = (row.token_index, next.rows.len(), hidden.cols);
            hidden.data.copy_within(from * width..(from + 1) * width, to * width);
            self.token_ids.push(last.0);
            next.rows.push(row.row);
            next.positions.push(position);
            next.row_starts.push(to as u32 + 1);
            next.context_lens.push(num_blocks * block_size); // As far as its blocks reach.
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
