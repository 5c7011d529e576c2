//! Gated DeltaNet behind its projections. Kernels: `gated_delta_decode.cu` for tokens in order; `gated_delta_chunks.cu`, which
//! prepares chunks of rows with several tokens, and `gated_delta_states.cu`, which goes through them.

use half::bf16;

use super::error::ensure;
use super::{Arg, CudaError, Launch, Queue, Span};

/// Size of a head of q, k and v.
pub const HEAD_DIM: usize = 128;
/// Inputs of the convolution.
pub const NUM_TAPS: usize = 4;
/// In the slots of rows: the row is padding.
pub const NO_SLOT: u32 = u32::MAX;

/// Positions of a chunk.
const CHUNK: usize = 64;
/// Places for chunks that [`scratch_bytes`] has at most: 4 096 tokens of a row, 90 MB for the heads of Qwen3.5 27B (kernels/README.md).
const MAX_PLACES: usize = 66;

/// Heads of a layer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DeltaShape {
    /// `K`, heads of q and k.
    pub num_key_heads: usize,
    /// `V`, heads of v and of the state; a multiple of `K`.
    pub num_value_heads: usize,
}

/// Weights of a layer besides its projections, in f32.
#[derive(Debug, Clone, Copy)]
pub struct DeltaWeights {
    /// `[4, C]`.
    pub conv: Span,
    /// `[V]`: `-exp(A_log)`.
    pub decay: Span,
    /// `[V]`.
    pub dt_bias: Span,
    /// `[128]`: norm of each head of the output.
    pub norm: Span,
    /// Added to the mean square of the output.
    pub eps: f32,
}

/// States of one layer.
#[derive(Debug, Clone, Copy)]
pub struct DeltaStates {
    /// The layer's part of the first slot, up to the end of its part of the last.
    pub memory: Span,
    /// Floats from one slot to the next.
    pub pitch: usize,
    /// Number of slots.
    pub num_slots: usize,
}

/// Inputs and outputs of a layer.
#[derive(Debug, Clone, Copy)]
pub struct GatedDelta {
    /// `[T, 128 V]` bf16.
    pub out: Span,
    /// `[T, C + 128 V]` bf16: q, k, v, and the gates of the output.
    pub qkvz: Span,
    /// `[T, 2 V]` bf16: learning rates, then steps.
    pub ba: Span,
    /// Heads.
    pub shape: DeltaShape,
    /// Weights.
    pub weights: DeltaWeights,
    /// States.
    pub states: DeltaStates,
    /// `[T]` u32.
    pub positions: Span,
}

impl DeltaShape {
    /// `C`, channels of the convolution.
    pub fn channels(&self) -> usize {
        (2 * self.num_key_heads + self.num_value_heads) * HEAD_DIM
    }

    /// Floats of a slot of the layer.
    pub fn state_len(&self) -> usize {
        (NUM_TAPS - 1) * self.channels() + self.num_value_heads * HEAD_DIM * HEAD_DIM
    }

    fn words(&self) -> [u32; 2] {
        [self.num_key_heads as u32, self.num_value_heads as u32]
    }
}

/// Structures as the kernels declare them.
#[repr(C)]
#[derive(Clone, Copy, bytemuck::Pod, bytemuck::Zeroable)]
struct RawWeights {
    conv: u64,
    decay: u64,
    dt_bias: u64,
    norm: u64,
    eps: f32,
    padding: u32,
}

#[repr(C)]
#[derive(Clone, Copy, bytemuck::Pod, bytemuck::Zeroable)]
struct RawStates {
    base: u64,
    pitch: u64,
    slots: u64,
}

#[repr(C)]
#[derive(Clone, Copy, bytemuck::Pod, bytemuck::Zeroable)]
struct RawScratch {
    base: u64,
    first_place: u32,
    num_places: u32,
}

