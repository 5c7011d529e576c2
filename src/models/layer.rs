//! One layer of a decoder.

use ops::{Device, DeviceError};

use crate::ModelError;
use crate::adapter::targets::TargetWeight;
use crate::buffers::{Buffers, InnerBuffers, Widths};
use crate::expert_branch::ExpertBranch;
use crate::layers::{LayerSource, Loader};
use crate::mixer::{Counts, Mixer};
use crate::mlp::Mlp;
use crate::per_layer::{PerLayerBranch, PerLayerInputs};

/// One decoder layer.
pub(crate) struct Layer<D: Device> {
    pub(crate) is_parallel: bool,
    /// Index of the buffers for its widths.
    pub(crate) widths: usize,
    pub(crate) attention_norm: Option<D::Weight>,
    pub(crate) mixer: Mixer<D>,
    pub(crate) attention_branch_norm: Option<D::Weight>,
    pub(crate) mlp_norm: Option<D::Weight>,
    pub(crate) mlp: Option<Mlp<D>>,
    pub(crate) experts: Option<D::Weight>,
    /// Projections from the width of the model to that of the experts, and back.
    expert_latents: Option<[D::Weight; 2]>,
    pub(crate) expert_branch: Option<ExpertBranch<D>>,
    pub(crate) mlp_branch_norm: Option<D::Weight>,
    pub(crate) per_layer: Option<PerLayerBranch<D>>,
    pub(crate) scalar: Option<f32>,
}

impl<D: Device> Layer<D> {
    pub(crate) fn load(
        loader: &mut Loader<'_, D>,
        index: usize,
        widths: &mut Vec<Widths>,
        counts: &mut Counts,
    ) -> Result<Self, ModelError> {
        let source: LayerSource<'_> = loader.layer(index);
        let own = Widths::of(source.spec, source.shard);
        let buffers = widths.iter().position(|known| *known == own).unwrap_or(widths.len());
        if buffers == widths.len() {
            widths.push(own);
        }
        let (names, feed_forward) = (loader.names.of(source.spec), source.feed_forward());
        let mlp_norm = names.mlp_norm.filter(|_| source.spec.has_feed_forward());
        let [attention_scale, mlp_scale] = source.spec.norm_scales;
        Ok(Self {
            is_parallel: source.spec.is_parallel,
            widths: buffers,
            attention_norm: loader.layer_norm(source, names.attention_norm, attention_scale)?,
            mixer: Mixer::load(loader, source, counts)?,
            attention_branch_norm: loader.branch_norm(source, names.attention_branch_norm)?,
            mlp_norm: loader.layer_norm(feed_forward, mlp_norm, mlp_scale)?,
            mlp: match source.spec.mlp {
                Some(mlp) => Some(Mlp::load(loader, feed_forward, mlp)?),
                None => None,
            },
            experts: match (source.spec.experts, &loader.names.experts) {
                (Some(experts), Some(names)) => Some(loader.experts(feed_forward, experts, names)?),
                (None, _) => None,
                (Some(_), None) => unreachable!("an architecture with experts names them"),
            },
            expert_latents: loader.expert_latents(feed_forward)?,
            expert_branch: ExpertBranch::load(loader, feed_forward)?,
            mlp_branch_norm: loader.branch_norm(feed_forward, names.mlp_branch_norm)?,
            per_layer: match loader.config.per_layer_input {
                Some(input) => Some(PerLayerBranch::load(loader, source, input)?),
                None => None,
            },
            scalar: loader.layer_scalar(source)?,
        })
    }

    fn has_feed_forward(&self) -> bool {
        self.mlp.is_some() || self.experts.is_some()
    }

    /// Whether it adds two parts, and needs buffers for both.
    pub(crate) fn has_two_parts(&self) -> bool {
        self.is_parallel || (self.mlp.is_some() && self.experts.is_some())
    }

    /// A weight in which adapters may add products, if the layer has it.
    pub(crate) fn target_weight(&self, weight: TargetWeight) -> Option<&D::Weight> {
        match weight {
            TargetWeight::Up => self.mlp.as_ref().map(|mlp| &mlp.up),
            TargetWeight::Down => self.mlp.as_ref().map(|mlp| &mlp.down),
            _ => self.mixer.target_weight(weight),
        }
    }

