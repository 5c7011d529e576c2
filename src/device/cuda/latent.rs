//! Layers whose KV blocks hold latent vectors.

use std::sync::Arc;

use half::bf16;
use kernels::cuda::decode_division::Division;
use kernels::cuda::latent_attention::{
    LatentAttention, LatentRows, LatentWorkspace, latent_attention, latent_attention_simple,
};
use kernels::cuda::latent_cache::{LatentNorm, RANKS, ROTARY, Rotation, latent_cache, width};
use kernels::cuda::latent_product::{LatentUp, latent_queries, latent_values};
use kernels::cuda::{CudaError, DeviceBuffer, Gpu, Residence};
use ops::{AttentionSpec, DeviceError, LatentShape, LatentWeights};

use super::load::RowOrder;
use super::{CudaDevice, CudaTensor, CudaWeight, device_error};

/// Bytes of the queries that attention takes at a time; the chunks of larger steps are attended for in parts.
const QUERY_BYTES: usize = 128 << 20;

/// What a layer has besides its projections and the products that give k and v, which are the values of its weight.
#[derive(Debug, Clone, Copy)]
pub(crate) struct LatentLayer {
    shape: LatentShape,
    num_heads: usize,
    norm: LatentNorm,
}

/// Queries on their way through attention, and its partial sums.
pub(crate) struct LatentBuffers {
    queries: DeviceBuffer, // [tokens, H, width] bf16
    /// Number of tokens for which there is room.
    max_tokens: usize,
    workspace: LatentWorkspace,
}

/// Heads of the layers with latent vectors, and elements of a vector, at most; `None` if there are no such layers.
fn largest(spec: &AttentionSpec) -> Option<(usize, usize)> {
    let layers = || spec.layers.iter().filter_map(|layer| Some((layer.num_heads, layer.latent?.rank)));
    Some((layers().map(|(heads, _)| heads).max()?, layers().map(|(_, rank)| rank).max()?))
}

/// Tokens that attention takes at a time, of steps of up to `max_tokens`: at least `max_rows`, which decode together. A token has
/// queries of `query_bytes`.
fn tokens_at_a_time(query_bytes: usize, max_tokens: usize, max_rows: usize) -> usize {
    (QUERY_BYTES / query_bytes).min(max_tokens).max(max_rows)
}

/// Bytes of the queries of a token.
fn query_bytes((num_heads, rank): (usize, usize)) -> usize {
    num_heads * width(rank) * size_of::<bf16>()
}

impl LatentBuffers {
    /// Bytes that [`LatentBuffers::new`] allocates.
    pub(super) fn bytes(spec: &AttentionSpec, [max_tokens, max_rows]: [usize; 2], division: Division) -> usize {
        largest(spec).map_or(0, |sizes| {
            let bytes = query_bytes(sizes);
            tokens_at_a_time(bytes, max_tokens, max_rows) * bytes + LatentWorkspace::bytes(division, sizes.1)
        })
    }

    /// `None` if no layer has latent vectors.
    pub(super) fn new(
        gpu: &Arc<Gpu>,
        spec: &AttentionSpec,
        [max_tokens, max_rows]: [usize; 2],
        division: Division,
        residence: Residence,
    ) -> Result<Option<Self>, CudaError> {
        let Some(sizes) = largest(spec) else { return Ok(None) };
        let max_tokens = tokens_at_a_time(query_bytes(sizes), max_tokens, max_rows);
        let queries = DeviceBuffer::with_residence(gpu, max_tokens * query_bytes(sizes), residence)?;
        Ok(Some(Self { queries, max_tokens, workspace: LatentWorkspace::new(gpu, division, sizes.1)? }))
    }

    /// The large buffer, whose contents a sleep need not keep.
    pub(super) fn contentless(&mut self) -> &mut DeviceBuffer {
        &mut self.queries
    }
}

/// Refuses sizes that the kernels lack.
pub(crate) fn check_latent_shape(shape: &LatentShape) -> Result<(), DeviceError> {
    if RANKS.contains(&shape.rank) && shape.rotary_dim == ROTARY {
        return Ok(());
    }
    let [low, high] = RANKS;
    Err(DeviceError::Unsupported {
        what: "attention over latent vectors (MLA) on GPUs".into(),
        found: format!("latent vectors of {}, {} rotated elements", shape.rank, shape.rotary_dim),
        expected: format!("latent vectors of {low} or {high}, {ROTARY} rotated elements, or `--device=cpu`"),
    })
}

impl CudaDevice {
    pub(super) fn load_latent_layer(&mut self, layer: &LatentWeights<'_>) -> Result<CudaWeight, DeviceError> {
        check_latent_shape(&layer.shape)?;
        let gain = self.load_row(std::slice::from_ref(&layer.norm), RowOrder::Stacked)?;
        let up = self.load_matrix(std::slice::from_ref(&layer.up), RowOrder::Stacked)?;
        let norm = LatentNorm { rank: layer.shape.rank, gain, eps: layer.eps };
        let latent = LatentLayer { shape: layer.shape, num_heads: layer.num_heads, norm };
        Ok(CudaWeight { latent: Some(latent), ..up })
    }

