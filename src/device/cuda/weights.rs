//! Converts slices of the checkpoint to matrices and vectors on the GPU.

use half::bf16;
use kernels::cuda::gated_activation::GATE_GROUP;
use kernels::cuda::{DeviceBuffer, Span};
use ops::{DeviceError, LinearRole, NormKind, NormSlices, WeightSlice};

use super::load::{Form, Part, RowOrder};
use super::packed::{Packed, has_fp8_inputs, input_order, packed_format};
use super::{CudaDevice, CudaWeight, device_error};

impl CudaDevice {
    /// Allocates a matrix in bf16 and queues its loading.
    pub(super) fn load_matrix(
        &mut self,
        parts: &[WeightSlice<'_>],
        order: RowOrder,
    ) -> Result<CudaWeight, DeviceError> {
        let (rows, cols) = matrix_shape(parts)?;
        let values = self.load_form(parts, order, Form::Values, rows * cols * 2)?;
        Ok(CudaWeight::matrix(values, rows, cols))
    }

    /// The same for a matrix of products, which stays quantized if it can.
    pub(super) fn load_product(
        &mut self,
        parts: &[WeightSlice<'_>],
        order: RowOrder,
    ) -> Result<CudaWeight, DeviceError> {
        let (rows, cols) = matrix_shape(parts)?;
        self.check_invariant_weight(rows, cols)?;
        let format = packed_format(parts, order);
        let Some(format) = format else { return self.load_matrix(parts, order) };
        let codes = self.load_form(parts, order, Form::Codes(format), format.codes_bytes(rows, cols))?;
        let scales = self.load_form(parts, order, Form::Scales(format), format.scales_bytes(rows, cols))?;
        let has_fp8_inputs = has_fp8_inputs(parts);
        self.product_scratch.count(rows, cols, has_fp8_inputs);
        let inputs = input_order(parts).map(|order| self.load_input_order(order)).transpose()?;
        let packed = Packed { scales, format, has_fp8_inputs, inputs };
        Ok(CudaWeight { packed: Some(packed), ..CudaWeight::matrix(codes, rows, cols) })
    }

    /// Copies the inputs of a weight's columns to the GPU.
    fn load_input_order(&mut self, order: &[u32]) -> Result<Span, DeviceError> {
        self.product_scratch.count_gathered(order.len());
        let buffer = DeviceBuffer::from_slice(&self.gpu, order).map_err(device_error)?;
        let span = buffer.span();
        self.weights.push(buffer);
        Ok(span)
    }

    /// Allocates a buffer and queues the loading of one form of a matrix.
    pub(super) fn load_form(
        &mut self,
        parts: &[WeightSlice<'_>],
        order: RowOrder,
        form: Form,
        bytes: usize,
    ) -> Result<Span, DeviceError> {
        let buffer = DeviceBuffer::with_residence(&self.gpu, bytes, self.config.residence()).map_err(device_error)?;
        let span = buffer.span();
        self.weights.push(buffer);
        let parts = parts.iter().map(Part::new).collect::<Result<Vec<_>, _>>()?;
        self.loader.get_mut().load(parts, order, form, span)?;
        Ok(span)
    }

    /// Allocates a bias or norm weight and queues its loading.
    pub(super) fn load_row(&mut self, parts: &[WeightSlice<'_>], order: RowOrder) -> Result<Span, DeviceError> {
        if parts.is_empty() {
            return Ok(Span::NULL);
        }
        // As a column, so that parts can be stacked.
        let columns = parts.iter().map(Part::column).collect::<Result<Vec<_>, _>>()?;
        self.load_columns(columns, order)
    }

    /// Allocates a norm's gain and bias and queues their loading. An RMS norm has no bias.
    pub(super) fn load_gain_and_bias(&mut self, norm: &NormSlices<'_>) -> Result<(Span, Span), DeviceError> {
        let gain = match &norm.weight {
            Some(weight) => {
                let column = Part::column(weight)?.changed(norm.offset, norm.factor);
                self.load_columns(vec![column], RowOrder::Stacked)?
            }
            None => self.filled((1.0 + norm.offset) * norm.factor, norm.width)?,
        };
        let bias = match (&norm.bias, norm.kind) {
            (Some(bias), _) => {
                self.load_columns(vec![Part::column(bias)?.changed(0.0, norm.factor)], RowOrder::Stacked)?
            }
            (None, NormKind::Layer) => self.filled(0.0, norm.width)?,
            (None, NormKind::Rms) => Span::NULL,
        };
        Ok((gain, bias))
    }

    fn filled(&mut self, value: f32, len: usize) -> Result<Span, DeviceError> {
        let buffer = DeviceBuffer::from_slice(&self.gpu, &vec![bf16::from_f32(value).to_bits(); len]);
        let buffer = buffer.map_err(device_error)?;
        let span = buffer.span();
        self.weights.push(buffer);
        Ok(span)
    }

    fn load_columns(&mut self, columns: Vec<Part>, order: RowOrder) -> Result<Span, DeviceError> {
        let length: usize = columns.iter().map(Part::rows).sum();
        let buffer = DeviceBuffer::new(&self.gpu, length * 2).map_err(device_error)?;
        let span = buffer.span();
        self.weights.push(buffer);
        self.loader.get_mut().load(columns, order, Form::Values, span)?;
        Ok(span)
    }
}

/// Rows and columns of the matrix of `parts`.
fn matrix_shape(parts: &[WeightSlice<'_>]) -> Result<(usize, usize), DeviceError> {
    let cols = parts.first().map_or(0, |part| part.cols.len());
    if let Some(part) = parts.iter().find(|part| part.cols.len() != cols || cols == 0 || !cols.is_multiple_of(8)) {
        return Err(DeviceError::Unsupported {
            what: format!("weight `{}`", part.name),
            found: format!("{} columns beside {cols}", part.cols.len()),
            expected: "equal columns in all parts, a multiple of 8".into(),
        });
    }
    Ok((parts.iter().map(|part| part.rows.len()).sum(), cols))
}

/// The row order of gate and up in one matrix, and the number of alternating columns of each: the groups of the fused
/// kernel if the sizes allow it. Other matrices are stacked.
pub(crate) fn gate_order(role: LinearRole, parts: &[WeightSlice<'_>]) -> (RowOrder, usize) {
    match (role, parts) {
        (LinearRole::GateUp, [gate, up]) if gate.rows.len() == up.rows.len() => match gate.rows.len() {
            rows if rows.is_multiple_of(GATE_GROUP) => (RowOrder::Interleaved(GATE_GROUP), GATE_GROUP),
            rows => (RowOrder::Stacked, rows),
        },
        _ => (RowOrder::Stacked, 0),
    }
}
