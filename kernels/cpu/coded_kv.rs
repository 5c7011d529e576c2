//! KV blocks of eight-bit codes (`kv_codes.rs`): the codes in the order of other blocks, and a scale for each position and KV head.

use crate::cpu::attention_tile::Tile;
use crate::cpu::kv_layout::{CHUNK, KvShape, MAX_HEAD_DIM, WriteHead};
use crate::cpu::shared::SharedOut;
use crate::cpu::{Buffer, Pool};
use crate::kv_codes::KvCodes;

pub(super) struct CodedKv {
    kind: KvCodes,
    table: [f32; 256],
    k: Buffer<u8>,
    v: Buffer<u8>,
    k_scales: Buffer<f32>, // [blocks, K, B]
    v_scales: Buffer<f32>,
}

impl CodedKv {
    /// Blocks for `num_rows` rows of `head_dim` codes of K, and of V.
    pub(super) fn new(kind: KvCodes, num_rows: usize, head_dim: usize) -> Self {
        let (codes, scales) = (|| Buffer::new(num_rows * head_dim), || Buffer::new(num_rows));
        Self { kind, table: kind.table(), k: codes(), v: codes(), k_scales: scales(), v_scales: scales() }
    }

    /// Calls `head` for each KV head with a function that writes K and V of a token, given the start of a block and an
    /// offset in it.
    pub(super) fn write_heads(
        &mut self,
        shape: &KvShape,
        pool: &mut Pool,
        chunk: usize,
        head: impl Fn(usize, &mut WriteHead<'_>) + Sync,
    ) {
        let (kind, len, block) = (self.kind, shape.block_size * shape.head_dim, shape.block_size);
        let (keys, values) = (SharedOut::new(&mut self.k), SharedOut::new(&mut self.v));
        let (k_scales, v_scales) = (SharedOut::new(&mut self.k_scales), SharedOut::new(&mut self.v_scales));
        pool.each(shape.num_kv_heads, chunk, |heads| {
            for kv_head in heads {
                head(kv_head, &mut |start, offset, key, value| {
                    let row = start / shape.head_dim;
                    // SAFETY: the part of a block that belongs to a KV head is written only by that head's thread.
                    let (k, v, k_scales, v_scales) = unsafe {
                        (
                            keys.slice(start, len),
                            values.slice(start, len),
                            k_scales.slice(row, block),
                            v_scales.slice(row, block),
                        )
                    };
                    [k_scales[offset], v_scales[offset]] = write_head(kind, shape, k, v, offset, key, value);
                });
            }
        });
    }

    /// Writes K and V of one token and KV head.
    pub(super) fn write(&mut self, shape: &KvShape, start: usize, offset: usize, key: &[f32], value: &[f32]) {
        let (k, v, row) = (&mut self.k[start..], &mut self.v[start..], start / shape.head_dim + offset);
        [self.k_scales[row], self.v_scales[row]] = write_head(self.kind, shape, k, v, offset, key, value);
    }

    /// The bytes of a block of `num_rows` rows of K, and of V.
    pub(super) fn parts(&self, num_rows: usize, head_dim: usize, block: usize) -> Vec<&[u8]> {
        let (rows, len) = (block * num_rows..(block + 1) * num_rows, num_rows * head_dim);
        let codes = [&self.k, &self.v].map(|codes| &codes[block * len..(block + 1) * len]);
        let scales = [&self.k_scales, &self.v_scales].map(|scales| bytemuck::cast_slice(&scales[rows.clone()]));
        codes.into_iter().chain(scales).collect()
    }

    /// The same, to write a block.
    pub(super) fn parts_mut(&mut self, num_rows: usize, head_dim: usize, block: usize) -> Vec<&mut [u8]> {
        let (rows, len) = (block * num_rows..(block + 1) * num_rows, num_rows * head_dim);
        let codes = [&mut self.k, &mut self.v].map(|codes| &mut codes[block * len..(block + 1) * len]);
        let scales =
            [&mut self.k_scales, &mut self.v_scales].map(|scales| bytemuck::cast_slice_mut(&mut scales[rows.clone()]));
        codes.into_iter().chain(scales).collect()
    }

    /// Copies the content of a block of `num_rows` rows of K, and of V.
    pub(super) fn copy_block(&mut self, num_rows: usize, head_dim: usize, from: usize, to: usize) {
        let len = num_rows * head_dim;
        [&mut self.k, &mut self.v].into_iter().for_each(|codes| {
            codes.copy_within(from * len..(from + 1) * len, to * len);
        });
        [&mut self.k_scales, &mut self.v_scales].into_iter().for_each(|scales| {
            scales.copy_within(from * num_rows..(from + 1) * num_rows, to * num_rows);
        });
    }

    /// K and V of 16 positions: pairs of K, `[D / 2, 16, 2]`, and rows of V.
    #[inline(always)]
    pub(super) fn expand<const DIM: usize>(
        &self,
        tile: &Tile<'_>,
        position: usize,
        keys: &mut [f32],
        values: &mut [[f32; DIM]; CHUNK],
    ) {
        let (block_size, dim) = (tile.shape.block_size, tile.shape.head_dim);
        let (k, v) = tile.chunk(&self.k, &self.v, position);
        let row = tile.row_of(position);
        let (k_scales, v_scales) = (&self.k_scales[row..][..CHUNK], &self.v_scales[row..][..CHUNK]);
        for (pair, keys) in keys.chunks_exact_mut(2 * CHUNK).take(dim / 2).enumerate() {
            let codes = &k[pair * block_size * 2..][..2 * CHUNK];
            for ((key, code), lane) in keys.iter_mut().zip(codes).zip(0..) {
                *key = self.table[usize::from(*code)] * k_scales[lane / 2];
            }
        }
        for ((values, codes), scale) in values.iter_mut().zip(v.chunks_exact(dim)).zip(v_scales) {
            for (value, code) in values.iter_mut().zip(codes) {
                *value = self.table[usize::from(*code)] * scale;
            }
        }
    }
}

/// Writes the codes of a token, given the rest of its part of the block. Returns the scales of K and V.
fn write_head(
    kind: KvCodes,
    shape: &KvShape,
    k: &mut [u8],
    v: &mut [u8],
    offset: usize,
    key: &[f32],
    value: &[f32],
) -> [f32; 2] {
    let v_scale = kind.encode_all(value, &mut v[offset * shape.head_dim..][..shape.head_dim]);
    let mut codes = [0; MAX_HEAD_DIM];
    let codes = &mut codes[..shape.head_dim];
    let k_scale = kind.encode_all(key, codes);
    for (pair, codes) in codes.chunks_exact(2).enumerate() {
        k[(pair * shape.block_size + offset) * 2..][..2].copy_from_slice(codes);
    }
    [k_scale, v_scale]
}
