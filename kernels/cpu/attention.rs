//! attention: out[t, h, :] = sum over s of softmax_s(scale * q[t, h, :] · k[s, h / (H / K), :] + bias) * v[s, h / (H / K), :]
//!
//! cap       if set, the scaled product x becomes cap * tanh(x / cap)                      (Gemma 2, 2024)
//! sink      if set, one more logit of the head takes part in the softmax, without a value (gpt-oss, 2025)
//! bias      slope[h] * (s - position of t) if there are slopes (ALiBi, Press et al. 2022), else 0
//! q         [T, q_stride] f32, heads first in each token's row
//! k, v      KV blocks; position `s` of a row is offset `s % B` of block `table[s / B]`
//! maths     online softmax (Milakov & Gimelshein 2018) over chunks of 16 positions aligned at 0, in order; f32 sums;
//!           q is rounded to bf16 if the blocks are bf16; `x86_attention`, for bf16 blocks with AVX-512 BF16, has a
//!           different order of operations
//! threads   divide tiles of (row, KV head, queries); up to 16 queries of one KV head read its blocks once
//! bound     memory: 4 * K * D bytes per position for decode, multiply-add for prefill
//! test      tests/cpu_ops.rs against reference::attention

use std::ops::Range;

use crate::cpu::attention_tile::{Attention, AttentionRow, TILE, Tile};
use crate::cpu::coded_kv::CodedKv;
use crate::cpu::kv_cache::KvData;
use crate::cpu::kv_layout::{CHUNK, KvElement, KvShape, MAX_HEAD_DIM};
use crate::cpu::shared::SharedOut;
#[cfg(target_arch = "x86_64")]
use crate::cpu::x86_attention;
use crate::cpu::{Isa, KvCache, Pool, exp};

impl Attention<'_> {
    /// Causal attention of every row's tokens over its blocks, written to `out [T, H D]`.
    ///
    /// # Panics
    /// Panics if a block table is too short or contains a block outside the cache, if `out` or `q` is too short, or if
    /// the processor lacks the instructions.
    pub fn run(&self, pool: &mut Pool, out: &mut [f32], q: &[f32], rows: &[AttentionRow<'_>], cache: &KvCache) {
        assert!(self.isa <= Isa::detect(), "the processor has the instructions");
        let out = SharedOut::new(out);
        match &cache.data {
            #[cfg(target_arch = "x86_64")]
            KvData::Bf16 { k, v } if self.isa == Isa::Avx512Bf16 => {
                // SAFETY: the processor has the instructions, and each tile has one thread.
                self.each_tile(pool, rows, &cache.shape, |tile| unsafe {
                    x86_attention::run(tile, &out, q, k, v);
                });
            }
            KvData::Bf16 { k, v } => {
                let blocks = Plain::<u16> { k, v };
                self.each_tile(pool, rows, &cache.shape, |tile| tile.run(self.isa, &out, q, &blocks));
            }
            KvData::F32 { k, v } => {
                let blocks = Plain::<f32> { k, v };
                self.each_tile(pool, rows, &cache.shape, |tile| tile.run(self.isa, &out, q, &blocks));
            }
            KvData::Coded(blocks) => {
                self.each_tile(pool, rows, &cache.shape, |tile| tile.run(self.isa, &out, q, &**blocks));
            }
        }
    }

    /// Distributes the tiles among the threads.
    fn each_tile(&self, pool: &mut Pool, rows: &[AttentionRow<'_>], shape: &KvShape, run: impl Fn(&Tile<'_>) + Sync) {
        let group = self.num_heads / shape.num_kv_heads;
        let tiles_of = |row: &AttentionRow<'_>| (row.num_tokens * group).div_ceil(TILE) * shape.num_kv_heads;
        let total: usize = rows.iter().map(tiles_of).sum();
        pool.each(total, 1, |range| {
            for mut index in range {
                // Late tokens have the most positions, so their tiles come first; then all threads finish at about the
                // same time.
                let row = rows.iter().find(|row| {
                    let tiles = tiles_of(row);
                    let found = index < tiles;
                    index -= if found { 0 } else { tiles };
                    found
                });
                let row = row.expect("items are counted by the same rule");
                let (kv_head, tile) = (index % shape.num_kv_heads, index / shape.num_kv_heads);
                let last_tile = (row.num_tokens * group).div_ceil(TILE) - 1;
                let first = (last_tile - tile) * TILE;
                let queries = first..(first + TILE).min(row.num_tokens * group);
                run(&Tile { attention: self, row, shape, kv_head, group, queries });
            }
        });
    }
}

