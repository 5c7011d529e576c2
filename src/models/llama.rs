//! Llama and its kin: pre-norm decoder layers of rotary attention and a gated feed-forward.

use std::path::Path;

use device::{Activation, AttentionSpec, Device, DeviceError};

use crate::layers::Loader;
use crate::registry::Model;
use crate::shard::Shard;
use crate::{Checkpoint, Config, ModelError};

/// A Llama on device `D`.
pub(crate) struct Llama<D: Device> {
    config: Config,
    shard: Shard,
    embedding: D::Weight,
    layers: Vec<Layer<D>>,
    final_norm: D::Weight,
    head: D::Weight,
    buffers: Buffers<D>,
}

/// One decoder layer.
struct Layer<D: Device> {
    attention_norm: D::Weight,
    qkv: D::Weight,
    out: D::Weight,
    mlp_norm: D::Weight,
    gate_up: D::Weight,
    down: D::Weight,
}

/// Activations of a step, shared by all layers.
struct Buffers<D: Device> {
    residual: D::Tensor, // [T, E]
    normed: D::Tensor,   // [T, E]
    qkv: D::Tensor,      // [T, (H + 2K) D]
    attended: D::Tensor, // [T, H D]
    gate_up: D::Tensor,  // [T, 2 I]
    gated: D::Tensor,    // [T, I]
    partial: D::Tensor,  // [T, E]
}

impl<D: Device> Llama<D> {
    pub(crate) fn load(
        dir: &Path,
        checkpoint: &Checkpoint,
        config: &Config,
        shard: Shard,
        device: &mut D,
    ) -> Result<Self, ModelError> {
        let mut loader = Loader { dir, checkpoint, config, shard: &shard, device };
        let embedding = loader.embedding("model.embed_tokens.weight")?;
        let layers =
            (0..config.num_layers).map(|index| Layer::load(&mut loader, index)).collect::<Result<Vec<_>, _>>()?;
        let final_norm = loader.norm("model.norm")?;
        let head =
            if config.tie_word_embeddings { loader.tied_head(&embedding)? } else { loader.head("lm_head.weight")? };
        let buffers = Buffers::allocate(config, &shard, loader.device);
        let buffers = loader.or_device_error(buffers)?;
        Ok(Self { config: config.clone(), shard, embedding, layers, final_norm, head, buffers })
    }
}

impl<D: Device> Layer<D> {
    fn load(loader: &mut Loader<'_, D>, index: usize) -> Result<Self, ModelError> {
        let name = format!("model.layers.{index}");
        Ok(Self {
            attention_norm: loader.norm(&format!("{name}.input_layernorm"))?,
            qkv: loader.qkv(&name)?,
            out: loader.out(&name)?,
            mlp_norm: loader.norm(&format!("{name}.post_attention_layernorm"))?,
            gate_up: loader.gate_up(&name)?,
            down: loader.down(&name)?,
        })
    }
}

impl<D: Device> Buffers<D> {
    fn allocate(config: &Config, shard: &Shard, device: &mut D) -> Result<Self, DeviceError> {
        let (hidden, intermediate) = (config.hidden_size, shard.intermediate.len());
        let (heads, kv_heads) = (shard.heads.len() * config.head_dim, shard.kv_heads.len() * config.head_dim);
        Ok(Self {
            residual: device.tensor(hidden)?,
            normed: device.tensor(hidden)?,
            qkv: device.tensor(heads + 2 * kv_heads)?,
            attended: device.tensor(heads)?,
            gate_up: device.tensor(2 * intermediate)?,
            gated: device.tensor(intermediate)?,
            partial: device.tensor(hidden)?,
        })
    }
}

impl<D: Device> Model<D> for Llama<D> {
    fn attention_spec(&self, block_size: usize) -> AttentionSpec {
        let config = &self.config;
        AttentionSpec {
            num_layers: config.num_layers,
            num_heads: self.shard.heads.len(),
            num_kv_heads: self.shard.kv_heads.len(),
            head_dim: config.head_dim,
            scale: (config.head_dim as f32).powf(-0.5),
            block_size,
            rope: config.rope.table(config.head_dim, config.max_position_embeddings),
            sliding_window: config.sliding_window,
        }
    }

    fn forward(&mut self, device: &mut D) -> Result<(), DeviceError> {
        let eps = self.config.rms_norm_eps;
        let activation: Activation = self.config.activation;
        let b = &mut self.buffers;
        device.embed(&mut b.residual, &self.embedding)?;
        let first_norm = self.layers.first().map_or(&self.final_norm, |layer| &layer.attention_norm);
        device.rms_norm(&mut b.normed, &b.residual, first_norm, eps)?;
        for (index, layer) in self.layers.iter().enumerate() {
            device.linear(&mut b.qkv, &b.normed, &layer.qkv)?;
            device.rope_and_cache(&mut b.qkv, index)?;
            device.attention(&mut b.attended, &b.qkv, index)?;
            device.linear(&mut b.partial, &b.attended, &layer.out)?;
            device.reduce_add_norm(&mut b.normed, &mut b.residual, &b.partial, &layer.mlp_norm, eps)?;
            device.gated_linear(&mut b.gated, &mut b.gate_up, &b.normed, &layer.gate_up, activation)?;
            device.linear(&mut b.partial, &b.gated, &layer.down)?;
            let next_norm = self.layers.get(index + 1).map_or(&self.final_norm, |next| &next.attention_norm);
            device.reduce_add_norm(&mut b.normed, &mut b.residual, &b.partial, next_norm, eps)?;
        }
        device.sample(&b.normed, &self.head)
    }
}
