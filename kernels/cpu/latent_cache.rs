//! The KV cache of attention over latent vectors: one row for each position, in blocks.

use std::ops::Range;

use crate::cpu::norm::normalize;
use crate::cpu::packed::bf16_bits;
use crate::cpu::{Buffer, KvType, Norm, rotate};

/// Sizes of attention over latent vectors.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LatentSizes {
    /// Elements of the latent vector.
    pub rank: usize,
    /// Rotated elements of q and k, behind the others; even.
    pub rotary_dim: usize,
    /// Elements of a head of q and k that are not rotated.
    pub key_dim: usize,
    /// Elements of a head of v.
    pub value_dim: usize,
    /// Whether rotated pairs are neighbours `(2i, 2i + 1)`; otherwise `(i, i + rotary_dim / 2)`.
    pub is_interleaved: bool,
}

impl LatentSizes {
    /// Elements of one position in a block: the latent vector and the rotated part of k.
    pub fn width(&self) -> usize {
        self.rank + self.rotary_dim
    }

    /// Rotates the pairs of `x [rotary_dim]`.
    pub(super) fn rotate(&self, x: &mut [f32], cos: &[f32], sin: &[f32]) {
        if !self.is_interleaved {
            return rotate(x, cos, sin);
        }
        for (pair, (cos, sin)) in x.chunks_exact_mut(2).zip(cos.iter().zip(sin)) {
            (pair[0], pair[1]) = (pair[0] * cos - pair[1] * sin, pair[1] * cos + pair[0] * sin);
        }
    }
}

/// Latent vectors of a layer, `[blocks, B, rank + rotary_dim]`.
pub struct LatentCache {
    pub(super) num_blocks: usize,
    pub(super) block_size: usize,
    pub(super) width: usize,
    pub(super) data: LatentData,
}

pub(super) enum LatentData {
    Bf16(Buffer<u16>),
    F32(Buffer<f32>),
}

/// The tokens of a step.
#[derive(Debug, Clone, Copy)]
pub struct LatentTokens<'a> {
    /// `[T]`.
    pub positions: &'a [u32],
    /// `[T]`, `block * B + offset`.
    pub slots: &'a [u32],
    /// Cosines and sines of all positions, each `[positions, rotary_dim / 2]`.
    pub angles: [&'a [f32]; 2],
}

impl LatentCache {
    /// Reserves blocks; the system assigns memory to a block when it is first written.
    ///
    /// # Panics
    /// Panics if `B` is not a multiple of 16, or if `kv_type` is one of codes.
    pub fn new(kv_type: KvType, num_blocks: usize, block_size: usize, width: usize) -> Self {
        assert!(block_size.is_multiple_of(16), "block size is a multiple of 16");
        let len = num_blocks * block_size * width;
        let data = match kv_type {
            KvType::Bf16 => LatentData::Bf16(Buffer::new(len)),
            KvType::F32 => LatentData::F32(Buffer::new(len)),
            KvType::Codes(_) => panic!("latent vectors are numbers"),
        };
        Self { num_blocks, block_size, width, data }
    }

    /// Normalizes the latent vectors of `rows [T, width]`, rotates the parts of k, and writes each row to its slot.
    ///
    /// # Panics
    /// Panics if a slot, a position or a length is out of range.
    pub fn write(&mut self, rows: &mut [f32], sizes: &LatentSizes, norm: (&[f32], f32), tokens: &LatentTokens<'_>) {
        let (width, half, [cos, sin]) = (self.width, sizes.rotary_dim / 2, tokens.angles);
        assert_eq!(sizes.width(), width, "rows are those of the cache");
        assert!(rows.len() >= tokens.slots.len() * width, "each token has a row");
        let (weight, eps) = norm;
        for ((row, &slot), &position) in rows.chunks_exact_mut(width).zip(tokens.slots).zip(tokens.positions) {
            let (latent, key) = row.split_at_mut(sizes.rank);
            normalize(latent, Norm::Rms { weight }, eps);
            let angles = position as usize * half..(position as usize + 1) * half;
            sizes.rotate(key, &cos[angles.clone()], &sin[angles]);
            let own = slot as usize * width..(slot as usize + 1) * width;
            match &mut self.data {
                LatentData::Bf16(data) => {
                    data[own].iter_mut().zip(&*row).for_each(|(to, from)| *to = bf16_bits(*from));
                }
                LatentData::F32(data) => data[own].copy_from_slice(row),
            }
        }
    }

    /// The bytes of a block.
    ///
    /// # Panics
    /// Panics if the block does not exist.
    pub fn bytes(&self, block: usize) -> &[u8] {
        let own = self.own(block);
        match &self.data {
            LatentData::Bf16(data) => bytemuck::cast_slice(&data[own]),
            LatentData::F32(data) => bytemuck::cast_slice(&data[own]),
        }
    }

    /// The same, to write a block.
    ///
    /// # Panics
    /// Panics if the block does not exist.
    pub fn bytes_mut(&mut self, block: usize) -> &mut [u8] {
        let own = self.own(block);
        match &mut self.data {
            LatentData::Bf16(data) => bytemuck::cast_slice_mut(&mut data[own]),
            LatentData::F32(data) => bytemuck::cast_slice_mut(&mut data[own]),
        }
    }

    /// The elements of a block, which must exist.
    fn own(&self, block: usize) -> Range<usize> {
        assert!(block < self.num_blocks, "block {block} is one of the cache");
        let len = self.block_size * self.width;
        block * len..(block + 1) * len
    }

    /// Copies the content of a block.
    ///
    /// # Panics
    /// Panics if a block does not exist.
    pub fn copy_block(&mut self, from: usize, to: usize) {
        assert!(from < self.num_blocks && to < self.num_blocks, "blocks {from} and {to} are two of the cache");
        let len = self.block_size * self.width;
        let range = from * len..(from + 1) * len;
        match &mut self.data {
            LatentData::Bf16(data) => data.copy_within(range, to * len),
            LatentData::F32(data) => data.copy_within(range, to * len),
        }
    }
}
