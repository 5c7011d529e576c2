//! KV blocks, and the attention of each layer.

use std::sync::Arc;

use kernels::cuda::copy_blocks::AllBlocks;
use kernels::cuda::decode_attention::{self, RopeTables};
use kernels::cuda::decode_division::{DecodeWorkspace, Division};
use kernels::cuda::prefill_attention::PrefillWorkspace;
use kernels::cuda::rope_cache::{CacheCodes, HeadShape, LayerCache, QueryScale};
use kernels::cuda::scores::{ScoreChange, Scores};
use kernels::cuda::{CudaError, DeviceBuffer, Gpu, Queue, Residence, Span};
use kernels::kv_codes::KvCodes;
use ops::{AttentionSpec, LayerAttention, StepLimits};

use super::latent::LatentBuffers;
use super::step::{AdapterBounds, StepBounds, TableShape};
use crate::kv_elements::kv_codes;

/// KV blocks and the rotation tables.
pub(crate) struct Cache {
    k: DeviceBuffer,
    v: DeviceBuffer,
    /// Kind of the codes in `k` and `v`, and the scales of each.
    codes: Option<(KvCodes, [DeviceBuffer; 2])>,
    ropes: Vec<[DeviceBuffer; 2]>,
    layers: Vec<CacheLayer>,
    /// For each buffer of KV blocks, the size of a block.
    buffers: Vec<BlockSize>,
    num_groups: usize,
    pub(crate) decode: DecodeWorkspace,
    pub(crate) prefill: PrefillWorkspace,
    /// For layers with latent vectors.
    latents: Option<LatentBuffers>,
    num_blocks: usize,
    block_size: usize,
    max_positions: usize,
}

/// Size of a block in one buffer.
#[derive(Clone, Copy, PartialEq)]
struct BlockSize {
    /// Rows of D elements of K, or of V.
    rows: usize,
    k_bytes: usize,
    /// 0 if a block has latent vectors, which are in the place of K.
    v_bytes: usize,
}

