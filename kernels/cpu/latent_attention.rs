//! latent_attention: attention over latent vectors                                   (MLA, DeepSeek-V2, 2024)
//!
//! out[t, h, :] = V_h (sum over s of p[s] * c[s, :rank]),   p = softmax_s(scale * q'[t, h, :] · c[s, :])
//! q'[t, h, :]  = [q[t, h, :key_dim] K_h | rotated q[t, h, key_dim:]], so that no k and no v of a position is computed
//!
//! q         [T, H (key_dim + rotary_dim)] f32
//! c         rows of the cache, bf16 or f32; position `s` of a row is offset `s % B` of block `table[s / B]`
//! K_h, V_h  rows `h (key_dim + value_dim)` and on of `up [H (key_dim + value_dim), rank]`
//! maths     f32; online softmax over chunks of 16 positions aligned at 0, in order
//! threads   divide tiles of up to 8 queries of a row, of several heads or of several tokens; a tile reads each row of the
//!           cache once
//! test      tests/cpu_latent.rs against reference::latent_attention

use std::ops::Range;

use crate::cpu::attention_tile::AttentionRow;
use crate::cpu::latent_cache::{LatentCache, LatentData, LatentSizes};
use crate::cpu::shared::SharedOut;
use crate::cpu::{Matrix, Pool, WeightType, exp, read_weights};

/// Positions in a step of the online softmax.
const CHUNK: usize = 16;
/// Queries that share one pass over the cache.
const TILE: usize = 8;

/// Parameters of a layer.
#[derive(Debug, Clone, Copy)]
pub struct LatentAttention<'a> {
    /// Sizes.
    pub sizes: LatentSizes,
    /// `H`.
    pub num_heads: usize,
    /// Multiplies q·k.
    pub scale: f32,
    /// `[H (key_dim + value_dim), rank]`.
    pub up: &'a Matrix,
    /// Cosines and sines of all positions, each `[positions, rotary_dim / 2]`.
    pub angles: [&'a [f32]; 2],
}

impl LatentAttention<'_> {
    /// Causal attention of every row's tokens over its blocks, written to `out [T, H value_dim]`. `q` is not rotated yet.
    ///
    /// # Panics
    /// Panics if a block table is too short or contains a block outside the cache, or if a length is out of range.
    pub fn run(&self, pool: &mut Pool, out: &mut [f32], q: &[f32], rows: &[AttentionRow<'_>], cache: &LatentCache) {
        let up_rows = self.num_heads * (self.sizes.key_dim + self.sizes.value_dim);
        assert!(self.up.rows() == up_rows && self.up.cols() == self.sizes.rank, "weights are those of all heads");
        let out = SharedOut::new(out);
        // Tiles of the same heads follow each other, so that their weights stay in the processor's cache.
        let mut tiles: Vec<Tile<'_>> = rows.iter().flat_map(|row| self.tiles(row)).collect();
        tiles.sort_by_key(|tile| (tile.heads.start, std::cmp::Reverse(tile.tokens.end)));
        pool.each(tiles.len(), 1, |range| {
            for tile in &tiles[range] {
                self.run_tile(tile, &out, q, cache);
            }
        });
    }

    fn tiles<'r>(&self, row: &'r AttentionRow<'r>) -> Vec<Tile<'r>> {
        let num_tokens = row.num_tokens.min(TILE);
        let num_heads = (TILE / num_tokens.max(1)).min(self.num_heads);
        let mut tiles = Vec::new();
        for first in (0..row.num_tokens).step_by(num_tokens.max(1)) {
            for head in (0..self.num_heads).step_by(num_heads) {
                let tokens = first..(first + num_tokens).min(row.num_tokens);
                tiles.push(Tile { row, tokens, heads: head..(head + num_heads).min(self.num_heads) });
            }
        }
        tiles
    }

    fn run_tile(&self, tile: &Tile<'_>, out: &SharedOut<f32>, q: &[f32], cache: &LatentCache) {
        let mut states: Vec<State> = tile.queries().map(|query| self.start(query, tile, q)).collect();
        self.absorb_keys(tile, &mut states, q);
        self.attend(tile, &mut states, cache);
        self.write_values(tile, &states, out);
    }

    /// A query whose rotated part is set.
    fn start(&self, (token, head): (usize, usize), tile: &Tile<'_>, q: &[f32]) -> State {
        let LatentSizes { rank, rotary_dim, key_dim, .. } = self.sizes;
        let (half, position) = (rotary_dim / 2, tile.row.first_position + token);
        let from = self.query_start(tile, token, head) + key_dim;
        let mut query = vec![0.0; rank + rotary_dim];
        query[rank..].copy_from_slice(&q[from..from + rotary_dim]);
        let angles = position * half..(position + 1) * half;
        self.sizes.rotate(&mut query[rank..], &self.angles[0][angles.clone()], &self.angles[1][angles]);
        State { query, seen: position + 1, max: f32::NEG_INFINITY, sum: 0.0, out: vec![0.0; rank] }
    }

    fn query_start(&self, tile: &Tile<'_>, token: usize, head: usize) -> usize {
        let dim = self.sizes.key_dim + self.sizes.rotary_dim;
        ((tile.row.first_token + token) * self.num_heads + head) * dim
    }

    /// Multiplies the unrotated part of each query by the keys' weights of its head.
    fn absorb_keys(&self, tile: &Tile<'_>, states: &mut [State], q: &[f32]) {
        let LatentSizes { rank, key_dim, value_dim, .. } = self.sizes;
        let mut weights = vec![0.0; rank];
        for (head, states) in tile.heads.clone().zip(states.chunks_exact_mut(tile.tokens.len())) {
            for element in 0..key_dim {
                self.expand_row(head * (key_dim + value_dim) + element, &mut weights);
                for (token, state) in tile.tokens.clone().zip(&mut *states) {
                    let factor = q[self.query_start(tile, token, head) + element];
                    add_scaled(&mut state.query[..rank], factor, &weights);
                }
            }
        }
    }

    /// Reads the cache up to the last position that a query sees.
    fn attend(&self, tile: &Tile<'_>, states: &mut [State], cache: &LatentCache) {
        let end = states.iter().map(|state| state.seen).max().unwrap_or(0);
        let mut rows = vec![0.0; CHUNK * cache.width];
        for first in (0..end).step_by(CHUNK) {
            cache.expand(tile.row.block_table, first, &mut rows);
            for state in states.iter_mut().filter(|state| first < state.seen) {
                let mut scores = [0.0; CHUNK];
                products(&mut scores, &state.query, &rows);
                for (lane, score) in scores.iter_mut().enumerate() {
                    *score = if first + lane < state.seen { *score * self.scale } else { f32::NEG_INFINITY };
                }
                state.add(&scores, &rows);
            }
        }
    }

    /// Multiplies the sums of latent vectors by the values' weights.
    fn write_values(&self, tile: &Tile<'_>, states: &[State], out: &SharedOut<f32>) {
        let LatentSizes { rank, key_dim, value_dim, .. } = self.sizes;
        let mut weights = vec![0.0; rank];
        for (head, states) in tile.heads.clone().zip(states.chunks_exact(tile.tokens.len())) {
            for element in 0..value_dim {
                self.expand_row(head * (key_dim + value_dim) + key_dim + element, &mut weights);
                for (token, state) in tile.tokens.clone().zip(states) {
                    let at = ((tile.row.first_token + token) * self.num_heads + head) * value_dim + element;
                    let mut product = [0.0];
                    products(&mut product, &state.out, &weights);
                    // SAFETY: each query is in one tile, and each tile has one thread.
                    let out = unsafe { out.slice(at, 1) };
                    out[0] = product[0] / state.sum;
                }
            }
        }
    }

    fn expand_row(&self, row: usize, out: &mut [f32]) {
        let bytes = self.up.row_bytes(row);
        match self.up.weight_type() {
            WeightType::Bf16 => expand_bf16(out, bytes),
            other => read_weights(other, bytes, out),
        }
    }
}

