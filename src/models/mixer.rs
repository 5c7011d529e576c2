//! The first part of a layer: attention, or a recurrent state in its place or beside it.

use ops::{Device, DeviceError, HeadNorms};

use crate::ModelError;
use crate::adapter::targets::TargetWeight;
use crate::buffers::InnerBuffers;
use crate::kimi_delta::KimiDelta;
use crate::layer_spec::{BesideLayer, RecurrentLayer};
use crate::layers::{HeadNormWeights, LATENT_EPS, LatentQuery, LayerSource, Loader};

/// Number of layers of each kind that a stage has so far.
#[derive(Debug, Default)]
pub(crate) struct Counts {
    attention: usize,
    recurrent: usize,
}

/// How a layer mixes the tokens of a sequence.
pub(crate) enum Mixer<D: Device> {
    Attention(Attention<D>),
    Recurrent(Recurrent<D>),
    KimiDelta(KimiDelta<D>),
    Latent(Latent<D>),
    Both(Attention<D>, Box<Beside<D>>),
}

pub(crate) struct Attention<D: Device> {
    /// Index in [`ops::AttentionSpec::layers`].
    index: usize,
    qkv: D::Weight,
    head_norms: Option<HeadNormWeights<D>>,
    /// Gates of the output.
    gates: Option<D::Weight>,
    out: D::Weight,
    out_scale: f32,
    sinks: Vec<f32>,       // of this worker's heads, or none
    query_gains: Vec<f32>, // of each head, or none
}

pub(crate) struct Recurrent<D: Device> {
    /// Index in [`ops::AttentionSpec::states`].
    index: usize,
    qkvz: D::Weight,
    ba: D::Weight,
    weights: D::Weight,
    out: D::Weight,
    eps: f32,
}

/// A state beside attention.
pub(crate) struct Beside<D: Device> {
    recurrent: Recurrent<D>,
    layer: BesideLayer,
}

pub(crate) struct Latent<D: Device> {
    /// Index in [`ops::AttentionSpec::layers`].
    index: usize,
    query: LatentQuery<D>,
    latents: D::Weight,
    weights: D::Weight,
    out: D::Weight,
}

impl<D: Device> Mixer<D> {
    pub(crate) fn load(
        loader: &mut Loader<'_, D>,
        source: LayerSource<'_>,
        counts: &mut Counts,
    ) -> Result<Self, ModelError> {
        if let Some(recurrent) = source.spec.recurrent.filter(|recurrent| recurrent.is_kimi_delta()) {
            counts.recurrent += 1;
            return Ok(Mixer::KimiDelta(KimiDelta::load(loader, source, recurrent, counts.recurrent - 1)?));
        }
        if let Some(recurrent) = source.spec.recurrent {
            return Ok(Mixer::Recurrent(Recurrent::load(loader, source, recurrent, [1.0; 3], counts)?));
        }
        counts.attention += 1;
        let attention = &source.spec.attention;
        if let Some(latent) = attention.latent {
            return Ok(Mixer::Latent(Latent {
                index: counts.attention - 1,
                query: loader.latent_query(source, latent)?,
                latents: loader.latents(source, latent)?,
                weights: loader.latent_weights(source, latent)?,
                out: loader.latent_out(source, latent)?,
            }));
        }
        let attention = Attention {
            index: counts.attention - 1,
            qkv: loader.qkv(source)?,
            head_norms: attention.head_norm.map(|norm| loader.head_norms(source, norm)).transpose()?,
            gates: loader.attention_gates(source)?,
            out: loader.out(source)?,
            out_scale: attention.out_scale,
            sinks: loader.sinks(source)?,
            query_gains: loader.query_gains(source)?,
        };
        let Some(layer) = source.spec.beside else { return Ok(Mixer::Attention(attention)) };
        let shard = source.shard.of_beside();
        let source = LayerSource { shard: &shard, ..source };
        let recurrent = Recurrent::load(loader, source, layer.recurrent, layer.conv_scales, counts)?;
        Ok(Mixer::Both(attention, Box::new(Beside { recurrent, layer })))
    }

