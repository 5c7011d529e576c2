//! What layers with a recurrent state have in common: the slots of states, the two ways in which rows are computed, places for
//! chunks, and the history of their convolutions (`recurrent_history.cu`).

use half::bf16;

use super::error::ensure;
use super::{Arg, CudaError, Launch, Queue, Span};

/// Inputs of a convolution, and rows of its history.
pub const NUM_TAPS: usize = 4;
/// In the slots of rows: the row is padding.
pub const NO_SLOT: u32 = u32::MAX;

/// Positions of a chunk.
pub(super) const CHUNK: usize = 64;
/// Places for chunks that [`Places::scratch_bytes`] has at most: 4 096 tokens of a row, 90 MB for the heads of Qwen3.5 27B
/// (kernels/README.md).
const MAX_PLACES: usize = 66;

/// A layer with its inputs, outputs and states, behind its projections.
pub trait RecurrentOp {
    /// Tokens `first_token..` of rows that have one token each. `slots` `[rows]` u32 are below the number of slots and differ, or
    /// are [`NO_SLOT`].
    ///
    /// # Errors
    /// Returns an error if a buffer is too short or not aligned, or the driver refuses a launch.
    fn decode(&self, q: &Queue, slots: Span, first_token: usize, rows: usize) -> Result<(), CudaError>;

    /// Tokens of rows that have several.
    ///
    /// # Errors
    /// As [`RecurrentOp::decode`].
    fn rows(&self, q: &Queue, rows: &RecurrentRows, kernel: RowsKernel) -> Result<(), CudaError>;
}

/// Rows of several tokens: tokens `0..num_tokens` of a step.
#[derive(Debug, Clone, Copy)]
pub struct RecurrentRows {
    /// `[rows]` u32, below the number of slots; they differ.
    pub slots: Span,
    /// `[rows + 1]` u32: the first token of each row.
    pub starts: Span,
    /// Tokens of all rows.
    pub num_tokens: usize,
    /// Number of rows.
    pub count: usize,
}

impl RecurrentRows {
    pub(super) fn check(&self, op: &'static str) -> Result<(), CudaError> {
        let Self { slots, starts, count, .. } = *self;
        check_slots(op, slots, count)?;
        ensure!(op, starts.count::<u32>() > count, "row starts are fewer than {}", count + 1);
        Ok(())
    }
}

/// Refuses a number of rows that no launch can have, or that has too few slots.
pub(super) fn check_slots(op: &'static str, slots: Span, rows: usize) -> Result<(), CudaError> {
    ensure!(op, rows > 0 && rows <= 65535, "{rows} rows; 1 to 65535");
    ensure!(op, slots.count::<u32>() >= rows, "slots are fewer than {rows}");
    Ok(())
}

/// How rows of several tokens are computed.
#[derive(Debug, Clone, Copy)]
pub enum RowsKernel {
    /// Token by token, in fp32.
    InOrder,
    /// The same, and states within rows are saved: `[rows, 2]` u32, for each row the number of its tokens before, 0 for none, and
    /// the slot that is written, which no row of the step has. Rows behind the last token are padding; tokens behind it have outputs
    /// of 0 if there are as many rows as tokens.
    Saving(Span),
    /// In chunks of 64 positions, on tensor cores. The memory keeps what does not depend on the state, for as many chunks at a
    /// time as fit; the layer's `scratch_bytes` are enough, and no result depends on their number.
    Chunks(Span),
}

impl RowsKernel {
    /// The states that are saved within `rows` rows; null if there are none.
    pub(super) fn saved(self, op: &'static str, rows: usize) -> Result<Span, CudaError> {
        let Self::Saving(saved) = self else { return Ok(Span::NULL) };
        ensure!(op, saved.count::<u32>() >= 2 * rows, "saved states are fewer than {rows}");
        Ok(saved)
    }
}

/// States of one layer.
#[derive(Debug, Clone, Copy)]
pub struct RecurrentStates {
    /// The layer's part of the first slot, up to the end of its part of the last.
    pub memory: Span,
    /// Floats from one slot to the next.
    pub pitch: usize,
    /// Number of slots.
    pub num_slots: usize,
}

