//! Decoders: a stack of layers, each built from its specification.

use std::path::Path;

use ops::{Activation, AttentionSpec, Device, DeviceError, HeadNorms, LayerAttention, LogitSpec, PipelineStage};

use crate::config::{HeadNormSpec, LayerSpec, MlpLayer};
use crate::layers::{LayerSource, Loader};
use crate::model::Model;
use crate::shard::{LayerShard, Shard};
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
    unused_tensors: Vec<String>,
}

/// The layers after the last decoder layer: final norm and output head.
struct FinalLayers<D: Device> {
    norm: D::Weight,
    head: D::Weight,
}

/// One decoder layer.
struct Layer<D: Device> {
    is_parallel: bool,
    /// Index of the buffers for its widths.
    widths: usize,
    attention_norm: Option<D::Weight>,
    qkv: D::Weight,
    head_norms: Option<(HeadNormSpec, [D::Weight; 2])>, // norms of q and of k
    out: D::Weight,
    attention_branch_norm: Option<D::Weight>,
    mlp_norm: Option<D::Weight>,
    mlp: Option<Mlp<D>>,
    experts: Option<D::Weight>,
    mlp_branch_norm: Option<D::Weight>,
}

/// A feed-forward that every token passes.
struct Mlp<D: Device> {
    activation: Activation,
    up: D::Weight, // gate and up, or up alone
    down: D::Weight,
    output_gate: Option<D::Weight>,
}

/// Activation buffers of a step, shared by all layers.
struct Buffers<D: Device> {
    residual: D::Tensor, // [T, E]
    normed: D::Tensor,   // [T, E]
    partial: D::Tensor,  // [T, E]
    second: Option<SecondBuffers<D>>,
    inner: Vec<InnerBuffers<D>>,
}

/// Buffers for layers that add two parts: attention and feed-forward of the same input, or a shared expert and others.
struct SecondBuffers<D: Device> {
    normed: D::Tensor,  // [T, E]
    partial: D::Tensor, // [T, E]
}

/// Buffers of the widths that some layers share.
struct InnerBuffers<D: Device> {
    qkv: D::Tensor,             // [T, (H + 2K) D]
    attended: D::Tensor,        // [T, H D]
    gate_up: Option<D::Tensor>, // [T, 2 I]
    inner: Option<D::Tensor>,   // [T, I]
}

/// The widths of [`InnerBuffers`].
#[derive(PartialEq)]
struct Widths {
    qkv: usize,
    attended: usize,
    inner: usize,
    is_gated: bool,
}

impl Widths {
    fn of(layer: &LayerSpec, shard: &LayerShard) -> Self {
        let dim = layer.attention.head_dim;
        let (heads, kv_heads) = (shard.heads.len() * dim, shard.kv_heads.len() * dim);
        let (inner, is_gated) = (shard.intermediate.len(), layer.mlp.is_some_and(|mlp| mlp.is_gated));
        Self { qkv: heads + 2 * kv_heads, attended: heads, inner, is_gated }
    }
}

impl<D: Device> Decoder<D> {
    pub(crate) fn load(
        dir: &Path,
        checkpoint: &Checkpoint,
        config: &Config,
        shard: Shard,
        device: &mut D,
    ) -> Result<Self, ModelError> {
        let mut loader = Loader::new(dir, checkpoint, config, &shard, device);
        let stage = loader.device.pipeline_stage();
        let has_tied_head = stage.is_last() && loader.has_tied_head();
        let needs_embedding = stage.is_first() || has_tied_head;
        let embedding = if needs_embedding { Some(loader.embedding()?) } else { None };
        let positions = match config.learned_positions {
            Some(num_positions) if stage.is_first() => Some(loader.positions(num_positions)?),
            _ => None,
        };
        let mut widths = Vec::new();
        let own = stage.layers(config.num_layers());
        let layers = own.map(|index| Layer::load(&mut loader, index, &mut widths)).collect::<Result<Vec<_>, _>>()?;
        let final_layers = if stage.is_last() {
            Some(FinalLayers::load(&mut loader, embedding.as_ref().filter(|_| has_tied_head))?)
        } else {
            None
        };
        let has_two_parts = |layer: &Layer<D>| layer.is_parallel || (layer.mlp.is_some() && layer.experts.is_some());
        let has_second = layers.iter().any(has_two_parts);
        let buffers = Buffers::allocate(config.hidden_size, has_second, &widths, loader.device);
        let buffers = loader.or_device_error(buffers)?;
        let unused_tensors = if stage == PipelineStage::WHOLE { checkpoint.unused() } else { Vec::new() };
        let config = config.clone();
        Ok(Self { config, shard, stage, embedding, positions, layers, final_layers, buffers, unused_tensors })
    }
}