    fn attention(&self) -> Option<&Attention<D>> {
        match self {
            Mixer::Attention(attention) | Mixer::Both(attention, ..) => Some(attention),
            Mixer::Recurrent(_) | Mixer::KimiDelta(_) | Mixer::Latent(_) => None,
        }
    }

    fn recurrent(&self) -> Option<&Recurrent<D>> {
        match self {
            Mixer::Recurrent(recurrent) => Some(recurrent),
            Mixer::Both(_, beside) => Some(&beside.recurrent),
            Mixer::Attention(_) | Mixer::KimiDelta(_) | Mixer::Latent(_) => None,
        }
    }

    /// The sinks of this worker's heads; none if the layer has none.
    pub(crate) fn sinks(&self) -> &[f32] {
        self.attention().map_or(&[], |attention| &attention.sinks)
    }

    /// Factors of the elements of each query head behind the rotation; none if there are none.
    pub(crate) fn query_gains(&self) -> &[f32] {
        self.attention().map_or(&[], |attention| &attention.query_gains)
    }

    /// A weight in which adapters may add products.
    pub(crate) fn target_weight(&self, weight: TargetWeight) -> Option<&D::Weight> {
        let (attention, recurrent) = (self.attention(), self.recurrent());
        match (self, weight) {
            (Mixer::Latent(latent), weight) => latent.target_weight(weight),
            (Mixer::Recurrent(recurrent), TargetWeight::Out) => Some(&recurrent.out),
            (Mixer::KimiDelta(own), TargetWeight::State) => Some(&own.qkvb),
            (Mixer::KimiDelta(own), TargetWeight::Out) => Some(&own.out),
            (_, TargetWeight::Qkv) => attention.map(|own| &own.qkv),
            (_, TargetWeight::Gates) => attention.and_then(|own| own.gates.as_ref()),
            (_, TargetWeight::Out) => attention.map(|own| &own.out),
            (_, TargetWeight::State) => recurrent.map(|own| &own.qkvz),
            (_, TargetWeight::Steps) => recurrent.map(|own| &own.ba),
            _ => None,
        }
    }

    /// `partial` = this worker's part of the sum, for the input `x`.
    pub(crate) fn run(
        &self,
        device: &mut D,
        x: &D::Tensor,
        partial: &mut D::Tensor,
        b: &mut InnerBuffers<D>,
    ) -> Result<(), DeviceError> {
        match self {
            Mixer::Attention(attention) => attention.run(device, x, partial, b),
            Mixer::Recurrent(recurrent) => {
                let steps = b.gates.as_mut().expect("the buffers are those of the layer's widths");
                recurrent.run(device, x, partial, [&mut b.qkv, steps, &mut b.attended], 1.0)
            }
            Mixer::KimiDelta(own) => own.run(device, x, partial, b),
            Mixer::Latent(latent) => latent.run(device, x, partial, b),
            Mixer::Both(attention, beside) => {
                attention.run(device, x, partial, b)?;
                let own = b.beside.as_mut().expect("the buffers are those of the layer's widths");
                let buffers = [&mut own.inputs, &mut own.steps, &mut own.mixed];
                let BesideLayer { step_scale, out_scales: [attention, state], .. } = beside.layer;
                beside.recurrent.run(device, x, &mut own.partial, buffers, step_scale)?;
                scale(device, partial, attention)?;
                scale(device, &mut own.partial, state)?;
                device.add(partial, &own.partial)
            }
        }
    }
}

