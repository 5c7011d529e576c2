//! Rotation, KV cache and attention of a layer.

use half::bf16;
use kernels::cuda::decode_attention::{
    DecodeAttention, DecodeRows, Positions, RotatedNorms, decode_attention, takes_ring,
};
use kernels::cuda::expand_blocks::ExpandedBlocks;
use kernels::cuda::paged_attention::{PagedAttention, TokenTables};
use kernels::cuda::prefill_attention::{
    PrefillAttention, PrefillRows, expanded_prefill_attention, gains_by_expansion, has_hopper_kernels,
    prefill_attention,
};
use kernels::cuda::rope_cache::{HeadShape, RopeInputs};
use kernels::cuda::{paged_attention, rope_cache};
use ops::DeviceError;

use super::{CudaDevice, CudaTensor, device_error};

/// Up to this number of KV heads of all rows it is faster if decode attention applies the rotation; above, attention is
/// memory-bound (kernels/README.md).
const MAX_ROTATED_HEADS: usize = 2048;

impl CudaDevice {
    pub(crate) fn op_rope_and_cache(&mut self, qkv: CudaTensor, layer: usize) -> Result<(), DeviceError> {
        if self.current().only_products {
            return Ok(());
        }
        self.flush()?;
        let (cache, spans) = (self.cache(), self.current().spans);
        let tables = cache.rope(layer).map(|rope| [rope.cos, rope.sin]);
        let inputs = RopeInputs {
            tables,
            positions: spans.positions,
            slots: spans.slots.of(cache.layer(layer).group),
            query_scale: cache.layer(layer).query_scale,
            query_gains: cache.layer(layer).query_gains(),
        };
        let shape = self.current().shape;
        let count = match self.attention_rotates(layer) {
            true => shape.tokens - (shape.rows - shape.prefill_rows),
            false => shape.tokens,
        };
        if count == 0 {
            return Ok(());
        }
        let layer = cache.layer(layer);
        rope_cache::rope_cache(&self.queue, qkv.values, layer.blocks, inputs, layer.shape, count).map_err(device_error)
    }

    /// Whether decode attention rotates and caches the tokens of its rows itself, so that `rope_cache` handles only
    /// prefill chunks.
    fn attention_rotates(&self, layer: usize) -> bool {
        let (shape, layer) = (self.current().shape, self.cache().layer(layer));
        let rows = shape.rows - shape.prefill_rows;
        // The newest position then has a tile of its own, so the sums have other bits than without rotation.
        if self.config.batch_invariant {
            return false;
        }
        let few =
            rows * layer.shape.num_kv_heads <= MAX_ROTATED_HEADS && !takes_ring(self.queue.gpu(), rows, layer.shape);
        let is_fast = self.config.use_fast_kernels && layer.has_fast_attention();
        few && !self.is_split && is_fast && layer.rotates()
    }

    pub(crate) fn op_attention(&mut self, out: CudaTensor, qkv: CudaTensor, layer: usize) -> Result<(), DeviceError> {
        if self.current().only_products {
            return Ok(());
        }
        let shape = self.current().shape;
        let decode_rows = shape.rows - shape.prefill_rows;
        let prefill_tokens = shape.tokens - decode_rows;
        if !self.config.use_fast_kernels || !self.cache().layer(layer).has_fast_attention() {
            return self.attend_simply(out, qkv, layer, shape.tokens);
        }
        if prefill_tokens > 0 {
            self.attend_chunks(out, qkv, layer, prefill_tokens)?;
        }
        if decode_rows > 0 {
            let norms = self.rotated_norms.take();
            self.attend_decodes(out, qkv, layer, prefill_tokens, norms)?;
        }
        Ok(())
    }

