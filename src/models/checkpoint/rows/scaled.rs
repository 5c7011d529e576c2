//! Matrices of bytes or halves of bytes, each times the scale of its block.

use std::ops::Range;

use ops::{Quantization, QuantizedRows, RowSource};

use super::StoredMatrix;
use crate::checkpoint::value::{e2m1, e4m3, e8m0, write_bf16};

/// Numbers of the scales of a matrix, row by row.
#[derive(Debug, Clone, Copy)]
pub(in crate::checkpoint) enum ScaleValues {
    /// Floats.
    Floats(StoredMatrix),
    /// Powers of two in e8m0, and how many a row has.
    E8m0(&'static [u8], usize),
}

/// Scales of the blocks of a matrix.
#[derive(Debug, Clone, Copy)]
pub(in crate::checkpoint) struct Scales {
    /// One for each block.
    pub(in crate::checkpoint) values: ScaleValues,
    /// Rows and columns of a block.
    pub(in crate::checkpoint) block: [usize; 2],
}

impl Scales {
    /// The scale of the element in this row and column.
    pub(in crate::checkpoint) fn get(&self, row: usize, col: usize) -> f64 {
        let (row, col) = (row / self.block[0], col / self.block[1]);
        match self.values {
            ScaleValues::Floats(values) => values.get(row, col),
            ScaleValues::E8m0(values, cols) => e8m0(values[row * cols + col]),
        }
    }

    /// The scales of a row.
    fn cols(&self) -> usize {
        match self.values {
            ScaleValues::Floats(values) => values.cols,
            ScaleValues::E8m0(_, cols) => cols,
        }
    }
}

/// A matrix of one byte an element: fp8 (e4m3), or 8-bit integers less their zero point. Each is multiplied by the scale of its
/// block, in bf16.
#[derive(Debug)]
pub(in crate::checkpoint) struct ScaledBytes {
    pub(in crate::checkpoint) data: &'static [u8],
    pub(in crate::checkpoint) cols: usize,
    pub(in crate::checkpoint) scales: Scales,
    /// Whether the bytes are integers, not fp8.
    pub(in crate::checkpoint) is_integer: bool,
    /// Zero points of integers, one for each scale.
    pub(in crate::checkpoint) zeros: Option<&'static [u8]>,
    /// Whether the checkpoint was made for inputs in fp8.
    pub(in crate::checkpoint) has_fp8_inputs: bool,
}

impl ScaledBytes {
    /// Columns of a block of MXFP8, whose scales are in e8m0.
    pub(in crate::checkpoint) const MXFP8_BLOCK: usize = 32;

    /// The zero point of the element in this row and column, in two's complement.
    fn zero(&self, row: usize, col: usize) -> u8 {
        let [height, width] = self.scales.block;
        self.zeros.map_or(0, |zeros| zeros[row / height * self.scales.cols() + col / width])
    }
}

impl RowSource for ScaledBytes {
    fn read_row(&self, row: usize, cols: Range<usize>, out: &mut [u8]) {
        let bytes = &self.data[row * self.cols..][..self.cols];
        let [_, width] = self.scales.block;
        let mut out = out;
        for (_, cols) in blocks(cols, width) {
            let (scale, zero) = self.scale(row, cols.start);
            let (part, rest) = out.split_at_mut(2 * cols.len());
            let value = |byte: &u8| match self.is_integer {
                true => f32::from(i16::from(byte.cast_signed()) - i16::from(zero.cast_signed())) * scale,
                false => e4m3(*byte) * scale,
            };
            write_bf16(bytes[cols].iter().map(value), part);
            out = rest;
        }
    }

    fn quantized(&self) -> Option<&dyn QuantizedRows> {
        Some(self)
    }
}

impl QuantizedRows for ScaledBytes {
    fn quantization(&self) -> Quantization {
        let block = self.scales.block;
        match (self.is_integer, self.scales.values) {
            (true, ScaleValues::Floats(StoredMatrix { dtype, .. })) => {
                Quantization::Int8 { group: block[1], has_zeros: self.zeros.is_some(), scale: dtype }
            }
            _ => Quantization::Fp8 { block },
        }
    }

    fn read_codes(&self, row: usize, cols: Range<usize>, out: &mut [u8]) {
        out.copy_from_slice(&self.data[row * self.cols..][cols]);
    }

