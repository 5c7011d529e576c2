//! Embeddings that layers have of their own ([`PerLayerInput`]). Every worker computes them whole: they are narrow, and
//! nothing has to be summed over the group.

use std::f32::consts::FRAC_1_SQRT_2;

use ops::{Activation, Device, DeviceError};

use crate::ModelError;
use crate::buffers::Buffers;
use crate::config::PerLayerInput;
use crate::layers::{LayerSource, Loader};

/// The inputs of all layers, `L` of width `P`.
pub(crate) struct PerLayerInputs<D: Device> {
    width: usize,
    scale: f32,
    context_eps: f32,
    table: D::Weight,        // [V, L P]
    context: D::Weight,      // [L P, E]
    context_norm: D::Weight, // [P]
    inputs: D::Tensor,       // [T, L P]
    scratch: D::Tensor,      // [T, L P]
    gated: D::Tensor,        // [T, P]
}

/// What a layer does with its input.
pub(crate) struct PerLayerBranch<D: Device> {
    activation: Activation,
    gate: D::Weight, // [P, E]
    out: D::Weight,  // [E, P]
    norm: D::Weight, // [E]
}

impl<D: Device> PerLayerInputs<D> {
    pub(crate) fn load(loader: &mut Loader<'_, D>, input: PerLayerInput) -> Result<Self, ModelError> {
        let names = loader.names.per_layer_input.expect("an architecture with these inputs names them");
        let (hidden, width) = (loader.config.hidden_size, input.width);
        let cols = loader.config.num_layers() * width;
        let (context, context_norm) = (loader.model_name(names.context), loader.model_name(names.context_norm));
        let tensors = [cols, cols, width].map(|cols| loader.device.tensor(cols));
        let [inputs, scratch, gated] = tensors.map(|tensor| loader.or_device_error(tensor));
        Ok(Self {
            width,
            scale: input.scale * FRAC_1_SQRT_2,
            // The projection is divided by the root of `E` before its norm, which is the same as this.
            context_eps: loader.config.norm.eps * hidden as f32,
            table: loader.per_layer_embedding(input, names.embedding)?,
            context: loader.whole(&context, [cols, hidden])?,
            context_norm: loader.norm_of_width(&format!("{context_norm}.weight"), width, FRAC_1_SQRT_2)?,
            inputs: inputs?,
            scratch: scratch?,
            gated: gated?,
        })
    }

    /// Computes the inputs of all layers for the tokens of a step, whose embeddings are `embedded`.
    pub(crate) fn begin(&mut self, device: &mut D, embedded: &D::Tensor) -> Result<(), DeviceError> {
        device.linear(&mut self.scratch, embedded, &self.context)?;
        device.norm(&mut self.inputs, &self.scratch, &self.context_norm, self.context_eps)?;
        device.embed(&mut self.scratch, &self.table, self.scale)?;
        device.add(&mut self.inputs, &self.scratch)
    }

    /// Adds the branch of layer `index` to the hidden state. It overwrites the other buffers.
    pub(crate) fn add_branch(
        &mut self,
        device: &mut D,
        branch: &PerLayerBranch<D>,
        index: usize,
        b: &mut Buffers<D>,
        eps: f32,
    ) -> Result<(), DeviceError> {
        device.activated_linear(&mut self.gated, &b.residual, &branch.gate, branch.activation)?;
        device.multiply_columns(&mut self.gated, &self.inputs, index * self.width)?;
        device.linear(&mut b.partial, &self.gated, &branch.out)?;
        device.norm(&mut b.normed, &b.partial, &branch.norm, eps)?;
        device.add(&mut b.residual, &b.normed)
    }
}

impl<D: Device> PerLayerBranch<D> {
    pub(crate) fn load(
        loader: &mut Loader<'_, D>,
        layer: LayerSource<'_>,
        input: PerLayerInput,
    ) -> Result<Self, ModelError> {
        let names = loader.names.per_layer_input.expect("an architecture with these inputs names them");
        let [gate, out, norm] =
            [names.gate, names.out, names.branch_norm].map(|name| loader.layer_name(layer.number, name));
        let hidden = loader.config.hidden_size;
        Ok(Self {
            activation: input.activation,
            gate: loader.whole(&gate, [input.width, hidden])?,
            out: loader.whole(&out, [hidden, input.width])?,
            norm: loader.norm_of_width(&format!("{norm}.weight"), hidden, 1.0)?,
        })
    }
}