/// Blocks from which a tile reads 16 positions at a time.
trait Blocks: Sync {
    /// Type of keys in the products.
    type Key: KvElement;

    /// Writes the rows of V to `values`. Returns the keys from the first pair on, and the distance between pairs in positions;
    /// `keys` is room for them.
    fn read<'a, const DIM: usize>(
        &'a self,
        tile: &Tile<'_>,
        position: usize,
        keys: &'a mut [[f32; CHUNK]; DIM],
        values: &mut [[f32; DIM]; CHUNK],
    ) -> (&'a [Self::Key], usize);
}

/// Blocks of numbers.
struct Plain<'a, T> {
    k: &'a [T],
    v: &'a [T],
}

impl<T: KvElement> Blocks for Plain<'_, T> {
    type Key = T;

    #[inline(always)]
    fn read<'a, const DIM: usize>(
        &'a self,
        tile: &Tile<'_>,
        position: usize,
        _keys: &'a mut [[f32; CHUNK]; DIM],
        values: &mut [[f32; DIM]; CHUNK],
    ) -> (&'a [T], usize) {
        let (keys, rows) = tile.chunk(self.k, self.v, position);
        for (values, row) in values.iter_mut().zip(rows.chunks_exact(tile.shape.head_dim)) {
            for (value, v) in values.iter_mut().zip(row) {
                *value = v.to_f32();
            }
        }
        (keys, tile.shape.block_size)
    }
}

impl Blocks for CodedKv {
    type Key = f32;

    #[inline(always)]
    fn read<'a, const DIM: usize>(
        &'a self,
        tile: &Tile<'_>,
        position: usize,
        keys: &'a mut [[f32; CHUNK]; DIM],
        values: &mut [[f32; DIM]; CHUNK],
    ) -> (&'a [f32], usize) {
        self.expand(tile, position, keys.as_flattened_mut(), values);
        (keys.as_flattened(), CHUNK)
    }
}

/// The running softmax of one query.
#[derive(Clone, Copy)]
struct State<const DIM: usize> {
    max: f32,
    sum: [f32; CHUNK],
    out: [f32; DIM],
}