    fn scale(&self, row: usize, col: usize) -> (f32, u8) {
        (self.scales.get(row, col) as f32, self.zero(row, col))
    }

    fn has_fp8_inputs(&self) -> bool {
        self.has_fp8_inputs
    }
}

/// The type of the scales of blocks of e2m1.
#[derive(Debug, Clone, Copy)]
pub(in crate::checkpoint) enum BlockScale {
    /// e8m0: a power of two, for 32 elements.
    E8m0,
    /// e4m3 times a factor of the matrix, for 16 elements.
    E4m3 {
        /// The factor.
        factor: f32,
    },
}

/// A matrix of e2m1, two elements a byte, the first in the low bits; each block of a row has a scale.
#[derive(Debug)]
pub(in crate::checkpoint) struct Microscaled {
    pub(in crate::checkpoint) nibbles: &'static [u8],
    pub(in crate::checkpoint) scales: &'static [u8],
    pub(in crate::checkpoint) cols: usize,
    pub(in crate::checkpoint) scale: BlockScale,
}

impl Microscaled {
    /// A matrix in MXFP4.
    pub(in crate::checkpoint) fn mxfp4(nibbles: &'static [u8], scales: &'static [u8], cols: usize) -> Self {
        Self { nibbles, scales, cols, scale: BlockScale::E8m0 }
    }

    /// A matrix in NVFP4; `factor` multiplies all of it.
    pub(in crate::checkpoint) fn nvfp4(
        nibbles: &'static [u8],
        scales: &'static [u8],
        cols: usize,
        factor: f32,
    ) -> Self {
        Self { nibbles, scales, cols, scale: BlockScale::E4m3 { factor } }
    }

    /// Elements of a block of MXFP4.
    pub(in crate::checkpoint) const MXFP4_BLOCK: usize = 32;
    /// Elements of a block of NVFP4.
    pub(in crate::checkpoint) const NVFP4_BLOCK: usize = 16;

    /// Elements of a block.
    fn width(&self) -> usize {
        match self.scale {
            BlockScale::E8m0 => Self::MXFP4_BLOCK,
            BlockScale::E4m3 { .. } => Self::NVFP4_BLOCK,
        }
    }
}

impl RowSource for Microscaled {
    fn read_row(&self, row: usize, cols: Range<usize>, out: &mut [u8]) {
        let width = self.width();
        let nibbles = &self.nibbles[row * self.cols / 2..];
        let scales = &self.scales[row * self.cols / width..];
        let mut out = out;
        for (block, cols) in blocks(cols, width) {
            // In f64, so that the smallest powers are exact before the product is rounded.
            let scale = match self.scale {
                BlockScale::E8m0 => e8m0(scales[block]),
                BlockScale::E4m3 { factor } => f64::from(e4m3(scales[block]) * factor),
            };
            let (part, rest) = out.split_at_mut(2 * cols.len());
            let value = |col: usize| (f64::from(e2m1(nibbles[col / 2] >> (col % 2 * 4))) * scale) as f32;
            write_bf16(cols.map(value), part);
            out = rest;
        }
    }

    fn quantized(&self) -> Option<&dyn QuantizedRows> {
        Some(self)
    }
}

impl QuantizedRows for Microscaled {
    fn quantization(&self) -> Quantization {
        match self.scale {
            BlockScale::E8m0 => Quantization::Mxfp4,
            BlockScale::E4m3 { .. } => Quantization::Nvfp4,
        }
    }

    fn read_codes(&self, row: usize, cols: Range<usize>, out: &mut [u8]) {
        let nibbles = &self.nibbles[row * self.cols / 2..][..self.cols / 2];
        out.iter_mut().zip(cols).for_each(|(out, col)| *out = nibbles[col / 2] >> (col % 2 * 4) & 15);
    }

    fn scale(&self, row: usize, col: usize) -> (f32, u8) {
        let scale = self.scales[(row * self.cols + col) / self.width()];
        match self.scale {
            BlockScale::E8m0 => (e8m0(scale) as f32, 0),
            BlockScale::E4m3 { factor } => (factor, scale),
        }
    }
}

/// The blocks of `width` columns that `cols` touches, with the part of `cols` in each.
pub(super) fn blocks(cols: Range<usize>, width: usize) -> impl Iterator<Item = (usize, Range<usize>)> {
    let numbers = cols.start / width..cols.end.div_ceil(width);
    numbers.map(move |block| (block, cols.start.max(block * width)..cols.end.min((block + 1) * width)))
}

#[cfg(test)]
mod tests {
    use half::bf16;
    use ops::DType;

