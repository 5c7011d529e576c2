//! The inputs of one step, packed on the host from the plan and the worker's rows.

use engine::{RowId, SampleMask};

use crate::DeviceError;

/// In [`StepInputs::token_ids`]: the token is the last one sampled for the row, which only the device knows.
pub const TOKEN_ON_DEVICE: u32 = u32::MAX;

/// In [`StepInputs::adapters`]: the row has none.
pub const NO_ADAPTER: u32 = u32::MAX;

/// The inputs of one forward pass in flat arrays: `T` tokens of `R` rows, `S` samples.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct StepInputs {
    /// The number of the plan.
    pub step: u64,
    /// `[R]`: row of each sequence; prefill chunks first, then decodes of one token.
    pub rows: Vec<RowId>,
    /// `rows[..num_prefill_rows]` are prefill chunks; the others have one token each.
    pub num_prefill_rows: usize,
    /// The number of rows that are chunks of prompts, before all others, if every other token must be computed as a decode is. Then rows
    /// behind them may have several tokens although they are no chunks.
    pub num_prompt_rows: Option<usize>,
    /// `[R + 1]`: prefix sum of the tokens per row, indices into the `[T]` arrays.
    pub row_starts: Vec<u32>,
    /// `[T]`: token ids, or [`TOKEN_ON_DEVICE`].
    pub token_ids: Vec<u32>,
    /// `[T]`: position of each token in its sequence.
    pub positions: Vec<u32>,
    /// `[G, T]`: index where K and V of each token are stored, in each of `G` KV groups: `block * block_size + offset`.
    pub slots: Vec<u32>,
    /// `[R]`: number of positions of the row after this step.
    pub context_lens: Vec<u32>,
    /// `[G, R, max_blocks]`: block table of each row in each KV group, padded with 0. Blocks before the window of a group
    /// may be any: devices may load them, but must not use them.
    pub block_tables: Vec<u32>,
    /// Row length of `block_tables`.
    pub max_blocks: usize,
    /// `[R]`: slot of each row's recurrent state; empty if the model has none.
    pub states: Vec<u32>,
    /// Recurrent states that are saved within the work of a row: the row's index in `0..R`, the number of its tokens before,
    /// and the slot that is written.
    pub saved_states: Vec<[u32; 3]>,
    /// `[R]`: slot of each row's adapter, or [`NO_ADAPTER`]; empty if no row has one.
    pub adapters: Vec<u32>,
    /// `[S]`: rows that choose a token, in plan order.
    pub samples: Vec<SampleInput>,
    /// Indices in `0..S` of samples that are chosen among the tokens of a mask. If there are any, the step's tokens are
    /// chosen by [`crate::Device::choose`].
    pub masked: Vec<u32>,
    /// Indices in `0..T` of positions whose raw logits must be reported.
    pub logits: Vec<u32>,
    /// Whether what guesses drafts runs behind the step.
    pub runs_drafter: bool,
    /// `[R]`: how many tokens are guessed behind the new ones of each row; empty if none are.
    pub guesses: Vec<u32>,
    /// `[R]`: how many positions the blocks of each row in `block_tables` have, those of guesses included; empty if none are guessed.
    pub reach: Vec<u32>,
}

/// One token that a row chooses: from the logits of its last position in this step, or, if it verifies drafts, from
/// each of its positions.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SampleInput {
    /// The row; its sampling parameters were set by [`crate::Device::join_row`].
    pub row: RowId,
    /// Index in `0..T` of the position whose logits are used.
    pub token_index: u32,
    /// Tokens generated before this one: the output position for the seed and for `min_tokens`.
    pub num_generated: u32,
}

impl StepInputs {
    /// Clears all arrays for step `step` and keeps their capacity.
    pub fn clear(&mut self, step: u64) {
        self.step = step;
        self.num_prefill_rows = 0;
        self.num_prompt_rows = None;
        self.max_blocks = 0;
        self.runs_drafter = false;
        self.rows.clear();
        self.row_starts.clear();
        self.row_starts.push(0);
        self.token_ids.clear();
        self.positions.clear();
        self.slots.clear();
        self.context_lens.clear();
        self.block_tables.clear();
        self.states.clear();
        self.saved_states.clear();
        self.adapters.clear();
        self.samples.clear();
        self.masked.clear();
        self.logits.clear();
        self.guesses.clear();
        self.reach.clear();
    }

    /// `T`, the number of tokens in this step.
    pub fn num_tokens(&self) -> usize {
        self.token_ids.len()
    }

    /// `R`, the number of rows in this step.
    pub fn num_rows(&self) -> usize {
        self.rows.len()
    }

    /// Whether sample `index` is one of several of its row; rank 0 then decides which of them are accepted.
    pub fn verifies(&self, index: usize) -> bool {
        let row = |index: usize| self.samples.get(index).map(|sample| sample.row);
        let own = row(index);
        own.is_some() && (row(index + 1) == own || index.checked_sub(1).and_then(row) == own)
    }

    /// Checks that `masks` are those of [`StepInputs::masked`], in that order.
    ///
    /// # Errors
    /// When they are not.
    pub fn check_masks(&self, masks: &[SampleMask]) -> Result<(), DeviceError> {
        let fits = |(&sample, mask): (&u32, &SampleMask)| mask.step == self.step && mask.sample == sample;
        if self.masked.len() == masks.len() && self.masked.iter().zip(masks).all(fits) {
            return Ok(());
        }
        let found: Vec<_> = masks.iter().map(|mask| (mask.step, mask.sample)).collect();
        let (call, expected) = (format!("step {}", self.step), &self.masked);
        Err(DeviceError::Call {
            call,
            reason: format!("masks of (step, sample) {found:?} came for samples {expected:?}"),
        })
    }

    /// `[T]`: index where K and V of each token are stored in a KV group.
    pub fn slots_of(&self, group: usize) -> &[u32] {
        &self.slots[group * self.num_tokens()..(group + 1) * self.num_tokens()]
    }

    /// The block table of row `index` of this step in a KV group.
    pub fn block_table(&self, group: usize, index: usize) -> &[u32] {
        let row = group * self.num_rows() + index;
        &self.block_tables[row * self.max_blocks..(row + 1) * self.max_blocks]
    }
}
