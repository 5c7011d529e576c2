//! The inputs of a step as they are sent to the GPU: checked, packed into one block of u32, and copied with one call.

use kernels::cuda::Span;
use kernels::cuda::sample::VERIFIES;
use ops::{DeviceError, StepInputs};

/// Value in `slots` of a padding token.
const PADDING: u32 = u32::MAX;
/// Arrays start at multiples of this number of words.
const ALIGN: usize = 16;

/// Limits that a step is checked against and packed with.
#[derive(Debug, Clone, Copy)]
pub(crate) struct StepBounds {
    pub(crate) max_tokens: usize,
    /// Number of rows in the row table. There is one more row, which receives what padding writes.
    pub(crate) max_rows: usize,
    pub(crate) max_samples: usize,
    pub(crate) num_blocks: usize,
    pub(crate) block_size: usize,
    /// Row length of the packed block tables.
    pub(crate) table_stride: usize,
    pub(crate) max_positions: usize,
    pub(crate) vocab_size: usize,
}

/// Numbers of tokens, rows and samples of a step, padding included.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct StepShape {
    pub(crate) tokens: usize,
    pub(crate) rows: usize,
    pub(crate) prefill_rows: usize,
    /// Tokens of the longest prefill chunk.
    pub(crate) max_chunk: usize,
    pub(crate) samples: usize,
}

impl StepShape {
    pub(crate) fn of(inputs: &StepInputs) -> Self {
        let chunks = inputs.row_starts.windows(2).take(inputs.num_prefill_rows);
        Self {
            tokens: inputs.num_tokens(),
            rows: inputs.num_rows(),
            prefill_rows: inputs.num_prefill_rows,
            max_chunk: chunks.map(|pair| (pair[1] - pair[0]) as usize).max().unwrap_or(0),
            samples: inputs.samples.len(),
        }
    }

    /// The shape of a decode step with `bucket` rows.
    pub(crate) fn decode(bucket: usize) -> Self {
        Self { tokens: bucket, rows: bucket, prefill_rows: 0, max_chunk: 0, samples: bucket }
    }
}

/// The offset of each array in the packed block, in words.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Layout {
    slot: usize,
    token_ids: usize,
    token_rows: usize,
    token_tables: usize,
    positions: usize,
    slots: usize,
    row_starts: usize,
    context_lens: usize,
    sample_rows: usize,
    sample_tokens: usize,
    num_generated: usize,
    block_tables: usize,
    /// Number of words of the whole block.
    pub(crate) words: usize,
}

impl Layout {
    pub(crate) fn new(shape: StepShape, table_stride: usize) -> Self {
        let mut words = 0;
        let mut take = |count: usize| {
            let start = words;
            words += count.next_multiple_of(ALIGN);
            start
        };
        let StepShape { tokens, rows, samples, .. } = shape;
        let mut layout = Self {
            slot: take(1),
            token_ids: take(tokens),
            token_rows: take(tokens),
            token_tables: take(tokens),
            positions: take(tokens),
            slots: take(tokens),
            row_starts: take(rows + 1),
            context_lens: take(rows),
            sample_rows: take(samples),
            sample_tokens: take(samples),
            num_generated: take(samples),
            block_tables: take(rows * table_stride),
            words: 0,
        };
        layout.words = words;
        layout
    }

    /// Number of words that is enough for any step within the limits.
    pub(crate) fn max_words(bounds: &StepBounds) -> usize {
        let (rows, tokens) = (bounds.max_rows, bounds.max_tokens.max(bounds.max_rows));
        let shape = StepShape { tokens, rows, prefill_rows: 0, max_chunk: 0, samples: tokens };
        Self::new(shape, bounds.table_stride).words
    }
}

/// The arrays of the current step on the device, with the names and shapes of `kernels::cuda`.
#[derive(Debug, Clone, Copy)]
pub(crate) struct StepSpans {
    pub(crate) slot: Span,
    pub(crate) token_ids: Span,
    pub(crate) token_rows: Span,
    /// `[T]`: the row of the block tables that a token uses.
    pub(crate) token_tables: Span,
    pub(crate) positions: Span,
    pub(crate) slots: Span,
    pub(crate) row_starts: Span,
    pub(crate) context_lens: Span,
    pub(crate) sample_rows: Span,
    /// `[S]`: the token whose logits are used.
    pub(crate) sample_tokens: Span,
    pub(crate) num_generated: Span,
    pub(crate) block_tables: Span,
}

impl StepSpans {
    pub(crate) fn new(block: Span, layout: &Layout, shape: StepShape, table_stride: usize) -> Self {
        let part = |start, count| block.elements::<u32>(start, count);
        let StepShape { tokens, rows, samples, .. } = shape;
        Self {
            slot: part(layout.slot, 1),
            token_ids: part(layout.token_ids, tokens),
            token_rows: part(layout.token_rows, tokens),
            token_tables: part(layout.token_tables, tokens),
            positions: part(layout.positions, tokens),
            slots: part(layout.slots, tokens),
            row_starts: part(layout.row_starts, rows + 1),
            context_lens: part(layout.context_lens, rows),
            sample_rows: part(layout.sample_rows, samples),
            sample_tokens: part(layout.sample_tokens, samples),
            num_generated: part(layout.num_generated, samples),
            block_tables: part(layout.block_tables, rows * table_stride),
        }
    }
}

