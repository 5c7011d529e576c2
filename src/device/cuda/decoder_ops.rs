//! Ops that only some decoders need: learned positions, MLPs without a gate, norms of heads and behind branches.

use kernels::cuda::Span;
use kernels::cuda::activation::{Xielu, activate, activate_xielu};
use kernels::cuda::add_positions::add_positions;
use kernels::cuda::branch_norm::{BranchNorm, add, branch_norm};
use kernels::cuda::decode_attention::RotatedNorms;
use kernels::cuda::gated_activation::GateActivation;
use kernels::cuda::head_norm::{HeadNorm, HeadNormWeights, head_norm};
use kernels::cuda::layer_norm::LayerNormWeight;
use kernels::cuda::scale::{Columns, multiply_columns, scale};
use kernels::cuda::wide_head_norm::{Squares, head_squares, scale_heads};
use ops::{Activation, DeviceError, HeadNormSpan, HeadNorms};

use super::{CudaDevice, CudaTensor, CudaWeight, device_error};

/// The activation as the kernels name it.
pub(super) fn gate_activation(activation: Activation) -> GateActivation {
    match activation {
        Activation::Silu => GateActivation::Silu,
        Activation::GeluTanh => GateActivation::GeluTanh,
        Activation::Gelu => GateActivation::Gelu,
        Activation::Relu => GateActivation::Relu,
        Activation::ReluSquared => GateActivation::ReluSquared,
        Activation::Xielu { .. } => unreachable!("only feed-forwards without a gate have it"),
        Activation::ClampedSwiglu { .. } => unreachable!("only experts have it"),
    }
}

impl CudaWeight {
    /// Weight and bias, if this is the weight of a layer norm.
    pub(crate) fn layer_norm(&self) -> Option<LayerNormWeight> {
        (!self.bias.is_null()).then_some(LayerNormWeight { weight: self.values, bias: self.bias })
    }
}

impl CudaDevice {
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
        let done = match activation {
            Activation::Xielu { positive, negative, slope, edge } => {
                activate_xielu(&self.queue, out.values, Xielu { positive, negative, slope, edge }, count)
            }
            activation => activate(&self.queue, out.values, gate_activation(activation), count),
        };
        done.map_err(device_error)
    }

    pub(crate) fn op_head_norm(
        &mut self,
        qkv: CudaTensor,
        layer: usize,
        norms: &HeadNorms<'_, CudaWeight>,
        eps: f32,
    ) -> Result<(), DeviceError> {
        if self.current().only_products {
            return Ok(());
        }
        self.flush()?;
        let values = |weight: Option<&CudaWeight>| weight.map_or(Span::NULL, |weight| weight.values);
        let weights = HeadNormWeights { q: norms.q.values, k: values(norms.k) };
        let (shape, count) = (self.cache().layer(layer).shape, self.current().shape.tokens);
        if norms.span != HeadNormSpan::AllHeads {
            let has_each = norms.span == HeadNormSpan::EachHead;
            let (v, is_layer) = (values(norms.v), norms.q.layer_norm().is_some());
            let is_plain = v.is_null() && !has_each && !is_layer && norms.k.is_some();
            if is_plain && self.attention_norms(layer) {
                self.rotated_norms = Some(RotatedNorms { weights, eps });
                return Ok(());
            }
            let norm = HeadNorm { weights, v, has_each, is_layer, eps };
            return head_norm(&self.queue, qkv.values, &norm, shape, count).map_err(device_error);
        }
        let workers = self.group.size();
        let all = self.workspace().squares.span().elements::<f32>(0, workers * count * 2);
        let own = all.elements::<f32>(self.group.rank() * count * 2, count * 2);
        head_squares(&self.queue, own, qkv.values, shape, count).map_err(device_error)?;
        self.group.all_gather(&self.queue, all)?;
        let squares = Squares { sums: all, workers };
        scale_heads(&self.queue, qkv.values, squares, weights, shape, count, eps).map_err(device_error)
    }

    pub(crate) fn op_reduce_norm_add_norm(
        &mut self,
        residual: CudaTensor,
        partial: CudaTensor,
        branch: &CudaWeight,
        next: Option<(CudaTensor, &CudaWeight)>,
        eps: f32,
    ) -> Result<(), DeviceError> {
        if self.current().only_products {
            return Ok(());
        }
        if let Some((out, weight)) = next
            && self.finish_deferred_branch(residual.values, branch, [out.values, weight.values], eps)?
        {
            return Ok(());
        }
        self.run_deferred()?;
        self.flush()?;
        self.sum_experts()?;
        let (rows, cols) = (self.current().shape.tokens, branch.cols);
        self.group.all_reduce(&self.queue, partial.values, rows, cols)?;
        let norm = BranchNorm {
            residual: residual.values,
            branch: partial.values,
            branch_weight: branch.values,
            next: next.map(|(out, weight)| [out.values, weight.values]),
            eps,
        };
        branch_norm(&self.queue, norm, rows, cols).map_err(device_error)
    }

    pub(crate) fn op_add(&mut self, x: CudaTensor, y: CudaTensor) -> Result<(), DeviceError> {
        if self.current().only_products {
            return Ok(());
        }
        self.run_deferred()?;
        self.flush()?;
        if self.add_to_experts(x, y) {
            return Ok(());
        }
        self.sum_experts()?;
        add(&self.queue, x.values, y.values, self.current().shape.tokens * x.cols).map_err(device_error)
    }

    pub(crate) fn op_reduce_norm(
        &mut self,
        out: CudaTensor,
        partial: CudaTensor,
        weight: &CudaWeight,
        eps: f32,
    ) -> Result<(), DeviceError> {
        if self.current().only_products {
            return Ok(());
        }
        self.run_deferred()?;
        self.flush()?;
        self.sum_experts()?;
        self.group.all_reduce(&self.queue, partial.values, self.num_tokens(), partial.cols)?;
        self.op_norm(out, partial, weight, eps)
    }

    pub(crate) fn op_scale(&mut self, x: CudaTensor, factor: f32) -> Result<(), DeviceError> {
        if self.current().only_products {
            return Ok(());
        }
        self.run_deferred()?;
        self.flush()?;
        self.sum_experts()?;
        scale(&self.queue, x.values, factor, self.num_tokens() * x.cols).map_err(device_error)
    }

    pub(crate) fn op_multiply_columns(
        &mut self,
        x: CudaTensor,
        y: CudaTensor,
        first: usize,
    ) -> Result<(), DeviceError> {
        if self.current().only_products {
            return Ok(());
        }
        self.run_deferred()?;
        self.flush()?;
        let columns = Columns { matrix: y.values, width: y.cols, first };
        multiply_columns(&self.queue, x.values, columns, self.num_tokens(), x.cols).map_err(device_error)
    }
}
