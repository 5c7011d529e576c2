//! Mamba-2 behind its projections. Kernels: `mamba2_decode.cu` for tokens in order, and the norm; `mamba2_chunks.cu`, which prepares
//! chunks of rows with several tokens, and `mamba2_states.cu`, which goes through them; `recurrent_history.cu`.

use half::bf16;

use super::error::ensure;
use super::recurrent::{
    CHUNK, NUM_TAPS, Places, RecurrentOp, RecurrentRows, RecurrentStates, RowsKernel, check_slots, store_history,
};
use super::{Arg, CudaError, Launch, Queue, Span};

/// Size of a head of C and B.
pub const KEY_DIM: usize = 128;
/// Sizes of a head of x that the kernels have.
pub const VALUE_DIMS: [usize; 3] = [64, 80, 128];
/// Elements of a norm, at most.
pub const MAX_NORM_WIDTH: usize = 16_384;

/// Sizes of a layer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MambaShape {
    /// `K`, heads of C and B.
    pub num_key_heads: usize,
    /// `V`, heads of x and of the state; a multiple of `K`.
    pub num_value_heads: usize,
    /// `D`, one of [`VALUE_DIMS`].
    pub value_dim: usize,
}

/// Weights of a layer besides its projections, in f32.
#[derive(Debug, Clone, Copy)]
pub struct MambaWeights {
    /// `[4, C]`.
    pub conv: Span,
    /// `[C]`, or null.
    pub conv_bias: Span,
    /// `[V]`: `-exp(A_log)`.
    pub decay: Span,
    /// `[V]`.
    pub dt_bias: Span,
    /// `[V]`: what of x is added to the output.
    pub skip: Span,
    /// `[V D]`.
    pub norm: Span,
    /// Neighbouring value heads that have one norm together; a divisor of `V`.
    pub norm_heads: usize,
    /// Added to the mean square of the output.
    pub eps: f32,
}

/// Inputs and outputs of a layer.
#[derive(Debug, Clone, Copy)]
pub struct Mamba2 {
    /// `[T, V D]` bf16.
    pub out: Span,
    /// `[T, C + V D]` bf16: C and B of all key heads, x, and the gates of the output.
    pub inputs: Span,
    /// `[T, V]` bf16: steps.
    pub dt: Span,
    /// Sizes.
    pub shape: MambaShape,
    /// Weights.
    pub weights: MambaWeights,
    /// States.
    pub states: RecurrentStates,
    /// `[T]` u32.
    pub positions: Span,
}

impl MambaShape {
    /// `V D`.
    pub fn width(&self) -> usize {
        self.num_value_heads * self.value_dim
    }

    /// `C`, channels of the convolution.
    pub fn channels(&self) -> usize {
        2 * self.num_key_heads * KEY_DIM + self.width()
    }

    /// Floats of a slot of the layer.
    pub fn state_len(&self) -> usize {
        (NUM_TAPS - 1) * self.channels() + self.width() * KEY_DIM
    }

    /// `MambaShape` of the kernels.
    fn words(&self) -> [u32; 3] {
        [self.num_key_heads, self.num_value_heads, self.value_dim].map(|size| size as u32)
    }

    /// `MambaScratch` of the kernels.
    fn places(&self) -> Places {
        let keys = 2 * CHUNK * KEY_DIM * size_of::<bf16>() + CHUNK * CHUNK * size_of::<f32>();
        Places { bytes: self.num_key_heads * keys + self.num_value_heads * 4 * CHUNK * size_of::<f32>() }
    }

    /// Scratch memory for chunks of steps of up to `tokens` tokens.
    pub fn scratch_bytes(&self, tokens: usize) -> usize {
        self.places().scratch_bytes(tokens)
    }
}

/// `MambaWeights` of the kernels.
#[repr(C)]
#[derive(Clone, Copy, bytemuck::Pod, bytemuck::Zeroable)]
struct RawWeights {
    conv: u64,
    conv_bias: u64,
    decay: u64,
    dt_bias: u64,
    skip: u64,
    norm: u64,
}

