//! bf16 weight matrices copied to panels, and inputs in the corresponding layout.
//!
//! A panel contains 32 outputs: for each pair of adjacent elements of `K`, the pairs of all its outputs, in the layout
//! of instructions that multiply bf16 pairs. So a matrix is read sequentially, and the sums of 32 outputs are in the
//! lanes of two registers.

use crate::cpu::packed::bf16_bits;
use crate::cpu::shared::SharedOut;
use crate::cpu::{Buffer, Isa, Matrix, Pool, WeightType};

/// Number of outputs in a panel.
pub(crate) const PANEL: usize = 32;
/// Number of pairs of one row that are stored together.
pub(crate) const RUN: usize = 16;
/// Maximum number of rows of a tile. Each needs two registers for its sums; the others are for weights and an input.
pub(crate) const TILE_ROWS: usize = 12;

/// A bf16 matrix `[N, K]` in panels.
pub struct PanelMatrix {
    pub(super) rows: usize,
    pub(super) cols: usize,
    pub(super) data: Buffer<u32>, // [panels, pairs, PANEL], zero beyond N and K
    pub(super) bias: Option<Vec<f32>>,
}

impl PanelMatrix {
    /// Whether panels are faster than rows on this processor.
    pub fn is_supported(isa: Isa) -> bool {
        isa == Isa::Avx512Bf16
    }

    /// Copies a checkpoint's matrix.
    ///
    /// # Panics
    /// Panics if its weights are not bf16.
    pub fn new(pool: &mut Pool, matrix: &Matrix) -> Self {
        assert_eq!(matrix.weight_type, WeightType::Bf16, "panels hold bf16 weights");
        let (rows, cols, pairs) = (matrix.rows, matrix.cols, matrix.cols.div_ceil(2));
        let panels = rows.div_ceil(PANEL);
        let mut data = Buffer::new(panels * pairs * PANEL);
        let shared = SharedOut::new(&mut data);
        pool.each(panels, 1, |range| {
            for panel in range {
                // SAFETY: each panel has one thread.
                let out = unsafe { shared.slice(panel * pairs * PANEL, pairs * PANEL) };
                copy_panel(matrix, panel * PANEL, out);
            }
        });
        Self { rows, cols, data, bias: matrix.bias.clone() }
    }

    /// `N`.
    pub fn rows(&self) -> usize {
        self.rows
    }

    /// `K`.
    pub fn cols(&self) -> usize {
        self.cols
    }

    /// Number of bytes that one product reads.
    pub fn bytes(&self) -> usize {
        size_of_val(&*self.data)
    }

    /// Whether gate and up, the two halves of the outputs, are whole panels.
    pub fn can_gate(&self) -> bool {
        self.rows.is_multiple_of(2 * PANEL)
    }

    pub(super) fn pairs(&self) -> usize {
        self.cols.div_ceil(2)
    }
}

/// Copies up to 32 rows of `matrix` starting at `first`; the rest of the panel is zero.
fn copy_panel(matrix: &Matrix, first: usize, out: &mut [u32]) {
    // Number of pairs that fit into the L1 cache.
    const PAIRS: usize = 128;
    let lanes = PANEL.min(matrix.rows - first);
    for (block, out) in out.chunks_mut(PAIRS * PANEL).enumerate() {
        for lane in 0..lanes {
            let bytes = &matrix.row_bytes(first + lane)[block * PAIRS * 4..];
            for (pair, bytes) in bytes.chunks(4).take(PAIRS).enumerate() {
                out[pair * PANEL + lane] = match *bytes {
                    [a, b, c, d] => u32::from_le_bytes([a, b, c, d]),
                    [a, b] => u32::from_le_bytes([a, b, 0, 0]),
                    _ => unreachable!("a row is whole bf16 numbers"),
                };
            }
        }
    }
}

/// Inputs of a [`PanelMatrix`]: for each tile of rows and each run of 16 pairs along `K`, the pairs of its rows.
pub struct PanelInput {
    pub(super) data: Buffer<u32>,
    pub(super) rows: usize,
    pub(super) cols: usize,
}

