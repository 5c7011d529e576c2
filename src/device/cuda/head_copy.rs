//! Copies of output heads in e4m3, from which drafts are guessed.
//!
//! A guess of few rows reads the whole head, which takes most of its time: 2.5 GB in bf16 of Qwen3.6 27B. A copy with a scale for each row
//! has half of these bytes. Tokens are chosen from the head itself, so a copy changes which drafts are made, and no token.
//!
//! The copy belongs to the weights: it is loaded with them, each worker of a group has that of its rows, and a sleeping device keeps it on
//! the host. The head in bf16 stays, for tokens, for logits and for guesses of many rows, which the tensor cores limit.

use kernels::cuda::Span;
use kernels::cuda::quantized_gemm::PackedFormat;
use kernels::cuda::skinny_gemm;
use ops::{DeviceError, WeightSlice};

use super::load::{Form, RowOrder};
use super::packed::{Packed, packed_format};
use super::{CudaDevice, CudaWeight};

/// The copy of an output head.
#[derive(Debug, Clone, Copy)]
pub(crate) struct HeadCopy {
    codes: Span,
    packed: Packed,
}

/// The format of the copy of a head with these rows in e4m3; `None` if there is no copy. With
/// `batch_invariant` there is none, since many rows guess from the head itself.
pub(crate) fn copy_format(rounded: &WeightSlice<'_>, batch_invariant: bool) -> Option<PackedFormat> {
    let format = packed_format(std::slice::from_ref(rounded), RowOrder::Stacked);
    format.filter(|_| !batch_invariant)
}

impl CudaDevice {
    /// Queues the loading of a copy. Unlike other quantized weights it is never expanded, so it needs no scratch memory for that.
    pub(super) fn copy_of_head(&mut self, rounded: &WeightSlice<'_>) -> Result<Option<HeadCopy>, DeviceError> {
        let Some(format) = copy_format(rounded, self.config.batch_invariant) else { return Ok(None) };
        let (parts, rows, cols) = (std::slice::from_ref(rounded), rounded.rows.len(), rounded.cols.len());
        let bytes = [format.codes_bytes(rows, cols), format.scales_bytes(rows, cols)];
        let codes = self.load_form(parts, RowOrder::Stacked, Form::Codes(format), bytes[0])?;
        let scales = self.load_form(parts, RowOrder::Stacked, Form::Scales(format), bytes[1])?;
        Ok(Some(HeadCopy { codes, packed: Packed { scales, format, has_fp8_inputs: false, inputs: None } }))
    }

    /// The head from which `count` rows guess: its copy, if the kernels for few rows take it.
    pub(super) fn head_for_guesses(&self, head: &CudaWeight, count: usize) -> CudaWeight {
        // Logits of a share that is not whole have gaps between rows, which these kernels do not leave.
        let is_dense = head.token_columns.is_some() || self.layout_of(head).share == head.rows;
        let is_fast = self.config.use_fast_kernels && count <= skinny_gemm::MAX_ROWS;
        match head.copy {
            Some(HeadCopy { codes, packed }) if is_dense && is_fast => {
                CudaWeight { values: codes, packed: Some(packed), ..*head }
            }
            _ => *head,
        }
    }
}

#[cfg(test)]
mod tests {
    use ops::Quantization;

    use super::super::packed::tests::slice;
    use super::*;

    #[test]
    fn heads_that_the_kernels_take_have_a_copy_unless_rows_are_invariant() {
        let format = |rows, batch_invariant| {
            copy_format(&slice(Quantization::Fp8 { block: [1, 512] }, rows, 0..512), batch_invariant)
        };
        assert_eq!(format(16..48, false), Some(PackedFormat::Fp8Rows));
        assert_eq!((format(16..48, true), format(0..30, false)), (None, None));
    }
}