/// Attention of one layer.
pub(crate) struct CacheLayer {
    pub(crate) shape: HeadShape,
    pub(crate) scores: Scores,
    rope: Option<usize>,
    pub(crate) query_scale: Option<QueryScale>,
    query_gains: Option<DeviceBuffer>,
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
        [max_tokens, max_rows]: [usize; 2],
        division: Division,
        [residence, activation_residence]: [Residence; 2],
    ) -> Result<Self, CudaError> {
        let kind = kv_codes(spec.kv_elements);
        let element_bytes = if kind.is_some() { 1 } else { 2 };
        let buffers: Vec<BlockSize> =
            spec.kv_buffers().iter().map(|layer| block_size(layer, spec.block_size, element_bytes)).collect();
        let total =
            |of: fn(&BlockSize) -> usize, count: usize| num_blocks * buffers[..count].iter().map(of).sum::<usize>();
        let rows = total(|size| size.rows, buffers.len());
        let blocks = |bytes: usize| DeviceBuffer::with_residence(gpu, bytes, residence);
        let k = blocks(total(|size| size.k_bytes, buffers.len()))?;
        let v = blocks(total(|size| size.v_bytes, buffers.len()))?;
        let codes = match kind {
            Some(kind) => {
                let scales = || blocks(rows * KvCodes::SCALE_BYTES);
                Some((kind, [scales()?, scales()?]))
            }
            None => None,
        };
        let mut layers = Vec::new();
        for layer in &spec.layers {
            let shape = head_shape(layer, spec.block_size);
            let own = buffers[layer.kv_buffer];
            let (k_start, v_start) =
                (total(|size| size.k_bytes, layer.kv_buffer), total(|size| size.v_bytes, layer.kv_buffer));
            let first_row = total(|size| size.rows, layer.kv_buffer);
            let codes = codes.as_ref().map(|(kind, scales)| {
                let [k_scales, v_scales] =
                    scales.each_ref().map(|scales| scales.span().elements::<f32>(first_row, num_blocks * own.rows));
                CacheCodes { kind: *kind, k_scales, v_scales }
            });
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
                query_gains: upload(&layer.query_gains)?,
                _vectors: [slopes, sinks],
                group: layer.kv_group,
                blocks: LayerCache {
                    k: k.span().part(k_start, num_blocks * own.k_bytes),
                    v: v.span().part(v_start, num_blocks * own.v_bytes),
                    codes,
                },
            });
        }
        let tables = spec
            .ropes
            .iter()
            .map(|rope| Ok([DeviceBuffer::from_slice(gpu, &rope.cos)?, DeviceBuffer::from_slice(gpu, &rope.sin)?]));
        Ok(Self {
            ropes: tables.collect::<Result<_, CudaError>>()?,
            decode: DecodeWorkspace::new(gpu, max_rows, &shapes(spec), division)?,
            prefill: PrefillWorkspace::new(gpu)?,
            latents: LatentBuffers::new(gpu, spec, [max_tokens, max_rows], division, activation_residence)?,
            k,
            v,
            codes,
            layers,
            buffers,
            num_groups: spec.kv_windows.len(),
            num_blocks,
            block_size: spec.block_size,
            max_positions: spec.max_positions,
        })
    }

    /// Whether a layer reads only a window or a chunk of the positions.
    pub(super) fn has_windows(&self) -> bool {
        self.layers.iter().any(|layer| layer.scores.window > 0 || layer.scores.chunk > 0)
    }

    /// Sets all keys and values to zero. Prefill attention multiplies values before the window by 0, and they may be
    /// unwritten: zero times NaN is not zero.
    pub(super) fn clear(&self, queue: &Queue) -> Result<(), CudaError> {
        let scales = self.codes.iter().flat_map(|(_, scales)| scales);
        [&self.k, &self.v].into_iter().chain(scales).try_for_each(|buffer| queue.fill(buffer.span(), 0))
    }

    /// The buffers of KV blocks, and others whose contents a sleep need not keep.
    pub(super) fn contentless(&mut self) -> impl Iterator<Item = &mut DeviceBuffer> {
        let scales = self.codes.iter_mut().flat_map(|(_, scales)| scales);
        let latents = self.latents.iter_mut().map(LatentBuffers::contentless);
        [&mut self.k, &mut self.v].into_iter().chain(scales).chain(latents)
    }

    /// Attention of one layer.
    pub(crate) fn layer(&self, layer: usize) -> &CacheLayer {
        &self.layers[layer]
    }

    /// Buffers of layers with latent vectors.
    pub(super) fn latents(&self) -> &LatentBuffers {
        self.latents.as_ref().expect("the model has layers with latent vectors")
    }

    /// cos and sin of the layer's rotary embedding, if it has one.
    pub(crate) fn rope(&self, layer: usize) -> Option<RopeTables> {
        let [cos, sin] = &self.ropes[self.layers[layer].rope?];
        Some(RopeTables { cos: cos.span(), sin: sin.span() })
    }

    /// All keys and values, in runs of buffers whose blocks have the same size; of codes, the scales, too.
    pub(crate) fn all_blocks(&self) -> Vec<AllBlocks> {
        let mut all = self.runs([&self.k, &self.v], |size| [size.k_bytes, size.v_bytes]);
        if let Some((_, [k_scales, v_scales])) = &self.codes {
            all.extend(self.runs([k_scales, v_scales], |size| [size.rows * KvCodes::SCALE_BYTES; 2]));
        }
        all
    }

    /// Runs of buffers whose blocks have the same size; `bytes_of` gives a block's in each of `from`.
    fn runs(&self, from: [&DeviceBuffer; 2], bytes_of: fn(BlockSize) -> [usize; 2]) -> Vec<AllBlocks> {
        let mut starts = [0, 0];
        let run = |buffers: &[BlockSize]| {
            let block_bytes = bytes_of(buffers[0]);
            let [k, v] = std::array::from_fn(|of| {
                let bytes = buffers.len() * self.num_blocks * block_bytes[of];
                starts[of] += bytes;
                from[of].span().part(starts[of] - bytes, bytes)
            });
            let (num_layers, num_blocks, block_bytes) = (buffers.len(), self.num_blocks, block_bytes[0]);
            AllBlocks { k, v, num_layers, num_blocks, block_bytes }
        };
        self.buffers.chunk_by(|a, b| a == b).map(run).collect()
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
            adapters: AdapterBounds::default(),
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
        let is_alone = self.query_scale.is_none() && self.shape.has_kv && self.blocks.codes.is_none();
        let has_gains = self.query_gains.is_some();
        self.rope.is_some() && is_plain && is_alone && !has_gains && decode_attention::rotates(self.shape)
    }

    /// Factors of the elements of each query head, or null.
    pub(crate) fn query_gains(&self) -> Span {
        self.query_gains.as_ref().map_or(Span::NULL, DeviceBuffer::span)
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

fn block_size(layer: &LayerAttention, positions: usize, element_bytes: usize) -> BlockSize {
    let k_bytes = head_shape(layer, positions).block_elements() * element_bytes;
    let v_bytes = if layer.latent.is_some() { 0 } else { k_bytes };
    BlockSize { rows: layer.num_kv_heads * positions, k_bytes, v_bytes }
}

/// The shapes of all layers with k and v of each KV head.
pub(super) fn shapes(spec: &AttentionSpec) -> Vec<HeadShape> {
    let with_heads = spec.layers.iter().filter(|layer| layer.latent.is_none());
    with_heads.map(|layer| head_shape(layer, spec.block_size)).collect()
}

/// The block tables of sequences up to the maximum length.
pub(super) fn table_shape(limits: &StepLimits, block_size: usize, num_groups: usize) -> TableShape {
    TableShape { stride: limits.max_sequence_len.div_ceil(block_size).next_multiple_of(4), num_groups }
}
