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

/// Pairs of `K` whose inputs of a tile stay in the first cache, and whose weights of a panel stay in the second.
const BLOCK_PAIRS: usize = 16 * RUN;
/// Weights that a thread takes at a time.
const CHUNK_BYTES: usize = 256 << 10;

/// `out [rows, N]` = the packed inputs times the matrix, plus bias.
///
/// # Panics
/// When the inputs were packed for another `K`, `out` is too short, or the processor lacks the instructions.
pub fn panel_linear(pool: &mut Pool, out: &mut [f32], x: &PanelInput, matrix: &PanelMatrix) {
    assert_eq!(x.cols, matrix.cols, "inputs have K columns");
    assert!(out.len() >= x.rows * matrix.rows, "outputs are [rows, N]");
    assert!(PanelMatrix::is_supported(Isa::detect()), "panels are multiplied with AVX-512 BF16");
    let job = Job { out: SharedOut::new(out), x, matrix };
    let panels = matrix.rows.div_ceil(PANEL);
    // Long enough to stream, short enough that threads end together.
    let chunk = (CHUNK_BYTES / (matrix.pairs() * PANEL * size_of::<u32>()).max(1)).clamp(1, 16);
    pool.each(panels, chunk, |range| {
        // SAFETY: the processor has the instructions, and chunks of panels are disjoint columns.
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
        let pairs = self.matrix.pairs();
        let block = if self.x.rows <= TILE_ROWS { pairs.max(1) } else { BLOCK_PAIRS };
        for first in (0..pairs.max(1)).step_by(block) {
            let block = first..pairs.min(first + block);
            for panel in range.clone() {
                // SAFETY: passed on.
                unsafe { self.panel(panel, block.clone(), panel + 1 < range.end) }
            }
        }
    }

    /// All rows of one panel over a block of `K`. Where there are several tiles the first two ask memory for the next
    /// panel's block.
    ///
    /// # Safety
    /// As [`Job::panels`].
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512bf16")]
    unsafe fn panel(&self, panel: usize, block: Range<usize>, has_next: bool) {
        let (rows, pairs) = (self.x.rows, self.matrix.pairs());
        let start = (panel * pairs + block.start) * PANEL;
        let weights = self.matrix.data[start..][..block.len() * PANEL].as_ptr();
        let next = weights.wrapping_add(pairs * PANEL);
        for row in (0..rows).step_by(TILE_ROWS) {
            let tile_rows = (rows - row).min(TILE_ROWS);
            let runs = block.len().next_multiple_of(RUN);
            let x = self.x.data[row * self.x.pairs() + block.start * tile_rows..][..runs * tile_rows].as_ptr();
            let ahead = match row / TILE_ROWS {
                half @ (0 | 1) if has_next => next.wrapping_add(half * block.len() * PANEL / 2),
                _ => weights,
            };
            let tile = Tile { row, panel, x, weights, ahead, block: block.clone() };
            // SAFETY: passed on; inputs and weights were checked to hold the block.
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

    /// Goes on with the sums of `R` rows by one panel.
    ///
    /// # Safety
    /// As [`Job::panels`]; `tile` points to a block of `R` rows and of the panel.
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512bf16")]
    unsafe fn tile<const R: usize>(&self, tile: Tile) {
        let col = tile.panel * PANEL;
        let valid = (self.matrix.rows - col).min(PANEL);
        let masks = [mask(valid), mask(valid.saturating_sub(16))];
        let is_last = tile.block.end == self.matrix.pairs();
        // SAFETY: passed on; lanes beyond the last column are masked out.
        unsafe {
            let mut outs = [std::ptr::null_mut::<f32>(); R];
            let mut sums = [[_mm512_setzero_ps(); 2]; R];
            for r in 0..R {
                outs[r] = self.out.slice((tile.row + r) * self.matrix.rows + col, valid).as_mut_ptr();
                if tile.block.start > 0 {
                    sums[r][0] = _mm512_maskz_loadu_ps(masks[0], outs[r]);
                    sums[r][1] = _mm512_maskz_loadu_ps(masks[1], outs[r].wrapping_add(16));
                }
            }
            add_block::<R>(&mut sums, &tile);
            if is_last && let Some(bias) = &self.matrix.bias {
                let bias = bias[col..][..valid].as_ptr();
                let low = _mm512_maskz_loadu_ps(masks[0], bias);
                let high = _mm512_maskz_loadu_ps(masks[1], bias.wrapping_add(16));
                for sums in &mut sums {
                    *sums = [_mm512_add_ps(sums[0], low), _mm512_add_ps(sums[1], high)];
                }
            }
            for r in 0..R {
                _mm512_mask_storeu_ps(outs[r], masks[0], sums[r][0]);
                _mm512_mask_storeu_ps(outs[r].wrapping_add(16), masks[1], sums[r][1]);
            }
        }
    }
}

/// Where a tile and what it is computed of lie.
struct Tile {
    row: usize,
    panel: usize,
    x: *const u32,       // [block / RUN, R, RUN]
    weights: *const u32, // [block, PANEL]
    ahead: *const u32,   // from here on a full tile asks memory for a line with each pair
    block: Range<usize>, // pairs of `K`
}

fn mask(lanes: usize) -> u16 {
    ((1u32 << lanes.min(16)) - 1) as u16
}

/// Adds the products of a block.
///
/// # Safety
/// The processor has the instructions, and `tile` points to a block of `R` rows and of a panel.
#[inline(always)]
unsafe fn add_block<const R: usize>(sums: &mut [[__m512; 2]; R], tile: &Tile) {
    for first in (0..tile.block.len()).step_by(RUN) {
        let pairs = (tile.block.len() - first).min(RUN);
        // SAFETY: passed on.
        unsafe { add_run::<R>(sums, tile, first, pairs) }
    }
}

/// Adds the products of a run of pairs.
///
/// # Safety
/// As [`add_block`].
#[inline(always)]
unsafe fn add_run<const R: usize>(sums: &mut [[__m512; 2]; R], tile: &Tile, first: usize, pairs: usize) {
    // SAFETY: passed on; asking for memory ahead never faults.
    unsafe {
        let x = tile.x.add(first * R);
        for pair in 0..pairs {
            let weights = tile.weights.add((first + pair) * PANEL);
            let low: __m512bh = std::mem::transmute(_mm512_load_si512(weights.cast()));
            let high: __m512bh = std::mem::transmute(_mm512_load_si512(weights.add(16).cast()));
            if R == TILE_ROWS {
                _mm_prefetch::<_MM_HINT_T1>(tile.ahead.wrapping_add((first + pair) * PANEL / 2).cast());
            }
            for (r, sums) in sums.iter_mut().enumerate() {
                let x: __m512bh = std::mem::transmute(_mm512_set1_epi32(*x.add(r * RUN + pair) as i32));
                sums[0] = _mm512_dpbf16_ps(sums[0], x, low);
                sums[1] = _mm512_dpbf16_ps(sums[1], x, high);
            }
        }
    }
}