/// Packs `inputs` into `words`, padded to `shape`. Padding rows of a graph read only harmless values.
pub(crate) fn pack(inputs: &StepInputs, bounds: &StepBounds, shape: StepShape, slot: u32, words: &mut [u32]) -> Layout {
    let layout = Layout::new(shape, bounds.table_stride);
    let (tokens, rows) = (inputs.num_tokens(), inputs.num_rows());
    let mut put = |start: usize, count: usize, values: &mut dyn Iterator<Item = u32>, padding: u32| {
        let target = &mut words[start..start + count];
        let mut filled = 0;
        for (to, value) in target.iter_mut().zip(values) {
            *to = value;
            filled += 1;
        }
        target[filled..].fill(padding);
    };
    let row_of_token = || (0..rows).flat_map(|r| (inputs.row_starts[r]..inputs.row_starts[r + 1]).map(move |_| r));
    let spare_row = bounds.max_rows as u32;
    let verifies = |index: usize| if inputs.verifies(index) { VERIFIES } else { 0 };
    let mut sample_rows = inputs.samples.iter().enumerate().map(|(index, s)| s.row.0 | verifies(index));
    put(layout.slot, 1, &mut std::iter::once(slot), 0);
    put(layout.token_ids, shape.tokens, &mut inputs.token_ids.iter().copied(), 0);
    put(layout.token_rows, shape.tokens, &mut row_of_token().map(|r| inputs.rows[r].0), spare_row);
    put(layout.token_tables, shape.tokens, &mut row_of_token().map(|r| r as u32), 0);
    put(layout.positions, shape.tokens, &mut inputs.positions.iter().copied(), 0);
    put(layout.slots, shape.tokens, &mut inputs.slots.iter().copied(), PADDING);
    put(layout.row_starts, shape.rows + 1, &mut inputs.row_starts.iter().copied(), tokens as u32);
    put(layout.context_lens, shape.rows, &mut inputs.context_lens.iter().copied(), 0);
    put(layout.sample_rows, shape.samples, &mut sample_rows, spare_row);
    put(layout.sample_tokens, shape.samples, &mut inputs.samples.iter().map(|s| s.token_index), 0);
    put(layout.num_generated, shape.samples, &mut inputs.samples.iter().map(|s| s.num_generated), 0);
    for row in 0..rows {
        let table = inputs.block_table(row);
        let used = table.len().min(bounds.table_stride);
        let start = layout.block_tables + row * bounds.table_stride;
        words[start..start + used].copy_from_slice(&table[..used]);
        words[start + used..start + bounds.table_stride].fill(0);
    }
    words[layout.block_tables + rows * bounds.table_stride..layout.words].fill(0);
    layout
}

