//! Rows of activations in e4m3, for products with weights in e4m3. Kernel: `quantize_rows.cu`.

use half::bf16;

use super::error::ensure;
use super::{CudaError, Launch, Queue, Span};

const OP: &str = "quantize_rows";
/// Columns with the same scale.
pub const FP8_SLICE: usize = 128;
const SLICE: usize = FP8_SLICE;
/// Scales of a slice belong to whole tiles of this number of rows.
const ROW_TILE: usize = 128;
/// Slices of a warp, and rows of a block.
const WARP_SLICES: usize = 4;
const BLOCK_ROWS: usize = 8;

/// Rows `[rows, k]` in e4m3. Each row has a scale for each slice of 128 columns.
#[derive(Debug, Clone, Copy)]
pub struct Fp8Rows {
    /// [`Fp8Rows::codes_bytes`]: `[rows, 128 * slices]`, the columns of a slice in the order of a packed weight.
    pub codes: Span,
    /// [`Fp8Rows::scales_bytes`]: `[slices, rows padded to a multiple of 128]` f32.
    pub scales: Span,
}

impl Fp8Rows {
    /// The rows in a buffer of [`Fp8Rows::bytes`].
    pub fn in_buffer(buffer: Span, rows: usize, k: usize) -> Self {
        let codes = Self::codes_bytes(rows, k);
        Self { codes: buffer.part(0, codes), scales: buffer.part(codes, Self::scales_bytes(rows, k)) }
    }

    /// Bytes of codes and scales.
    pub fn bytes(rows: usize, k: usize) -> usize {
        Self::codes_bytes(rows, k) + Self::scales_bytes(rows, k)
    }

    /// Bytes of the codes.
    pub fn codes_bytes(rows: usize, k: usize) -> usize {
        rows * k.next_multiple_of(SLICE)
    }

    /// Bytes of the scales.
    pub fn scales_bytes(rows: usize, k: usize) -> usize {
        k.div_ceil(SLICE) * Self::pitch(rows) * size_of::<f32>()
    }

    /// Scales from one slice to the next.
    pub(super) fn pitch(rows: usize) -> usize {
        rows.next_multiple_of(ROW_TILE)
    }

    /// Checks that the buffers are long enough and aligned.
    pub(super) fn check(self, rows: usize, k: usize) -> Result<(), CudaError> {
        let Self { codes, scales } = self;
        ensure!(OP, codes.bytes() >= Self::codes_bytes(rows, k), "the codes are shorter than {rows} x {k}");
        ensure!(OP, scales.bytes() >= Self::scales_bytes(rows, k), "the scales are shorter than those of {rows} x {k}");
        ensure!(OP, codes.is_aligned(16) && scales.is_aligned(16), "a buffer is not 16-byte aligned");
        Ok(())
    }
}

/// `out` = `x [rows, k]`, each slice of a row divided by the least power of two with which it fits into e4m3, and rounded.
pub fn quantize_rows(q: &Queue, out: Fp8Rows, x: Span, rows: usize, k: usize) -> Result<(), CudaError> {
    ensure!(OP, rows > 0 && k > 0 && k.is_multiple_of(8), "{rows} rows of {k} columns, which are not a multiple of 8");
    ensure!(OP, x.count::<bf16>() >= rows * k && x.is_aligned(16), "x is shorter than {rows} x {k}, or not aligned");
    out.check(rows, k)?;
    let args = [
        out.codes.into(),
        out.scales.into(),
        x.into(),
        (rows as u32).into(),
        (k as u32).into(),
        (Fp8Rows::pitch(rows) as u32).into(),
    ];
    let slices = k.div_ceil(SLICE);
    let grid = [slices.div_ceil(WARP_SLICES), rows.div_ceil(BLOCK_ROWS)].map(|size| size as u32);
    q.launch("quantize_rows_fp8", Launch::new(0, 256).grid(grid[0], grid[1], 1), &args)
}