impl GatedDelta {
    fn check(&self, tokens: usize) -> Result<(), CudaError> {
        let (op, shape) = ("gated_delta", self.shape);
        let DeltaShape { num_key_heads: keys, num_value_heads: values } = shape;
        ensure!(op, keys > 0 && values > 0 && values.is_multiple_of(keys), "{values} value heads of {keys} key heads");
        let (channels, inner) = (shape.channels(), values * HEAD_DIM);
        ensure!(op, self.out.count::<bf16>() >= tokens * inner, "out is shorter than {tokens} x {inner}");
        let width = channels + inner;
        ensure!(op, self.qkvz.count::<bf16>() >= tokens * width, "qkvz is shorter than {tokens} x {width}");
        ensure!(op, self.ba.count::<bf16>() >= tokens * 2 * values, "ba is shorter than {tokens} x {}", 2 * values);
        ensure!(op, self.positions.count::<u32>() >= tokens, "positions are fewer than {tokens}");
        let DeltaWeights { conv, decay, dt_bias, norm, .. } = self.weights;
        let sizes = [(conv, NUM_TAPS * channels), (decay, values), (dt_bias, values), (norm, HEAD_DIM)];
        ensure!(op, sizes.iter().all(|(span, len)| span.count::<f32>() >= *len), "a weight is too short");
        let DeltaStates { memory, pitch, num_slots } = self.states;
        let needed = num_slots.saturating_sub(1) * pitch + shape.state_len();
        ensure!(op, num_slots > 0 && pitch >= shape.state_len(), "{num_slots} slots of {pitch} floats");
        ensure!(op, memory.count::<f32>() >= needed, "states are shorter than {needed}");
        ensure!(op, memory.is_aligned(16) && pitch.is_multiple_of(4), "states are not 16-byte aligned");
        let aligned = [self.out, self.qkvz, conv].iter().all(|span| span.is_aligned(16));
        ensure!(op, aligned, "out, qkvz or the convolution's weights are not 16-byte aligned");
        Ok(())
    }

    fn raw(&self, slots: Span) -> (RawWeights, RawStates) {
        let DeltaWeights { conv, decay, dt_bias, norm, eps } = self.weights;
        let [conv, decay, dt_bias, norm] = [conv, decay, dt_bias, norm].map(Span::address);
        let (base, pitch, slots) = (self.states.memory.address(), self.states.pitch as u64, slots.address());
        (RawWeights { conv, decay, dt_bias, norm, eps, padding: 0 }, RawStates { base, pitch, slots })
    }
}

/// Tokens `first_token..` of rows that have one token each. `slots` `[rows]` u32 are below the number of slots and differ, or
/// are [`NO_SLOT`].
pub fn gated_delta_decode(
    q: &Queue,
    delta: &GatedDelta,
    slots: Span,
    first_token: usize,
    rows: usize,
) -> Result<(), CudaError> {
    let op = "gated_delta_decode";
    delta.check(first_token + rows)?;
    ensure!(op, rows > 0 && rows <= 65535, "{rows} rows; 1 to 65535");
    ensure!(op, slots.count::<u32>() >= rows, "slots are fewer than {rows}");
    let (weights, states) = delta.raw(slots);
    let shape = delta.shape.words();
    let args = [
        delta.out.into(),
        delta.qkvz.into(),
        delta.ba.into(),
        Arg::Bytes(bytemuck::bytes_of(&weights)),
        Arg::Bytes(bytemuck::bytes_of(&states)),
        Arg::Bytes(bytemuck::bytes_of(&shape)),
        delta.positions.into(),
        (first_token as u32).into(),
    ];
    let launch = Launch::new(0, 512).grid(shape[1], rows as u32, 1);
    q.launch("gated_delta_decode_bf16", launch, &args)
}

/// Dynamic shared memory of a block that prepares a chunk: k, q and A.
const CHUNK_SHARED_BYTES: u32 = 54 << 10;
/// Dynamic shared memory of a block that goes through chunks: k twice, q, T, P and factors.
const STATE_SHARED_BYTES: u32 = 72 << 10;

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
    /// time as fit; [`scratch_bytes`] are enough, and no result depends on their number.
    Chunks(Span),
}

/// Bytes of a chunk in the scratch memory, `DeltaScratch` of the kernels.
fn place_bytes(shape: DeltaShape) -> usize {
    let DeltaShape { num_key_heads: keys, num_value_heads: values } = shape;
    keys * 2 * CHUNK * HEAD_DIM * 2 + values * (2 * CHUNK * CHUNK * 2 + 4 * CHUNK * size_of::<f32>())
}

/// Scratch memory for chunks of steps of up to `tokens` tokens.
pub fn scratch_bytes(shape: DeltaShape, tokens: usize) -> usize {
    places(tokens, 1).min(MAX_PLACES) * place_bytes(shape)
}

