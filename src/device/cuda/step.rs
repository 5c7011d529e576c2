//! The inputs of a step as they are sent to the GPU: checked, packed into one block of u32, and copied with one call.

mod check;

use kernels::cuda::expand_blocks::Contexts;
use kernels::cuda::sample::VERIFIES;
use kernels::cuda::{Span, low_rank};
use ops::{NO_ADAPTER, SampleInput, StepInputs};

use super::verify;
pub(crate) use check::check;

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
    /// Of prefilling rows.
    pub(crate) contexts: Contexts,
    pub(crate) samples: usize,
    /// Whether a row has an adapter.
    pub(crate) has_adapters: bool,
}

impl StepShape {
    pub(crate) fn of(inputs: &StepInputs) -> Self {
        let chunks = inputs.row_starts.windows(2).take(inputs.num_prefill_rows);
        let contexts = || inputs.context_lens.iter().take(inputs.num_prefill_rows).map(|&len| len as usize);
        Self {
            tokens: inputs.num_tokens(),
            rows: inputs.num_rows(),
            prefill_rows: inputs.num_prefill_rows,
            max_chunk: chunks.map(|pair| (pair[1] - pair[0]) as usize).max().unwrap_or(0),
            contexts: Contexts { sum: contexts().sum(), longest: contexts().max().unwrap_or(0) },
            samples: inputs.samples.len(),
            has_adapters: inputs.adapters.iter().any(|&slot| slot != NO_ADAPTER),
        }
    }

    /// The shape of a decode step with `bucket` rows.
    pub(crate) fn decode(bucket: usize, has_adapters: bool) -> Self {
        let contexts = Contexts::default();
        Self { tokens: bucket, rows: bucket, prefill_rows: 0, max_chunk: 0, contexts, samples: bucket, has_adapters }
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
    state_starts: usize,
    saved_states: usize,
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
            state_starts: take(rows + 1),
            saved_states: take(2 * rows),
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
        let shape = StepShape { tokens, samples: tokens, ..StepShape::decode(rows, has_adapters) };
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
    /// `[R]`: the slot of the row's recurrent state. Where positions of a row are decodes of their own, they share its slot, so here
    /// and in the two arrays that follow `R` counts rows as they are in the plan, and then padding.
    pub(crate) states: Span,
    /// `[R + 1]`: indices of the tokens of these rows.
    pub(crate) state_starts: Span,
    /// `[R, 2]`: the number of tokens before a state that is saved, 0 for none, and its slot.
    pub(crate) saved_states: Span,
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
    pub(super) all: Span,
    /// Words from one array to the next.
    pub(super) stride: usize,
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
            state_starts: part(layout.state_starts, rows + 1),
            saved_states: part(layout.saved_states, 2 * rows),
            sample_rows: part(layout.sample_rows, samples),
            sample_tokens: part(layout.sample_tokens, samples),
            num_generated: part(layout.num_generated, samples),
            adapters: part(layout.adapters, if has_adapters { tokens } else { 0 }),
            adapter_slices: part(layout.adapter_slices, if has_adapters { 2 } else { 0 }),
            block_tables: groups(layout.block_tables, group_stride(rows, tables), rows * tables.stride),
        }
    }
}

/// Packs `inputs` into `words`, padded to `shape`. Padding rows of a graph read only harmless values. `whole` are the inputs as they
/// are in the plan, of which `inputs` may have positions as decodes of their own.
pub(crate) fn pack(
    [inputs, whole]: [&StepInputs; 2],
    bounds: &StepBounds,
    shape: StepShape,
    slot: u32,
    words: &mut [u32],
) -> Layout {
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
    // Nothing is appended for a sample that the plan does not have.
    let verifies = |sample: &SampleInput| match verify::sample_at(whole, sample.token_index) {
        Some(index) if !whole.verifies(index) => 0,
        _ => VERIFIES,
    };
    let mut sample_rows = inputs.samples.iter().map(|s| s.row.0 | verifies(s));
    let mut saved_states = vec![0; 2 * whole.num_rows()];
    for &[row, count, slot] in &whole.saved_states {
        saved_states[2 * row as usize..][..2].copy_from_slice(&[count, slot]);
    }
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
    put(layout.states, shape.rows, &mut whole.states.iter().copied(), PADDING);
    put(layout.state_starts, shape.rows + 1, &mut whole.row_starts.iter().copied(), tokens as u32);
    put(layout.saved_states, 2 * shape.rows, &mut saved_states.iter().copied(), 0);
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

/// Packs the inputs of a pass of guesses, of which the device makes tokens, positions and slots itself. Nothing is appended to rows.
pub(crate) fn pack_guesses(
    inputs: &StepInputs,
    bounds: &StepBounds,
    shape: StepShape,
    slot: u32,
    words: &mut [u32],
) -> Layout {
    let layout = pack([inputs, inputs], bounds, shape, slot, words);
    words[layout.sample_rows..layout.sample_rows + shape.samples].iter_mut().for_each(|row| *row |= VERIFIES);
    layout
}

#[cfg(test)]
mod tests;
