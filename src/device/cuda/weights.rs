//! Converts slices of the checkpoint to matrices and vectors on the GPU.

use kernels::cuda::skinny_gemm::GATE_GROUP;
use kernels::cuda::{DeviceBuffer, Span};
use ops::{DeviceError, LinearRole, WeightSlice};

use super::load::{Part, RowOrder};
use super::{CudaDevice, device_error};

impl CudaDevice {
    /// Allocates a matrix and queues its loading.
    pub(super) fn load_matrix(
        &mut self,
        parts: &[WeightSlice<'_>],
        order: RowOrder,
    ) -> Result<(Span, usize, usize), DeviceError> {
        let cols = parts.first().map_or(0, |part| part.cols.len());
        let rows: usize = parts.iter().map(|part| part.rows.len()).sum();
        if let Some(part) = parts.iter().find(|part| part.cols.len() != cols || cols == 0 || !cols.is_multiple_of(8)) {
            return Err(DeviceError::Unsupported {
                what: format!("weight `{}`", part.name),
                found: format!("{} columns beside {cols}", part.cols.len()),
                expected: "equal columns in all parts, a multiple of 8".into(),
            });
        }
        let buffer = DeviceBuffer::new(&self.gpu, rows * cols * 2).map_err(device_error)?;
        let span = buffer.span();
        self.weights.push(buffer);
        let parts = parts.iter().map(Part::new).collect::<Result<Vec<_>, _>>()?;
        self.loader.get_mut().load(parts, order, span)?;
        Ok((span, rows, cols))
    }

    /// Allocates a bias or norm weight and queues its loading.
    pub(super) fn load_row(&mut self, parts: &[WeightSlice<'_>], order: RowOrder) -> Result<Span, DeviceError> {
        if parts.is_empty() {
            return Ok(Span::NULL);
        }
        // As a column, so that parts can be stacked.
        let columns = parts.iter().map(Part::column).collect::<Result<Vec<_>, _>>()?;
        let length: usize = columns.iter().map(Part::rows).sum();
        let buffer = DeviceBuffer::new(&self.gpu, length * 2).map_err(device_error)?;
        let span = buffer.span();
        self.weights.push(buffer);
        self.loader.get_mut().load(columns, order, span)?;
        Ok(span)
    }
}

/// The row order of gate and up in one matrix, and the number of alternating columns of each: the groups of the fused
/// kernel if the sizes allow it. Other matrices are stacked.
pub(super) fn gate_order(role: LinearRole, parts: &[WeightSlice<'_>]) -> (RowOrder, usize) {
    match (role, parts) {
        (LinearRole::GateUp, [gate, up]) if gate.rows.len() == up.rows.len() => match gate.rows.len() {
            rows if rows.is_multiple_of(GATE_GROUP) => (RowOrder::Interleaved(GATE_GROUP), GATE_GROUP),
            rows => (RowOrder::Stacked, rows),
        },
        _ => (RowOrder::Stacked, 0),
    }
}