/// Places for the chunks of rows that have `tokens` tokens together: the kernels give row `r` the places from
/// `row_starts[r] / 64 + 2 r` on.
fn places(tokens: usize, rows: usize) -> usize {
    tokens / CHUNK + 2 * rows
}

/// Tokens `0..tokens` of rows that have several, from `row_starts` `[rows + 1]` u32. `slots` `[rows]` u32 are below the number
/// of slots and differ.
pub fn gated_delta_rows(
    q: &Queue,
    delta: &GatedDelta,
    [slots, row_starts]: [Span; 2],
    tokens: usize,
    rows: usize,
    kernel: RowsKernel,
) -> Result<(), CudaError> {
    let op = "gated_delta_rows";
    delta.check(tokens)?;
    ensure!(op, rows > 0 && rows <= 65535, "{rows} rows; 1 to 65535");
    ensure!(op, slots.count::<u32>() >= rows, "slots are fewer than {rows}");
    ensure!(op, row_starts.count::<u32>() > rows, "row starts are fewer than {}", rows + 1);
    let (weights, states) = delta.raw(slots);
    let shape = delta.shape.words();
    let [weights, states] = [bytemuck::bytes_of(&weights), bytemuck::bytes_of(&states)].map(Arg::Bytes);
    let words = Arg::Bytes(bytemuck::bytes_of(&shape));
    let (positions, starts): (Arg, Arg) = (delta.positions.into(), row_starts.into());
    let count = (rows as u32).into();
    let saved = if let RowsKernel::Saving(saved) = kernel { saved } else { Span::NULL };
    match kernel {
        RowsKernel::InOrder | RowsKernel::Saving(_) => {
            let is_long = saved.is_null() || saved.count::<u32>() >= 2 * rows;
            ensure!(op, is_long, "saved states are fewer than {rows}");
            let [out, qkvz, ba] = [delta.out, delta.qkvz, delta.ba].map(Arg::from);
            let args = [out, qkvz, ba, weights, states, words, positions, starts, saved.into()];
            q.launch("gated_delta_rows_bf16", Launch::new(0, 512).grid(shape[1], rows as u32, 1), &args)?;
        }
        RowsKernel::Chunks(scratch) => {
            let bytes = place_bytes(delta.shape);
            ensure!(op, scratch.bytes() >= bytes, "scratch memory of {} bytes; a chunk needs {bytes}", scratch.bytes());
            ensure!(op, scratch.is_aligned(16), "scratch memory is not 16-byte aligned");
            let all = places(tokens, rows);
            let most = (scratch.bytes() / bytes).min(65535);
            for first in (0..all).step_by(most) {
                let num_places = most.min(all - first);
                let scratch =
                    RawScratch { base: scratch.address(), first_place: first as u32, num_places: num_places as u32 };
                let scratch = Arg::Bytes(bytemuck::bytes_of(&scratch));
                let [out, qkvz, ba] = [delta.out, delta.qkvz, delta.ba].map(Arg::from);
                let args = [out, qkvz, ba, weights, states, words, positions, starts, count, scratch];
                let launch = Launch::new(0, 256).grid(shape[1], num_places as u32, 1).shared(CHUNK_SHARED_BYTES);
                q.launch("gated_delta_chunks_bf16", launch, &args)?;
                let args = [out, states, words, positions, starts, count, scratch];
                // Every row but the first has at least two places.
                let rows = rows.min(num_places / 2 + 1) as u32;
                // Two blocks of four warps have all columns of a head, or four of two, which are faster while there are few.
                let warps = if 8 * shape[1] * rows <= 3 * q.gpu().num_multiprocessors() { 2 } else { 4 };
                let launch = Launch::new(0, 32 * warps).grid(8 / warps * shape[1], rows, 1).shared(STATE_SHARED_BYTES);
                q.launch(&format!("gated_delta_states_bf16_w{warps}"), launch, &args)?;
            }
            let heads = tokens * delta.shape.num_value_heads;
            let args = [delta.out.into(), delta.qkvz.into(), weights, words, (heads as u32).into()];
            q.launch("gated_delta_norm_bf16", Launch::new(heads.div_ceil(8) as u32, 256), &args)?;
        }
    }
    let args = [delta.qkvz.into(), states, words, positions, starts, saved.into()];
    let blocks = delta.shape.channels().div_ceil(256) as u32;
    q.launch("gated_delta_history_bf16", Launch::new(0, 256).grid(blocks, rows as u32, 1), &args)
}