    pub(super) fn op_latent_attention(
        &mut self,
        out: CudaTensor,
        [q, latents]: [CudaTensor; 2],
        layer: usize,
        weights: &CudaWeight,
    ) -> Result<(), DeviceError> {
        if self.current().only_products {
            return Ok(());
        }
        self.run_deferred()?;
        self.flush()?;
        let own = weights.latent.expect("the weights of a layer with latent vectors");
        let (cache, spans, step) = (self.cache(), self.current().spans, self.current().shape);
        let blocks = cache.layer(layer);
        let slots = spans.slots.of(blocks.group);
        let rotation = Rotation { query_scale: None, ..self.rotation(layer, &own, 0) };
        latent_cache(&self.queue, blocks.blocks.k, latents.values, own.norm, slots, &rotation, step.tokens)
            .map_err(device_error)?;
        let max_blocks = cache.tables(&self.config.limits).stride;
        let block_tables = spans.block_tables.of(blocks.group);
        let decodes = step.rows - step.prefill_rows;
        let chunk_tokens = step.tokens - decodes;
        let at_a_time = cache.latents().max_tokens;
        for first_token in (0..chunk_tokens).step_by(at_a_time) {
            let rows = LatentRows {
                block_tables,
                max_blocks,
                context_lens: spans.context_lens,
                row_starts: Some(spans.row_starts),
                num_rows: step.prefill_rows,
                first_token,
                num_tokens: at_a_time.min(chunk_tokens - first_token),
                max_chunk: step.max_chunk,
            };
            self.attend_latents([out, q], layer, weights, first_token, rows)?;
        }
        if decodes > 0 {
            let rows = LatentRows {
                block_tables: block_tables.elements::<u32>(step.prefill_rows * max_blocks, decodes * max_blocks),
                max_blocks,
                context_lens: spans.context_lens.elements::<u32>(step.prefill_rows, decodes),
                row_starts: None,
                num_rows: decodes,
                first_token: 0,
                num_tokens: decodes,
                max_chunk: 1,
            };
            self.attend_latents([out, q], layer, weights, chunk_tokens, rows)?;
        }
        Ok(())
    }

    /// Angles of the step's tokens from `first` on, and the factors of their queries.
    fn rotation(&self, layer: usize, own: &LatentLayer, first: usize) -> Rotation {
        let tables = self.cache().rope(layer).expect("a part of k is rotated");
        let (positions, tokens) = (self.current().spans.positions, self.current().shape.tokens);
        let positions = positions.elements::<u32>(first, tokens - first);
        let query_scale = self.cache().layer(layer).query_scale;
        Rotation { cos: tables.cos, sin: tables.sin, positions, is_interleaved: own.shape.is_interleaved, query_scale }
    }

    /// Attention of the tokens of `rows`, which are those of the step from `first` on. Their latent vectors are in the blocks.
    fn attend_latents(
        &self,
        [out, q]: [CudaTensor; 2],
        layer: usize,
        weights: &CudaWeight,
        first: usize,
        rows: LatentRows,
    ) -> Result<(), DeviceError> {
        let own = weights.latent.expect("the weights of a layer with latent vectors");
        let (cache, count) = (self.cache(), rows.num_tokens);
        let (buffers, blocks) = (cache.latents(), cache.layer(layer));
        let LatentShape { rank, key_dim, value_dim, .. } = own.shape;
        let up = LatentUp { weight: weights.values, rank, num_heads: own.num_heads, key_dim, value_dim };
        let part = |tensor: CudaTensor| tensor.values.elements::<bf16>(first * tensor.cols, count * tensor.cols);
        let queries = buffers.queries.span();
        let attention = LatentAttention {
            rows: queries,
            cache: blocks.blocks.k,
            rank,
            step: rows,
            num_heads: own.num_heads,
            block_size: blocks.shape.block_size,
            scale: blocks.scores.scale,
            workspace: &buffers.workspace,
        };
        let attend = match self.config.batch_invariant || self.config.use_fast_kernels {
            true => latent_attention,
            false => latent_attention_simple,
        };
        latent_queries(&self.queue, queries, part(q), &up, &self.rotation(layer, &own, first), count)
            .and_then(|()| attend(&self.queue, &attention))
            .and_then(|()| latent_values(&self.queue, part(out), queries, &up, count))
            .map_err(device_error)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn queries_of_a_part_of_a_step_fit_their_buffer_and_all_decoding_rows_do() {
        // 16 heads of V2-Lite: all tokens of a step. 128 heads of V3: parts.
        let [lite, v3] = [16, 128].map(|heads| query_bytes((heads, 512)));
        assert_eq!(tokens_at_a_time(lite, 4096, 64), 4096);
        assert_eq!(tokens_at_a_time(v3, 8192, 64), 910);
        assert_eq!(tokens_at_a_time(v3, 8192, 1024), 1024);
        assert_eq!(tokens_at_a_time(lite, 16, 24), 24);
    }

    #[test]
    fn other_sizes_are_refused_by_name() {
        let shape = LatentShape { rank: 512, rotary_dim: 64, key_dim: 128, value_dim: 128, is_interleaved: true };
        assert!(RANKS.into_iter().all(|rank| check_latent_shape(&LatentShape { rank, ..shape }).is_ok()));
        let error = check_latent_shape(&LatentShape { rotary_dim: 32, ..shape }).unwrap_err().to_string();
        assert!(error.contains("latent vectors of 512, 32 rotated elements"), "{error}");
        assert!(check_latent_shape(&LatentShape { rank: 384, ..shape }).is_err());
        assert!(error.contains("--device=cpu"), "{error}");
    }
}
