//! The order of K and V within the blocks of the KV cache.

use bytemuck::Pod;

use crate::cpu::Pool;
use crate::cpu::packed::bf16_bits;
use crate::cpu::shared::SharedOut;

/// Number of positions in a step of attention's online softmax.
pub(super) const CHUNK: usize = 16;
/// Largest head dimension.
pub(super) const MAX_HEAD_DIM: usize = 512;

/// K is `[blocks, K, D / 2, B, 2]`, so that 16 positions fit into the lanes of a register; V is `[blocks, K, B, D]`.
#[derive(Debug, Clone, Copy)]
pub(super) struct KvShape {
    pub(super) num_blocks: usize,
    pub(super) num_kv_heads: usize,
    pub(super) block_size: usize,
    pub(super) head_dim: usize,
}

impl KvShape {
    #[inline(always)]
    pub(super) fn start(&self, block: usize, head: usize) -> usize {
        (block * self.num_kv_heads + head) * self.block_size * self.head_dim
    }

    /// Calls `head` for each KV head with a function that writes K and V of a token, given the start of a block and an
    /// offset in it.
    pub(super) fn write_heads<T: KvElement>(
        &self,
        pool: &mut Pool,
        chunk: usize,
        k: &mut [T],
        v: &mut [T],
        head: impl Fn(usize, &mut WriteHead<'_>) + Sync,
    ) {
        let (len, keys, values) = (self.block_size * self.head_dim, SharedOut::new(k), SharedOut::new(v));
        pool.each(self.num_kv_heads, chunk, |heads| {
            for kv_head in heads {
                head(kv_head, &mut |start, offset, key, value| {
                    // SAFETY: the part of a block that belongs to a KV head is written only by that head's thread.
                    let (k, v) = unsafe { (keys.slice(start, len), values.slice(start, len)) };
                    self.write_head(k, v, offset, key, value);
                });
            }
        });
    }

    pub(super) fn write_head<T: KvElement>(&self, k: &mut [T], v: &mut [T], offset: usize, key: &[f32], value: &[f32]) {
        for (pair, key) in key.chunks_exact(2).enumerate() {
            let at = (pair * self.block_size + offset) * 2;
            (k[at], k[at + 1]) = (T::from_f32(key[0]), T::from_f32(key[1]));
        }
        for (v, value) in v[offset * self.head_dim..].iter_mut().zip(value) {
            *v = T::from_f32(*value);
        }
    }
}

/// Writes K and V of one token and KV head. Arguments: start of the head's part of the block, offset in it, K, V.
pub(super) type WriteHead<'a> = dyn FnMut(usize, usize, &[f32], &[f32]) + 'a;

pub(super) trait KvElement: Pod + Send + Sync {
    fn from_f32(x: f32) -> Self;
    fn to_f32(self) -> f32;
}

impl KvElement for u16 {
    #[inline(always)]
    fn from_f32(x: f32) -> u16 {
        bf16_bits(x)
    }

    #[inline(always)]
    fn to_f32(self) -> f32 {
        f32::from_bits(u32::from(self) << 16)
    }
}

impl KvElement for f32 {
    #[inline(always)]
    fn from_f32(x: f32) -> f32 {
        x
    }

    #[inline(always)]
    fn to_f32(self) -> f32 {
        self
    }
}