impl PanelInput {
    /// A buffer for `max_rows` rows of `max_cols`.
    pub fn new(max_rows: usize, max_cols: usize) -> Self {
        Self { data: Buffer::new(Self::bytes(max_rows, max_cols) / size_of::<u32>()), rows: 0, cols: 0 }
    }

    /// Number of bytes of a buffer for `max_rows` rows of `max_cols`.
    pub fn bytes(max_rows: usize, max_cols: usize) -> usize {
        max_rows * padded_pairs(max_cols) * size_of::<u32>()
    }

    /// Rounds `x [rows, cols]` to bf16 and packs it.
    ///
    /// # Panics
    /// Panics if `x` is too short, or larger than the buffer.
    pub fn pack(&mut self, pool: &mut Pool, x: &[f32], rows: usize, cols: usize) {
        let pairs = padded_pairs(cols);
        assert!(x.len() >= rows * cols, "inputs are [rows, cols]");
        assert!(rows * pairs <= self.data.len(), "packed inputs fit");
        (self.rows, self.cols) = (rows, cols);
        let (out, tile_rows) = (SharedOut::new(&mut self.data), self.tile_rows());
        let chunk = if rows * cols < 1 << 15 { rows } else { rows.div_ceil(4 * pool.threads()) };
        pool.each(rows, chunk.max(1), |range| {
            for row in range {
                let tile = row - row % tile_rows;
                let stride = (rows - tile).min(tile_rows) * RUN;
                pack_row(&x[row * cols..][..cols], &out, tile * pairs + (row - tile) * RUN, stride);
            }
        });
    }

    /// Number of rows of every tile but the last: at most 12. The last has about as many.
    pub(super) fn tile_rows(&self) -> usize {
        self.rows.div_ceil(self.rows.div_ceil(TILE_ROWS).max(1)).max(1)
    }

    /// Number of pairs of a row, with its last run padded.
    pub(super) fn pairs(&self) -> usize {
        padded_pairs(self.cols)
    }
}

fn padded_pairs(cols: usize) -> usize {
    cols.div_ceil(2).next_multiple_of(RUN)
}

/// Writes the runs of one row, `stride` pairs apart. No other thread may access them.
fn pack_row(x: &[f32], out: &SharedOut<u32>, start: usize, stride: usize) {
    #[cfg(target_arch = "x86_64")]
    if PanelMatrix::is_supported(Isa::detect()) {
        // SAFETY: the processor has the instructions.
        return unsafe { pack_row_avx512(x, out, start, stride) };
    }
    for (run, x) in x.chunks(2 * RUN).enumerate() {
        // SAFETY: each row has one thread and separate runs.
        let out = unsafe { out.slice(start + run * stride, RUN) };
        let mut padded = [0.0; 2 * RUN];
        padded[..x.len()].copy_from_slice(x);
        for (out, x) in out.iter_mut().zip(padded.chunks_exact(2)) {
            *out = u32::from(bf16_bits(x[0])) | u32::from(bf16_bits(x[1])) << 16;
        }
    }
}

/// Like [`pack_row`]; denormals become zero, like in products.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512bf16")]
unsafe fn pack_row_avx512(x: &[f32], out: &SharedOut<u32>, start: usize, stride: usize) {
    use std::arch::x86_64::*;
    for (run, x) in x.chunks(2 * RUN).enumerate() {
        let valid = (1u64 << x.len()) - 1;
        // SAFETY: as in `pack_row`; elements beyond `x` are masked out.
        unsafe {
            let out = out.slice(start + run * stride, RUN);
            let low = _mm512_maskz_loadu_ps(valid as u16, x.as_ptr());
            let high = _mm512_maskz_loadu_ps((valid >> 16) as u16, x.as_ptr().wrapping_add(16));
            let pairs: __m512i = std::mem::transmute(_mm512_cvtne2ps_pbh(high, low));
            _mm512_storeu_si512(out.as_mut_ptr().cast(), pairs);
        }
    }
}
