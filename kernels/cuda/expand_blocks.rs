//! Expands the blocks of prefilling rows from codes to bf16, in scratch memory. Kernel: `expand_blocks.cu`.

use half::bf16;

use super::error::ensure;
use super::prefill_attention::PrefillAttention;
use super::rope_cache::{HeadShape, LayerCache};
use super::{Arg, CudaError, Launch, Queue, Span};

const OP: &str = "expand_blocks";
/// Alignment of each array in the scratch memory.
const ALIGN: usize = 256;

/// Lengths of the contexts of prefilling rows, in positions.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Contexts {
    /// Of all rows.
    pub sum: usize,
    /// Of the row that has most.
    pub longest: usize,
}

/// Scratch memory for blocks in bf16: their places, then K, then V.
#[derive(Debug, Clone, Copy)]
pub struct ExpandedBlocks {
    /// `[R, max_blocks]` u32.
    places: Span,
    /// Row length of `places`: blocks of the longest row.
    max_blocks: usize,
    /// Number of rows.
    num_rows: usize,
    /// The blocks, `[blocks, K, B, D]` bf16.
    cache: LayerCache,
}

/// Bytes of the places and of K, which is as large as V.
fn sizes(shape: HeadShape, num_rows: usize, contexts: Contexts) -> [usize; 2] {
    let max_blocks = contexts.longest.div_ceil(shape.block_size);
    // The last block of each row may have one position.
    let blocks = (contexts.sum + num_rows * (shape.block_size - 1)) / shape.block_size;
    let blocks = blocks.min(num_rows * max_blocks);
    [num_rows * max_blocks * size_of::<u32>(), blocks * shape.block_elements() * size_of::<bf16>()]
}

impl ExpandedBlocks {
    /// Bytes that are enough for any `num_rows` rows with these contexts.
    pub fn bytes(shape: HeadShape, num_rows: usize, contexts: Contexts) -> usize {
        let [places, k] = sizes(shape, num_rows, contexts).map(|bytes| bytes.next_multiple_of(ALIGN));
        places + 2 * k
    }

    /// The arrays in `scratch`; `None` if it is too small.
    pub fn in_buffer(scratch: Span, shape: HeadShape, num_rows: usize, contexts: Contexts) -> Option<Self> {
        if Self::bytes(shape, num_rows, contexts) > scratch.bytes() {
            return None;
        }
        let [places, blocks] = sizes(shape, num_rows, contexts);
        let k_start = places.next_multiple_of(ALIGN);
        let v_start = k_start + blocks.next_multiple_of(ALIGN);
        let [k, v] = [k_start, v_start].map(|start| scratch.part(start, blocks));
        let max_blocks = contexts.longest.div_ceil(shape.block_size);
        Some(Self { places: scratch.part(0, places), max_blocks, num_rows, cache: LayerCache { k, v, codes: None } })
    }

    /// `attention` with these blocks, which [`expand_blocks`] fills.
    pub(super) fn read_by<'a>(&self, attention: &PrefillAttention<'a>) -> PrefillAttention<'a> {
        let mut read = *attention;
        (read.cache, read.rows.block_tables, read.rows.max_blocks) = (self.cache, self.places, self.max_blocks);
        read
    }
}

/// Queues the expansion of the blocks that `attention` reads.
pub(super) fn expand_blocks(q: &Queue, attention: &PrefillAttention<'_>, to: &ExpandedBlocks) -> Result<(), CudaError> {
    attention.check()?;
    to.cache.check(OP, attention.shape.head_dim)?;
    let (rows, HeadShape { num_kv_heads, head_dim, .. }) = (attention.rows, attention.shape);
    let Some(codes) = attention.cache.codes else {
        return Err(CudaError::argument(OP, "keys and values are not codes".to_owned()));
    };
    ensure!(OP, to.num_rows == rows.num_rows, "memory for {} rows of {}", to.num_rows, rows.num_rows);
    let max_blocks = to.max_blocks;
    ensure!(OP, (1..=rows.max_blocks).contains(&max_blocks), "{max_blocks} blocks of tables of {}", rows.max_blocks);
    ensure!(OP, to.places.is_aligned(4), "places are not 4-byte aligned");
    // The kernel's `Expanded`: three pointers, two words.
    let sizes = max_blocks as u64 | (head_dim as u64) << 32;
    let expanded = [to.cache.k.address(), to.cache.v.address(), to.places.address(), sizes];
    let args = [Arg::Bytes(&attention.argument()), Arg::Bytes(bytemuck::bytes_of(&expanded))];
    let launch = Launch::new(0, 256).grid(max_blocks as u32, num_kv_heads as u32, rows.num_rows as u32);
    q.launch(&format!("expand_blocks_{}", codes.kind.name()), launch, &args)
}
