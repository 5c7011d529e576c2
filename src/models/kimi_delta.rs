//! Kimi Delta Attention in place of attention.

use ops::{Device, DeviceError};

use crate::ModelError;
use crate::buffers::InnerBuffers;
use crate::layer_spec::RecurrentLayer;
use crate::layers::{LayerSource, Loader};

pub(crate) struct KimiDelta<D: Device> {
    /// Index in [`ops::AttentionSpec::states`].
    index: usize,
    /// q, k, v and learning rates.
    pub(crate) qkvb: D::Weight,
    /// The two products that give steps, one behind the other, and those that give the gates of the output.
    steps: [D::Weight; 2],
    gates: [D::Weight; 2],
    weights: D::Weight,
    pub(crate) out: D::Weight,
    eps: f32,
}

impl<D: Device> KimiDelta<D> {
    pub(crate) fn load(
        loader: &mut Loader<'_, D>,
        source: LayerSource<'_>,
        layer: RecurrentLayer,
        index: usize,
    ) -> Result<Self, ModelError> {
        let [qkvb, steps_low, steps, gates_low, gates] = loader.kimi_delta_inputs(source, layer)?;
        let weights = loader.recurrent_weights(source, layer, [1.0; 3])?;
        let out = loader.recurrent_out(source, layer)?;
        let (steps, gates) = ([steps_low, steps], [gates_low, gates]);
        Ok(Self { index, qkvb, steps, gates, weights, out, eps: layer.eps })
    }

    /// `partial` = this worker's part of the sum, for the input `x`.
    pub(crate) fn run(
        &self,
        device: &mut D,
        x: &D::Tensor,
        partial: &mut D::Tensor,
        b: &mut InnerBuffers<D>,
    ) -> Result<(), DeviceError> {
        let (Some(gates), Some([low, steps])) = (&mut b.gates, &mut b.decays) else {
            unreachable!("the buffers are those of the layer's widths")
        };
        device.linear(&mut b.qkv, x, &self.qkvb)?;
        device.linear(low, x, &self.steps[0])?;
        device.linear(steps, low, &self.steps[1])?;
        device.linear(low, x, &self.gates[0])?;
        device.linear(gates, low, &self.gates[1])?;
        device.kimi_delta(&mut b.attended, [&b.qkv, steps, gates], self.index, &self.weights, self.eps)?;
        device.linear(partial, &b.attended, &self.out)
    }
}
