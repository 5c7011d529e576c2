//! The feed-forward of a layer without experts.

use ops::{Activation, Device, DeviceError};

use crate::ModelError;
use crate::buffers::InnerBuffers;
use crate::layer_spec::MlpLayer;
use crate::layers::{LayerSource, Loader};

/// A feed-forward that every token passes.
pub(crate) struct Mlp<D: Device> {
    activation: Activation,
    pub(crate) up: D::Weight, // gate and up, or up alone
    pub(crate) down: D::Weight,
    output_gate: Option<D::Weight>,
    scale: f32,
}

impl<D: Device> Mlp<D> {
    pub(crate) fn load(loader: &mut Loader<'_, D>, source: LayerSource<'_>, mlp: MlpLayer) -> Result<Self, ModelError> {
        let names = loader.names;
        let shared = names.experts.and_then(|names| names.shared).filter(|_| source.spec.experts.is_some());
        let (up, down, gate) = shared.unwrap_or((names.up, names.down, ""));
        Ok(Self {
            activation: loader.activation(source, mlp.activation)?,
            up: loader.up(source, mlp, up)?,
            down: loader.down(source, mlp, down)?,
            output_gate: if mlp.has_output_gate { Some(loader.output_gate(source, gate)?) } else { None },
            scale: mlp.scale,
        })
    }

    /// `partial` = feed-forward of `x`, this worker's part of the sum.
    pub(crate) fn run(
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
        if self.scale != 1.0 {
            device.scale(partial, self.scale)?;
        }
        match &self.output_gate {
            Some(gate) => device.gate_rows(partial, x, gate),
            None => Ok(()),
        }
    }
}
