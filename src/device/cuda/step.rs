//! The inputs of a step as they are sent to the GPU: checked, packed into one block of u32, and copied with one call.

use kernels::cuda::sample::VERIFIES;
use kernels::cuda::{Span, low_rank};
use ops::{DeviceError, NO_ADAPTER, StepInputs};

/// Value in `slots` of a padding token, and in `states` of a padding row.
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
    pub(crate) tables: TableShape,
    pub(crate) max_positions: usize,
    pub(crate) vocab_size: usize,
    pub(crate) adapters: AdapterBounds,
}

/// The slots for adapters; none by default.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct AdapterBounds {
    pub(crate) num_slots: usize,
    /// The rank that an adapter takes.
    pub(crate) rank: usize,
}

/// The packed block tables.
#[derive(Debug, Clone, Copy)]
pub(crate) struct TableShape {
    /// Row length.
    pub(crate) stride: usize,
    /// Number of KV groups; each has slots and tables of its own.
    pub(crate) num_groups: usize,
}

impl TableShape {
    /// Before the KV blocks are allocated.
    pub(crate) const NONE: Self = Self { stride: 0, num_groups: 1 };
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
    /// Whether a row has an adapter.
    pub(crate) has_adapters: bool,
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
            has_adapters: inputs.adapters.iter().any(|&slot| slot != NO_ADAPTER),
        }
    }

    /// The shape of a decode step with `bucket` rows.
    pub(crate) fn decode(bucket: usize, has_adapters: bool) -> Self {
        Self { tokens: bucket, rows: bucket, prefill_rows: 0, max_chunk: 0, samples: bucket, has_adapters }
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
    states: usize,
    sample_rows: usize,
    sample_tokens: usize,
    num_generated: usize,
    adapters: usize,
    adapter_slices: usize,
    block_tables: usize,
    /// Number of words of the whole block.
    pub(crate) words: usize,
}

impl Layout {
    pub(crate) fn new(shape: StepShape, tables: TableShape) -> Self {
        let mut words = 0;
        let mut take = |count: usize| {
            let start = words;
            words += count.next_multiple_of(ALIGN);
            start
        };
        let StepShape { tokens, rows, samples, has_adapters, .. } = shape;
        let mut layout = Self {
            slot: take(1),
            token_ids: take(tokens),
            token_rows: take(tokens),
            token_tables: take(tokens),
            positions: take(tokens),
            slots: take(tables.num_groups * slot_stride(tokens)),
            row_starts: take(rows + 1),
            context_lens: take(rows),
            states: take(rows),
            sample_rows: take(samples),
            sample_tokens: take(samples),
            num_generated: take(samples),
            adapters: take(if has_adapters { tokens } else { 0 }),
            adapter_slices: take(if has_adapters { 2 } else { 0 }),
            block_tables: take(tables.num_groups * group_stride(rows, tables)),
            words: 0,
        };
        layout.words = words;
        layout
    }