impl RecurrentStates {
    pub(super) fn check(&self, op: &'static str, state_len: usize) -> Result<(), CudaError> {
        let Self { memory, pitch, num_slots } = *self;
        let needed = num_slots.saturating_sub(1) * pitch + state_len;
        ensure!(op, num_slots > 0 && pitch >= state_len, "{num_slots} slots of {pitch} floats");
        ensure!(op, memory.count::<f32>() >= needed, "states are shorter than {needed}");
        ensure!(op, memory.is_aligned(16) && pitch.is_multiple_of(4), "states are not 16-byte aligned");
        Ok(())
    }

    pub(super) fn raw(&self, slots: Span) -> RawStates {
        RawStates { base: self.memory.address(), pitch: self.pitch as u64, slots: slots.address() }
    }
}

/// `RecurrentStates` of the kernels.
#[repr(C)]
#[derive(Clone, Copy, bytemuck::Pod, bytemuck::Zeroable)]
pub(super) struct RawStates {
    base: u64,
    pitch: u64,
    slots: u64,
}

/// Chunks of rows that are prepared at a time, each in a place of the scratch memory.
#[derive(Debug, Clone, Copy)]
pub(super) struct Places {
    /// Bytes of a place.
    pub(super) bytes: usize,
}

/// `ChunkPlaces` of the kernels.
#[repr(C)]
#[derive(Clone, Copy, bytemuck::Pod, bytemuck::Zeroable)]
pub(super) struct RawPlaces {
    base: u64,
    first_place: u32,
    pub(super) num_places: u32,
}

impl Places {
    /// Scratch memory for chunks of steps of up to `tokens` tokens.
    pub(super) fn scratch_bytes(self, tokens: usize) -> usize {
        Self::count(tokens, 1).min(MAX_PLACES) * self.bytes
    }

    /// Calls `launch` for as many places at a time as `scratch` has, with the number of rows that may have some of them.
    pub(super) fn each(
        self,
        op: &'static str,
        scratch: Span,
        rows: &RecurrentRows,
        mut launch: impl FnMut(&RawPlaces, u32) -> Result<(), CudaError>,
    ) -> Result<(), CudaError> {
        let (bytes, found) = (self.bytes, scratch.bytes());
        ensure!(op, found >= bytes, "scratch memory of {found} bytes; a chunk needs {bytes}");
        ensure!(op, scratch.is_aligned(16), "scratch memory is not 16-byte aligned");
        let all = Self::count(rows.num_tokens, rows.count);
        let most = (found / bytes).min(65535);
        for first in (0..all).step_by(most) {
            let num_places = most.min(all - first);
            let (first_place, num_places) = (first as u32, num_places as u32);
            // Every row but the first has at least two places.
            let rows = rows.count.min(num_places as usize / 2 + 1) as u32;
            launch(&RawPlaces { base: scratch.address(), first_place, num_places }, rows)?;
        }
        Ok(())
    }

    /// Places for the chunks of rows that have `tokens` tokens together: the kernels give row `r` the places from
    /// `row_starts[r] / 64 + 2 r` on.
    fn count(tokens: usize, rows: usize) -> usize {
        tokens / CHUNK + 2 * rows
    }
}

/// Stores the last inputs of the convolution of rows of several tokens, and those before states that are `saved`. The first `channels`
/// of the `stride` columns of `inputs` `[T, stride]` bf16 are mixed.
pub(super) fn store_history(
    q: &Queue,
    inputs: Span,
    [channels, stride]: [usize; 2],
    states: &RecurrentStates,
    positions: Span,
    rows: &RecurrentRows,
    saved: Span,
) -> Result<(), CudaError> {
    let op = "recurrent_history";
    ensure!(op, inputs.count::<bf16>() >= rows.num_tokens * stride, "inputs are shorter than {}", rows.num_tokens);
    let (states, sizes) = (states.raw(rows.slots), [channels as u32, stride as u32]);
    let args = [
        inputs.into(),
        Arg::Bytes(bytemuck::bytes_of(&states)),
        Arg::Bytes(bytemuck::bytes_of(&sizes)),
        positions.into(),
        rows.starts.into(),
        saved.into(),
    ];
    let blocks = channels.div_ceil(256) as u32;
    q.launch("recurrent_history_bf16", Launch::new(0, 256).grid(blocks, rows.count as u32, 1), &args)
}
