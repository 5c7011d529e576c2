//! The short convolutions of LFM2, behind their projections. Kernel: `short_conv.cu`.

use half::bf16;

use super::error::ensure;
use super::recurrent::{RawStates, RecurrentOp, RecurrentRows, RecurrentStates, RowsKernel, check_slots};
use super::{Arg, CudaError, Launch, Queue, Span};

/// Inputs of the convolution.
pub const SHORT_TAPS: usize = 3;

/// Tokens of a block.
const TILE: usize = 8;
/// Channels of a block.
const BLOCK_CHANNELS: usize = 512;

/// Inputs and outputs of a layer.
#[derive(Debug, Clone, Copy)]
pub struct ShortConv {
    /// `[T, W]` bf16.
    pub out: Span,
    /// `[T, 2 W]` bf16: x and the gates of the input.
    pub inputs: Span,
    /// `[T, W]` bf16: the gates of the output.
    pub gates: Span,
    /// `W`, channels.
    pub width: usize,
    /// `[3, W]` f32.
    pub taps: Span,
    /// `[W]` f32, or null.
    pub bias: Span,
    /// States.
    pub states: RecurrentStates,
    /// `[T]` u32.
    pub positions: Span,
}

/// `ShortConv` as the kernels declare it.
#[repr(C)]
#[derive(Clone, Copy, bytemuck::Pod, bytemuck::Zeroable)]
struct RawShortConv {
    out: u64,
    inputs: u64,
    gates: u64,
    taps: u64,
    bias: u64,
    states: RawStates,
    positions: u64,
    width: u32,
    padding: u32,
}

impl ShortConv {
    /// Floats of a slot of a layer of `width` channels.
    pub fn state_len(width: usize) -> usize {
        (SHORT_TAPS - 1) * width
    }

    fn check(&self, op: &'static str, tokens: usize) -> Result<(), CudaError> {
        let Self { out, inputs, gates, width, taps, bias, states, positions } = *self;
        ensure!(op, width > 0 && width.is_multiple_of(8), "{width} channels are not a multiple of 8");
        ensure!(op, out.count::<bf16>() >= tokens * width, "out is shorter than {tokens} x {width}");
        ensure!(op, inputs.count::<bf16>() >= tokens * 2 * width, "inputs are shorter than {tokens} x {}", 2 * width);
        ensure!(op, gates.count::<bf16>() >= tokens * width, "gates are shorter than {tokens} x {width}");
        ensure!(op, positions.count::<u32>() >= tokens, "positions are fewer than {tokens}");
        ensure!(op, taps.count::<f32>() >= SHORT_TAPS * width, "taps are shorter than {SHORT_TAPS} x {width}");
        ensure!(op, bias.is_null() || bias.count::<f32>() >= width, "the bias is shorter than {width}");
        let aligned = [out, inputs, gates, taps, bias].iter().all(|span| span.is_aligned(16));
        ensure!(op, aligned, "out, inputs, gates or a weight are not 16-byte aligned");
        states.check(op, Self::state_len(width))
    }

    fn raw(&self, slots: Span) -> RawShortConv {
        let Self { out, inputs, gates, width, taps, bias, states, positions } = *self;
        let [out, inputs, gates, taps, bias, positions] =
            [out, inputs, gates, taps, bias, positions].map(Span::address);
        let states = states.raw(slots);
        RawShortConv { out, inputs, gates, taps, bias, states, positions, width: width as u32, padding: 0 }
    }

    fn launch(&self, blocks: usize) -> Launch {
        Launch::new(0, 64).grid(blocks as u32, self.width.div_ceil(BLOCK_CHANNELS) as u32, 1)
    }
}

impl RecurrentOp for ShortConv {
    fn decode(&self, q: &Queue, slots: Span, first_token: usize, rows: usize) -> Result<(), CudaError> {
        let op = "short_conv_decode";
        self.check(op, first_token + rows)?;
        check_slots(op, slots, rows)?;
        let layer = self.raw(slots);
        let args = [Arg::Bytes(bytemuck::bytes_of(&layer)), (first_token as u32).into()];
        q.launch("short_conv_decode_bf16", self.launch(rows), &args)
    }

    fn rows(&self, q: &Queue, rows: &RecurrentRows, kernel: RowsKernel) -> Result<(), CudaError> {
        let op = "short_conv_rows";
        self.check(op, rows.num_tokens)?;
        rows.check(op)?;
        let (layer, saved) = (self.raw(rows.slots), kernel.saved(op, rows.count)?);
        let layer = Arg::Bytes(bytemuck::bytes_of(&layer));
        let args = [layer, rows.starts.into(), (rows.count as u32).into(), saved.into()];
        q.launch("short_conv_rows_bf16", self.launch(rows.num_tokens / TILE + rows.count), &args)
    }
}
