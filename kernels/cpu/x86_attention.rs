//! Attention over bf16 blocks with AVX-512 BF16: scores are products of bf16 pairs, values are weighted in f32.
//!
//! Up to four queries are in registers at the same time. The operations of an output and their order are the same for
//! any number.

use std::arch::x86_64::*;
use std::ops::Range;

use crate::cpu::attention_tile::{TILE, Tile};
use crate::cpu::exp;
use crate::cpu::kv_layout::{CHUNK, MAX_HEAD_DIM};
use crate::cpu::packed::bf16_bits;
use crate::cpu::shared::SharedOut;

/// Number of queries in registers at the same time.
const GROUP: usize = 4;
/// Number of elements of an output in registers at the same time.
const SLICE: usize = 64;

/// Computes a tile with buffer sizes that fit its queries and head.
///
/// # Safety
/// The processor must have AVX-512 BF16, and no other thread may compute this tile.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512bf16")]
pub(super) unsafe fn run(tile: &Tile<'_>, out: &SharedOut<f32>, q: &[f32], k: &[u16], v: &[u16]) {
    // SAFETY: passed on.
    unsafe {
        match (tile.queries.len() <= GROUP, tile.shape.head_dim) {
            (true, ..=64) => run_in::<GROUP, 64>(tile, out, q, k, v),
            (false, ..=64) => run_in::<TILE, 64>(tile, out, q, k, v),
            (true, ..=128) => run_in::<GROUP, 128>(tile, out, q, k, v),
            (false, ..=128) => run_in::<TILE, 128>(tile, out, q, k, v),
            (_, ..=256) => run_in::<TILE, 256>(tile, out, q, k, v),
            _ => run_in::<TILE, MAX_HEAD_DIM>(tile, out, q, k, v),
        }
    }
}

/// A query and its running softmax.
#[derive(Clone, Copy)]
struct Query<const DIM: usize> {
    q: [u16; DIM], // bf16
    max: f32,
    sum: [f32; CHUNK],
    out: [f32; DIM],
}

/// # Safety
/// The same as for [`run`]; the tile must have at most `QUERIES` queries of at most `DIM` elements, a multiple of 64.
#[inline(always)]
unsafe fn run_in<const QUERIES: usize, const DIM: usize>(
    tile: &Tile<'_>,
    out: &SharedOut<f32>,
    q: &[f32],
    k: &[u16],
    v: &[u16],
) {
    let (dim, len) = (tile.shape.head_dim, tile.queries.len());
    let mut queries = [Query { q: [0; DIM], max: f32::NEG_INFINITY, sum: [0.0; CHUNK], out: [0.0; DIM] }; QUERIES];
    for (state, query) in queries.iter_mut().zip(tile.queries.clone()) {
        let (token, head) = tile.token_and_head(query);
        let q = &q[token * tile.attention.q_stride + head * dim..][..dim];
        for (rounded, q) in state.q.iter_mut().zip(q) {
            *rounded = bf16_bits(*q);
        }
    }
    let end = tile.seen(tile.queries.end - 1).end;
    for position in (tile.seen(tile.queries.start).start / CHUNK * CHUNK..end).step_by(CHUNK) {
        let (keys, values) = tile.chunk(k, v, position);
        for first in (0..len).step_by(GROUP) {
            let chunk = Chunk { tile, position, first_query: tile.queries.start + first, keys, values };
            let group = &mut queries[first..len.min(first + GROUP)];
            // SAFETY: passed on.
            unsafe {
                match group.len() {
                    1 => chunk.add::<1, DIM>(group),
                    2 => chunk.add::<2, DIM>(group),
                    3 => chunk.add::<3, DIM>(group),
                    _ => chunk.add::<GROUP, DIM>(group),
                }
            }
        }
    }
    for (query, state) in tile.queries.clone().zip(&queries) {
        tile.write(out, query, state.max, &state.sum, &state.out);
    }
}

/// 16 positions for up to four queries.
struct Chunk<'a> {
    tile: &'a Tile<'a>,
    position: usize, // position of the first
    first_query: usize,
    keys: &'a [u16],   // starting at the first pair of the first position
    values: &'a [u16], // [16, D]
}

