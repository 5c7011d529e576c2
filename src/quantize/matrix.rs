//! The values of a matrix, with the factors that move between a layer and what makes its input.

use half::{bf16, f16};
use models::StoredTensor;

use crate::QuantizeError;

/// Type of the values of a tensor.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Dtype {
    Bf16,
    F16,
    F32,
}

impl Dtype {
    pub(crate) fn of(name: &str) -> Option<Self> {
        match name {
            "BF16" => Some(Self::Bf16),
            "F16" => Some(Self::F16),
            "F32" => Some(Self::F32),
            _ => None,
        }
    }

    pub(crate) fn size(self) -> usize {
        if self == Self::F32 { 4 } else { 2 }
    }

    /// Converts stored values.
    pub(crate) fn read(self, bytes: &[u8], out: &mut [f32]) {
        match self {
            Self::Bf16 => {
                let values = bytes.as_chunks::<2>().0.iter();
                // The upper half of an f32.
                let value = |bits: &[u8; 2]| f32::from_bits(u32::from(u16::from_le_bytes(*bits)) << 16);
                out.iter_mut().zip(values).for_each(|(out, bits)| *out = value(bits));
            }
            Self::F16 => {
                let values = bytes.as_chunks::<2>().0.iter();
                out.iter_mut().zip(values).for_each(|(out, bits)| *out = f16::from_le_bytes(*bits).to_f32());
            }
            Self::F32 => {
                let values = bytes.as_chunks::<4>().0.iter();
                out.iter_mut().zip(values).for_each(|(out, bits)| *out = f32::from_le_bytes(*bits));
            }
        }
    }

    /// Stores values.
    pub(crate) fn write(self, values: impl Iterator<Item = f32>, out: &mut Vec<u8>) {
        match self {
            Self::Bf16 => values.for_each(|value| out.extend(bf16::from_f32(value).to_le_bytes())),
            Self::F16 => values.for_each(|value| out.extend(f16::from_f32(value).to_le_bytes())),
            Self::F32 => values.for_each(|value| out.extend(value.to_le_bytes())),
        }
    }
}

/// A matrix to quantize.
#[derive(Debug, Clone)]
pub(crate) struct Matrix<'a> {
    pub(crate) tensor: StoredTensor<'a>,
    pub(crate) dtype: Dtype,
    pub(crate) rows: usize,
    pub(crate) cols: usize,
    /// Multiplies each column; none: 1.
    pub(crate) column_factors: Vec<f32>,
    /// Divides each row; none: 1.
    pub(crate) row_divisors: Vec<f32>,
    /// How much the square of an error in each column weighs, after the factors; none: all the same.
    pub(crate) importance: Vec<f32>,
}

impl<'a> Matrix<'a> {
    /// The matrix that is stored in a tensor.
    ///
    /// # Errors
    /// When the tensor is no matrix of floats.
    pub(crate) fn new(tensor: StoredTensor<'a>) -> Result<Self, QuantizeError> {
        let (StoredTensor { name, dtype, shape, data }, read) = (tensor, Dtype::of(tensor.dtype));
        match (shape, read) {
            (&[rows, cols], Some(dtype)) if data.len() == rows * cols * dtype.size() => {
                let [column_factors, row_divisors, importance] = [const { Vec::new() }; 3];
                Ok(Self { tensor, dtype, rows, cols, column_factors, row_divisors, importance })
            }
            _ => Err(QuantizeError::NotLinear { tensor: name.into(), dtype: dtype.into(), shape: shape.into() }),
        }
    }

    /// The values of a row, with all factors.
    pub(crate) fn read_row(&self, row: usize, out: &mut [f32]) {
        let bytes = self.cols * self.dtype.size();
        self.dtype.read(&self.tensor.data[row * bytes..][..bytes], out);
        out.iter_mut().zip(&self.column_factors).for_each(|(value, factor)| *value *= factor);
        if let Some(divisor) = self.row_divisors.get(row) {
            out.iter_mut().for_each(|value| *value /= divisor);
        }
    }
}
