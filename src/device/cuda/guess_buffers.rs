//! Buffers of guesses, and what is known of the passes behind a step.

use std::sync::Arc;

use engine::{RowId, TokenId};
use kernels::cuda::guess::{FollowRow, Results};
use kernels::cuda::sample::Outputs;
use kernels::cuda::{CudaError, DeviceBuffer, Gpu, PinnedBuffer, Span};
use ops::{DrafterKind, SampleInput};

use super::drafters::pair_shape;
use super::queued::Current;
use super::step::{Layout, StepShape, StepSpans, TableShape};

/// Words of a [`FollowRow`].
pub(super) const FOLLOW_WORDS: usize = size_of::<FollowRow>() / 4;

/// Buffers of guesses, and the passes behind the current step.
pub(super) struct Guesses {
    pub(super) kind: DrafterKind,
    /// Inputs of passes: those of a decode, then `wanted`, `index`, rows to follow, and for a draft model those of a pass of pairs.
    pub(super) block: DeviceBuffer,
    /// The same on the host for each step that may be queued.
    pub(super) pinned: Vec<PinnedBuffer>,
    /// `[T]` u32: the tokens that follow those of the step.
    pub(super) followed: DeviceBuffer,
    /// For a draft model `[T]` u32: the tokens of the step.
    pub(super) kept: DeviceBuffer,
    /// `[G]` u32.
    pub(super) made: DeviceBuffer,
    /// Outputs of one pass: a slot, and its number, 0.
    pub(super) guessed: DeviceBuffer,
    pub(super) zero: DeviceBuffer,
    pub(super) results: PinnedBuffer,
    pub(super) max_rows: usize,
    pub(super) most: usize,
    /// For each row, what was guessed behind its last step, if the next step has not begun.
    pub(super) last: Vec<Vec<TokenId>>,
    pub(super) passes: Option<Passes>,
}

/// The passes behind the current step.
pub(super) struct Passes {
    /// Slot of the step, and the samples of its plan with their indices in the outputs.
    pub(super) slot: usize,
    pub(super) samples: Vec<(usize, SampleInput)>,
    /// The rows that guess.
    pub(super) rows: Vec<RowId>,
    /// Their number with padding.
    pub(super) count: usize,
    /// The largest number of guesses.
    pub(super) most: usize,
    pub(super) num_done: usize,
    /// Whether the first pass is recorded, as the step is.
    pub(super) is_recorded: bool,
    /// The inputs of further passes.
    pub(super) spans: StepSpans,
    pub(super) wanted: Span,
    pub(super) index: Span,
    pub(super) follow: Span,
    /// The step, and a draft model's first pass if it has two tokens of each row.
    pub(super) step: Current,
    pub(super) pair: Option<Current>,
}

/// The arrays of a block for `count` rows that guess and `rows` of the step: the inputs of a decode, and the first words of `wanted`,
/// `index` and the rows to follow.
pub(super) fn arrays(count: usize, tables: TableShape) -> (Layout, [usize; 3]) {
    let layout = Layout::new(StepShape::decode(count, false), tables);
    let wanted = layout.words;
    let index = (wanted + 2 * count).next_multiple_of(16);
    (layout, [wanted, index, (index + count).next_multiple_of(16)])
}

/// The first word behind the arrays for `rows` of the step.
pub(super) fn pairs_at(follow: usize, rows: usize) -> usize {
    (follow + rows * FOLLOW_WORDS).next_multiple_of(16)
}

/// Words of a block.
fn block_words(kind: DrafterKind, max_rows: usize, tables: TableShape) -> usize {
    let (_, [.., follow]) = arrays(max_rows, tables);
    let pairs = match kind {
        DrafterKind::Head => 0,
        DrafterKind::Model => Layout::new(pair_shape(max_rows / 2), tables).words,
    };
    pairs_at(follow, max_rows) + pairs
}

fn kept_tokens(kind: DrafterKind, max_tokens: usize) -> usize {
    if kind == DrafterKind::Model { max_tokens } else { 0 }
}

impl Guesses {
    /// Bytes on the GPU.
    pub(super) fn bytes(kind: DrafterKind, max_tokens: usize, max_rows: usize, tables: TableShape) -> usize {
        let tokens = max_tokens + kept_tokens(kind, max_tokens);
        4 * (block_words(kind, max_rows, tables) + tokens + max_rows + 1) + Outputs::slot_bytes(max_rows, 0)
    }

    /// For steps of up to `max_tokens` tokens and `max_rows` rows, padding included, with up to `most` guesses of each; as many as
    /// `num_slots` are queued.
    pub(super) fn new(
        gpu: &Arc<Gpu>,
        kind: DrafterKind,
        [max_tokens, max_rows, most, num_slots]: [usize; 4],
        tables: TableShape,
    ) -> Result<Self, CudaError> {
        let words = block_words(kind, max_rows, tables);
        let pinned = |bytes: usize| PinnedBuffer::new(gpu, bytes);
        Ok(Self {
            kind,
            block: DeviceBuffer::with_count::<u32>(gpu, words)?,
            pinned: (0..num_slots).map(|_| pinned(words * 4)).collect::<Result<_, _>>()?,
            followed: DeviceBuffer::with_count::<u32>(gpu, max_tokens)?,
            kept: DeviceBuffer::with_count::<u32>(gpu, kept_tokens(kind, max_tokens))?,
            made: DeviceBuffer::with_count::<u32>(gpu, max_rows)?,
            guessed: DeviceBuffer::new(gpu, Outputs::slot_bytes(max_rows, 0))?,
            zero: DeviceBuffer::from_slice(gpu, &[0u32])?,
            results: pinned(num_slots * Results::slot_bytes(max_rows, most))?,
            max_rows,
            most,
            last: vec![Vec::new(); max_rows],
            passes: None,
        })
    }

    /// The guesses of the step in `slot`, which has completed.
    pub(super) fn read(&mut self, slot: usize, rows: &[RowId]) -> Vec<(RowId, Vec<TokenId>)> {
        let bytes = Results::slot_bytes(self.max_rows, self.most);
        let words: &[u32] = bytemuck::cast_slice(&self.results[slot * bytes..(slot + 1) * bytes]);
        let of_row = |(&row, words): (&RowId, &[u32])| {
            let tokens = words[1..].iter().take(words[0] as usize);
            (row, tokens.map(|&token| TokenId(token)).collect())
        };
        let found: Vec<_> = rows.iter().zip(words.chunks_exact(1 + self.most)).map(of_row).collect();
        found.iter().for_each(|(row, tokens)| self.last[row.0 as usize].clone_from(tokens));
        found
    }

    /// Takes what was guessed behind the last step of a row; returns whether `drafts` are the first of these guesses.
    pub(super) fn take_last(&mut self, row: RowId, drafts: &[u32]) -> bool {
        let last = std::mem::take(&mut self.last[row.0 as usize]);
        drafts.len() <= last.len() && drafts.iter().zip(&last).all(|(&draft, guess)| draft == guess.0)
    }
}