impl<D: Device> FinalLayers<D> {
    fn load(loader: &mut Loader<'_, D>, tied_head: Option<&D::Weight>) -> Result<Self, ModelError> {
        Ok(Self { norm: loader.final_norm()?, head: loader.head(tied_head)? })
    }
}

impl<D: Device> Layer<D> {
    fn load(loader: &mut Loader<'_, D>, index: usize, widths: &mut Vec<Widths>) -> Result<Self, ModelError> {
        let source: LayerSource<'_> = loader.layer(index);
        let own = Widths::of(source.spec, source.shard);
        let buffers = widths.iter().position(|known| *known == own).unwrap_or(widths.len());
        if buffers == widths.len() {
            widths.push(own);
        }
        let head_norm = source.spec.attention.head_norm;
        Ok(Self {
            is_parallel: source.spec.is_parallel,
            widths: buffers,
            attention_norm: loader.layer_norm(source, loader.names.attention_norm)?,
            qkv: loader.qkv(source)?,
            head_norms: match head_norm {
                Some(norm) => Some((norm, loader.head_norms(source, norm)?)),
                None => None,
            },
            out: loader.out(source)?,
            attention_branch_norm: loader.layer_norm(source, loader.names.attention_branch_norm)?,
            mlp_norm: loader.layer_norm(source, loader.names.mlp_norm)?,
            mlp: match source.spec.mlp {
                Some(mlp) => Some(Mlp::load(loader, source, mlp)?),
                None => None,
            },
            experts: match (source.spec.experts, &loader.names.experts) {
                (Some(experts), Some(names)) => Some(loader.experts(source, experts, names)?),
                (None, _) => None,
                (Some(_), None) => unreachable!("an architecture with experts names them"),
            },
            mlp_branch_norm: loader.layer_norm(source, loader.names.mlp_branch_norm)?,
        })
    }

    /// `partial` = attention of `x`, this worker's part of the sum.
    fn attend(
        &self,
        device: &mut D,
        index: usize,
        x: &D::Tensor,
        partial: &mut D::Tensor,
        b: &mut InnerBuffers<D>,
    ) -> Result<(), DeviceError> {
        device.linear(&mut b.qkv, x, &self.qkv)?;
        if let Some((norm, [q, k])) = &self.head_norms {
            device.head_norm(&mut b.qkv, index, &HeadNorms { span: norm.span, q, k }, norm.eps)?;
        }
        device.rope_and_cache(&mut b.qkv, index)?;
        device.attention(&mut b.attended, &b.qkv, index)?;
        device.linear(partial, &b.attended, &self.out)
    }

    /// `partial` = feed-forward of `x`, this worker's part of the sum. `second` is needed if it has two parts.
    fn feed_forward(
        &self,
        device: &mut D,
        x: &D::Tensor,
        partial: &mut D::Tensor,
        second: Option<&mut D::Tensor>,
        b: &mut InnerBuffers<D>,
    ) -> Result<(), DeviceError> {
        if let Some(mlp) = &self.mlp {
            mlp.run(device, x, partial, b)?;
        }
        match (&self.experts, second) {
            (None, _) => Ok(()),
            (Some(experts), Some(second)) if self.mlp.is_some() => {
                device.experts(second, x, experts)?;
                device.add(partial, second)
            }
            (Some(experts), _) => device.experts(partial, x, experts),
        }
    }
}