impl Tile<'_> {
    /// Performs the same operations in the same order with any instruction set; it uses wider registers if available.
    fn run<B: Blocks>(&self, isa: Isa, out: &SharedOut<f32>, q: &[f32], blocks: &B) {
        match isa {
            // SAFETY: `isa` says that the processor has the instructions.
            #[cfg(target_arch = "x86_64")]
            Isa::Avx512 | Isa::Avx512Bf16 => unsafe { run_avx512(self, out, q, blocks) },
            // SAFETY: as above.
            #[cfg(target_arch = "x86_64")]
            Isa::Avx2 => unsafe { run_avx2(self, out, q, blocks) },
            _ => self.compute(out, q, blocks),
        }
    }

    /// Chooses buffer sizes that fit these queries and this head.
    #[inline(always)]
    fn compute<B: Blocks>(&self, out: &SharedOut<f32>, q: &[f32], blocks: &B) {
        match (self.queries.len() <= 4, self.shape.head_dim) {
            (true, ..=64) => self.compute_in::<B, 4, 64>(out, q, blocks),
            (false, ..=64) => self.compute_in::<B, TILE, 64>(out, q, blocks),
            (true, ..=128) => self.compute_in::<B, 4, 128>(out, q, blocks),
            (false, ..=128) => self.compute_in::<B, TILE, 128>(out, q, blocks),
            (_, ..=256) => self.compute_in::<B, TILE, 256>(out, q, blocks),
            _ => self.compute_in::<B, TILE, MAX_HEAD_DIM>(out, q, blocks),
        }
    }

    #[inline(always)]
    fn compute_in<B: Blocks, const QUERIES: usize, const DIM: usize>(
        &self,
        out: &SharedOut<f32>,
        q: &[f32],
        blocks: &B,
    ) {
        let dim = self.shape.head_dim;
        let mut scaled = [[0.0f32; DIM]; QUERIES];
        let mut states = [State { max: f32::NEG_INFINITY, sum: [0.0; CHUNK], out: [0.0; DIM] }; QUERIES];
        for (scaled, query) in scaled.iter_mut().zip(self.queries.clone()) {
            let (token, head) = self.token_and_head(query);
            let q = &q[token * self.attention.q_stride + head * dim..][..dim];
            for (scaled, q) in scaled.iter_mut().zip(q) {
                *scaled = B::Key::from_f32(*q).to_f32();
            }
        }
        let mut values = [[0.0f32; DIM]; CHUNK];
        let mut expanded = [[0.0f32; CHUNK]; DIM];
        let first_seen = self.seen(self.queries.start).start;
        let end = self.seen(self.queries.end - 1).end;
        for chunk in (first_seen / CHUNK * CHUNK..end).step_by(CHUNK) {
            let (keys, stride) = blocks.read(self, chunk, &mut expanded, &mut values);
            for ((query, q), state) in self.queries.clone().zip(&scaled).zip(&mut states) {
                let seen = self.seen(query);
                if seen.start < chunk + CHUNK && chunk < seen.end {
                    let mut scores = scores(&q[..dim], keys, stride, self.attention.scale);
                    self.cap(&mut scores);
                    if !self.attention.alibi_slopes.is_empty() {
                        self.add_alibi(&mut scores, chunk, query);
                    }
                    mask(&mut scores, chunk, &seen);
                    state.add(&scores, &values, dim);
                }
            }
        }
        for (query, state) in self.queries.clone().zip(&states) {
            self.write(out, query, state.max, &state.sum, &state.out);
        }
    }
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
unsafe fn run_avx512<B: Blocks>(tile: &Tile<'_>, out: &SharedOut<f32>, q: &[f32], blocks: &B) {
    tile.compute(out, q, blocks);
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2")]
unsafe fn run_avx2<B: Blocks>(tile: &Tile<'_>, out: &SharedOut<f32>, q: &[f32], blocks: &B) {
    tile.compute(out, q, blocks);
}

/// `scale * q·k` of 16 positions; pairs of keys are `stride` positions apart.
#[inline(always)]
fn scores<T: KvElement>(q: &[f32], keys: &[T], stride: usize, scale: f32) -> [f32; CHUNK] {
    let mut sums = [0.0; CHUNK];
    for (pair, q) in q.chunks_exact(2).enumerate() {
        let keys = &keys[pair * stride * 2..][..2 * CHUNK];
        for lane in 0..CHUNK {
            sums[lane] += q[0] * keys[2 * lane].to_f32() + q[1] * keys[2 * lane + 1].to_f32();
        }
    }
    sums.map(|sum| sum * scale)
}

#[inline(always)]
fn mask(scores: &mut [f32; CHUNK], first: usize, seen: &Range<usize>) {
    if first < seen.start || first + CHUNK > seen.end {
        for (lane, score) in scores.iter_mut().enumerate() {
            if !seen.contains(&(first + lane)) {
                *score = f32::NEG_INFINITY;
            }
        }
    }
}

impl<const DIM: usize> State<DIM> {
    #[inline(always)]
    fn add(&mut self, scores: &[f32; CHUNK], values: &[[f32; DIM]; CHUNK], dim: usize) {
        let max = scores.iter().fold(self.max, |max, score| max.max(*score));
        let old = exp(self.max - max);
        self.max = max;
        let weights = scores.map(|score| exp(score - max));
        for (sum, weight) in self.sum.iter_mut().zip(&weights) {
            *sum = *sum * old + weight;
        }
        let out = &mut self.out[..dim];
        for out in &mut *out {
            *out *= old;
        }
        for (weight, values) in weights.iter().zip(values) {
            for (out, value) in out.iter_mut().zip(values) {
                *out += weight * value;
            }
        }
    }
}
