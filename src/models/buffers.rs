//! Activation buffers of a decoder.

use ops::{Device, DeviceError};

use crate::layer_spec::{KvSource, LatentLayer, LayerSpec, RecurrentLayer};
use crate::layers::shape_of;
use crate::shard::LayerShard;

/// Activation buffers of a step, shared by all layers.
pub(crate) struct Buffers<D: Device> {
    pub(crate) residual: D::Tensor, // [T, E]
    pub(crate) normed: D::Tensor,   // [T, E]
    pub(crate) partial: D::Tensor,  // [T, E]
    pub(crate) second: Option<SecondBuffers<D>>,
    pub(crate) inner: Vec<InnerBuffers<D>>,
}

/// Buffers for layers that add two parts: attention and feed-forward of the same input, or a shared expert and others.
pub(crate) struct SecondBuffers<D: Device> {
    pub(crate) normed: D::Tensor,  // [T, E]
    pub(crate) partial: D::Tensor, // [T, E]
}

/// Buffers of the widths that some layers share.
pub(crate) struct InnerBuffers<D: Device> {
    pub(crate) qkv: D::Tensor, // [T, (H + 2K) D], without k and v [T, H D]; of a state [T, C + V DV]; q of latent vectors
    pub(crate) gates: Option<D::Tensor>, // of the output of attention [T, H D], of a state [T, 2 V] or [T, V], or latent vectors [T, width]
    pub(crate) attended: D::Tensor,      // [T, H D]
    pub(crate) decays: Option<[D::Tensor; 2]>, // of Kimi Delta Attention: inputs of low rank [T, DK], and steps [T, V DK]
    pub(crate) query_latents: Option<[D::Tensor; 2]>, // [T, rank of q], before and behind the norm
    pub(crate) gate_up: Option<D::Tensor>,     // [T, 2 I]
    pub(crate) inner: Option<D::Tensor>,       // [T, I]
    pub(crate) expert_latents: Option<[D::Tensor; 2]>, // [T, L], inputs and outputs of experts
    pub(crate) beside: Option<BesideBuffers<D>>,
}

/// Buffers of a state beside attention.
pub(crate) struct BesideBuffers<D: Device> {
    pub(crate) inputs: D::Tensor,  // [T, C + V DV]
    pub(crate) steps: D::Tensor,   // [T, 2 V] or [T, V]
    pub(crate) mixed: D::Tensor,   // [T, V DV]
    pub(crate) partial: D::Tensor, // [T, E]
}

/// The widths of [`InnerBuffers`].
#[derive(PartialEq)]
pub(crate) struct Widths {
    pub(crate) qkv: usize,
    pub(crate) gates: usize,
    pub(crate) attended: usize,
    /// Of Kimi Delta Attention: inputs of low rank, and steps.
    pub(crate) decays: Option<[usize; 2]>,
    pub(crate) query_rank: usize,
    pub(crate) inner: usize,
    pub(crate) is_gated: bool,
    pub(crate) expert_latents: usize,
    /// Of a state beside attention: its inputs, steps and outputs.
    pub(crate) beside: Option<[usize; 3]>,
}

impl Widths {
    pub(crate) fn of(layer: &LayerSpec, shard: &LayerShard) -> Self {
        let (inner, is_gated) = (shard.intermediate.len(), layer.mlp.is_some_and(|mlp| mlp.is_gated));
        let expert_latents = layer.experts.and_then(|experts| experts.latent_size).unwrap_or(0);
        let of_state = |recurrent: RecurrentLayer, shard: &LayerShard| {
            let shape = shape_of(recurrent.shape, shard);
            let values = shape.widths()[1];
            [shape.channels() + values, shape.num_steps(), values]
        };
        let beside = layer.beside.map(|beside| of_state(beside.recurrent, &shard.of_beside()));
        let decays = layer.recurrent.filter(|recurrent| recurrent.is_kimi_delta()).map(|recurrent| {
            let dim = recurrent.shape.key_dim;
            [dim, shard.heads.len() * dim]
        });
        let usual =
            Self { qkv: 0, gates: 0, attended: 0, decays, query_rank: 0, inner, is_gated, expert_latents, beside };
        if let Some(recurrent) = layer.recurrent {
            let [qkv, gates, attended] = of_state(recurrent, shard);
            let (qkv, gates) = match decays {
                // Learning rates are behind q, k and v, in place of the gates.
                Some(_) => (qkv - attended + gates, attended),
                None => (qkv, gates),
            };
            return Self { qkv, gates, attended, ..usual };
        }
        if let Some(LatentLayer { shape, query_rank }) = layer.attention.latent {
            let (heads, query_rank) = (shard.heads.len(), query_rank.unwrap_or(0));
            let (qkv, attended) = (heads * shape.query_dim(), heads * shape.value_dim);
            return Self { qkv, gates: shape.width(), attended, query_rank, ..usual };
        }
        let dim = layer.attention.head_dim;
        let (heads, kv_heads) = (shard.heads.len() * dim, shard.kv_heads.len() * dim);
        let kv_heads = if matches!(layer.attention.kv, KvSource::Layer(_)) { 0 } else { kv_heads };
        let gates = if layer.attention.has_output_gate { heads } else { 0 };
        Self { qkv: heads + 2 * kv_heads, gates, attended: heads, ..usual }
    }
}

impl<D: Device> Buffers<D> {
    pub(crate) fn allocate(
        hidden: usize,
        has_second: bool,
        widths: &[Widths],
        device: &mut D,
    ) -> Result<Self, DeviceError> {
        let inner = |widths: &Widths, device: &mut D| {
            Ok(InnerBuffers {
                qkv: device.tensor(widths.qkv)?,
                gates: if widths.gates > 0 { Some(device.tensor(widths.gates)?) } else { None },
                attended: device.tensor(widths.attended)?,
                decays: match widths.decays {
                    Some([low, steps]) => Some([device.tensor(low)?, device.tensor(steps)?]),
                    None => None,
                },
                query_latents: match widths.query_rank {
                    0 => None,
                    rank => Some([device.tensor(rank)?, device.tensor(rank)?]),
                },
                gate_up: if widths.is_gated { Some(device.tensor(2 * widths.inner)?) } else { None },
                inner: if widths.inner > 0 { Some(device.tensor(widths.inner)?) } else { None },
                expert_latents: match widths.expert_latents {
                    0 => None,
                    size => Some([device.tensor(size)?, device.tensor(size)?]),
                },
                beside: match widths.beside {
                    Some([inputs, steps, mixed]) => Some(BesideBuffers {
                        inputs: device.tensor(inputs)?,
                        steps: device.tensor(steps)?,
                        mixed: device.tensor(mixed)?,
                        partial: device.tensor(hidden)?,
                    }),
                    None => None,
                },
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
    pub(crate) fn add_branch(
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
