//! Layers whose KV blocks hold latent vectors.

use kernels::cpu::{self as k, KvCache, KvType, LatentCache, LatentSizes, LatentTokens, Matrix};
use ops::{DeviceError, LatentShape, LatentWeights, LayerAttention};

use super::{Cache, CpuDevice, CpuTensor};
use crate::slices;

/// The weights of a layer besides its projections.
pub struct Latent {
    norm: Vec<f32>, // [rank]
    eps: f32,
    up: Matrix, // [H (key_dim + value_dim), rank]
}

/// The KV blocks of a layer.
pub(super) enum KvBuffer {
    /// k and v of each KV head.
    Heads(KvCache),
    /// One latent vector for all heads.
    Latent(LatentCache),
}

impl KvBuffer {
    pub(super) fn new(kv_type: KvType, num_blocks: usize, block_size: usize, layer: &LayerAttention) -> Self {
        match layer.latent {
            Some(shape) => Self::Latent(LatentCache::new(kv_type, num_blocks, block_size, shape.width())),
            None => Self::Heads(KvCache::new(kv_type, num_blocks, layer.num_kv_heads, block_size, layer.head_dim)),
        }
    }

    pub(super) fn heads(&self) -> &KvCache {
        match self {
            Self::Heads(cache) => cache,
            Self::Latent(_) => panic!("the layer has latent vectors"),
        }
    }

    pub(super) fn heads_mut(&mut self) -> &mut KvCache {
        match self {
            Self::Heads(cache) => cache,
            Self::Latent(_) => panic!("the layer has latent vectors"),
        }
    }

    fn latent_mut(&mut self) -> &mut LatentCache {
        match self {
            Self::Latent(cache) => cache,
            Self::Heads(_) => panic!("the layer has k and v"),
        }
    }

    /// The bytes of a block, in parts that have the same sizes for all blocks.
    pub(super) fn parts(&self, block: usize) -> Vec<&[u8]> {
        match self {
            Self::Heads(cache) => cache.parts(block),
            Self::Latent(cache) => vec![cache.bytes(block)],
        }
    }

    /// The same, to write a block.
    pub(super) fn parts_mut(&mut self, block: usize) -> Vec<&mut [u8]> {
        match self {
            Self::Heads(cache) => cache.parts_mut(block),
            Self::Latent(cache) => vec![cache.bytes_mut(block)],
        }
    }

    pub(super) fn copy_block(&mut self, from: usize, to: usize) {
        match self {
            Self::Heads(cache) => cache.copy_block(from, to),
            Self::Latent(cache) => cache.copy_block(from, to),
        }
    }
}

fn sizes(shape: LatentShape) -> LatentSizes {
    let LatentShape { rank, rotary_dim, key_dim, value_dim, is_interleaved } = shape;
    LatentSizes { rank, rotary_dim, key_dim, value_dim, is_interleaved }
}

impl CpuDevice {
    pub(super) fn load_latent_layer(&mut self, layer: &LatentWeights<'_>) -> Result<Latent, DeviceError> {
        let norm = slices::vector(&layer.norm)?;
        let up = slices::matrix(&mut self.pool, std::slice::from_ref(&layer.up), &[])?;
        self.weights_bytes += (size_of_val(&*norm) + up.bytes()) as u64;
        if up.weight_type() != k::WeightType::Bf16 && !self.loads_drafter {
            self.widest_weight = Some(KvType::F32);
        }
        Ok(Latent { norm, eps: layer.eps, up })
    }

    pub(super) fn run_latent_attention(
        &mut self,
        out: &mut CpuTensor,
        [q, latents]: [&mut CpuTensor; 2],
        layer: usize,
        weights: &Latent,
    ) {
        let (tokens, inputs) = (self.num_tokens(), &self.inputs);
        let Cache { buffers, spec, .. } =
            self.cache.as_mut().expect("`allocate_cache` is called before the first step");
        let own = &spec.layers[layer];
        let (shape, rope) = (own.latent.expect("the layer has latent vectors"), own.rope.expect("they are rotated"));
        if let Some(query_scale) = own.query_scale {
            let queries = q.rows_mut(tokens).chunks_exact_mut(own.num_heads * shape.query_dim());
            for (query, &position) in queries.zip(&inputs.positions) {
                let factor = query_scale.at(position);
                query.iter_mut().for_each(|x| *x *= factor);
            }
        }
        let (sizes, rope) = (sizes(shape), &spec.ropes[rope]);
        let angles = [&rope.cos[..], &rope.sin[..]];
        let (positions, slots) = (&inputs.positions[..], inputs.slots_of(own.kv_group));
        let cache = buffers[own.kv_buffer].latent_mut();
        let written = LatentTokens { positions, slots, angles };
        cache.write(latents.rows_mut(tokens), &sizes, (&weights.norm, weights.eps), &written);
        let row = |(index, starts): (usize, &[u32])| k::AttentionRow {
            first_token: starts[0] as usize,
            num_tokens: (starts[1] - starts[0]) as usize,
            first_position: positions[starts[0] as usize] as usize,
            block_table: inputs.block_table(own.kv_group, index),
        };
        let rows: Vec<_> = inputs.row_starts.windows(2).enumerate().filter(|(_, s)| s[0] < s[1]).map(row).collect();
        let (num_heads, scale, up) = (own.num_heads, own.scale, &weights.up);
        let attention = k::LatentAttention { sizes, num_heads, scale, up, angles };
        attention.run(&mut self.pool, out.rows_mut(tokens), q.rows(tokens), &rows, cache);
    }
}