/// Refuses a step whose arrays are inconsistent or contain indices outside the device's buffers, because kernels do not
/// check them.
pub(crate) fn check(inputs: &StepInputs, bounds: &StepBounds) -> Result<(), DeviceError> {
    let (tokens, rows) = (inputs.num_tokens(), inputs.num_rows());
    let refuse = |reason: String| {
        Err(DeviceError::Call {
            call: format!("step {}", inputs.step),
            reason: format!("inputs are inconsistent: {reason}"),
        })
    };
    let samples = inputs.samples.len();
    if tokens == 0 || tokens > bounds.max_tokens || rows > bounds.max_rows || samples > bounds.max_samples {
        return refuse(format!(
            "{tokens} tokens of {}, {rows} rows of {}, {samples} samples of {}",
            bounds.max_tokens, bounds.max_rows, bounds.max_samples
        ));
    }
    let lengths = [inputs.positions.len(), inputs.slots.len()];
    if lengths != [tokens; 2] || inputs.row_starts.len() != rows + 1 || inputs.context_lens.len() != rows {
        return refuse(format!(
            "positions, slots {lengths:?} for {tokens} tokens, or arrays of rows differ from {rows}"
        ));
    }
    if inputs.block_tables.len() != rows * inputs.max_blocks || inputs.num_prefill_rows > rows {
        return refuse(format!("block tables of {} for {rows} x {}", inputs.block_tables.len(), inputs.max_blocks));
    }
    let starts = &inputs.row_starts;
    if starts[0] != 0 || starts[rows] as usize != tokens || starts.windows(2).any(|pair| pair[0] >= pair[1]) {
        return refuse(format!("row starts {starts:?} for {tokens} tokens"));
    }
    if (inputs.num_prefill_rows..rows).any(|r| starts[r + 1] - starts[r] != 1) {
        return refuse("a decode row has more than one token".into());
    }
    if let Some(row) =
        inputs.rows.iter().chain(inputs.samples.iter().map(|s| &s.row)).find(|r| r.0 as usize >= bounds.max_rows)
    {
        return refuse(format!("row {} of {}", row.0, bounds.max_rows));
    }
    let positions = inputs.samples.iter().map(|s| s.token_index).chain(inputs.logits.iter().copied());
    if let Some(token) = positions.into_iter().find(|&token| token as usize >= tokens) {
        return refuse(format!("sample of token {token} of {tokens}"));
    }
    if let Some(token) =
        inputs.token_ids.iter().find(|&&t| t as usize >= bounds.vocab_size && t != ops::TOKEN_ON_DEVICE)
    {
        return refuse(format!("token {token} of a vocabulary of {}", bounds.vocab_size));
    }
    if let Some(position) = inputs.positions.iter().find(|&&p| p as usize >= bounds.max_positions) {
        return refuse(format!("position {position} of {}", bounds.max_positions));
    }
    if let Some(slot) = inputs.slots.iter().find(|&&s| s as usize >= bounds.num_blocks * bounds.block_size) {
        return refuse(format!("slot {slot} of {} blocks of {}", bounds.num_blocks, bounds.block_size));
    }
    for (row, &context) in inputs.context_lens.iter().enumerate() {
        let blocks = (context as usize).div_ceil(bounds.block_size);
        let table = inputs.block_table(row);
        if blocks > table.len() || blocks > bounds.table_stride || context < starts[row + 1] - starts[row] {
            return refuse(format!("context of {context} positions in a table of {} blocks", table.len()));
        }
        if let Some(block) = table[..blocks].iter().find(|&&b| b as usize >= bounds.num_blocks) {
            return refuse(format!("block {block} of {}", bounds.num_blocks));
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use engine::RowId;
    use ops::SampleInput;

    fn bounds() -> StepBounds {
        StepBounds {
            max_tokens: 8,
            max_rows: 4,
            max_samples: 6,
            num_blocks: 10,
            block_size: 4,
            table_stride: 3,
            max_positions: 12,
            vocab_size: 100,
        }
    }

    fn inputs() -> StepInputs {
        StepInputs {
            step: 1,
            rows: vec![RowId(2), RowId(0)],
            num_prefill_rows: 1,
            row_starts: vec![0, 3, 4],
            token_ids: vec![5, 6, 7, ops::TOKEN_ON_DEVICE],
            positions: vec![0, 1, 2, 6],
            slots: vec![36, 37, 38, 6],
            context_lens: vec![3, 7],
            block_tables: vec![9, 0, 3, 1],
            max_blocks: 2,
            samples: vec![SampleInput { row: RowId(0), token_index: 3, num_generated: 2 }],
            masked: Vec::new(),
            logits: Vec::new(),
        }
    }

    #[test]
    fn a_step_is_packed_with_tables_at_the_fixed_stride_and_padded() {
        let (inputs, bounds) = (inputs(), bounds());
        assert!(check(&inputs, &bounds).is_ok());
        let shape = StepShape { tokens: 6, rows: 3, prefill_rows: 1, max_chunk: 3, samples: 2 };
        let mut words = vec![u32::MAX - 1; Layout::max_words(&bounds)];
        let layout = pack(&inputs, &bounds, shape, 3, &mut words);
        assert_eq!(words[layout.slot], 3);
        assert_eq!(words[layout.token_rows..][..6], [2, 2, 2, 0, 4, 4]);
        assert_eq!(words[layout.token_tables..][..6], [0, 0, 0, 1, 0, 0]);
        assert_eq!(words[layout.slots..][..6], [36, 37, 38, 6, PADDING, PADDING]);
        assert_eq!(words[layout.row_starts..][..4], [0, 3, 4, 4]);
        assert_eq!(words[layout.context_lens..][..3], [3, 7, 0]);
        assert_eq!(words[layout.block_tables..][..9], [9, 0, 0, 3, 1, 0, 0, 0, 0]);
        assert_eq!(words[layout.sample_rows..][..2], [0, 4]);
    }

    #[test]
    fn samples_of_a_row_that_verifies_drafts_are_marked() {
        let (mut inputs, bounds) = (inputs(), bounds());
        let sample = |row, token_index| SampleInput { row: RowId(row), token_index, num_generated: token_index };
        inputs.samples = vec![sample(2, 0), sample(2, 1), sample(2, 2), sample(0, 3)];
        assert!(check(&inputs, &bounds).is_ok());
        let mut words = vec![0; Layout::max_words(&bounds)];
        let layout = pack(&inputs, &bounds, StepShape::of(&inputs), 0, &mut words);
        assert_eq!(words[layout.sample_rows..][..4], [2 | VERIFIES, 2 | VERIFIES, 2 | VERIFIES, 0]);
    }

    #[test]
    fn a_step_that_points_outside_is_refused() {
        let spoil: [fn(&mut StepInputs); 7] = [
            |i| i.rows[0] = RowId(4),
            |i| i.token_ids[0] = 100,
            |i| i.positions[3] = 12,
            |i| i.slots[0] = 40,
            |i| i.block_tables[0] = 10,
            |i| i.context_lens[1] = 9,
            |i| i.row_starts[1] = 2,
        ];
        for (index, spoil) in spoil.iter().enumerate() {
            let mut inputs = inputs();
            spoil(&mut inputs);
            assert!(check(&inputs, &bounds()).is_err(), "case {index}");
        }
    }
}