impl<D: Device> Mlp<D> {
    fn load(loader: &mut Loader<'_, D>, source: LayerSource<'_>, mlp: MlpLayer) -> Result<Self, ModelError> {
        let names = loader.names;
        let shared = names.experts.and_then(|names| names.shared).filter(|_| source.spec.experts.is_some());
        let (up, down, gate) = shared.unwrap_or((names.up, names.down, ""));
        Ok(Self {
            activation: mlp.activation,
            up: loader.up(source, mlp, up)?,
            down: loader.down(source, mlp, down)?,
            output_gate: if mlp.has_output_gate { Some(loader.output_gate(source, gate)?) } else { None },
        })
    }

    fn run(
        &self,
        device: &mut D,
        x: &D::Tensor,
        partial: &mut D::Tensor,
        b: &mut InnerBuffers<D>,
    ) -> Result<(), DeviceError> {
        let inner = b.inner.as_mut().expect("a feed-forward has an inner layer");
        match &mut b.gate_up {
            Some(gate_up) => device.gated_linear(inner, gate_up, x, &self.up, self.activation)?,
            None => device.activated_linear(inner, x, &self.up, self.activation)?,
        }
        device.linear(partial, inner, &self.down)?;
        match &self.output_gate {
            Some(gate) => device.gate_rows(partial, x, gate),
            None => Ok(()),
        }
    }
}

impl<D: Device> Buffers<D> {
    fn allocate(hidden: usize, has_second: bool, widths: &[Widths], device: &mut D) -> Result<Self, DeviceError> {
        let inner = |widths: &Widths, device: &mut D| {
            Ok(InnerBuffers {
                qkv: device.tensor(widths.qkv)?,
                attended: device.tensor(widths.attended)?,
                gate_up: if widths.is_gated { Some(device.tensor(2 * widths.inner)?) } else { None },
                inner: if widths.inner > 0 { Some(device.tensor(widths.inner)?) } else { None },
            })
        };
        Ok(Self {
            residual: device.tensor(hidden)?,
            normed: device.tensor(hidden)?,
            inner: widths.iter().map(|widths| inner(widths, device)).collect::<Result<_, DeviceError>>()?,
            partial: device.tensor(hidden)?,
            second: match has_second {
                true => Some(SecondBuffers { normed: device.tensor(hidden)?, partial: device.tensor(hidden)? }),
                false => None,
            },
        })
    }

    /// Adds a branch, the sum of `partial` over the group, to the hidden state, and computes the next norm of it.
    fn add_branch(
        &mut self,
        device: &mut D,
        branch_norm: Option<&D::Weight>,
        next_norm: Option<&D::Weight>,
        eps: f32,
    ) -> Result<(), DeviceError> {
        match (branch_norm, next_norm) {
            (Some(branch), next) => {
                let next = next.map(|norm| (&mut self.normed, norm));
                device.reduce_norm_add_norm(&mut self.residual, &mut self.partial, branch, next, eps)
            }
            (None, Some(next)) => {
                device.reduce_add_norm(&mut self.normed, &mut self.residual, &self.partial, next, eps)
            }
            (None, None) => unreachable!("a branch without a norm is followed by one"),
        }
    }
}

impl<D: Device> Decoder<D> {
    /// Computes the input of the first layer: embeds the step's tokens, or receives the hidden state from the previous
    /// stage, and normalizes it.
    fn begin(&mut self, device: &mut D) -> Result<(), DeviceError> {
        let b = &mut self.buffers;
        match &self.embedding {
            Some(embedding) if self.stage.is_first() => {
                device.embed(&mut b.residual, embedding, self.config.embedding_scale)?;
            }
            _ => device.recv_hidden(&mut b.residual)?,
        }
        if let Some(positions) = &self.positions {
            device.add_positions(&mut b.residual, positions)?;
        }
        let final_norm = self.final_layers.as_ref().map(|layers| &layers.norm);
        let first_norm = self.layers.first().map_or(final_norm, |layer| layer.attention_norm.as_ref());
        match first_norm {
            Some(norm) => device.norm(&mut b.normed, &b.residual, norm, self.config.norm.eps),
            None => Ok(()),
        }
    }

