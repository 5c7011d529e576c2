//! Matrices that are quantized while they are read.

use std::ops::Range;
use std::sync::Arc;

use half::f16;
use ops::{DType, Quantization, QuantizedRows, RowSource, WeightData, WeightSlice};

use super::scaled::blocks;
use crate::checkpoint::value::{e4m3, write_bf16};
use crate::config::Rounding;
use crate::rounding::{Affine, fp8_codes, fp8_scale, int4_group, int8_codes, int8_scale};

/// Values that are read at once; a multiple of every group.
const CHUNK: usize = 512;

/// The same slice in another form, in bf16. Scales are those of the whole matrix's rows and groups, so they do not depend on the slice. A
/// matrix that cannot be divided into groups stays as it is.
pub fn rounded(slice: WeightSlice<'_>, rounding: Rounding) -> WeightSlice<'_> {
    let cols = slice.matrix_cols;
    let form = match rounding {
        Rounding::Fp8Rows => Form::Fp8Rows,
        Rounding::Int8Rows => Form::Int8Rows,
        Rounding::Int4 => match int4_group(cols) {
            Some(group) => Form::Int4 { group },
            None => return slice,
        },
    };
    let rows = RoundedRows { data: slice.data, dtype: slice.dtype, cols, form };
    WeightSlice { data: WeightData::Computed(Arc::new(rows)), dtype: DType::Bf16, ..slice }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Form {
    /// e4m3, with a scale for each row.
    Fp8Rows,
    /// Integers of 8 bits, with a scale for each row.
    Int8Rows,
    /// 4 bits, with scale and zero point for each group.
    Int4 { group: usize },
}

/// A matrix of which rows become codes when they are read.
#[derive(Debug)]
struct RoundedRows {
    data: WeightData,
    dtype: DType,
    cols: usize,
    form: Form,
}

impl RoundedRows {
    /// Passes the values of these columns to `take`, up to [`CHUNK`] at once, with the place of the first among them.
    fn values(&self, row: usize, cols: Range<usize>, mut take: impl FnMut(usize, &[f32])) {
        let (mut bytes, mut values) = ([0; CHUNK * size_of::<f32>()], [0.0; CHUNK]);
        let first = cols.start;
        for (_, part) in blocks(cols, CHUNK) {
            let (values, at) = (&mut values[..part.len()], part.start - first);
            let size = self.dtype.size();
            let stored = match &self.data {
                WeightData::Stored(stored) => &stored[(row * self.cols + part.start) * size..][..part.len() * size],
                WeightData::Computed(source) => {
                    let bytes = &mut bytes[..part.len() * size];
                    source.read_row(row, part, bytes);
                    &*bytes
                }
            };
            widen(self.dtype, stored, values);
            take(at, values);
        }
    }

    /// The size of the largest value of a row.
    fn largest(&self, row: usize) -> f32 {
        let mut largest = 0u32;
        // The bits of floats of one sign are in the order of their sizes.
        self.values(row, 0..self.cols, |_, values| {
            largest = values.iter().fold(largest, |largest, value| largest.max(value.to_bits() & 0x7fff_ffff));
        });
        f32::from_bits(largest)
    }

    /// Scale and zero point of the group of `group` columns to which this one belongs.
    fn affine(&self, row: usize, col: usize, group: usize) -> Affine {
        let (first, mut affine) = (col / group * group, None);
        self.values(row, first..first + group, |_, values| affine = Some(Affine::of(values)));
        affine.expect("a group is not empty, and is read at once")
    }
}

/// Converts values to f32.
fn widen(dtype: DType, bytes: &[u8], out: &mut [f32]) {
    match dtype {
        DType::Bf16 => {
            let bits = bytes.as_chunks::<2>().0.iter();
            // The upper half of an f32. Without a test for NaN, unlike `half`'s function, this loop is vectorized.
            let value = |bits: &[u8; 2]| f32::from_bits(u32::from(u16::from_le_bytes(*bits)) << 16);
            out.iter_mut().zip(bits).for_each(|(out, bits)| *out = value(bits));
        }
        DType::F16 => {
            let bits = bytes.as_chunks::<2>().0.iter();
            out.iter_mut().zip(bits).for_each(|(out, bits)| *out = f16::from_le_bytes(*bits).to_f32());
        }
        DType::F32 => {
            let bits = bytes.as_chunks::<4>().0.iter();
            out.iter_mut().zip(bits).for_each(|(out, bits)| *out = f32::from_le_bytes(*bits));
        }
    }
}

impl RowSource for RoundedRows {
    fn read_row(&self, row: usize, cols: Range<usize>, out: &mut [u8]) {
        let mut codes = vec![0; cols.len()];
        self.read_codes(row, cols.clone(), &mut codes);
        match self.form {
            Form::Fp8Rows => {
                let scale = fp8_scale(self.largest(row));
                write_bf16(codes.iter().map(|code| e4m3(*code) * scale), out);
            }
            Form::Int8Rows => {
                let scale = int8_scale(self.largest(row));
                write_bf16(codes.iter().map(|code| f32::from(code.cast_signed()) * scale), out);
            }
            Form::Int4 { group } => {
                let (mut codes, mut out) = (&codes[..], out);
                for (_, part) in blocks(cols, group) {
                    let affine = self.affine(row, part.start, group);
                    let (own, rest) = codes.split_at(part.len());
                    let (bytes, left) = out.split_at_mut(2 * part.len());
                    write_bf16(own.iter().map(|code| affine.value(*code)), bytes);
                    (codes, out) = (rest, left);
                }
            }
        }
    }

    fn quantized(&self) -> Option<&dyn QuantizedRows> {
        Some(self)
    }
}

impl QuantizedRows for RoundedRows {
    fn quantization(&self) -> Quantization {
        match self.form {
            Form::Fp8Rows => Quantization::Fp8 { block: [1, self.cols] },
            Form::Int8Rows => Quantization::Int8 { group: self.cols, has_zeros: false, scale: DType::F32 },
            Form::Int4 { group } => Quantization::Int4 { group, has_zeros: true, scale: DType::F16 },
        }
    }

    /// Inputs are rounded, too, as in published checkpoints in fp8.
    fn has_fp8_inputs(&self) -> bool {
        self.form == Form::Fp8Rows
    }

    fn read_codes(&self, row: usize, cols: Range<usize>, out: &mut [u8]) {
        match self.form {
            Form::Fp8Rows => {
                let scale = fp8_scale(self.largest(row));
                self.values(row, cols, |at, values| fp8_codes(values, scale, &mut out[at..at + values.len()]));
            }
            Form::Int8Rows => {
                let scale = int8_scale(self.largest(row));
                self.values(row, cols, |at, values| int8_codes(values, scale, &mut out[at..at + values.len()]));
            }
            Form::Int4 { group } => {
                // Whole groups are read, of which the first and the last may be wanted in part.
                let whole = cols.start / group * group..cols.end.next_multiple_of(group);
                let mut codes = [0; CHUNK];
                self.values(row, whole.clone(), |at, values| {
                    for (group_at, values) in (at..).step_by(group).zip(values.chunks_exact(group)) {
                        let codes = &mut codes[..group];
                        Affine::of(values).codes(values, codes);
                        let first = whole.start + group_at;
                        let wanted = cols.start.max(first)..cols.end.min(first + group);
                        out[wanted.start - cols.start..wanted.end - cols.start]
                            .copy_from_slice(&codes[wanted.start - first..wanted.end - first]);
                    }
                });
            }
        }
    }

    fn scale(&self, row: usize, col: usize) -> (f32, u8) {
        match self.form {
            Form::Fp8Rows => (fp8_scale(self.largest(row)), 0),
            Form::Int8Rows => (int8_scale(self.largest(row)), 0),
            Form::Int4 { group } => {
                let affine = self.affine(row, col, group);
                (affine.scale, affine.zero)
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use half::bf16;

    use super::*;

    const ROWS: usize = 3;

    /// A matrix of numbers without order.
    fn matrix(dtype: DType, cols: usize) -> WeightSlice<'static> {
        let value = |index: usize| ((index * 7919 % 2003) as f32 / 1001.0 - 1.0) * (1.0 + (index % 13) as f32);
        let bytes = |value: f32| match dtype {
            DType::Bf16 => bf16::from_f32(value).to_le_bytes().to_vec(),
            DType::F16 => f16::from_f32(value).to_le_bytes().to_vec(),
            DType::F32 => value.to_le_bytes().to_vec(),
        };
        let data: Vec<u8> = (0..ROWS * cols).flat_map(|index| bytes(value(index))).collect();
        let data = WeightData::Stored(data.into());
        WeightSlice { name: "w", data, dtype, matrix_cols: cols, rows: 0..ROWS, cols: 0..cols, head_order: None }
    }

    fn source(slice: &WeightSlice<'_>) -> Arc<dyn RowSource> {
        let WeightData::Computed(source) = &slice.data else { panic!("the rows are computed") };
        source.clone()
    }

    fn values(slice: &WeightSlice<'_>, row: usize) -> Vec<f32> {
        let mut bytes = vec![0; slice.cols.len() * slice.dtype.size()];
        slice.read_row(row, &mut bytes);
        let mut values = vec![0.0; slice.cols.len()];
        widen(slice.dtype, &bytes, &mut values);
        values
    }

    #[test]
    fn parts_of_a_row_have_the_codes_of_the_whole_row() {
        for (rounding, dtype) in [
            (Rounding::Fp8Rows, DType::Bf16),
            (Rounding::Int8Rows, DType::Bf16),
            (Rounding::Int4, DType::F32),
            (Rounding::Int4, DType::F16),
        ] {
            let cols = 1344; // Not a multiple of 128: groups of 64.
            let source = source(&rounded(matrix(dtype, cols), rounding));
            let rows = source.quantized().unwrap();
            for row in 0..ROWS {
                let mut whole = vec![0; cols];
                rows.read_codes(row, 0..cols, &mut whole);
                for part in [0..8, 8..1000, 500..1344, 1336..1344] {
                    let mut codes = vec![0; part.len()];
                    rows.read_codes(row, part.clone(), &mut codes);
                    assert_eq!(codes, whole[part.clone()], "{rounding:?} {part:?}");
                    let mut bytes = vec![0; 2 * part.len()];
                    source.read_row(row, part.clone(), &mut bytes);
                    let values: Vec<f32> =
                        bytes.as_chunks::<2>().0.iter().map(|bytes| bf16::from_le_bytes(*bytes).to_f32()).collect();
                    for ((col, code), value) in part.zip(codes).zip(values) {
                        let (scale, zero) = rows.scale(row, col);
                        let exact = match rounding {
                            Rounding::Fp8Rows => e4m3(code) * scale,
                            Rounding::Int8Rows => f32::from(code.cast_signed()) * scale,
                            Rounding::Int4 => f32::from(i16::from(code) - i16::from(zero)) * scale,
                        };
                        assert_eq!(value, bf16::from_f32(exact).to_f32());
                    }
                }
            }
        }
    }

    #[test]
    fn codes_are_the_nearest_to_the_values() {
        let roundings =
            [(Rounding::Fp8Rows, 1.0 / 16.0), (Rounding::Int8Rows, 0.25 / 127.0), (Rounding::Int4, 1.0 / 15.0)];
        for (rounding, steps) in roundings {
            let plain = matrix(DType::Bf16, 256);
            let slice = rounded(plain.clone(), rounding);
            for row in 0..ROWS {
                let (plain, found) = (values(&plain, row), values(&slice, row));
                let largest = plain.iter().fold(0f32, |largest, value| largest.max(value.abs()));
                for (plain, found) in plain.iter().zip(found) {
                    // Half a step of e4m3's mantissa; half of the steps into which integers divide the range of a row or group. Values
                    // are rounded to bf16.
                    let size = if rounding == Rounding::Fp8Rows { plain.abs() } else { 2.0 * largest };
                    let allowed = size * steps * 1.05 + plain.abs() / 256.0 + largest / 448.0 / 512.0;
                    assert!((plain - found).abs() <= allowed, "{rounding:?}: {plain} became {found}");
                }
            }
        }
    }

    #[test]
    fn a_matrix_without_groups_stays_as_it_is() {
        let slice = rounded(matrix(DType::Bf16, 40), Rounding::Int4);
        assert!(matches!(slice.data, WeightData::Stored(_)));
    }
}
