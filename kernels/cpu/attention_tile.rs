//! The unit of work of CPU attention: a few queries that share a KV head.

use std::ops::Range;

use crate::cpu::kv_layout::{CHUNK, KvShape};
use crate::cpu::shared::SharedOut;
use crate::cpu::{Isa, exp};

/// Number of queries that share one pass over K and V.
pub(super) const TILE: usize = 16;

/// The tokens of one row in this step: consecutive tokens at consecutive positions.
#[derive(Debug, Clone, Copy)]
pub struct AttentionRow<'a> {
    /// Index of the first token in the step.
    pub first_token: usize,
    /// Number of tokens.
    pub num_tokens: usize,
    /// Position of the first token in its sequence.
    pub first_position: usize,
    /// Block table of the sequence, covering all positions up to the last token's.
    pub block_table: &'a [u32],
}

/// Parameters that are the same in every step.
#[derive(Debug, Clone, Copy)]
pub struct Attention<'a> {
    /// `H`, a multiple of the cache's KV heads.
    pub num_heads: usize,
    /// Multiplies q·k.
    pub scale: f32,
    /// If set, only this number of last positions is attended to, the token's own included.
    pub window: Option<usize>,
    /// If set, only the positions of a token's own chunk of this size are attended to: those from
    /// `position / chunk * chunk` on.
    pub chunk: Option<usize>,
    /// Distance in elements from one token's q to the next.
    pub q_stride: usize,
    /// `[H]` ALiBi slopes, or empty.
    pub alibi_slopes: &'a [f32],
    /// If set, a score `s` becomes `cap * tanh(s / cap)`.
    pub score_cap: Option<f32>,
    /// `[H]` logits that take part in the softmax without a value, or empty.
    pub sinks: &'a [f32],
    /// Instruction set to use.
    pub isa: Isa,
}

/// Up to 16 queries (token, head) of one row that share a KV head.
pub(super) struct Tile<'a> {
    pub(super) attention: &'a Attention<'a>,
    pub(super) row: &'a AttentionRow<'a>,
    pub(super) shape: &'a KvShape,
    pub(super) kv_head: usize,
    pub(super) group: usize,
    pub(super) queries: Range<usize>, // token * group + head in group
}

impl Tile<'_> {
    /// Writes a query's output: its weighted values divided by the sum of weights, which are relative to `max`.
    #[inline(always)]
    pub(super) fn write(&self, out: &SharedOut<f32>, query: usize, max: f32, weights: &[f32; CHUNK], values: &[f32]) {
        let (token, head) = self.token_and_head(query);
        let (dim, heads) = (self.shape.head_dim, self.attention.num_heads);
        // SAFETY: each query is in one tile, and each tile has one thread.
        let out = unsafe { out.slice((token * heads + head) * dim, dim) };
        let sink = self.attention.sinks.get(head).map_or(0.0, |sink| exp(sink - max));
        let scale = 1.0 / (weights.iter().sum::<f32>() + sink);
        for (out, value) in out.iter_mut().zip(values) {
            *out = value * scale;
        }
    }

    pub(super) fn token_and_head(&self, query: usize) -> (usize, usize) {
        (self.row.first_token + query / self.group, self.kv_head * self.group + query % self.group)
    }

    /// Adds the ALiBi bias of a query to the scores of 16 positions.
    #[inline(always)]
    pub(super) fn add_alibi(&self, scores: &mut [f32; CHUNK], first: usize, query: usize) {
        let (_, head) = self.token_and_head(query);
        let slope = self.attention.alibi_slopes[head];
        let position = self.row.first_position + query / self.group;
        for (lane, score) in scores.iter_mut().enumerate() {
            *score += slope * ((first + lane) as f32 - position as f32);
        }
    }

    /// Caps the scores of 16 positions, if scores are capped.
    #[inline(always)]
    pub(super) fn cap(&self, scores: &mut [f32; CHUNK]) {
        if let Some(cap) = self.attention.score_cap {
            scores.iter_mut().for_each(|score| *score = cap * (*score / cap).tanh());
        }
    }

    /// The positions that a query attends to.
    pub(super) fn seen(&self, query: usize) -> Range<usize> {
        let end = self.row.first_position + query / self.group + 1;
        let in_window = self.attention.window.map_or(0, |window| end.saturating_sub(window));
        let in_chunk = self.attention.chunk.map_or(0, |chunk| (end - 1) / chunk * chunk);
        in_window.max(in_chunk)..end
    }

    /// K and V of 16 positions: K starts at the first pair, V is `[16, D]`.
    pub(super) fn chunk<'k, T>(&self, k: &'k [T], v: &'k [T], position: usize) -> (&'k [T], &'k [T]) {
        let (block_size, dim) = (self.shape.block_size, self.shape.head_dim);
        let block = self.row.block_table[position / block_size] as usize;
        assert!(block < self.shape.num_blocks, "block {block} is in the cache");
        let start = self.shape.start(block, self.kv_head);
        let offset = position % block_size;
        let keys = &k[start..start + block_size * dim][offset * 2..];
        (keys, &v[start + offset * dim..][..CHUNK * dim])
    }

    /// The index of a position among those of all blocks of its KV head's part.
    pub(super) fn row_of(&self, position: usize) -> usize {
        let block_size = self.shape.block_size;
        let block = self.row.block_table[position / block_size] as usize;
        self.shape.start(block, self.kv_head) / self.shape.head_dim + position % block_size
    }
}