/// Queries of a row: each of these tokens with each of these heads.
struct Tile<'a> {
    row: &'a AttentionRow<'a>,
    tokens: Range<usize>, // of the row
    heads: Range<usize>,
}

impl Tile<'_> {
    /// Tokens and heads, by head.
    fn queries(&self) -> impl Iterator<Item = (usize, usize)> + '_ {
        self.heads.clone().flat_map(|head| self.tokens.clone().map(move |token| (token, head)))
    }
}

/// A query, and its running softmax.
struct State {
    query: Vec<f32>, // [rank + rotary_dim]
    seen: usize,     // number of positions
    max: f32,
    sum: f32,
    out: Vec<f32>, // [rank]
}

impl State {
    fn add(&mut self, scores: &[f32; CHUNK], rows: &[f32]) {
        let max = scores.iter().fold(self.max, |max, score| max.max(*score));
        let old = exp(self.max - max);
        let weights = scores.map(|score| exp(score - max));
        self.max = max;
        self.sum = self.sum * old + weights.iter().sum::<f32>();
        add_rows(&mut self.out, old, &weights, rows);
    }
}

impl LatentCache {
    /// The rows of 16 positions of a sequence in f32.
    fn expand(&self, table: &[u32], position: usize, out: &mut [f32]) {
        let block = table[position / self.block_size] as usize;
        assert!(block < self.num_blocks, "block {block} is in the cache");
        let start = (block * self.block_size + position % self.block_size) * self.width;
        let own = start..start + CHUNK * self.width;
        match &self.data {
            LatentData::Bf16(data) => expand_bf16(out, bytemuck::cast_slice(&data[own])),
            LatentData::F32(data) => out.copy_from_slice(&data[own]),
        }
    }
}

for_each_isa! {
    fn expand_bf16(out: &mut [f32], bytes: &[u8]) {
        for (out, bytes) in out.iter_mut().zip(bytes.chunks_exact(2)) {
            *out = f32::from_bits(u32::from(u16::from_le_bytes([bytes[0], bytes[1]])) << 16);
        }
    }

    /// `out += factor * x`.
    fn add_scaled(out: &mut [f32], factor: f32, x: &[f32]) {
        for (out, x) in out.iter_mut().zip(x) {
            *out += factor * x;
        }
    }

    /// `out = old * out` + the sum of the first elements of each row times its weight.
    fn add_rows(out: &mut [f32], old: f32, weights: &[f32; CHUNK], rows: &[f32]) {
        for out in out.iter_mut() {
            *out *= old;
        }
        for (weight, row) in weights.iter().zip(rows.chunks_exact(rows.len() / CHUNK)) {
            for (out, x) in out.iter_mut().zip(row) {
                *out += weight * x;
            }
        }
    }

    /// `out[i] = x · row i`, each as sums of 16 lanes.
    fn products(out: &mut [f32], x: &[f32], rows: &[f32]) {
        for (out, row) in out.iter_mut().zip(rows.chunks_exact(x.len())) {
            let mut lanes = [0.0f32; 16];
            let (xs, ys) = (x.chunks_exact(16), row.chunks_exact(16));
            let rest = xs.remainder().iter().zip(ys.remainder());
            for (x, y) in xs.zip(ys) {
                for lane in 0..16 {
                    lanes[lane] += x[lane] * y[lane];
                }
            }
            for (lane, (x, y)) in lanes.iter_mut().zip(rest) {
                *lane += x * y;
            }
            *out = lanes.iter().sum();
        }
    }
}