    use super::*;

    fn row(source: &dyn RowSource, row: usize, cols: Range<usize>) -> Vec<f32> {
        let mut out = vec![0; cols.len() * 2];
        source.read_row(row, cols, &mut out);
        out.as_chunks::<2>().0.iter().map(|bytes| bf16::from_le_bytes(*bytes).to_f32()).collect()
    }

    fn scales(values: &[f32], cols: usize, block: [usize; 2]) -> Scales {
        let data: Vec<u8> = values.iter().flat_map(|value| value.to_le_bytes()).collect();
        Scales { values: ScaleValues::Floats(StoredMatrix { data: data.leak(), dtype: DType::F32, cols }), block }
    }

    #[test]
    fn bytes_have_the_scale_of_their_block() {
        let scales = scales(&[1.0, 2.0, 0.5, 4.0], 2, [1, 2]);
        let data: &[u8] = &[0x38, 0xb8, 0x7e, 0x01, 0x00, 0x40];
        let fp8 = ScaledBytes { data, cols: 3, scales, is_integer: false, zeros: None, has_fp8_inputs: false };
        assert_eq!(row(&fp8, 0, 0..3), [1.0, -1.0, 896.0]);
        assert_eq!(row(&fp8, 1, 1..3), [0.0, 8.0]);
        let powers = Scales { values: ScaleValues::E8m0(&[127, 129, 126, 0], 2), block: [1, 2] };
        let microscaled = ScaledBytes { scales: powers, ..fp8 };
        assert_eq!(row(&microscaled, 0, 0..3), [1.0, -1.0, 1792.0]);
        assert_eq!(row(&microscaled, 1, 2..3), [2.0 * 2f32.powi(-127)]);
        let integers = ScaledBytes { is_integer: true, zeros: Some(&[0, 0, 1, 0xff]), ..fp8 };
        assert_eq!(row(&integers, 0, 0..2), [56.0, -72.0]);
        assert_eq!(row(&integers, 1, 0..3), [0.0, -0.5, 260.0]);
        let form = Quantization::Int8 { group: 2, has_zeros: true, scale: DType::F32 };
        assert_eq!((integers.quantization(), integers.scale(1, 2)), (form, (4.0, 0xff)));
        let mut codes = [0; 2];
        integers.read_codes(0, 1..3, &mut codes);
        assert_eq!(codes, [0xb8, 0x7e]);
    }

    #[test]
    fn halves_of_bytes_have_the_low_half_first_and_a_scale_for_each_block() {
        let (nibbles, exponents): (&mut [u8], &[u8]) = (vec![0; 32].leak(), &[128, 124]);
        (nibbles[0], nibbles[16]) = (0xf1, 0x2b); // 0.5, -6 and -1.5, 1
        let nibbles = &*nibbles;
        let mx = Microscaled::mxfp4(nibbles, exponents, 64);
        let values = row(&mx, 0, 0..64);
        assert_eq!((&values[..3], &values[32..35]), (&[1.0, -12.0, 0.0][..], &[-0.1875, 0.125, 0.0][..]));
        assert_eq!(row(&mx, 0, 31..34), values[31..34]);
        let mut codes = [0; 3];
        mx.read_codes(0, 31..34, &mut codes);
        assert_eq!((codes, mx.scale(0, 31), mx.scale(0, 32)), ([0, 11, 2], (2.0, 0), (0.125, 0)));
        let nv = Microscaled::nvfp4(nibbles, &[0x38, 0, 0x40, 0], 64, 0.25);
        assert_eq!([row(&nv, 0, 0..2), row(&nv, 0, 32..34)].concat(), [0.125, -1.5, -0.75, 0.5]);
        assert_eq!((nv.scale(0, 15), nv.scale(0, 16), nv.scale(0, 32)), ((0.25, 0x38), (0.25, 0), (0.25, 0x40)));
    }
}