/// Dynamic shared memory of a block that prepares a chunk: C and B.
const CHUNK_SHARED_BYTES: u32 = 34 << 10;
/// Dynamic shared memory of a block that goes through chunks: B and factors twice, C, their products and P.
const STATE_SHARED_BYTES: u32 = 80 << 10;

impl Mamba2 {
    fn check(&self, tokens: usize) -> Result<(), CudaError> {
        let (op, shape) = ("mamba2", self.shape);
        let MambaShape { num_key_heads: keys, num_value_heads: values, value_dim } = shape;
        ensure!(op, keys > 0 && values > 0 && values.is_multiple_of(keys), "{values} value heads of {keys} key heads");
        ensure!(op, VALUE_DIMS.contains(&value_dim), "heads of {value_dim}; {VALUE_DIMS:?}");
        let (channels, width) = (shape.channels(), shape.width());
        ensure!(op, self.out.count::<bf16>() >= tokens * width, "out is shorter than {tokens} x {width}");
        let stride = channels + width;
        ensure!(op, self.inputs.count::<bf16>() >= tokens * stride, "inputs are shorter than {tokens} x {stride}");
        ensure!(op, self.dt.count::<bf16>() >= tokens * values, "dt is shorter than {tokens} x {values}");
        ensure!(op, self.positions.count::<u32>() >= tokens, "positions are fewer than {tokens}");
        let MambaWeights { conv, conv_bias, decay, dt_bias, skip, norm, norm_heads, .. } = self.weights;
        let sizes = [(conv, NUM_TAPS * channels), (decay, values), (dt_bias, values), (skip, values), (norm, width)];
        ensure!(op, sizes.iter().all(|(span, len)| span.count::<f32>() >= *len), "a weight is too short");
        let has_bias = conv_bias.is_null() || conv_bias.count::<f32>() >= channels;
        ensure!(op, has_bias, "the bias of the convolution is shorter than {channels}");
        let is_divisor = norm_heads > 0 && values.is_multiple_of(norm_heads);
        ensure!(op, is_divisor, "norms of {norm_heads} of {values} heads");
        let norm_width = norm_heads * value_dim;
        ensure!(op, norm_width <= MAX_NORM_WIDTH, "norms of {norm_width} elements; up to {MAX_NORM_WIDTH}");
        self.states.check(op, shape.state_len())?;
        let aligned = [self.out, self.inputs, conv, conv_bias, norm].iter().all(|span| span.is_aligned(16));
        ensure!(op, aligned, "out, inputs, or the weights of the convolution or norm are not 16-byte aligned");
        Ok(())
    }

    fn raw_weights(&self) -> RawWeights {
        let MambaWeights { conv, conv_bias, decay, dt_bias, skip, norm, .. } = self.weights;
        let [conv, conv_bias, decay, dt_bias, skip, norm] =
            [conv, conv_bias, decay, dt_bias, skip, norm].map(Span::address);
        RawWeights { conv, conv_bias, decay, dt_bias, skip, norm }
    }

    /// Gates and norms the outputs of `tokens` tokens from `first_token` on, but not of those before the first of `row_starts`.
    fn norm(&self, q: &Queue, first_token: usize, tokens: usize, row_starts: Span) -> Result<(), CudaError> {
        let MambaWeights { norm, norm_heads, eps, .. } = self.weights;
        let (width, shape) = (norm_heads * self.shape.value_dim, self.shape.words());
        let args = [
            self.out.into(),
            self.inputs.into(),
            norm.into(),
            Arg::Bytes(bytemuck::bytes_of(&shape)),
            (width as u32).into(),
            eps.into(),
            (first_token as u32).into(),
            row_starts.into(),
        ];
        let threads = width.div_ceil(8).next_multiple_of(32).min(1024) as u32;
        let norms = (self.shape.num_value_heads / norm_heads) as u32;
        q.launch("mamba2_norm_bf16", Launch::new(0, threads).grid(tokens as u32, norms, 1), &args)
    }
}

