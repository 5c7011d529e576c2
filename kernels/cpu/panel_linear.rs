//! panel_linear:       out[t, n] = sum over k of x[t, k] * w[n, k] + bias[n]
//! panel_gated_linear: out[t, i] = activation(y[t, i]) * y[t, I + i], where y is the result of `panel_linear`
//!
//! x       [T, K] rounded to bf16, `PanelInput`
//! w       [N, K] bf16, `PanelMatrix`
//! maths   an output is one f32 sum over pairs of `K` in order, whatever is computed together with it
//! threads divide the panels of 32 columns; each is read from memory once for all rows
//! bound   memory for few rows, then bf16 products
//! needs   AVX-512 BF16
//! test    tests/cpu_panels.rs against reference::linear

use std::arch::x86_64::*;
use std::ops::Range;

use crate::cpu::activation::gated;
use crate::cpu::panels::{PANEL, RUN, TILE_ROWS};
use crate::cpu::shared::SharedOut;
use crate::cpu::{Gate, Isa, PanelInput, PanelMatrix, Pool};

/// Maximum number of rows for which the hardware prefetcher keeps up with the products.
const STREAM_ROWS: usize = 8;
/// Number of elements in a cache line.
const LINE: usize = 16;

/// `out [rows, N]` = the packed inputs times the matrix, plus bias.
///
/// # Panics
/// Panics if the inputs were packed for another `K`, if `out` is too short, or if the processor lacks the instructions.
pub fn panel_linear(pool: &mut Pool, out: &mut [f32], x: &PanelInput, matrix: &PanelMatrix) {
    assert!(out.len() >= x.rows * matrix.rows, "outputs are [rows, N]");
    run(pool, Job { out: SharedOut::new(out), width: matrix.rows, x, matrix, gate: None });
}

/// `out [rows, N / 2]` = activation(gate) * up, where the product with its bias is `[gate | up]`.
///
/// # Panics
/// Panics in the cases of [`panel_linear`], or if the gates are not whole panels ([`PanelMatrix::can_gate`]).
pub fn panel_gated_linear(pool: &mut Pool, out: &mut [f32], x: &PanelInput, matrix: &PanelMatrix, gate: Gate) {
    let width = matrix.rows / 2;
    assert!(matrix.can_gate(), "gates are whole panels");
    assert!(out.len() >= x.rows * width, "outputs are [rows, N / 2]");
    run(pool, Job { out: SharedOut::new(out), width, x, matrix, gate: Some(gate) });
}

fn run(pool: &mut Pool, job: Job<'_>) {
    assert_eq!(job.x.cols, job.matrix.cols, "inputs have K columns");
    assert!(PanelMatrix::is_supported(Isa::detect()), "panels are multiplied with AVX-512 BF16");
    pool.each_contiguous(job.width.div_ceil(PANEL), 1, |range| {
        // SAFETY: the processor has the instructions, and panels are disjoint columns.
        unsafe { job.panels(range) }
    });
}

struct Job<'a> {
    out: SharedOut<f32>,
    width: usize, // of `out`
    x: &'a PanelInput,
    matrix: &'a PanelMatrix,
    gate: Option<Gate>, // for the first half of the columns, which gates the second
}

