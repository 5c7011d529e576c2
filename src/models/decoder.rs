//! Pre-norm decoders: Llama and its kin, and GPT-2. What differs between them is in [`Config`].

use std::path::Path;

use device::{AttentionSpec, Device, DeviceError, RopeTable};

use crate::config::{Mlp, NormKind, Positions};
use crate::layers::{Loader, Names};
use crate::registry::Model;
use crate::shard::Shard;
use crate::{Checkpoint, Config, ModelError, alibi};

/// A decoder on device `D`.
pub(crate) struct Decoder<D: Device> {
    config: Config,
    shard: Shard,
    embedding: D::Weight,
    positions: Option<D::Weight>,
    layers: Vec<Layer<D>>,
    final_norm: D::Weight,
    head: D::Weight,
    buffers: Buffers<D>,
}

/// One decoder layer.
struct Layer<D: Device> {
    attention_norm: D::Weight,
    qkv: D::Weight,
    head_norms: Option<[D::Weight; 2]>, // of q and of k
    out: D::Weight,
    mlp_norm: D::Weight,
    up: D::Weight, // gate and up where there is a gate
    down: D::Weight,
}

/// Activations of a step, shared by all layers.
struct Buffers<D: Device> {
    residual: D::Tensor,        // [T, E]
    normed: D::Tensor,          // [T, E]
    qkv: D::Tensor,             // [T, (H + 2K) D]
    attended: D::Tensor,        // [T, H D]
    gate_up: Option<D::Tensor>, // [T, 2 I]
    inner: D::Tensor,           // [T, I]
    partial: D::Tensor,         // [T, E]
}

impl<D: Device> Decoder<D> {
    pub(crate) fn load(
        dir: &Path,
        checkpoint: &Checkpoint,
        config: &Config,
        names: &Names,
        shard: Shard,
        device: &mut D,
    ) -> Result<Self, ModelError> {
        let mut loader = Loader::new(dir, checkpoint, config, names, &shard, device);
        let embedding = loader.embedding()?;
        let positions = match config.positions {
            Positions::Learned { num_positions } => Some(loader.positions(num_positions)?),
            Positions::Rotary(_) | Positions::Alibi => None,
        };
        let layers =
            (0..config.num_layers).map(|index| Layer::load(&mut loader, index)).collect::<Result<Vec<_>, _>>()?;
        let final_norm = loader.norm(&format!("{}{}", loader.prefix, names.final_norm))?;
        let head = loader.head(&embedding)?;
        let buffers = Buffers::allocate(config, &shard, loader.device);
        let buffers = loader.or_device_error(buffers)?;
        Ok(Self { config: config.clone(), shard, embedding, positions, layers, final_norm, head, buffers })
    }
}

impl<D: Device> Layer<D> {
    fn load(loader: &mut Loader<'_, D>, index: usize) -> Result<Self, ModelError> {
        Ok(Self {
            attention_norm: loader.norm(&loader.of_layer(index, loader.names.attention_norm))?,
            qkv: loader.qkv(index)?,
            head_norms: if loader.config.head_norms { Some(loader.head_norms(index)?) } else { None },
            out: loader.out(index)?,
            mlp_norm: loader.norm(&loader.of_layer(index, loader.names.mlp_norm))?,
            up: loader.up(index)?,
            down: loader.down(index)?,
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
            gate_up: match config.mlp {
                Mlp::Gated => Some(device.tensor(2 * intermediate)?),
                Mlp::Plain => None,
            },
            inner: device.tensor(intermediate)?,
            partial: device.tensor(hidden)?,
        })
    }
}

impl<D: Device> Decoder<D> {
    /// Embeds the step's tokens and norms them for the first layer.
    fn embed(&mut self, device: &mut D) -> Result<(), DeviceError> {
        let b = &mut self.buffers;
        device.embed(&mut b.residual, &self.embedding)?;
        if let Some(positions) = &self.positions {
            device.add_positions(&mut b.residual, positions)?;
        }
        let first_norm = self.layers.first().map_or(&self.final_norm, |layer| &layer.attention_norm);
        match self.config.norm {
            NormKind::Rms => device.rms_norm(&mut b.normed, &b.residual, first_norm, self.config.norm_eps),
            NormKind::Layer => device.layer_norm(&mut b.normed, &b.residual, first_norm, self.config.norm_eps),
        }
    }
}

impl<D: Device> Model<D> for Decoder<D> {
    fn attention_spec(&self, block_size: usize) -> AttentionSpec {
        let config = &self.config;
        let slopes = match config.positions {
            Positions::Alibi => alibi::slopes(config.num_heads)[self.shard.heads.clone()].to_vec(),
            Positions::Rotary(_) | Positions::Learned { .. } => Vec::new(),
        };
        AttentionSpec {
            num_layers: config.num_layers,
            num_heads: self.shard.heads.len(),
            num_kv_heads: self.shard.kv_heads.len(),
            head_dim: config.head_dim,
            scale: (config.head_dim as f32).powf(-0.5),
            block_size,
            rope: match &config.positions {
                Positions::Rotary(rope) => rope.table(config.head_dim, config.max_position_embeddings),
                Positions::Alibi | Positions::Learned { .. } => {
                    RopeTable::identity(config.head_dim, config.max_position_embeddings)
                }
            },
            sliding_window: config.sliding_window,
            alibi_slopes: slopes,
        }
    }

    fn forward(&mut self, device: &mut D) -> Result<(), DeviceError> {
        self.embed(device)?;
        let (eps, activation) = (self.config.norm_eps, self.config.activation);
        let b = &mut self.buffers;
        for (index, layer) in self.layers.iter().enumerate() {
            device.linear(&mut b.qkv, &b.normed, &layer.qkv)?;
            if let Some([q_norm, k_norm]) = &layer.head_norms {
                device.head_norm(&mut b.qkv, q_norm, k_norm, eps)?;
            }
            device.rope_and_cache(&mut b.qkv, index)?;
            device.attention(&mut b.attended, &b.qkv, index)?;
            device.linear(&mut b.partial, &b.attended, &layer.out)?;
            device.reduce_add_norm(&mut b.normed, &mut b.residual, &b.partial, &layer.mlp_norm, eps)?;
            match &mut b.gate_up {
                Some(gate_up) => device.gated_linear(&mut b.inner, gate_up, &b.normed, &layer.up, activation)?,
                None => device.activated_linear(&mut b.inner, &b.normed, &layer.up, activation)?,
            }
            device.linear(&mut b.partial, &b.inner, &layer.down)?;
            let next_norm = self.layers.get(index + 1).map_or(&self.final_norm, |next| &next.attention_norm);
            device.reduce_add_norm(&mut b.normed, &mut b.residual, &b.partial, next_norm, eps)?;
        }
        device.sample(&b.normed, &self.head)
    }
}