    /// `partial` = feed-forward of `x`, this worker's part of the sum, without experts that have inputs of their own.
    /// `second` is needed if it has two parts.
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
            (Some(_), _) if self.expert_branch.is_some() => Ok(()),
            (Some(experts), Some(second)) if self.mlp.is_some() => {
                self.run_experts(device, second, x, experts, b)?;
                device.add(partial, second)
            }
            (Some(experts), _) => self.run_experts(device, partial, x, experts, b),
        }
    }

    /// `out` = experts of `x`, this worker's part of the sum.
    fn run_experts(
        &self,
        device: &mut D,
        out: &mut D::Tensor,
        x: &D::Tensor,
        experts: &D::Weight,
        b: &mut InnerBuffers<D>,
    ) -> Result<(), DeviceError> {
        match (&self.expert_latents, &mut b.expert_latents) {
            (Some([down, up]), Some([latents, outputs])) => {
                device.linear(latents, x, down)?;
                device.experts_of(outputs, latents, x, experts)?;
                device.linear(out, outputs, up)
            }
            _ => device.experts(out, x, experts),
        }
    }

    /// Adds `partial` of `b`, the output of attention, to the hidden state; `partial` = feed-forward of the sum.
    fn add_attention(&self, device: &mut D, b: &mut Buffers<D>, eps: f32) -> Result<(), DeviceError> {
        b.add_branch(device, self.attention_branch_norm.as_ref(), self.mlp_norm.as_ref(), eps)?;
        let x = if self.mlp_norm.is_some() { &b.normed } else { &b.residual };
        let second = b.second.as_mut().map(|second| &mut second.partial);
        self.feed_forward(device, x, &mut b.partial, second, &mut b.inner[self.widths])
    }

    /// Runs a layer of Llama's form whose attention has the input `x`, and adds its parts to the residual of `b`. `next` is the norm
    /// behind the layer.
    pub(crate) fn run_beside(
        &self,
        device: &mut D,
        x: &D::Tensor,
        b: &mut Buffers<D>,
        next: &D::Weight,
        eps: f32,
    ) -> Result<(), DeviceError> {
        self.mixer.run(device, x, &mut b.partial, &mut b.inner[self.widths])?;
        self.add_attention(device, b, eps)?;
        b.add_branch(device, self.mlp_branch_norm.as_ref(), Some(next), eps)
    }

    /// Runs the layer on the residual of `b`, and on its norm if the layer begins with one. `next` is the norm behind the layer:
    /// that of the next layer, or of the output. `per_layer` has the layer's number.
    pub(crate) fn run(
        &self,
        device: &mut D,
        b: &mut Buffers<D>,
        next: Option<&D::Weight>,
        per_layer: Option<(&mut PerLayerInputs<D>, usize)>,
        eps: f32,
    ) -> Result<(), DeviceError> {
        let Buffers { residual, normed, partial, inner, second } = b;
        let inner = &mut inner[self.widths];
        let x = if self.attention_norm.is_some() { &*normed } else { &*residual };
        self.mixer.run(device, x, partial, inner)?;
        if let Some(second) = second.as_mut().filter(|_| self.is_parallel) {
            let x = match &self.mlp_norm {
                Some(norm) => {
                    device.norm(&mut second.normed, residual, norm, eps)?;
                    &second.normed
                }
                None => normed,
            };
            if let Some(mlp) = &self.mlp {
                mlp.run(device, x, &mut second.partial, inner)?;
                device.add(partial, &second.partial)?;
            }
            if let Some(experts) = &self.experts {
                self.run_experts(device, &mut second.partial, x, experts, inner)?;
                device.add(partial, &second.partial)?;
            }
        } else if self.has_feed_forward() {
            self.add_attention(device, b, eps)?;
        }
        let branch_norm = self.mlp_branch_norm.as_ref();
        match (&self.expert_branch, &self.experts, branch_norm) {
            (Some(branch), Some(experts), Some(outer)) => branch.add(device, experts, outer, b, eps)?,
            _ if self.per_layer.is_none() && self.scalar.is_none() => {
                return b.add_branch(device, branch_norm, next, eps);
            }
            _ => b.add_branch(device, branch_norm, None, eps)?,
        }
        if let (Some(branch), Some((inputs, index))) = (&self.per_layer, per_layer) {
            inputs.add_branch(device, branch, index, b, eps)?;
        }
        if let Some(factor) = self.scalar {
            device.scale(&mut b.residual, factor)?;
        }
        match next {
            Some(norm) => device.norm(&mut b.normed, &b.residual, norm, eps),
            None => Ok(()),
        }
    }
}
