//! One step as a device takes it: packed on the host from the plan and the worker's rows.

use engine::RowId;

/// In [`StepInputs::token_ids`]: the token is the row's last sampled one, which only the device holds.
pub const TOKEN_ON_DEVICE: u32 = u32::MAX;

/// The inputs of one forward pass, packed flat. `T` tokens of `R` rows, of which `S` sample.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct StepInputs {
    /// The plan's number.
    pub step: u64,
    /// `[R]` row of each sequence; prefill chunks first, then decodes of one token.
    pub rows: Vec<RowId>,
    /// `rows[..num_prefill_rows]` are prefill chunks; the rest has one token each.
    pub num_prefill_rows: usize,
    /// `[R + 1]` prefix sum of tokens per row, into the `[T]` arrays.
    pub row_starts: Vec<u32>,
    /// `[T]` token ids, or [`TOKEN_ON_DEVICE`].
    pub token_ids: Vec<u32>,
    /// `[T]` position of each token in its sequence.
    pub positions: Vec<u32>,
    /// `[T]` where each token's K and V go: `block * block_size + offset`.
    pub slots: Vec<u32>,
    /// `[R]` positions of the row that exist after this step.
    pub context_lens: Vec<u32>,
    /// `[R, max_blocks]` block table of each row, row-major, padded with 0.
    pub block_tables: Vec<u32>,
    /// Row length of `block_tables`.
    pub max_blocks: usize,
    /// `[S]` rows that choose a token, in plan order.
    pub samples: Vec<SampleInput>,
    /// Indices in `0..T` of positions whose raw logits are to be reported.
    pub logits: Vec<u32>,
}

/// One token that a row chooses: from the logits of its last position in this step, or, where drafts are verified, from
/// each of its positions.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SampleInput {
    /// Which row; its sampling parameters came with [`crate::Device::join_row`].
    pub row: RowId,
    /// Index in `0..T` of the position whose logits count.
    pub token_index: u32,
    /// Tokens generated before this one: the output position for the seed and for `min_tokens`.
    pub num_generated: u32,
}

impl StepInputs {
    /// Empties every array for step `step`, keeping what was allocated.
    pub fn clear(&mut self, step: u64) {
        self.step = step;
        self.num_prefill_rows = 0;
        self.max_blocks = 0;
        self.rows.clear();
        self.row_starts.clear();
        self.row_starts.push(0);
        self.token_ids.clear();
        self.positions.clear();
        self.slots.clear();
        self.context_lens.clear();
        self.block_tables.clear();
        self.samples.clear();
        self.logits.clear();
    }

    /// `T`, the tokens of this step.
    pub fn num_tokens(&self) -> usize {
        self.token_ids.len()
    }

    /// `R`, the rows of this step.
    pub fn num_rows(&self) -> usize {
        self.rows.len()
    }

    /// Whether sample `index` is one of several of its row: rank 0 then decides which of them count.
    pub fn verifies(&self, index: usize) -> bool {
        let row = |index: usize| self.samples.get(index).map(|sample| sample.row);
        let own = row(index);
        own.is_some() && (row(index + 1) == own || index.checked_sub(1).and_then(row) == own)
    }

    /// The block table of row `index` of this step.
    pub fn block_table(&self, index: usize) -> &[u32] {
        &self.block_tables[index * self.max_blocks..(index + 1) * self.max_blocks]
    }
}