    /// Attention of prefilling rows, whose chunks are tokens `0..num_tokens`.
    fn attend_chunks(
        &mut self,
        out: CudaTensor,
        qkv: CudaTensor,
        layer: usize,
        num_tokens: usize,
    ) -> Result<(), DeviceError> {
        let (cache, spans, shape) = (self.cache(), self.current().spans, self.current().shape);
        let rows = PrefillRows {
            block_tables: spans.block_tables.of(cache.layer(layer).group),
            max_blocks: cache.tables(&self.config.limits).stride,
            context_lens: spans.context_lens,
            row_starts: spans.row_starts,
            num_rows: shape.prefill_rows,
            num_tokens,
            max_chunk: shape.max_chunk,
        };
        let layer = cache.layer(layer);
        let attention = PrefillAttention {
            out: out.values,
            qkv: qkv.values,
            cache: layer.blocks,
            rows,
            shape: layer.shape,
            scores: layer.scores,
            workspace: &cache.prefill,
        };
        let expanded = layer.blocks.codes.and_then(|_| self.expanded_blocks(layer.shape));
        let Some(blocks) = expanded else {
            return prefill_attention(&self.queue, &attention).map_err(device_error);
        };
        expanded_prefill_attention(&self.queue, &attention, &blocks).map_err(device_error)?;
        // Rows that a norm may have stored there.
        self.rounded = None;
        Ok(())
    }

    /// Whether this device expands keys and values in codes before attention of long chunks.
    pub(super) fn expands_blocks(&self) -> bool {
        self.config.use_fast_kernels && has_hopper_kernels(&self.gpu)
    }

    /// Memory for the blocks of this step's prefilling rows in bf16. `None` if the kernel for codes is faster, or if they do not fit.
    fn expanded_blocks(&self, heads: HeadShape) -> Option<ExpandedBlocks> {
        let shape = self.current().shape;
        let gains = self.expands_blocks() && gains_by_expansion(heads, shape.max_chunk);
        let scratch = self.workspace().products.span();
        gains.then(|| ExpandedBlocks::in_buffer(scratch, heads, shape.prefill_rows, shape.contexts)).flatten()
    }

    /// Attention of tokens `0..count`, one by one.
    fn attend_simply(&self, out: CudaTensor, qkv: CudaTensor, layer: usize, count: usize) -> Result<(), DeviceError> {
        let (cache, spans) = (self.cache(), self.current().spans);
        let tables = TokenTables {
            block_tables: spans.block_tables.of(cache.layer(layer).group),
            max_blocks: cache.tables(&self.config.limits).stride,
            token_tables: spans.token_tables,
            positions: spans.positions,
            slots: spans.slots.of(cache.layer(layer).group),
        };
        let layer = cache.layer(layer);
        let attention = PagedAttention {
            out: out.values,
            qkv: qkv.values,
            cache: layer.blocks,
            tables,
            shape: layer.shape,
            scores: layer.scores,
        };
        paged_attention::paged_attention(&self.queue, &attention, count).map_err(device_error)
    }

    /// Whether decode attention applies the norms of q and k of this step's tokens, too, for weights `[D]`.
    pub(super) fn attention_norms(&self, layer: usize) -> bool {
        let shape = self.current().shape;
        shape.prefill_rows == 0 && shape.rows == shape.tokens && self.attention_rotates(layer)
    }

    /// Attention of decoding rows, which have one token each, from token `first` on.
    fn attend_decodes(
        &self,
        out: CudaTensor,
        qkv: CudaTensor,
        layer: usize,
        first: usize,
        norms: Option<RotatedNorms>,
    ) -> Result<(), DeviceError> {
        let (cache, spans, shape) = (self.cache(), self.current().spans, self.current().shape);
        let num_rows = shape.rows - shape.prefill_rows;
        let max_blocks = cache.tables(&self.config.limits).stride;
        let block_tables = spans.block_tables.of(cache.layer(layer).group);
        let rows = DecodeRows {
            block_tables: block_tables.elements::<u32>(shape.prefill_rows * max_blocks, num_rows * max_blocks),
            max_blocks,
            context_lens: spans.context_lens.elements::<u32>(shape.prefill_rows, num_rows),
            num_rows,
        };
        let from = |tensor: CudaTensor| tensor.values.elements::<bf16>(first * tensor.cols, num_rows * tensor.cols);
        let positions = match cache.rope(layer).filter(|_| self.attention_rotates(layer)) {
            Some(tables) => Positions::Rope(tables, norms),
            None if self.is_split => Positions::Late,
            None => Positions::Known,
        };
        let layer = cache.layer(layer);
        let attention = DecodeAttention {
            out: from(out),
            qkv: from(qkv),
            cache: layer.blocks,
            positions,
            rows,
            shape: layer.shape,
            scores: layer.scores,
            workspace: &cache.decode,
        };
        decode_attention(&self.queue, &attention).map_err(device_error)
    }
}
