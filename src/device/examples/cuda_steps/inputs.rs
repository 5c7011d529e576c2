//! Inputs of steps over rows that have blocks of their own.

use std::ops::Range;

use engine::{CopiedState, RowId, StateId, TokenId};
use ops::{SampleInput, StepInputs, TOKEN_ON_DEVICE};

pub const BLOCK: usize = 64;
/// Token ids of prompts are below this value for every shape.
const MAX_TOKEN: u32 = 32000;

/// How the KV blocks are divided: each row has as many in each KV group. If the model has recurrent states, each row has a slot.
#[derive(Clone, Copy)]
pub struct Blocks {
    pub groups: usize,
    pub has_states: bool,
    pub rows: usize,
    pub per_row: usize,
}

impl Blocks {
    /// A row's state becomes the one before its drafts.
    pub fn restored(self, row: usize) -> CopiedState {
        CopiedState { from: StateId((self.rows + row) as u32), to: StateId(row as u32) }
    }

    fn of(self, group: usize, row: usize, index: usize) -> usize {
        (group * self.rows + row) * self.per_row + index
    }
}

/// What rows compute in a step that verifies drafts.
#[derive(Clone, Copy)]
pub struct Drafting {
    /// Positions before.
    pub context: usize,
    /// Known tokens before the drafts.
    pub known: usize,
    /// Drafts, and guesses behind them.
    pub num_drafts: usize,
}

/// A step in which `rows` rows verify drafts.
pub fn verifying(number: u64, rows: usize, drafting: Drafting, blocks: Blocks) -> StepInputs {
    let Drafting { context, known, num_drafts } = drafting;
    let tokens = known + num_drafts;
    let work: Vec<_> = (0..rows).map(|row| (row, context..context + tokens)).collect();
    let mut inputs = step(number, &work, blocks);
    inputs.samples.clear();
    for row in 0..rows as u32 {
        let end = (row + 1) * tokens as u32;
        let sample = |token_index| SampleInput { row: RowId(row), token_index, num_generated: 0 };
        inputs.samples.extend((end - 1 - num_drafts as u32..end).map(sample));
        if blocks.has_states {
            inputs.saved_states.push([row, known as u32, (blocks.rows as u32) + row]);
        }
    }
    inputs.runs_drafter = true;
    inputs.guesses = vec![num_drafts as u32; rows];
    inputs.reach = vec![(blocks.per_row * BLOCK) as u32; rows];
    inputs
}

/// A step in which row `work[i].0` computes the positions `work[i].1`: chunks first, then decodes of one token.
pub fn step(number: u64, work: &[(usize, Range<usize>)], blocks: Blocks) -> StepInputs {
    let mut inputs = StepInputs::default();
    inputs.clear(number);
    inputs.max_blocks = blocks.per_row;
    for (row, positions) in work {
        let is_chunk = positions.len() > 1;
        inputs.num_prefill_rows += usize::from(is_chunk);
        inputs.rows.push(RowId(*row as u32));
        for position in positions.clone() {
            let TokenId(token) = token(*row, position);
            inputs.token_ids.push(if is_chunk { token } else { TOKEN_ON_DEVICE });
            inputs.positions.push(position as u32);
        }
        inputs.row_starts.push(inputs.token_ids.len() as u32);
        inputs.context_lens.push(positions.end as u32);
        let token_index = inputs.token_ids.len() as u32 - 1;
        inputs.samples.push(SampleInput { row: RowId(*row as u32), token_index, num_generated: 0 });
    }
    if blocks.has_states {
        inputs.states.extend(work.iter().map(|(row, _)| *row as u32));
    }
    for group in 0..blocks.groups {
        for (row, positions) in work {
            let slot = |p: usize| (blocks.of(group, *row, p / BLOCK) * BLOCK + p % BLOCK) as u32;
            inputs.slots.extend(positions.clone().map(slot));
            inputs.block_tables.extend((0..blocks.per_row).map(|index| blocks.of(group, *row, index) as u32));
        }
    }
    inputs
}

/// The first `len` tokens of a row whose prompt is computed in chunks.
pub fn prompt(row: usize, len: usize) -> Vec<TokenId> {
    (0..len).map(|position| token(row, position)).collect()
}

fn token(row: usize, position: usize) -> TokenId {
    TokenId((position * 7 + row) as u32 % MAX_TOKEN)
}