impl RecurrentOp for Mamba2 {
    fn decode(&self, q: &Queue, slots: Span, first_token: usize, rows: usize) -> Result<(), CudaError> {
        self.check(first_token + rows)?;
        check_slots("mamba2_decode", slots, rows)?;
        let (weights, states, shape) = (self.raw_weights(), self.states.raw(slots), self.shape.words());
        let args = [
            self.out.into(),
            self.inputs.into(),
            self.dt.into(),
            Arg::Bytes(bytemuck::bytes_of(&weights)),
            Arg::Bytes(bytemuck::bytes_of(&states)),
            Arg::Bytes(bytemuck::bytes_of(&shape)),
            self.positions.into(),
            (first_token as u32).into(),
        ];
        let launch = Launch::new(0, 256).grid(shape[1], rows as u32, 1);
        q.launch(&format!("mamba2_decode_bf16_d{}", self.shape.value_dim), launch, &args)?;
        self.norm(q, first_token, rows, Span::NULL)
    }

    fn rows(&self, q: &Queue, rows: &RecurrentRows, kernel: RowsKernel) -> Result<(), CudaError> {
        let (op, shape) = ("mamba2_rows", self.shape.words());
        self.check(rows.num_tokens)?;
        rows.check(op)?;
        let saved = kernel.saved(op, rows.count)?;
        let (weights, states) = (self.raw_weights(), self.states.raw(rows.slots));
        let [weights, states] = [bytemuck::bytes_of(&weights), bytemuck::bytes_of(&states)].map(Arg::Bytes);
        let words = Arg::Bytes(bytemuck::bytes_of(&shape));
        let [out, inputs, dt, positions, starts] =
            [self.out, self.inputs, self.dt, self.positions, rows.starts].map(Arg::from);
        match kernel {
            RowsKernel::InOrder | RowsKernel::Saving(_) => {
                let args = [out, inputs, dt, weights, states, words, positions, starts, saved.into()];
                let launch = Launch::new(0, 256).grid(shape[1], rows.count as u32, 1);
                q.launch(&format!("mamba2_rows_bf16_d{}", self.shape.value_dim), launch, &args)?;
            }
            RowsKernel::Chunks(scratch) => {
                let count = (rows.count as u32).into();
                let width = self.shape.width() as u32;
                let blocks = shape[0] + width.div_ceil(128) + shape[1].div_ceil(8);
                self.shape.places().each(op, scratch, rows, |places, rows| {
                    let scratch = Arg::Bytes(bytemuck::bytes_of(places));
                    let args = [out, inputs, dt, weights, states, words, positions, starts, count, scratch];
                    let launch = Launch::new(0, 256).grid(blocks, places.num_places, 1).shared(CHUNK_SHARED_BYTES);
                    q.launch("mamba2_chunks_bf16", launch, &args)?;
                    let args = [out, weights, states, words, positions, starts, count, scratch];
                    // More blocks of fewer warps while there are few.
                    let parts = self.shape.value_dim as u32 / 16;
                    let warps = if parts * shape[1] * rows <= 3 * q.gpu().num_multiprocessors() { 2 } else { 4 };
                    let launch = Launch::new(0, 32 * warps).grid(parts.div_ceil(warps) * shape[1], rows, 1);
                    q.launch(&format!("mamba2_states_bf16_w{warps}"), launch.shared(STATE_SHARED_BYTES), &args)
                })?;
            }
        }
        self.norm(q, 0, rows.num_tokens, rows.starts)?;
        let channels = self.shape.channels();
        let sizes = [channels, channels + self.shape.width()];
        store_history(q, self.inputs, sizes, &self.states, self.positions, rows, saved)
    }
}