impl Chunk<'_> {
    /// Adds the contribution of these positions to `G` queries.
    ///
    /// # Safety
    /// The same as for [`run_in`]; there must be `G` queries.
    #[inline(always)]
    unsafe fn add<const G: usize, const DIM: usize>(&self, queries: &mut [Query<DIM>]) {
        // SAFETY: passed on.
        unsafe {
            let scores = self.scores::<G, DIM>(queries);
            let (weights, olds) = self.weigh::<G, DIM>(queries, scores);
            let dim = self.tile.shape.head_dim;
            for start in (0..dim).step_by(SLICE) {
                match (dim - start).div_ceil(16) {
                    1 => self.add_values::<G, 1, DIM>(queries, start, &weights, &olds),
                    2 => self.add_values::<G, 2, DIM>(queries, start, &weights, &olds),
                    3 => self.add_values::<G, 3, DIM>(queries, start, &weights, &olds),
                    _ => self.add_values::<G, 4, DIM>(queries, start, &weights, &olds),
                }
            }
        }
    }

    /// `scale * q·k` of the 16 positions: separate sums over even and odd pairs, added at the end.
    ///
    /// # Safety
    /// The same as for [`Chunk::add`].
    #[inline(always)]
    unsafe fn scores<const G: usize, const DIM: usize>(&self, queries: &[Query<DIM>]) -> [__m512; G] {
        let pairs = self.tile.shape.head_dim / 2;
        let stride = self.tile.shape.block_size * 2;
        assert!(self.keys.len() >= (pairs - 1) * stride + 2 * CHUNK && pairs * 2 <= DIM, "a chunk has all of its keys");
        // SAFETY: the processor has the instructions; keys and queries contain all pairs.
        unsafe {
            let mut sums = [[_mm512_setzero_ps(); 2]; G];
            for first in (0..pairs).step_by(2) {
                for pair in first..pairs.min(first + 2) {
                    let keys = _mm512_loadu_si512(self.keys.as_ptr().add(pair * stride).cast());
                    for g in 0..G {
                        let q = _mm512_set1_epi32(queries[g].q.as_ptr().cast::<i32>().add(pair).read_unaligned());
                        let sum = &mut sums[g][pair - first];
                        *sum = _mm512_dpbf16_ps(
                            *sum,
                            std::mem::transmute::<__m512i, __m512bh>(q),
                            std::mem::transmute::<__m512i, __m512bh>(keys),
                        );
                    }
                }
            }
            let mut scores = [_mm512_setzero_ps(); G];
            for g in 0..G {
                scores[g] =
                    _mm512_mul_ps(_mm512_add_ps(sums[g][0], sums[g][1]), _mm512_set1_ps(self.tile.attention.scale));
            }
            scores
        }
    }

    /// Bias, mask and softmax: the positions' weights for each query, and the factors for its earlier sums.
    ///
    /// # Safety
    /// The same as for [`Chunk::add`].
    #[inline(always)]
    unsafe fn weigh<const G: usize, const DIM: usize>(
        &self,
        queries: &mut [Query<DIM>],
        scores: [__m512; G],
    ) -> ([[f32; CHUNK]; G], [f32; G]) {
        let (mut weights, mut olds) = ([[0.0; CHUNK]; G], [1.0; G]);
        for g in 0..G {
            let Some(lanes) = self.lanes(self.first_query + g) else { continue };
            // SAFETY: the processor has the instructions; both types are 64 plain bytes.
            let mut lane_scores: [f32; CHUNK] = unsafe { std::mem::transmute(scores[g]) };
            self.tile.cap(&mut lane_scores);
            if !self.tile.attention.alibi_slopes.is_empty() {
                self.tile.add_alibi(&mut lane_scores, self.position, self.first_query + g);
            }
            // SAFETY: as above.
            let max = unsafe {
                let masked =
                    _mm512_mask_mov_ps(_mm512_set1_ps(f32::NEG_INFINITY), lanes, _mm512_loadu_ps(lane_scores.as_ptr()));
                _mm512_storeu_ps(lane_scores.as_mut_ptr(), masked);
                _mm512_reduce_max_ps(masked).max(queries[g].max)
            };
            olds[g] = exp(queries[g].max - max);
            queries[g].max = max;
            for lane in 0..CHUNK {
                weights[g][lane] = exp(lane_scores[lane] - max);
                queries[g].sum[lane] = queries[g].sum[lane] * olds[g] + weights[g][lane];
            }
        }
        (weights, olds)
    }

    /// A mask of the positions that a query attends to; `None` if there are none.
    #[inline(always)]
    fn lanes(&self, query: usize) -> Option<u16> {
        let Range { start, end } = self.tile.seen(query);
        let (start, end) = (start.saturating_sub(self.position), end.saturating_sub(self.position).min(CHUNK));
        (start < end).then(|| ((1u32 << end) - (1u32 << start)) as u16)
    }

    /// Adds weighted values to `N` registers of each output, starting at element `start`.
    ///
    /// # Safety
    /// The same as for [`Chunk::add`]; the outputs' elements must fill at least the registers before the last.
    #[inline(always)]
    unsafe fn add_values<const G: usize, const N: usize, const DIM: usize>(
        &self,
        queries: &mut [Query<DIM>],
        start: usize,
        weights: &[[f32; CHUNK]; G],
        olds: &[f32; G],
    ) {
        let dim = self.tile.shape.head_dim;
        assert!(self.values.len() >= CHUNK * dim && start + 16 * N <= DIM, "a chunk has all of its values");
        let mut masks = [0u16; N];
        for (n, mask) in masks.iter_mut().enumerate() {
            *mask = ((1u32 << (dim - start - 16 * n).min(16)) - 1) as u16;
        }
        // SAFETY: the processor has the instructions; elements beyond the head's are masked out.
        unsafe {
            let mut outs = [[_mm512_setzero_ps(); N]; G];
            for ((outs, query), old) in outs.iter_mut().zip(&*queries).zip(olds) {
                for (n, out) in outs.iter_mut().enumerate() {
                    let sum = _mm512_loadu_ps(query.out.as_ptr().add(start + 16 * n));
                    *out = _mm512_mul_ps(sum, _mm512_set1_ps(*old));
                }
            }
            for (position, row) in self.values.chunks_exact(dim).take(CHUNK).enumerate() {
                let row = row.as_ptr().add(start);
                let mut values = [_mm512_setzero_ps(); N];
                for (n, (value, mask)) in values.iter_mut().zip(masks).enumerate() {
                    let bits = _mm256_maskz_loadu_epi16(mask, row.wrapping_add(16 * n).cast());
                    *value = _mm512_castsi512_ps(_mm512_slli_epi32::<16>(_mm512_cvtepu16_epi32(bits)));
                }
                for (outs, weights) in outs.iter_mut().zip(weights) {
                    let weight = _mm512_set1_ps(weights[position]);
                    for (out, value) in outs.iter_mut().zip(&values) {
                        *out = _mm512_fmadd_ps(weight, *value, *out);
                    }
                }
            }
            for (query, outs) in queries.iter_mut().zip(&outs) {
                for (n, out) in outs.iter().enumerate() {
                    _mm512_storeu_ps(query.out.as_mut_ptr().add(start + 16 * n), *out);
                }
            }
        }
    }
}
