//! Pre-norm decoders: the Llama family and GPT-2. [`Config`] contains the differences between them.

use std::path::Path;

use ops::{AttentionSpec, Device, DeviceError, PipelineStage, RopeTable};

use crate::config::{Mlp, NormKind, Positions};
use crate::layers::Loader;
use crate::model::Model;
use crate::names::Names;
use crate::shard::Shard;
use crate::{Checkpoint, Config, ModelError, alibi};

/// A decoder on device `D`, or one pipeline stage of it.
pub(crate) struct Decoder<D: Device> {
    config: Config,
    shard: Shard,
    stage: PipelineStage,
    /// Set in the first stage, and in the last stage if the head is tied to the embedding.
    embedding: Option<D::Weight>,
    positions: Option<D::Weight>,
    layers: Vec<Layer<D>>,
    /// Set in the last stage.
    final_layers: Option<FinalLayers<D>>,
    buffers: Buffers<D>,
}

/// The layers after the last decoder layer: final norm and output head.
struct FinalLayers<D: Device> {
    norm: D::Weight,
    head: D::Weight,
}

/// One decoder layer.
struct Layer<D: Device> {
    attention_norm: D::Weight,
    qkv: D::Weight,
    head_norms: Option<[D::Weight; 2]>, // norms of q and of k
    out: D::Weight,
    mlp_norm: D::Weight,
    up: D::Weight, // gate and up, or up alone
    down: D::Weight,
}

/// Activation buffers of a step, shared by all layers.
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
        let stage = loader.device.pipeline_stage();
        let needs_embedding = stage.is_first() || (stage.is_last() && config.tie_word_embeddings);
        let embedding = if needs_embedding { Some(loader.embedding()?) } else { None };
        let positions = match config.positions {
            Positions::Learned { num_positions } if stage.is_first() => Some(loader.positions(num_positions)?),
            _ => None,
        };
        let layers = stage.layers(config.num_layers).map(|index| Layer::load(&mut loader, index));
        let layers = layers.collect::<Result<Vec<_>, _>>()?;
        let final_layers =
            if stage.is_last() { Some(FinalLayers::load(&mut loader, embedding.as_ref())?) } else { None };
        let buffers = Buffers::allocate(config, &shard, loader.device);
        let buffers = loader.or_device_error(buffers)?;
        Ok(Self { config: config.clone(), shard, stage, embedding, positions, layers, final_layers, buffers })
    }
}

impl<D: Device> FinalLayers<D> {
    fn load(loader: &mut Loader<'_, D>, embedding: Option<&D::Weight>) -> Result<Self, ModelError> {
        let norm = loader.norm(&format!("{}{}", loader.prefix, loader.names.final_norm))?;
        Ok(Self { norm, head: loader.head(embedding)? })
    }
}

impl<D: Device> Layer<D> {
    fn load(loader: &mut Loader<'_, D>, index: usize) -> Result<Self, ModelError> {
        Ok(Self {
            attention_norm: loader.norm(&loader.layer_name(index, loader.names.attention_norm))?,
            qkv: loader.qkv(index)?,
            head_norms: if loader.config.head_norms { Some(loader.head_norms(index)?) } else { None },
            out: loader.out(index)?,
            mlp_norm: loader.norm(&loader.layer_name(index, loader.names.mlp_norm))?,
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
    /// Computes the input of the first layer: embeds the step's tokens, or receives the hidden state from the previous
    /// stage, and normalizes it.
    fn begin(&mut self, device: &mut D) -> Result<(), DeviceError> {
        let b = &mut self.buffers;
        match &self.embedding {
            Some(embedding) if self.stage.is_first() => device.embed(&mut b.residual, embedding)?,
            _ => device.recv_hidden(&mut b.residual)?,
        }
        if let Some(positions) = &self.positions {
            device.add_positions(&mut b.residual, positions)?;
        }
        let final_norm = || self.final_layers.as_ref().map(|layers| &layers.norm);
        let first_norm = self.layers.first().map(|layer| &layer.attention_norm).or_else(final_norm);
        let first_norm = first_norm.expect("a stage has a layer or the model's end");
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
            num_layers: self.stage.layers(config.num_layers).len(),
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
        self.begin(device)?;
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
            let next = self.layers.get(index + 1).map(|next| &next.attention_norm);
            // Before the next stage any norm may be used: that stage normalizes the sum itself.
            let next_norm = next.or(self.final_layers.as_ref().map(|layers| &layers.norm)).unwrap_or(&layer.mlp_norm);
            device.reduce_add_norm(&mut b.normed, &mut b.residual, &b.partial, next_norm, eps)?;
        }
        match &self.final_layers {
            Some(layers) => device.sample(&b.normed, &layers.head),
            None => device.send_hidden(&b.residual),
        }
    }
}
