//! Copies KV blocks, for rows that stop sharing them. Kernel: `copy_blocks.cu`.

use super::error::ensure;
use super::{Arg, CudaError, Launch, Queue, Span};

/// Number of pairs in one launch.
const MAX_PAIRS: usize = 32;

/// Keys and values of some layers, each `[layers][blocks][block_bytes]`; or latent vectors.
#[derive(Debug, Clone, Copy)]
pub struct AllBlocks {
    /// Keys, or latent vectors.
    pub k: Span,
    /// Values; empty where `k` has latent vectors.
    pub v: Span,
    /// Number of layers.
    pub num_layers: usize,
    /// Number of blocks in each layer.
    pub num_blocks: usize,
    /// Bytes of one block in one layer, a multiple of 16.
    pub block_bytes: usize,
}

/// Copies block `from` to `to` for each pair, in order, in all layers.
pub fn copy_blocks(q: &Queue, blocks: AllBlocks, pairs: &[(u32, u32)]) -> Result<(), CudaError> {
    let op = "copy_blocks";
    let AllBlocks { k, v, num_layers, num_blocks, block_bytes } = blocks;
    ensure!(op, block_bytes > 0 && block_bytes.is_multiple_of(16), "{block_bytes} bytes a block; a multiple of 16");
    ensure!(op, (1..=65_535).contains(&num_layers), "{num_layers} layers");
    let needed = num_layers * num_blocks * block_bytes;
    let has_values = v.bytes() > 0;
    let fits = k.bytes() >= needed && (v.bytes() >= needed || !has_values);
    ensure!(op, fits, "{} and {} bytes of {needed}", k.bytes(), v.bytes());
    ensure!(op, k.is_aligned(16) && v.is_aligned(16), "a buffer is not 16-byte aligned");
    if let Some((from, to)) = pairs.iter().find(|(from, to)| (*from.max(to)) as usize >= num_blocks) {
        return Err(CudaError::argument(op, format!("block {from} to {to} of {num_blocks}")));
    }
    let units = block_bytes / 16;
    for pairs in pairs.chunks(MAX_PAIRS) {
        let mut words = [0u32; 2 * MAX_PAIRS];
        for (index, (from, to)) in pairs.iter().enumerate() {
            (words[index], words[MAX_PAIRS + index]) = (*from, *to);
        }
        let args = [
            k.into(),
            v.into(),
            Arg::Bytes(bytemuck::cast_slice(&words)),
            (pairs.len() as u32).into(),
            ((num_blocks * units) as u64).into(),
            (units as u32).into(),
        ];
        let launch = Launch::new(0, 256).grid(units.div_ceil(256) as u32, num_layers as u32, 1 + u32::from(has_values));
        q.launch("copy_blocks", launch, &args)?;
    }
    Ok(())
}
