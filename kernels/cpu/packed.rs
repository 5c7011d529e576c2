//! Inputs of linear layers, converted and packed once for all outputs.

use bytemuck::Pod;

use crate::cpu::dot::STEP;
use crate::cpu::shared::SharedOut;
use crate::cpu::{Buffer, Pool, WeightType};

/// Size of the blocks in which `K` is summed: a block of some columns and of a tile's rows fits into the L1 cache.
pub(crate) const BLOCK_K: usize = 2048;
/// Number of rows of a tile, which share one load of four columns' weights into registers.
pub(crate) const TILE_ROWS: usize = 6;

/// Inputs of a linear layer, in the order in which its inner loop reads them.
///
/// For each block of `K` and tile of rows: steps of 32 elements, the rows of the tile in turn, padded with 0.
pub struct PackedInput {
    pub(super) bf16: Buffer<u16>,
    pub(super) f32: Buffer<f32>,
    pub(super) rows: usize,
    pub(super) cols: usize,
}

impl PackedInput {
    /// A buffer for `max_rows` rows of `max_cols`.
    pub fn new(max_rows: usize, max_cols: usize) -> Self {
        let len = max_rows * max_cols.next_multiple_of(STEP);
        Self { bf16: Buffer::new(len), f32: Buffer::new(len), rows: 0, cols: 0 }
    }

    /// Packs `x [rows, cols]` for weights of `weight_type`.
    ///
    /// # Panics
    /// Panics if `x` is too short, or larger than the buffer.
    pub fn pack(&mut self, pool: &mut Pool, x: &[f32], rows: usize, cols: usize, weight_type: WeightType) {
        assert!(x.len() >= rows * cols, "inputs are [rows, cols]");
        assert!(rows * cols.next_multiple_of(STEP) <= self.f32.len(), "packed inputs fit");
        (self.rows, self.cols) = (rows, cols);
        match weight_type {
            WeightType::Bf16 => pack(pool, x, rows, cols, &mut self.bf16, bf16_bits),
            WeightType::F16 | WeightType::F32 => pack(pool, x, rows, cols, &mut self.f32, |x| x),
        }
    }
}

/// Rounds to the nearest bfloat16, ties to even; NaN stays NaN.
#[inline(always)]
pub(crate) fn bf16_bits(x: f32) -> u16 {
    let bits = x.to_bits();
    let rounded = bits.wrapping_add(0x7fff + ((bits >> 16) & 1));
    if x.is_nan() { ((bits >> 16) | 0x40) as u16 } else { (rounded >> 16) as u16 }
}

/// Offset of the tile from `row` in the block of `K` from `k`, and the number of rows of the tile.
#[inline(always)]
pub(crate) fn tile_at(rows: usize, cols: usize, k: usize, row: usize) -> (usize, usize) {
    let block = (cols - k).min(BLOCK_K).next_multiple_of(STEP);
    (rows * k + row * block, (rows - row).min(TILE_ROWS))
}

fn pack<T: Pod + Send + Sync>(
    pool: &mut Pool,
    x: &[f32],
    rows: usize,
    cols: usize,
    out: &mut [T],
    convert: impl Fn(f32) -> T + Sync,
) {
    let out = SharedOut::new(out);
    let tiles = rows.div_ceil(TILE_ROWS);
    let chunk = if rows * cols < 1 << 15 { tiles } else { 1 };
    pool.each(tiles, chunk, |range| {
        for row in range.start * TILE_ROWS..(range.end * TILE_ROWS).min(rows) {
            let (tile, in_tile) = (row - row % TILE_ROWS, row % TILE_ROWS);
            for k in (0..cols).step_by(BLOCK_K) {
                let (start, tile_rows) = tile_at(rows, cols, k, tile);
                let block = &x[row * cols + k..][..(cols - k).min(BLOCK_K)];
                for (step, x) in block.chunks(STEP).enumerate() {
                    // SAFETY: each row has its own steps, and each row has one thread.
                    let out = unsafe { out.slice(start + (step * tile_rows + in_tile) * STEP, STEP) };
                    for (out, x) in out.iter_mut().zip(x) {
                        *out = convert(*x);
                    }
                    out[x.len()..].fill(T::zeroed());
                }
            }
        }
    });
}
