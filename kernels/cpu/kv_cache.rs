//! The KV cache: K and V of past tokens, in blocks.

use crate::cpu::coded_kv::CodedKv;
use crate::cpu::kv_layout::{CHUNK, KvShape, MAX_HEAD_DIM, WriteHead};
use crate::cpu::shared::SharedOut;
use crate::cpu::{Buffer, Pool, rotate};
use crate::kv_codes::KvCodes;

/// Element type of KV blocks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum KvType {
    /// bfloat16: half the memory and bandwidth, and as exact as bf16 weights.
    Bf16,
    /// IEEE single precision.
    F32,
    /// Codes of eight bits with a scale for each position and KV head.
    Codes(KvCodes),
}

impl KvType {
    /// Bytes of one position: of `num_vectors` vectors with `width` elements in all.
    pub fn position_bytes(self, num_vectors: usize, width: usize) -> usize {
        match self {
            KvType::Bf16 => width * 2,
            KvType::F32 => width * 4,
            KvType::Codes(_) => width + num_vectors * KvCodes::SCALE_BYTES,
        }
    }
}

/// K and V of a layer in blocks of `B` positions. `kv_layout` has their order.
pub struct KvCache {
    pub(super) shape: KvShape,
    pub(super) data: KvData,
}

pub(super) enum KvData {
    Bf16 { k: Buffer<u16>, v: Buffer<u16> },
    F32 { k: Buffer<f32>, v: Buffer<f32> },
    Coded(Box<CodedKv>),
}

impl KvCache {
    /// Reserves blocks; the system assigns memory to a block when it is first written.
    ///
    /// # Panics
    /// Panics if `D` is odd or above 512, or if `B` is not a multiple of 16.
    pub fn new(kv_type: KvType, num_blocks: usize, num_kv_heads: usize, block_size: usize, head_dim: usize) -> Self {
        assert!(head_dim.is_multiple_of(2) && head_dim <= MAX_HEAD_DIM, "head dim is even and at most 512");
        assert!(block_size.is_multiple_of(CHUNK), "block size is a multiple of 16");
        let len = num_blocks * num_kv_heads * block_size * head_dim;
        let data = match kv_type {
            KvType::Bf16 => KvData::Bf16 { k: Buffer::new(len), v: Buffer::new(len) },
            KvType::F32 => KvData::F32 { k: Buffer::new(len), v: Buffer::new(len) },
            KvType::Codes(kind) => KvData::Coded(Box::new(CodedKv::new(kind, len / head_dim, head_dim))),
        };
        Self { shape: KvShape { num_blocks, num_kv_heads, block_size, head_dim }, data }
    }

    /// Writes `k` and `v [K, D]` of one token at `slot = block * B + offset`.
    ///
    /// # Panics
    /// Panics if the slot or a length is out of range.
    pub fn write(&mut self, slot: usize, k: &[f32], v: &[f32]) {
        let KvShape { num_blocks, num_kv_heads, block_size, head_dim } = self.shape;
        let (block, offset) = (slot / block_size, slot % block_size);
        assert!(block < num_blocks, "slot {slot} lies in a block of the cache");
        assert!(k.len() == num_kv_heads * head_dim && v.len() == k.len(), "k and v are [K, D]");
        for head in 0..num_kv_heads {
            let start = self.shape.start(block, head);
            let own = head * head_dim..(head + 1) * head_dim;
            let (key, value) = (&k[own.clone()], &v[own]);
            match &mut self.data {
                KvData::Bf16 { k, v } => self.shape.write_head(&mut k[start..], &mut v[start..], offset, key, value),
                KvData::F32 { k, v } => self.shape.write_head(&mut k[start..], &mut v[start..], offset, key, value),
                KvData::Coded(blocks) => blocks.write(&self.shape, start, offset, key, value),
            }
        }
    }

