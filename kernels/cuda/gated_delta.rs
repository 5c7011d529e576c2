//! Gated DeltaNet behind its projections. Kernels: `gated_delta_decode.cu` for tokens in order; `gated_delta_chunks.cu`, which
//! prepares chunks of rows with several tokens, and `gated_delta_states.cu`, which goes through them; `recurrent_history.cu`.

use half::bf16;

use super::error::ensure;
use super::recurrent::{
    CHUNK, NUM_TAPS, Places, RecurrentOp, RecurrentRows, RecurrentStates, RowsKernel, check_slots, store_history,
};
use super::{Arg, CudaError, Launch, Queue, Span};

/// Size of a head of q, k and v.
pub const HEAD_DIM: usize = 128;

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
    pub states: RecurrentStates,
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
        self.states.check(op, shape.state_len())?;
        let aligned = [self.out, self.qkvz, conv].iter().all(|span| span.is_aligned(16));
        ensure!(op, aligned, "out, qkvz or the convolution's weights are not 16-byte aligned");
        Ok(())
    }

    fn raw_weights(&self) -> RawWeights {
        let DeltaWeights { conv, decay, dt_bias, norm, eps } = self.weights;
        let [conv, decay, dt_bias, norm] = [conv, decay, dt_bias, norm].map(Span::address);
        RawWeights { conv, decay, dt_bias, norm, eps, padding: 0 }
    }
}

/// Dynamic shared memory of a block that prepares a chunk: k, q and A.
const CHUNK_SHARED_BYTES: u32 = 54 << 10;
/// Dynamic shared memory of a block that goes through chunks: k twice, q, T, P and factors.
const STATE_SHARED_BYTES: u32 = 72 << 10;

/// `DeltaScratch` of the kernels.
fn places(shape: DeltaShape) -> Places {
    let DeltaShape { num_key_heads: keys, num_value_heads: values } = shape;
    let bytes = keys * 2 * CHUNK * HEAD_DIM * 2 + values * (2 * CHUNK * CHUNK * 2 + 4 * CHUNK * size_of::<f32>());
    Places { bytes }
}

/// Scratch memory for chunks of steps of up to `tokens` tokens.
pub fn scratch_bytes(shape: DeltaShape, tokens: usize) -> usize {
    places(shape).scratch_bytes(tokens)
}

impl RecurrentOp for GatedDelta {
    fn decode(&self, q: &Queue, slots: Span, first_token: usize, rows: usize) -> Result<(), CudaError> {
        self.check(first_token + rows)?;
        check_slots("gated_delta_decode", slots, rows)?;
        let (weights, states, shape) = (self.raw_weights(), self.states.raw(slots), self.shape.words());
        let args = [
            self.out.into(),
            self.qkvz.into(),
            self.ba.into(),
            Arg::Bytes(bytemuck::bytes_of(&weights)),
            Arg::Bytes(bytemuck::bytes_of(&states)),
            Arg::Bytes(bytemuck::bytes_of(&shape)),
            self.positions.into(),
            (first_token as u32).into(),
        ];
        let launch = Launch::new(0, 512).grid(shape[1], rows as u32, 1);
        q.launch("gated_delta_decode_bf16", launch, &args)
    }

    fn rows(&self, q: &Queue, rows: &RecurrentRows, kernel: RowsKernel) -> Result<(), CudaError> {
        let (op, shape) = ("gated_delta_rows", self.shape.words());
        self.check(rows.num_tokens)?;
        rows.check(op)?;
        let saved = kernel.saved(op, rows.count)?;
        let (weights, states) = (self.raw_weights(), self.states.raw(rows.slots));
        let [weights, states] = [bytemuck::bytes_of(&weights), bytemuck::bytes_of(&states)].map(Arg::Bytes);
        let words = Arg::Bytes(bytemuck::bytes_of(&shape));
        let [out, qkvz, ba, positions, starts] =
            [self.out, self.qkvz, self.ba, self.positions, rows.starts].map(Arg::from);
        match kernel {
            RowsKernel::InOrder | RowsKernel::Saving(_) => {
                let args = [out, qkvz, ba, weights, states, words, positions, starts, saved.into()];
                q.launch("gated_delta_rows_bf16", Launch::new(0, 512).grid(shape[1], rows.count as u32, 1), &args)?;
            }
            RowsKernel::Chunks(scratch) => {
                let count = (rows.count as u32).into();
                places(self.shape).each(op, scratch, rows, |places, rows| {
                    let scratch = Arg::Bytes(bytemuck::bytes_of(places));
                    let args = [out, qkvz, ba, weights, states, words, positions, starts, count, scratch];
                    let launch = Launch::new(0, 256).grid(shape[1], places.num_places, 1).shared(CHUNK_SHARED_BYTES);
                    q.launch("gated_delta_chunks_bf16", launch, &args)?;
                    let args = [out, states, words, positions, starts, count, scratch];
                    // Two blocks of four warps have all columns of a head, or four of two, which are faster while there are few.
                    let warps = if 8 * shape[1] * rows <= 3 * q.gpu().num_multiprocessors() { 2 } else { 4 };
                    let launch =
                        Launch::new(0, 32 * warps).grid(8 / warps * shape[1], rows, 1).shared(STATE_SHARED_BYTES);
                    q.launch(&format!("gated_delta_states_bf16_w{warps}"), launch, &args)
                })?;
                let heads = rows.num_tokens * self.shape.num_value_heads;
                let args = [out, qkvz, weights, words, (heads as u32).into()];
                q.launch("gated_delta_norm_bf16", Launch::new(heads.div_ceil(8) as u32, 256), &args)?;
            }
        }
        let channels = self.shape.channels();
        let sizes = [channels, channels + self.shape.num_value_heads * HEAD_DIM];
        store_history(q, self.qkvz, sizes, &self.states, self.positions, rows, saved)
    }
}
