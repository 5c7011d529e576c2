//! Quantized matrices, which a device may keep as they are.

use std::fmt::Debug;
use std::ops::Range;

use crate::DType;

/// How the codes of a quantized matrix become values: `value = (code - zero point) * scale`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Quantization {
    /// e4m3 without zero points, with a scale in f32 for each block.
    Fp8 {
        /// Rows and columns of a block, from the first row and column of the matrix on. The last blocks may be smaller.
        block: [usize; 2],
    },
    /// Integers from 0 to 15. Each group of a row has a scale.
    Int4 {
        /// Columns of a group, from the first column of the matrix on. They divide the columns of the matrix.
        group: usize,
        /// Whether groups have zero points, from 0 to 16; otherwise they are 8.
        has_zeros: bool,
        /// Type of the scales: bf16 or f16.
        scale: DType,
    },
    /// Integers from -128 to 127, as codes in two's complement. Each group of a row has a scale.
    Int8 {
        /// Columns of a group, from the first column of the matrix on; at least those of the matrix if each row has one scale.
        group: usize,
        /// Whether groups have zero points, which are codes, too; otherwise they are 0.
        has_zeros: bool,
        /// Type of the scales.
        scale: DType,
    },
    /// e2m1, as codes from 0 to 15 with the sign in bit 3. Each 32 columns of a row have a scale that is a power of two
    /// (OCP Microscaling Formats 1.0).
    Mxfp4,
    /// The same codes. Each 16 columns of a row have a scale in e4m3, and the matrix has a factor in f32.
    Nvfp4,
}

/// The rows of a quantized matrix. Columns are counted in the order of [`QuantizedRows::col_order`].
pub trait QuantizedRows: Debug + Send + Sync {
    /// The form of the codes.
    fn quantization(&self) -> Quantization;

    /// The columns of the matrix in the order in which groups are contiguous, if that is not their own order.
    fn col_order(&self) -> Option<&[u32]> {
        None
    }

    /// Writes the codes of the columns `cols` of row `row` to `out`, one byte for each.
    ///
    /// # Panics
    /// Panics if there is no such row or column, or if `out` has another length.
    fn read_codes(&self, row: usize, cols: Range<usize>, out: &mut [u8]);

    /// Scale and zero point of the element in this row and column; the zero point of floats is 0. For [`Quantization::Nvfp4`] the factor of
    /// the matrix, and the code of the scale.
    ///
    /// # Panics
    /// Panics if there is no such element.
    fn scale(&self, row: usize, col: usize) -> (f32, u8);

    /// Whether the inputs of the layer may be rounded to e4m3, with a scale for each row and group of columns, as the
    /// checkpoint was made for. A device may keep them in more bits.
    fn has_fp8_inputs(&self) -> bool {
        false
    }
}