    /// Rotates Q and K of each token's row of `qkv [T, stride]` according to its position, and writes K and V to its
    /// slot. Rows are `[H D | K D | K D]`; the angles of position `p` start at `p * D / 2` in the tables.
    ///
    /// # Panics
    /// Panics if a slot, a position or a length is out of range.
    pub fn rotate_and_write(&mut self, pool: &mut Pool, qkv: &mut [f32], tokens: &Rotation<'_>) {
        let KvShape { num_blocks, num_kv_heads, block_size, head_dim } = self.shape;
        let Rotation { stride, num_heads, positions, slots, angles, query_gains, query_factors } = *tokens;
        assert!(stride >= (num_heads + 2 * num_kv_heads) * head_dim, "a row holds Q, K and V");
        assert!(
            slots.iter().all(|slot| (*slot as usize) < num_blocks * block_size),
            "slots lie in blocks of the cache"
        );
        assert_eq!(positions.len(), slots.len(), "each token has a position and a slot");
        assert!(query_factors.is_empty() || query_factors.len() == slots.len(), "each token has a factor, or none has");
        assert!(query_gains.is_empty() || query_gains.len() == head_dim, "gains are [D]");
        let (shape, group, half) = (self.shape, num_heads / num_kv_heads, head_dim / 2);
        let qkv = SharedOut::new(qkv);
        let head = |kv_head: usize, write: &mut WriteHead<'_>| {
            for (token, (position, slot)) in positions.iter().zip(slots).enumerate() {
                let slot = *slot as usize;
                let at = |head: usize| token * stride + head * head_dim;
                // SAFETY: each KV head with its queries belongs to one thread, and these parts of a row do not overlap.
                let (q, k, v) = unsafe {
                    (
                        qkv.slice(at(kv_head * group), group * head_dim),
                        qkv.slice(at(num_heads + kv_head), head_dim),
                        qkv.slice(at(num_heads + num_kv_heads + kv_head), head_dim),
                    )
                };
                let first = *position as usize * half;
                turn(q, first, half, angles);
                stretch(q, query_gains, query_factors.get(token));
                turn(k, first, half, angles);
                write(shape.start(slot / block_size, kv_head), slot % block_size, k, v);
            }
        };
        // A single call if there is little work.
        let chunk = if positions.len() * stride < 1 << 14 { num_kv_heads } else { 1 };
        match &mut self.data {
            KvData::Bf16 { k, v } => shape.write_heads(pool, chunk, k, v, head),
            KvData::F32 { k, v } => shape.write_heads(pool, chunk, k, v, head),
            KvData::Coded(blocks) => blocks.write_heads(&shape, pool, chunk, head),
        }
    }

    /// The bytes of a block, in parts that have the same sizes for all blocks.
    ///
    /// # Panics
    /// Panics if the block does not exist.
    pub fn parts(&self, block: usize) -> Vec<&[u8]> {
        let len = self.block_len(block);
        let own = block * len..(block + 1) * len;
        match &self.data {
            KvData::Bf16 { k, v } => [k, v].map(|data| bytemuck::cast_slice(&data[own.clone()])).into(),
            KvData::F32 { k, v } => [k, v].map(|data| bytemuck::cast_slice(&data[own.clone()])).into(),
            KvData::Coded(blocks) => blocks.parts(len / self.shape.head_dim, self.shape.head_dim, block),
        }
    }

    /// The same, to write a block.
    ///
    /// # Panics
    /// Panics if the block does not exist.
    pub fn parts_mut(&mut self, block: usize) -> Vec<&mut [u8]> {
        let len = self.block_len(block);
        let own = block * len..(block + 1) * len;
        match &mut self.data {
            KvData::Bf16 { k, v } => [k, v].map(|data| bytemuck::cast_slice_mut(&mut data[own.clone()])).into(),
            KvData::F32 { k, v } => [k, v].map(|data| bytemuck::cast_slice_mut(&mut data[own.clone()])).into(),
            KvData::Coded(blocks) => blocks.parts_mut(len / self.shape.head_dim, self.shape.head_dim, block),
        }
    }

    /// Elements of K, or of V, of a block, which must exist.
    fn block_len(&self, block: usize) -> usize {
        let KvShape { num_blocks, num_kv_heads, block_size, head_dim } = self.shape;
        assert!(block < num_blocks, "block {block} is one of the cache");
        num_kv_heads * block_size * head_dim
    }

    /// Copies the content of a block.
    ///
    /// # Panics
    /// Panics if a block does not exist.
    pub fn copy_block(&mut self, from: usize, to: usize) {
        let KvShape { num_blocks, num_kv_heads, block_size, head_dim } = self.shape;
        assert!(from < num_blocks && to < num_blocks, "blocks {from} and {to} are two of the cache");
        let len = num_kv_heads * block_size * head_dim;
        match &mut self.data {
            KvData::Bf16 { k, v } => [k, v].into_iter().for_each(|data| copy_block(data, len, from, to)),
            KvData::F32 { k, v } => [k, v].into_iter().for_each(|data| copy_block(data, len, from, to)),
            KvData::Coded(blocks) => blocks.copy_block(len / head_dim, head_dim, from, to),
        }
    }
}