impl Job<'_> {
    /// Computes all rows of the columns of some panels.
    ///
    /// # Safety
    /// The processor must have the instructions, and no other thread may compute these columns.
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512bf16")]
    unsafe fn panels(&self, range: Range<usize>) {
        let (rows, tile_rows) = (self.x.rows, self.x.tile_rows());
        for panel in range {
            for row in (0..rows).step_by(tile_rows) {
                // SAFETY: passed on.
                unsafe {
                    match (rows - row).min(tile_rows) {
                        1 => self.tile::<1>(panel, row),
                        2 => self.tile::<2>(panel, row),
                        3 => self.tile::<3>(panel, row),
                        4 => self.tile::<4>(panel, row),
                        5 => self.tile::<5>(panel, row),
                        6 => self.tile::<6>(panel, row),
                        7 => self.tile::<7>(panel, row),
                        8 => self.tile::<8>(panel, row),
                        9 => self.tile::<9>(panel, row),
                        10 => self.tile::<10>(panel, row),
                        11 => self.tile::<11>(panel, row),
                        _ => self.tile::<TILE_ROWS>(panel, row),
                    }
                }
            }
        }
    }

    /// `R` rows of the outputs of one panel.
    ///
    /// # Safety
    /// The same as for [`Job::panels`].
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512bf16")]
    unsafe fn tile<const R: usize>(&self, panel: usize, row: usize) {
        let col = panel * PANEL;
        let valid = (self.width - col).min(PANEL);
        let masks = masks(valid);
        // SAFETY: passed on; lanes beyond the last column are masked out.
        unsafe {
            let mut sums = self.sums::<R>(panel, row);
            if let Some(gate) = self.gate {
                multiply_gated(&mut sums, &self.sums::<R>(panel + self.width / PANEL, row), gate);
            }
            for (r, sums) in sums.iter().enumerate() {
                let out = self.out.slice((row + r) * self.width + col, valid).as_mut_ptr();
                _mm512_mask_storeu_ps(out, masks[0], sums[0]);
                _mm512_mask_storeu_ps(out.wrapping_add(16), masks[1], sums[1]);
            }
        }
    }

    /// Products of `R` rows and one panel, with the bias.
    ///
    /// # Safety
    /// The processor must have the instructions.
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512bf16")]
    unsafe fn sums<const R: usize>(&self, panel: usize, row: usize) -> [[__m512; 2]; R] {
        let tile = self.tile_at(panel, row, R);
        // SAFETY: passed on; `tile_at` checked that inputs and weights contain the tile.
        unsafe {
            let mut sums = [[_mm512_setzero_ps(); 2]; R];
            for first in (0..tile.pairs).step_by(RUN) {
                add_run::<R>(&mut sums, &tile, first, (tile.pairs - first).min(RUN));
            }
            if let Some(bias) = &self.matrix.bias {
                let bias = &bias[panel * PANEL..];
                let masks = masks(bias.len().min(PANEL));
                let low = _mm512_maskz_loadu_ps(masks[0], bias.as_ptr());
                let high = _mm512_maskz_loadu_ps(masks[1], bias.as_ptr().wrapping_add(16));
                for sums in &mut sums {
                    *sums = [_mm512_add_ps(sums[0], low), _mm512_add_ps(sums[1], high)];
                }
            }
            sums
        }
    }

    /// The inputs and weights of a tile. The first two tiles each prefetch half of the next panel; a single tile
    /// prefetches all of it.
    fn tile_at(&self, panel: usize, row: usize, tile_rows: usize) -> Tile {
        let pairs = self.matrix.pairs();
        let weights = self.matrix.data[panel * pairs * PANEL..][..pairs * PANEL].as_ptr();
        let x = self.x.data[row * self.x.pairs()..][..tile_rows * self.x.pairs()].as_ptr();
        let next = weights.wrapping_add(pairs * PANEL);
        let halves = [next, next.wrapping_add(pairs * LINE)];
        let ahead = match row / self.x.tile_rows() {
            _ if self.x.rows <= STREAM_ROWS => [weights; 2],
            0 if self.x.rows <= TILE_ROWS => halves,
            half @ (0 | 1) => [halves[half], weights],
            _ => [weights; 2],
        };
        Tile { x, weights, ahead, pairs }
    }
}

/// The locations of the inputs and weights of a tile.
struct Tile {
    pairs: usize,
    x: *const u32,          // [pairs / RUN, R, RUN]
    weights: *const u32,    // [pairs, PANEL]
    ahead: [*const u32; 2], // address to prefetch from, one line with each pair; weights that are already cached cost nothing
}

/// The lanes of a panel's two registers that are columns.
fn masks(valid: usize) -> [u16; 2] {
    let mask = (1u64 << valid) - 1;
    [mask as u16, (mask >> 16) as u16]
}

/// `gates = activation(gates) * ups`.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
fn multiply_gated<const R: usize>(gates: &mut [[__m512; 2]; R], ups: &[[__m512; 2]; R], gate: Gate) {
    for (gates, ups) in gates.as_flattened_mut().iter_mut().zip(ups.as_flattened()) {
        // SAFETY: both types are 64 plain bytes.
        let (mut lanes, ups) = unsafe {
            (std::mem::transmute::<__m512, [f32; 16]>(*gates), std::mem::transmute::<__m512, [f32; 16]>(*ups))
        };
        for (lane, up) in lanes.iter_mut().zip(&ups) {
            *lane = gated(gate, *lane, *up);
        }
        // SAFETY: as above.
        *gates = unsafe { std::mem::transmute::<[f32; 16], __m512>(lanes) };
    }
}

/// Adds the products of a run of pairs.
///
/// # Safety
/// The processor must have the instructions, and `tile` must point to `R` rows and a panel.
#[inline(always)]
unsafe fn add_run<const R: usize>(sums: &mut [[__m512; 2]; R], tile: &Tile, first: usize, pairs: usize) {
    // SAFETY: passed on; a prefetch never faults.
    unsafe {
        let x = tile.x.add(first * R);
        for pair in 0..pairs {
            let weights = tile.weights.add((first + pair) * PANEL);
            let low: __m512bh = std::mem::transmute(_mm512_load_si512(weights.cast()));
            let high: __m512bh = std::mem::transmute(_mm512_load_si512(weights.add(16).cast()));
            for ahead in tile.ahead {
                _mm_prefetch::<_MM_HINT_T1>(ahead.wrapping_add((first + pair) * LINE).cast());
            }
            for (r, sums) in sums.iter_mut().enumerate() {
                let x: __m512bh = std::mem::transmute(_mm512_set1_epi32(*x.add(r * RUN + pair) as i32));
                sums[0] = _mm512_dpbf16_ps(sums[0], x, low);
                sums[1] = _mm512_dpbf16_ps(sums[1], x, high);
            }
        }
    }
}
