//! KV blocks of all layers, and the attention of each.

use std::sync::Arc;

use kernels::cuda::copy_blocks::AllBlocks;
use kernels::cuda::decode_attention::{self, ALIBI_HEAD_DIMS, DecodeWorkspace, HEAD_DIMS, RopeTables};
use kernels::cuda::prefill_attention::PrefillWorkspace;
use kernels::cuda::rope_cache::{HeadShape, LayerCache};
use kernels::cuda::{CudaError, DeviceBuffer, Gpu, Span};
use ops::{AttentionSpec, LayerAttention, StepLimits};

use super::step::StepBounds;

/// KV blocks of all layers and the rotation tables.
pub(crate) struct Cache {
    k: DeviceBuffer,
    v: DeviceBuffer,
    ropes: Vec<[DeviceBuffer; 2]>,
    layers: Vec<CacheLayer>,
    pub(crate) decode: DecodeWorkspace,
    pub(crate) prefill: PrefillWorkspace,
    num_blocks: usize,
    block_size: usize,
    max_positions: usize,
}

/// Attention of one layer.
pub(crate) struct CacheLayer {
    pub(crate) shape: HeadShape,
    pub(crate) scale: f32,
    /// 0 if there is no window.
    pub(crate) window: u32,
    /// 0 if scores are not capped.
    pub(crate) score_cap: f32,
    rope: Option<usize>,
    slopes: Option<DeviceBuffer>,
    /// Keys and values.
    pub(crate) blocks: LayerCache,
}

impl Cache {
    pub(super) fn new(
        gpu: &Arc<Gpu>,
        spec: &AttentionSpec,
        num_blocks: usize,
        max_rows: usize,
    ) -> Result<Self, CudaError> {
        let bytes = num_blocks * spec.block_size * spec.kv_width() * 2;
        let (k, v) = (DeviceBuffer::new(gpu, bytes)?, DeviceBuffer::new(gpu, bytes)?);
        let mut start = 0;
        let mut layers = Vec::new();
        for layer in &spec.layers {
            let shape = head_shape(layer, spec.block_size);
            let bytes = num_blocks * shape.block_elements() * 2;
            layers.push(CacheLayer {
                shape,
                scale: layer.scale,
                window: layer.window.unwrap_or(0) as u32,
                score_cap: layer.score_cap.unwrap_or(0.0),
                rope: layer.rope,
                slopes: match layer.alibi_slopes.as_slice() {
                    [] => None,
                    slopes => Some(DeviceBuffer::from_slice(gpu, slopes)?),
                },
                blocks: LayerCache { k: k.span().part(start, bytes), v: v.span().part(start, bytes) },
            });
            start += bytes;
        }
        let tables = spec
            .ropes
            .iter()
            .map(|rope| Ok([DeviceBuffer::from_slice(gpu, &rope.cos)?, DeviceBuffer::from_slice(gpu, &rope.sin)?]));
        Ok(Self {
            ropes: tables.collect::<Result<_, CudaError>>()?,
            decode: DecodeWorkspace::new(gpu, max_rows, &shapes(spec))?,
            prefill: PrefillWorkspace::new(gpu)?,
            k,
            v,
            layers,
            num_blocks,
            block_size: spec.block_size,
            max_positions: spec.max_positions,
        })
    }

    /// Attention of one layer.
    pub(crate) fn layer(&self, layer: usize) -> &CacheLayer {
        &self.layers[layer]
    }

    /// cos and sin of the layer's rotary embedding, if it has one.
    pub(crate) fn rope(&self, layer: usize) -> Option<RopeTables> {
        let [cos, sin] = &self.ropes[self.layers[layer].rope?];
        Some(RopeTables { cos: cos.span(), sin: sin.span() })
    }

    /// Keys and values of all layers, in runs of layers whose blocks have the same size.
    pub(crate) fn all_blocks(&self) -> Vec<AllBlocks> {
        let mut start = 0;
        let block_bytes = |layer: &CacheLayer| layer.shape.block_elements() * 2;
        let runs = self.layers.chunk_by(|a, b| block_bytes(a) == block_bytes(b));
        let run = |layers: &[CacheLayer]| {
            let block_bytes = block_bytes(&layers[0]);
            let bytes = layers.len() * self.num_blocks * block_bytes;
            let [k, v] = [&self.k, &self.v].map(|buffer| buffer.span().part(start, bytes));
            start += bytes;
            AllBlocks { k, v, num_layers: layers.len(), num_blocks: self.num_blocks, block_bytes }
        };
        runs.map(run).collect()
    }

    /// Row length of the block tables.
    pub(crate) fn table_stride(&self, limits: &StepLimits) -> usize {
        table_stride(limits, self.block_size)
    }

    pub(crate) fn bounds(&self, limits: &StepLimits) -> StepBounds {
        StepBounds {
            max_tokens: limits.max_tokens,
            max_rows: limits.max_rows,
            max_samples: limits.max_rows,
            num_blocks: self.num_blocks,
            block_size: self.block_size,
            table_stride: self.table_stride(limits),
            max_positions: self.max_positions,
            vocab_size: limits.vocab_size,
        }
    }
}

impl CacheLayer {
    /// `[H]` f32 ALiBi slopes, if the layer uses ALiBi.
    pub(crate) fn slopes(&self) -> Option<Span> {
        self.slopes.as_ref().map(DeviceBuffer::span)
    }

    /// Whether optimized kernels exist for this attention.
    pub(crate) fn has_fast_attention(&self) -> bool {
        let head_dim = &self.shape.head_dim;
        let supported = if self.slopes.is_some() { ALIBI_HEAD_DIMS.as_slice() } else { HEAD_DIMS.as_slice() };
        self.score_cap == 0.0 && supported.contains(head_dim)
    }

    /// Whether decode attention can apply the rotation itself.
    pub(crate) fn rotates(&self) -> bool {
        self.rope.is_some() && self.slopes.is_none() && decode_attention::rotates(self.shape)
    }
}

fn head_shape(layer: &LayerAttention, block_size: usize) -> HeadShape {
    HeadShape { num_heads: layer.num_heads, num_kv_heads: layer.num_kv_heads, head_dim: layer.head_dim, block_size }
}

/// The shapes of all layers.
pub(super) fn shapes(spec: &AttentionSpec) -> Vec<HeadShape> {
    spec.layers.iter().map(|layer| head_shape(layer, spec.block_size)).collect()
}

/// Row length of the block tables of sequences up to the maximum.
pub(super) fn table_stride(limits: &StepLimits, block_size: usize) -> usize {
    limits.max_sequence_len.div_ceil(block_size).next_multiple_of(4)
}
