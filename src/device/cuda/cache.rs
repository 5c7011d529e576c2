//! KV blocks, and the attention of each layer.

use std::sync::Arc;

use kernels::cuda::copy_blocks::AllBlocks;
use kernels::cuda::decode_attention::{self, DecodeWorkspace, RopeTables};
use kernels::cuda::prefill_attention::PrefillWorkspace;
use kernels::cuda::rope_cache::{HeadShape, LayerCache, QueryScale};
use kernels::cuda::scores::{ScoreChange, Scores};
use kernels::cuda::{CudaError, DeviceBuffer, Gpu, Queue};
use ops::{AttentionSpec, LayerAttention, StepLimits};

use super::step::{StepBounds, TableShape};

/// KV blocks and the rotation tables.
pub(crate) struct Cache {
    k: DeviceBuffer,
    v: DeviceBuffer,
    ropes: Vec<[DeviceBuffer; 2]>,
    layers: Vec<CacheLayer>,
    /// For each buffer of KV blocks, bytes of K, or of V, of a block.
    buffer_bytes: Vec<usize>,
    num_groups: usize,
    pub(crate) decode: DecodeWorkspace,
    pub(crate) prefill: PrefillWorkspace,
    num_blocks: usize,
    block_size: usize,
    max_positions: usize,
}

/// Attention of one layer.
pub(crate) struct CacheLayer {
    pub(crate) shape: HeadShape,
    pub(crate) scores: Scores,
    rope: Option<usize>,
    pub(crate) query_scale: Option<QueryScale>,
    /// ALiBi slopes and sinks, which `scores` refers to.
    _vectors: [Option<DeviceBuffer>; 2],
    /// The KV group, whose block tables the layer uses.
    pub(crate) group: usize,
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
        let block_bytes = |layer: &&LayerAttention| head_shape(layer, spec.block_size).block_elements() * 2;
        let buffer_bytes: Vec<usize> = spec.kv_buffers().iter().map(block_bytes).collect();
        let mut layers = Vec::new();
        for layer in &spec.layers {
            let shape = head_shape(layer, spec.block_size);
            let start = num_blocks * buffer_bytes[..layer.kv_buffer].iter().sum::<usize>();
            let bytes = num_blocks * buffer_bytes[layer.kv_buffer];
            let upload = |values: &[f32]| match values {
                [] => Ok(None),
                values => DeviceBuffer::from_slice(gpu, values).map(Some),
            };
            let (slopes, sinks) = (upload(&layer.alibi_slopes)?, upload(&layer.sinks)?);
            let change = match (&slopes, layer.score_cap) {
                (Some(slopes), _) => ScoreChange::Alibi(slopes.span()),
                (None, Some(cap)) => ScoreChange::Capped(cap),
                (None, None) => ScoreChange::None,
            };
            layers.push(CacheLayer {
                shape,
                scores: Scores {
                    scale: layer.scale,
                    window: layer.window.unwrap_or(0) as u32,
                    chunk: layer.chunk.unwrap_or(0) as u32,
                    change,
                    sinks: sinks.as_ref().map(DeviceBuffer::span),
                },
                rope: layer.rope,
                query_scale: layer.query_scale.map(|scale| QueryScale {
                    beta: scale.beta,
                    period: scale.period.max(1),
                    offset: scale.offset,
                }),
                _vectors: [slopes, sinks],
                group: layer.kv_group,
                blocks: LayerCache { k: k.span().part(start, bytes), v: v.span().part(start, bytes) },
            });
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
            buffer_bytes,
            num_groups: spec.kv_windows.len(),
            num_blocks,
            block_size: spec.block_size,
            max_positions: spec.max_positions,
        })
    }

    /// Sets all keys and values to zero. Prefill attention multiplies values before the window by 0, and they may be
    /// unwritten: zero times NaN is not zero.
    pub(super) fn clear(&self, queue: &Queue) -> Result<(), CudaError> {
        [&self.k, &self.v].into_iter().try_for_each(|buffer| queue.fill(buffer.span(), 0))
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

    /// All keys and values, in runs of buffers whose blocks have the same size.
    pub(crate) fn all_blocks(&self) -> Vec<AllBlocks> {
        let mut start = 0;
        let runs = self.buffer_bytes.chunk_by(|a, b| a == b);
        let run = |buffers: &[usize]| {
            let bytes = buffers.len() * self.num_blocks * buffers[0];
            let [k, v] = [&self.k, &self.v].map(|buffer| buffer.span().part(start, bytes));
            start += bytes;
            AllBlocks { k, v, num_layers: buffers.len(), num_blocks: self.num_blocks, block_bytes: buffers[0] }
        };
        runs.map(run).collect()
    }

    /// Row length and number of the block tables.
    pub(crate) fn tables(&self, limits: &StepLimits) -> TableShape {
        table_shape(limits, self.block_size, self.num_groups)
    }

    pub(crate) fn bounds(&self, limits: &StepLimits) -> StepBounds {
        StepBounds {
            max_tokens: limits.max_tokens,
            max_rows: limits.max_rows,
            max_samples: limits.max_rows,
            num_blocks: self.num_blocks,
            block_size: self.block_size,
            tables: self.tables(limits),
            max_positions: self.max_positions,
            vocab_size: limits.vocab_size,
        }
    }
}

impl CacheLayer {
    /// Whether optimized kernels exist for this attention.
    pub(crate) fn has_fast_attention(&self) -> bool {
        self.scores.has_fast_kernels(self.shape.head_dim)
    }

    /// Whether decode attention can apply the rotation itself.
    pub(crate) fn rotates(&self) -> bool {
        let is_plain = self.scores.change == ScoreChange::None && self.scores.chunk == 0;
        let is_alone = self.query_scale.is_none() && self.shape.has_kv;
        self.rope.is_some() && is_plain && is_alone && decode_attention::rotates(self.shape)
    }
}

fn head_shape(layer: &LayerAttention, block_size: usize) -> HeadShape {
    HeadShape {
        num_heads: layer.num_heads,
        num_kv_heads: layer.num_kv_heads,
        head_dim: layer.head_dim,
        block_size,
        has_kv: !layer.has_shared_kv,
    }
}

/// The shapes of all layers.
pub(super) fn shapes(spec: &AttentionSpec) -> Vec<HeadShape> {
    spec.layers.iter().map(|layer| head_shape(layer, spec.block_size)).collect()
}

/// The block tables of sequences up to the maximum length.
pub(super) fn table_shape(limits: &StepLimits, block_size: usize, num_groups: usize) -> TableShape {
    TableShape { stride: limits.max_sequence_len.div_ceil(block_size).next_multiple_of(4), num_groups }
}