    /// Runs layer `index` of this stage.
    fn run_layer(&mut self, device: &mut D, index: usize) -> Result<(), DeviceError> {
        let (eps, layer, b) = (self.config.norm.eps, &self.layers[index], &mut self.buffers);
        let next = match self.layers.get(index + 1) {
            Some(next) => next.attention_norm.as_ref(),
            None => self.final_layers.as_ref().map(|layers| &layers.norm),
        };
        let Buffers { residual, normed, partial, inner, second } = b;
        let inner = &mut inner[layer.widths];
        layer.attend(
            device,
            index,
            if layer.attention_norm.is_some() { &*normed } else { &*residual },
            partial,
            inner,
        )?;
        if let Some(second) = second.as_mut().filter(|_| layer.is_parallel) {
            let x = match &layer.mlp_norm {
                Some(norm) => {
                    device.norm(&mut second.normed, residual, norm, eps)?;
                    &second.normed
                }
                None => normed,
            };
            layer.feed_forward(device, x, &mut second.partial, None, inner)?;
            device.add(partial, &second.partial)?;
        } else {
            b.add_branch(device, layer.attention_branch_norm.as_ref(), layer.mlp_norm.as_ref(), eps)?;
            let x = if layer.mlp_norm.is_some() { &b.normed } else { &b.residual };
            let second = b.second.as_mut().map(|second| &mut second.partial);
            layer.feed_forward(device, x, &mut b.partial, second, &mut b.inner[layer.widths])?;
        }
        // Before the next stage any norm may be used: that stage normalizes the sum itself.
        let any = layer.attention_norm.as_ref().or(layer.mlp_norm.as_ref());
        let is_last_of_stage = index + 1 == self.layers.len() && self.final_layers.is_none();
        let next = if is_last_of_stage { any } else { next };
        self.buffers.add_branch(device, layer.mlp_branch_norm.as_ref(), next, eps)
    }

    fn layer_attention(&self, index: usize) -> LayerAttention {
        let (attention, shard) = (&self.config.layers[index].attention, &self.shard.layers[index]);
        LayerAttention {
            num_heads: shard.heads.len(),
            num_kv_heads: shard.kv_heads.len(),
            head_dim: attention.head_dim,
            scale: attention.scale,
            rope: attention.rope,
            window: attention.window,
            score_cap: attention.score_cap,
            sinks: Vec::new(),
            alibi_slopes: match attention.has_alibi {
                true => alibi::slopes(attention.num_heads)[shard.heads.clone()].to_vec(),
                false => Vec::new(),
            },
        }
    }
}

impl<D: Device> Model<D> for Decoder<D> {
    fn attention_spec(&self, block_size: usize) -> AttentionSpec {
        let max_positions = self.config.max_position_embeddings;
        AttentionSpec {
            block_size,
            max_positions,
            ropes: self.config.ropes.iter().map(|rope| rope.table(max_positions)).collect(),
            layers: self.stage.layers(self.config.num_layers()).map(|index| self.layer_attention(index)).collect(),
        }
    }

    fn unused_tensors(&self) -> &[String] {
        &self.unused_tensors
    }

    fn forward(&mut self, device: &mut D) -> Result<(), DeviceError> {
        self.begin(device)?;
        for index in 0..self.layers.len() {
            self.run_layer(device, index)?;
        }
        match &self.final_layers {
            Some(layers) => device.sample(&self.buffers.normed, &layers.head, LogitSpec { cap: self.config.head.cap }),
            None => device.send_hidden(&self.buffers.residual),
        }
    }
}