fn copy_block<T: Copy>(data: &mut [T], len: usize, from: usize, to: usize) {
    data.copy_within(from * len..(from + 1) * len, to * len);
}

/// Rotates Q of each token's row of `q [T, stride]` according to its position, as [`KvCache::rotate_and_write`] does.
///
/// # Panics
/// Panics if a position or a length is out of range.
pub fn rotate_queries(pool: &mut Pool, q: &mut [f32], head_dim: usize, tokens: &Rotation<'_>) {
    let Rotation { stride, num_heads, positions, angles, query_gains, query_factors, .. } = *tokens;
    let (width, half) = (num_heads * head_dim, head_dim / 2);
    assert!(stride >= width && q.len() >= positions.len() * stride, "a row holds Q");
    assert!(query_factors.is_empty() || query_factors.len() == positions.len(), "each token has a factor, or none has");
    assert!(query_gains.is_empty() || query_gains.len() == head_dim, "gains are [D]");
    let chunk = if positions.len() * stride < 1 << 14 { positions.len().max(1) } else { 1 };
    let q = SharedOut::new(q);
    pool.each(positions.len(), chunk, |rows| {
        for token in rows {
            // SAFETY: each row has one thread.
            let q = unsafe { q.slice(token * stride, width) };
            turn(q, positions[token] as usize * half, half, angles);
            stretch(q, query_gains, query_factors.get(token));
        }
    });
}

/// Rotates heads by the `half` angles that start at `first`.
fn turn(heads: &mut [f32], first: usize, half: usize, angles: Option<[&[f32]; 2]>) {
    if let Some([cos, sin]) = angles {
        rotate(heads, &cos[first..first + half], &sin[first..first + half]);
    }
}

/// Multiplies each head by gains, if there are any, and by a factor.
fn stretch(heads: &mut [f32], gains: &[f32], factor: Option<&f32>) {
    if !gains.is_empty() {
        for head in heads.chunks_exact_mut(gains.len()) {
            head.iter_mut().zip(gains).for_each(|(x, gain)| *x *= gain);
        }
    }
    if let Some(factor) = factor {
        heads.iter_mut().for_each(|x| *x *= factor);
    }
}

/// The tokens of a step, for [`KvCache::rotate_and_write`] and [`rotate_queries`].
#[derive(Debug, Clone, Copy)]
pub struct Rotation<'a> {
    /// Distance in elements from one token's row to the next.
    pub stride: usize,
    /// `H`.
    pub num_heads: usize,
    /// `[T]`.
    pub positions: &'a [u32],
    /// `[T]`, `block * B + offset`.
    pub slots: &'a [u32],
    /// Cosines and sines of all positions, each `[positions, D / 2]`. Without them nothing is rotated.
    pub angles: Option<[&'a [f32]; 2]>,
    /// `[D]` factors of the elements of each head of Q behind the rotation, or empty.
    pub query_gains: &'a [f32],
    /// `[T]` factors of Q, or empty.
    pub query_factors: &'a [f32],
}
