//! Ops that only some decoders need: layer norms, learned positions, MLPs without a gate, head norms.

use kernels::cuda::activation::activate;
use kernels::cuda::add_positions::add_positions;
use kernels::cuda::gated_activation::GateActivation;
use kernels::cuda::head_norm::{HeadNormWeights, head_norm};
use kernels::cuda::layer_norm::{LayerNormWeight, layer_norm};
use ops::{Activation, DeviceError};

use super::{CudaDevice, CudaTensor, CudaWeight, device_error};

/// The activation as the kernels name it.
pub(super) fn gate_activation(activation: Activation) -> GateActivation {
    match activation {
        Activation::Silu => GateActivation::Silu,
        Activation::GeluTanh => GateActivation::GeluTanh,
    }
}

impl CudaWeight {
    /// Weight and bias, if this is the weight of a layer norm.
    pub(crate) fn layer_norm(&self) -> Option<LayerNormWeight> {
        (!self.bias.is_null()).then_some(LayerNormWeight { weight: self.values, bias: self.bias })
    }
}

impl CudaDevice {
    pub(crate) fn op_layer_norm(
        &mut self,
        out: CudaTensor,
        x: CudaTensor,
        weight: &CudaWeight,
        eps: f32,
    ) -> Result<(), DeviceError> {
        if self.current().only_products {
            return Ok(());
        }
        let (rows, norm) = (self.current().shape.tokens, weight.layer_norm().expect("a layer norm has a bias"));
        layer_norm(&self.queue, out.values, x.values, norm, rows, weight.cols, eps).map_err(device_error)
    }

    pub(crate) fn op_add_positions(&mut self, out: CudaTensor, table: &CudaWeight) -> Result<(), DeviceError> {
        if self.current().only_products {
            return Ok(());
        }
        let (positions, count) = (self.current().spans.positions, self.current().shape.tokens);
        add_positions(&self.queue, out.values, table.values, positions, count, table.cols).map_err(device_error)
    }

    pub(crate) fn op_activated_linear(
        &mut self,
        out: CudaTensor,
        x: CudaTensor,
        weight: &CudaWeight,
        activation: Activation,
    ) -> Result<(), DeviceError> {
        self.op_linear(out.values, x.values, weight)?;
        if self.current().only_products {
            return Ok(());
        }
        self.flush()?;
        let count = self.current().shape.tokens * weight.rows;
        activate(&self.queue, out.values, gate_activation(activation), count).map_err(device_error)
    }

    pub(crate) fn op_head_norm(
        &mut self,
        qkv: CudaTensor,
        q_norm: &CudaWeight,
        k_norm: &CudaWeight,
        eps: f32,
    ) -> Result<(), DeviceError> {
        if self.current().only_products {
            return Ok(());
        }
        self.flush()?;
        let weights = HeadNormWeights { q: q_norm.values, k: k_norm.values };
        let (shape, count) = (self.cache().shape, self.current().shape.tokens);
        head_norm(&self.queue, qkv.values, weights, shape, count, eps).map_err(device_error)
    }
}
