//! panel_linear: out[t, n] = sum over k of x[t, k] * w[n, k] + bias[n]
//!
//! x       [T, K] rounded to bf16, `PanelInput`
//! w       [N, K] bf16, `PanelMatrix`
//! maths   an output is one f32 sum over pairs of `K` in order, whatever is computed beside it
//! threads share out panels of 32 columns; each is read from memory once for all rows
//! bound   memory for few rows, then bf16 products
//! needs   AVX-512 BF16
//! test    tests/cpu_panels.rs against reference::linear

use std::arch::x86_64::*;
use std::ops::Range;

use crate::cpu::panels::{PANEL, RUN, TILE_ROWS};
use crate::cpu::shared::SharedOut;
use crate::cpu::{Isa, PanelInput, PanelMatrix, Pool};

/// Most rows for which the processor's own reading ahead of weights keeps up with the products.
const STREAM_ROWS: usize = 8;
/// Elements of a line of memory.
const LINE: usize = 16;

/// `out [rows, N]` = the packed inputs times the matrix, plus bias.
///
/// # Panics
/// When the inputs were packed for another `K`, `out` is too short, or the processor lacks the instructions.
pub fn panel_linear(pool: &mut Pool, out: &mut [f32], x: &PanelInput, matrix: &PanelMatrix) {
    assert_eq!(x.cols, matrix.cols, "inputs have K columns");
    assert!(out.len() >= x.rows * matrix.rows, "outputs are [rows, N]");
    assert!(PanelMatrix::is_supported(Isa::detect()), "panels are multiplied with AVX-512 BF16");
    let job = Job { out: SharedOut::new(out), x, matrix };
    pool.stretches(matrix.rows.div_ceil(PANEL), 1, |range| {
        // SAFETY: the processor has the instructions, and panels are disjoint columns.
        unsafe { job.panels(range) }
    });
}

struct Job<'a> {
    out: SharedOut<f32>,
    x: &'a PanelInput,
    matrix: &'a PanelMatrix,
}

impl Job<'_> {
    /// All rows of the columns of some panels.
    ///
    /// # Safety
    /// The processor has the instructions, and no other thread computes these columns.
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512bf16")]
    unsafe fn panels(&self, range: Range<usize>) {
        let (rows, tile_rows) = (self.x.rows, self.x.tile_rows());
        for panel in range {
            for row in (0..rows).step_by(tile_rows) {
                let tile_rows = (rows - row).min(tile_rows);
                let tile = self.tile_at(panel, row, tile_rows);
                // SAFETY: passed on; `tile_at` checks that inputs and weights hold the tile.
                unsafe {
                    match tile_rows {
                        1 => self.tile::<1>(tile),
                        2 => self.tile::<2>(tile),
                        3 => self.tile::<3>(tile),
                        4 => self.tile::<4>(tile),
                        5 => self.tile::<5>(tile),
                        6 => self.tile::<6>(tile),
                        7 => self.tile::<7>(tile),
                        8 => self.tile::<8>(tile),
                        9 => self.tile::<9>(tile),
                        10 => self.tile::<10>(tile),
                        11 => self.tile::<11>(tile),
                        _ => self.tile::<TILE_ROWS>(tile),
                    }
                }
            }
        }
    }

    /// Where a tile's inputs and weights lie. The first two tiles ask memory for half of the next panel each, a single one
    /// for all of it.
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
        Tile { row, panel, x, weights, ahead, pairs }
    }

    /// `R` rows by one panel.
    ///
    /// # Safety
    /// As [`Job::panels`]; `tile` points to `R` rows and the panel.
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512bf16")]
    unsafe fn tile<const R: usize>(&self, tile: Tile) {
        let col = tile.panel * PANEL;
        let valid = (self.matrix.rows - col).min(PANEL);
        let masks = [mask(valid), mask(valid.saturating_sub(16))];
        // SAFETY: passed on; lanes beyond the last column are masked out.
        unsafe {
            let mut sums = [[_mm512_setzero_ps(); 2]; R];
            for first in (0..tile.pairs).step_by(RUN) {
                add_run::<R>(&mut sums, &tile, first, (tile.pairs - first).min(RUN));
            }
            if let Some(bias) = &self.matrix.bias {
                let bias = bias[col..][..valid].as_ptr();
                let low = _mm512_maskz_loadu_ps(masks[0], bias);
                let high = _mm512_maskz_loadu_ps(masks[1], bias.wrapping_add(16));
                for sums in &mut sums {
                    *sums = [_mm512_add_ps(sums[0], low), _mm512_add_ps(sums[1], high)];
                }
            }
            for (r, sums) in sums.iter().enumerate() {
                let out = self.out.slice((tile.row + r) * self.matrix.rows + col, valid).as_mut_ptr();
                _mm512_mask_storeu_ps(out, masks[0], sums[0]);
                _mm512_mask_storeu_ps(out.wrapping_add(16), masks[1], sums[1]);
            }
        }
    }
}

/// Where a tile and what it is computed of lie.
struct Tile {
    row: usize,
    panel: usize,
    pairs: usize,
    x: *const u32,          // [pairs / RUN, R, RUN]
    weights: *const u32,    // [pairs, PANEL]
    ahead: [*const u32; 2], // from here on memory is asked for a line with each pair; weights at hand cost nothing
}

fn mask(lanes: usize) -> u16 {
    ((1u32 << lanes.min(16)) - 1) as u16
}

/// Adds the products of a run of pairs.
///
/// # Safety
/// The processor has the instructions, and `tile` points to `R` rows and a panel.
#[inline(always)]
unsafe fn add_run<const R: usize>(sums: &mut [[__m512; 2]; R], tile: &Tile, first: usize, pairs: usize) {
    // SAFETY: passed on; asking for memory ahead never faults.
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
