//! What follows the products of experts: their sum, beside other rows and their gate, and the norm of it.

use kernels::cuda::Span;
use kernels::cuda::gate_rows::gate_rows;
use kernels::cuda::sum_experts::{ExpertOutputs, MAX_NORM_COLS, sum_experts, sum_experts_add_norm};
use ops::DeviceError;

use super::group::ReduceAddNorm;
use super::{CudaDevice, CudaTensor, CudaWeight, device_error};

/// Outputs of experts whose sum is not computed yet.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Unsummed {
    pub(super) out: Span,
    pub(super) experts: ExpertOutputs,
    /// The rows to which the experts will be added, if the factors of their gate were computed with the router.
    pub(super) gated: Option<Span>,
}

/// A gate that multiplies rows to which experts are added next. The router's kernel may compute its factors.
#[derive(Debug, Clone, Copy)]
pub(crate) struct RowGate {
    pub(super) out: CudaTensor,
    pub(super) x: CudaTensor,
    pub(super) gate: CudaWeight,
}

impl CudaDevice {
    /// `x += y`, if `y` are outputs of experts that wait for their sum: then they wait for the sum with `x`. Returns false otherwise.
    pub(super) fn add_to_experts(&mut self, x: CudaTensor, y: CudaTensor) -> bool {
        let waiting = self.unsummed.as_mut().filter(|waiting| waiting.out.address() == y.values.address());
        let Some(waiting) = waiting.filter(|waiting| waiting.experts.also.is_null()) else { return false };
        waiting.out = x.values;
        waiting.experts.also = x.values;
        if let Some(gated) = waiting.gated.take() {
            assert_eq!(gated.address(), x.values.address(), "experts are added to the rows of the gate");
        }
        true
    }

    /// Sums the outputs of experts, if they still wait for it: what follows is not the norm that would include the sum.
    pub(super) fn sum_experts(&mut self) -> Result<(), DeviceError> {
        match self.unsummed.take() {
            Some(Unsummed { out, experts, gated }) => {
                assert!(gated.is_none(), "experts are added to the rows of a gate before another operation");
                sum_experts(&self.queue, out, &experts, self.num_tokens()).map_err(device_error)
            }
            None => Ok(()),
        }
    }

    /// Sums the outputs of experts, adds the residual and applies the norm; returns false if none wait for their sum.
    pub(super) fn sum_experts_add_norm(&mut self, norm: &ReduceAddNorm) -> Result<bool, DeviceError> {
        if self.group.size() > 1 || norm.layer_norm.is_some() || norm.cols > MAX_NORM_COLS {
            self.sum_experts()?;
            return Ok(false);
        }
        let Some(Unsummed { out, experts, gated }) = self.unsummed.take() else { return Ok(false) };
        assert!(gated.is_none(), "experts are added to the rows of a gate before another operation");
        assert_eq!(out.address(), norm.partial.address(), "the norm that follows experts takes their sum");
        sum_experts_add_norm(&self.queue, norm.out, norm.residual, &experts, norm.weight, norm.rows, norm.eps)
            .map_err(device_error)?;
        Ok(true)
    }

    /// `out[t, :] *= sigmoid(x[t, :] · gate)`, at once or with the experts that are added to it next.
    pub(super) fn op_gate_rows(
        &mut self,
        out: CudaTensor,
        x: CudaTensor,
        gate: &CudaWeight,
    ) -> Result<(), DeviceError> {
        if self.current().only_products {
            return Ok(());
        }
        self.run_deferred()?;
        self.flush()?;
        self.row_gate = Some(RowGate { out, x, gate: *gate });
        Ok(())
    }

    /// Applies the gate that waits for experts, if there is one.
    pub(super) fn run_row_gate(&mut self) -> Result<(), DeviceError> {
        let Some(RowGate { out, x, gate }) = self.row_gate.take() else { return Ok(()) };
        gate_rows(&self.queue, out.values, x.values, gate.values, self.num_tokens(), out.cols, gate.cols)
            .map_err(device_error)
    }
}