impl<D: Device> Attention<D> {
    fn run(
        &self,
        device: &mut D,
        x: &D::Tensor,
        partial: &mut D::Tensor,
        b: &mut InnerBuffers<D>,
    ) -> Result<(), DeviceError> {
        device.linear(&mut b.qkv, x, &self.qkv)?;
        if let (Some(weight), Some(gates)) = (&self.gates, &mut b.gates) {
            device.linear(gates, x, weight)?;
        }
        if let Some(HeadNormWeights { spec, q, k, v }) = &self.head_norms {
            let norms = HeadNorms { span: spec.span, q, k: k.as_ref(), v: v.as_ref() };
            device.head_norm(&mut b.qkv, self.index, &norms, spec.eps)?;
        }
        device.rope_and_cache(&mut b.qkv, self.index)?;
        device.attention(&mut b.attended, &b.qkv, self.index)?;
        if let Some(gates) = &b.gates {
            device.gate(&mut b.attended, gates)?;
        }
        device.linear(partial, &b.attended, &self.out)?;
        scale(device, partial, self.out_scale)
    }
}

/// `x *= factor`.
fn scale<D: Device>(device: &mut D, x: &mut D::Tensor, factor: f32) -> Result<(), DeviceError> {
    if factor == 1.0 { Ok(()) } else { device.scale(x, factor) }
}

impl<D: Device> Recurrent<D> {
    fn load(
        loader: &mut Loader<'_, D>,
        source: LayerSource<'_>,
        recurrent: RecurrentLayer,
        conv_scales: [f32; 3],
        counts: &mut Counts,
    ) -> Result<Self, ModelError> {
        counts.recurrent += 1;
        let [qkvz, ba] = loader.recurrent_inputs(source, recurrent)?;
        let weights = loader.recurrent_weights(source, recurrent, conv_scales)?;
        let (index, out) = (counts.recurrent - 1, loader.recurrent_out(source, recurrent)?);
        Ok(Recurrent { index, qkvz, ba, weights, out, eps: recurrent.eps })
    }

    /// The buffers are those of the inputs, of the steps and of what the state gives. Steps are multiplied by `step_scale`.
    fn run(
        &self,
        device: &mut D,
        x: &D::Tensor,
        partial: &mut D::Tensor,
        [inputs, steps, mixed]: [&mut D::Tensor; 3],
        step_scale: f32,
    ) -> Result<(), DeviceError> {
        device.linear(inputs, x, &self.qkvz)?;
        device.linear(steps, x, &self.ba)?;
        scale(device, steps, step_scale)?;
        device.recurrent(mixed, [inputs, steps], self.index, &self.weights, self.eps)?;
        device.linear(partial, mixed, &self.out)
    }
}

impl<D: Device> Latent<D> {
    fn target_weight(&self, weight: TargetWeight) -> Option<&D::Weight> {
        match (weight, &self.query) {
            (TargetWeight::LatentQuery, LatentQuery::Direct(query)) => Some(query),
            (TargetWeight::LatentQuery, LatentQuery::Latent { up, .. }) => Some(up),
            (TargetWeight::QueryLatent, LatentQuery::Latent { down, .. }) => Some(down),
            (TargetWeight::Latent, _) => Some(&self.latents),
            (TargetWeight::Out, _) => Some(&self.out),
            _ => None,
        }
    }

    fn run(
        &self,
        device: &mut D,
        x: &D::Tensor,
        partial: &mut D::Tensor,
        b: &mut InnerBuffers<D>,
    ) -> Result<(), DeviceError> {
        let latents = b.gates.as_mut().expect("the buffers are those of the layer's widths");
        match (&self.query, &mut b.query_latents) {
            (LatentQuery::Direct(query), _) => device.linear(&mut b.qkv, x, query)?,
            (LatentQuery::Latent { down, norm, up }, Some([low, normed])) => {
                device.linear(low, x, down)?;
                device.norm(normed, low, norm, LATENT_EPS)?;
                device.linear(&mut b.qkv, normed, up)?;
            }
            (LatentQuery::Latent { .. }, None) => unreachable!("the buffers are those of the layer's widths"),
        }
        device.linear(latents, x, &self.latents)?;
        device.latent_attention(&mut b.attended, [&mut b.qkv, latents], self.index, &self.weights)?;
        device.linear(partial, &b.attended, &self.out)
    }
}
