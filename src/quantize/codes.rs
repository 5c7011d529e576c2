//! Rounds matrices to codes, on all cores, and packs the codes as compressed-tensors stores them.

use half::bf16;
use models::rounding::{Symmetric, fp8_codes, fp8_scale};
use rayon::prelude::*;

use crate::form::{BLOCK, Form};
use crate::matrix::{Dtype, Matrix};
use crate::search::best_shrink;

/// Rows that a thread rounds at once; a block of fp8.
const ROWS_AT_ONCE: usize = BLOCK;

/// The bytes of the tensors of a layer.
#[derive(Debug, Default, PartialEq)]
pub(crate) struct Codes {
    /// Codes, packed.
    pub(crate) weight: Vec<u8>,
    /// Scales, in the type that [`scale_dtype`] tells.
    pub(crate) scales: Vec<u8>,
    /// Zero points, packed.
    pub(crate) zeros: Vec<u8>,
}

/// The type of the scales of a matrix of this type: readers convert them to the model's type, which must hold them exactly.
pub(crate) fn scale_dtype(stored: Dtype) -> Dtype {
    if stored == Dtype::F16 { Dtype::F16 } else { Dtype::Bf16 }
}

/// A scale as it is stored.
fn stored(scale: f32, dtype: Dtype) -> f32 {
    match dtype {
        Dtype::F16 => half::f16::from_f32(scale).max(half::f16::from_bits(1)).to_f32(),
        _ => bf16::from_f32(scale).max(bf16::from_bits(1)).to_f32(),
    }
}

/// Rounds a matrix.
pub(crate) fn quantize(matrix: &Matrix<'_>, form: Form) -> Codes {
    let rows: Vec<usize> = (0..matrix.rows).step_by(ROWS_AT_ONCE).collect();
    let parts: Vec<Part> = rows
        .into_par_iter()
        .map(|first| {
            let rows = first..matrix.rows.min(first + ROWS_AT_ONCE);
            match form {
                Form::Fp8Rows | Form::Fp8Blocks => fp8_part(matrix, rows, form == Form::Fp8Blocks),
                Form::Integers { bits, group, has_zeros } => integer_part(matrix, rows, bits, (group, has_zeros)),
            }
        })
        .collect();
    let mut codes = Codes::default();
    let mut zeros = Vec::new();
    for part in parts {
        codes.weight.extend(part.weight);
        scale_dtype(matrix.dtype).write(part.scales.into_iter(), &mut codes.scales);
        zeros.extend(part.zeros);
    }
    if let Form::Integers { bits, group, has_zeros: true } = form {
        codes.zeros = packed_columns(&zeros, matrix.cols / group, bits);
    }
    codes
}

/// What some rows of a matrix become.
#[derive(Default)]
struct Part {
    weight: Vec<u8>,
    scales: Vec<f32>,
    /// Codes of 0, one for each scale.
    zeros: Vec<u8>,
}

fn fp8_part(matrix: &Matrix<'_>, rows: std::ops::Range<usize>, in_blocks: bool) -> Part {
    let cols = matrix.cols;
    let mut values = vec![0.0; rows.len() * cols];
    for (row, out) in rows.zip(values.chunks_exact_mut(cols)) {
        matrix.read_row(row, out);
    }
    let largest = |values: &[f32]| values.iter().fold(0f32, |largest, value| largest.max(value.abs()));
    let scale = |largest| stored(fp8_scale(largest), scale_dtype(matrix.dtype));
    let mut part = Part { weight: vec![0; values.len()], ..Part::default() };
    if in_blocks {
        let mut maxima = vec![0f32; cols.div_ceil(BLOCK)];
        for row in values.chunks_exact(cols) {
            maxima.iter_mut().zip(row.chunks(BLOCK)).for_each(|(found, values)| *found = found.max(largest(values)));
        }
        part.scales = maxima.into_iter().map(scale).collect();
        for (row, out) in values.chunks_exact(cols).zip(part.weight.chunks_exact_mut(cols)) {
            let blocks = row.chunks(BLOCK).zip(out.chunks_mut(BLOCK)).zip(&part.scales);
            blocks.for_each(|((values, out), scale)| fp8_codes(values, *scale, out));
        }
        return part;
    }
    for (row, out) in values.chunks_exact(cols).zip(part.weight.chunks_exact_mut(cols)) {
        let scale = scale(largest(row));
        fp8_codes(row, scale, out);
        part.scales.push(scale);
    }
    part
}

fn integer_part(
    matrix: &Matrix<'_>,
    rows: std::ops::Range<usize>,
    bits: usize,
    (group, has_zeros): (usize, bool),
) -> Part {
    let (mut values, mut codes) = (vec![0.0; matrix.cols], vec![0; matrix.cols]);
    let dtype = scale_dtype(matrix.dtype);
    let mut part = Part::default();
    for row in rows {
        matrix.read_row(row, &mut values);
        for (index, (values, codes)) in values.chunks_exact(group).zip(codes.chunks_exact_mut(group)).enumerate() {
            let importance = matrix.importance.get(index * group..(index + 1) * group);
            let (scale, zero) = match has_zeros {
                true => {
                    let affine = best_shrink(values, importance, |scale| stored(scale, dtype));
                    affine.codes(values, codes);
                    (affine.scale, affine.zero)
                }
                false => {
                    let symmetric = Symmetric::of(values, bits as u32, |scale| stored(scale, dtype));
                    symmetric.codes(values, codes);
                    (symmetric.scale, 0)
                }
            };
            part.scales.push(scale);
            part.zeros.push(zero);
        }
        pack(&codes, bits, &mut part.weight);
    }
    part
}

/// Packs codes of 4 or 8 bits, the first in the low bits.
fn pack(codes: &[u8], bits: usize, out: &mut Vec<u8>) {
    match bits {
        4 => out.extend(codes.as_chunks::<2>().0.iter().map(|[low, high]| low | high << 4)),
        _ => out.extend_from_slice(codes),
    }
}

/// Packs a matrix of `[rows, cols]` codes along its columns: `[rows * bits / 32, cols]` words.
fn packed_columns(codes: &[u8], cols: usize, bits: usize) -> Vec<u8> {
    let per_word = 32 / bits;
    let words = codes.chunks(cols * per_word).flat_map(|rows| {
        (0..cols).map(move |col| {
            let codes = rows.chunks_exact(cols).map(|row| u32::from(row[col])).enumerate();
            codes.fold(0u32, |word, (index, code)| word | code << (index * bits))
        })
    });
    words.flat_map(u32::to_le_bytes).collect()
}