    /// Number of words that is enough for any step within the limits.
    pub(crate) fn max_words(bounds: &StepBounds) -> usize {
        let (rows, tokens) = (bounds.max_rows, bounds.max_tokens.max(bounds.max_rows));
        let has_adapters = bounds.adapters.num_slots > 0;
        let shape = StepShape { tokens, rows, prefill_rows: 0, max_chunk: 0, samples: tokens, has_adapters };
        Self::new(shape, bounds.tables).words
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
    pub(crate) slots: GroupSpans,
    pub(crate) row_starts: Span,
    pub(crate) context_lens: Span,
    /// `[R]`: the slot of the row's recurrent state.
    pub(crate) states: Span,
    pub(crate) sample_rows: Span,
    /// `[S]`: the token whose logits are used.
    pub(crate) sample_tokens: Span,
    pub(crate) num_generated: Span,
    /// `[T]`: the slot of the token's adapter; nothing if no row has one.
    pub(crate) adapters: Span,
    /// A u64: the slices of slots that a token uses, as `kernels::cuda::low_rank` takes them.
    pub(crate) adapter_slices: Span,
    pub(crate) block_tables: GroupSpans,
}

/// An array for each KV group.
#[derive(Debug, Clone, Copy)]
pub(crate) struct GroupSpans {
    all: Span,
    /// Words from one array to the next.
    stride: usize,
    /// Words of one array.
    count: usize,
}

impl GroupSpans {
    /// The array of a KV group.
    pub(crate) fn of(&self, group: usize) -> Span {
        self.all.elements::<u32>(group * self.stride, self.count)
    }
}

/// Words from the slots of one KV group to those of the next.
fn slot_stride(tokens: usize) -> usize {
    tokens.next_multiple_of(ALIGN)
}

/// Words from the block tables of one KV group to those of the next.
fn group_stride(rows: usize, tables: TableShape) -> usize {
    (rows * tables.stride).next_multiple_of(ALIGN)
}

impl StepSpans {
    pub(crate) fn new(block: Span, layout: &Layout, shape: StepShape, tables: TableShape) -> Self {
        let part = |start, count| block.elements::<u32>(start, count);
        let groups = |start, stride, count| GroupSpans { all: part(start, tables.num_groups * stride), stride, count };
        let StepShape { tokens, rows, samples, has_adapters, .. } = shape;
        Self {
            slot: part(layout.slot, 1),
            token_ids: part(layout.token_ids, tokens),
            token_rows: part(layout.token_rows, tokens),
            token_tables: part(layout.token_tables, tokens),
            positions: part(layout.positions, tokens),
            slots: groups(layout.slots, slot_stride(tokens), tokens),
            row_starts: part(layout.row_starts, rows + 1),
            context_lens: part(layout.context_lens, rows),
            states: part(layout.states, rows),
            sample_rows: part(layout.sample_rows, samples),
            sample_tokens: part(layout.sample_tokens, samples),
            num_generated: part(layout.num_generated, samples),
            adapters: part(layout.adapters, if has_adapters { tokens } else { 0 }),
            adapter_slices: part(layout.adapter_slices, if has_adapters { 2 } else { 0 }),
            block_tables: groups(layout.block_tables, group_stride(rows, tables), rows * tables.stride),
        }
    }
}

/// Packs `inputs` into `words`, padded to `shape`. Padding rows of a graph read only harmless values.
pub(crate) fn pack(inputs: &StepInputs, bounds: &StepBounds, shape: StepShape, slot: u32, words: &mut [u32]) -> Layout {
    let TableShape { stride, num_groups } = bounds.tables;
    let layout = Layout::new(shape, bounds.tables);
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
    for group in 0..num_groups {
        let start = layout.slots + group * slot_stride(shape.tokens);
        put(start, shape.tokens, &mut inputs.slots_of(group).iter().copied(), PADDING);
    }
    put(layout.row_starts, shape.rows + 1, &mut inputs.row_starts.iter().copied(), tokens as u32);
    put(layout.context_lens, shape.rows, &mut inputs.context_lens.iter().copied(), 0);
    put(layout.states, shape.rows, &mut inputs.states.iter().copied(), PADDING);
    put(layout.sample_rows, shape.samples, &mut sample_rows, spare_row);
    put(layout.sample_tokens, shape.samples, &mut inputs.samples.iter().map(|s| s.token_index), 0);
    put(layout.num_generated, shape.samples, &mut inputs.samples.iter().map(|s| s.num_generated), 0);
    if shape.has_adapters {
        put(layout.adapters, shape.tokens, &mut row_of_token().map(|r| inputs.adapters[r]), NO_ADAPTER);
        let used = inputs.adapters.iter().filter(|&&slot| slot != NO_ADAPTER);
        let slices = used.fold(0, |slices, &slot| slices | low_rank::slice_bit(slot, bounds.adapters.rank));
        put(layout.adapter_slices, 2, &mut [slices as u32, (slices >> 32) as u32].into_iter(), 0);
    }
    for group in 0..num_groups {
        let group_start = layout.block_tables + group * group_stride(shape.rows, bounds.tables);
        for row in 0..rows {
            let table = inputs.block_table(group, row);
            let used = table.len().min(stride);
            let start = group_start + row * stride;
            words[start..start + used].copy_from_slice(&table[..used]);
            words[start + used..start + stride].fill(0);
        }
        words[group_start + rows * stride..group_start + group_stride(shape.rows, bounds.tables)].fill(0);
    }
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
    if !inputs.saved_states.is_empty() {
        return refuse("recurrent states are not saved within a step on GPUs".into());
    }
    let num_groups = bounds.tables.num_groups;
    let lengths = [inputs.positions.len(), inputs.slots.len()];
    if lengths != [tokens, num_groups * tokens]
        || inputs.row_starts.len() != rows + 1
        || inputs.context_lens.len() != rows
    {
        return refuse(format!(
            "positions, slots {lengths:?} for {tokens} tokens, or arrays of rows differ from {rows}"
        ));
    }
    if inputs.block_tables.len() != num_groups * rows * inputs.max_blocks || inputs.num_prefill_rows > rows {
        return refuse(format!(
            "block tables of {} for {num_groups} x {rows} x {}",
            inputs.block_tables.len(),
            inputs.max_blocks
        ));
    }
    let num_adapters = bounds.adapters.num_slots;
    if !matches!(inputs.adapters.len(), len if len == 0 || len == rows) {
        return refuse(format!("adapters of {} rows of {rows}", inputs.adapters.len()));
    }
    if let Some(slot) = inputs.adapters.iter().find(|&&slot| slot != NO_ADAPTER && slot as usize >= num_adapters) {
        return refuse(format!("adapter slot {slot} of {num_adapters}"));
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
        let len = inputs.max_blocks;
        if blocks > len || blocks > bounds.tables.stride || context < starts[row + 1] - starts[row] {
            return refuse(format!("context of {context} positions in a table of {len} blocks"));
        }
        let tables = (0..num_groups).flat_map(|group| &inputs.block_table(group, row)[..blocks]);
        if let Some(block) = tables.copied().find(|&block| block as usize >= bounds.num_blocks) {
            return refuse(format!("block {block} of {}", bounds.num_blocks));
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests;
