//! Weights that must be converted when they are loaded: transposed or scaled.

use std::ops::Range;

use half::{bf16, f16};
use ops::DType;

/// Side of the square tiles that are transposed at once: two of them fit into the L1 cache.
const TILE: usize = 32;

/// Returns the given rows and columns of a matrix that is stored in column-major order in `data` and has `matrix_rows`
/// rows.
///
/// # Panics
/// Panics if `data` does not contain them.
pub(super) fn transpose(
    data: &[u8],
    dtype: DType,
    matrix_rows: usize,
    rows: Range<usize>,
    cols: Range<usize>,
) -> Vec<u8> {
    match dtype.size() {
        2 => transpose_elements::<2>(data, matrix_rows, rows, cols),
        _ => transpose_elements::<4>(data, matrix_rows, rows, cols),
    }
}

fn transpose_elements<const N: usize>(
    data: &[u8],
    matrix_rows: usize,
    rows: Range<usize>,
    cols: Range<usize>,
) -> Vec<u8> {
    let source = data.as_chunks::<N>().0;
    let mut out = vec![0; rows.len() * cols.len() * N];
    let elements = out.as_chunks_mut::<N>().0;
    for first_row in rows.clone().step_by(TILE) {
        for first_col in cols.clone().step_by(TILE) {
            for row in first_row..rows.end.min(first_row + TILE) {
                for col in first_col..cols.end.min(first_col + TILE) {
                    let at = (row - rows.start) * cols.len() + col - cols.start;
                    elements[at] = source[col * matrix_rows + row];
                }
            }
        }
    }
    out
}

/// Returns a matrix of `cols` columns whose rows `rows` are those of `data` divided by their Euclidean norm. The rows
/// before them are 0.
///
/// # Panics
/// Panics if `data` does not contain them.
pub(super) fn unit_rows(data: &[u8], dtype: DType, cols: usize, rows: Range<usize>) -> Vec<u8> {
    let (size, width) = (dtype.size(), cols * dtype.size());
    // The system assigns memory only to the pages of rows that are written.
    let mut out = vec![0; rows.end * width];
    let taken = rows.start * width..rows.end * width;
    for (out, row) in out[taken.clone()].chunks_exact_mut(width).zip(data[taken].chunks_exact(width)) {
        let length = row.chunks_exact(size).map(|x| read(dtype, x).powi(2)).sum::<f64>().sqrt().max(1e-12);
        for (out, x) in out.chunks_exact_mut(size).zip(row.chunks_exact(size)) {
            write(dtype, read(dtype, x) / length, out);
        }
    }
    out
}

/// The order of the rows of a matrix.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RowOrder {
    /// That of the file.
    AsStored,
    /// Those with even numbers, then those with odd ones.
    EvenFirst,
}

/// The rows of `row_bytes` each in another order.
pub(super) fn ordered(rows: Vec<u8>, row_bytes: usize, order: RowOrder) -> Vec<u8> {
    match order {
        RowOrder::AsStored => rows,
        RowOrder::EvenFirst => {
            let half = |first: usize| rows.chunks_exact(row_bytes).skip(first).step_by(2);
            half(0).chain(half(1)).flatten().copied().collect()
        }
    }
}

/// Elements that share a scale in MXFP4.
pub(super) const MXFP4_BLOCK: usize = 32;

/// Expands MXFP4 to bf16. `nibbles` has two elements a byte, the first in the low bits: a sign and an index of eight
/// magnitudes. `exponents` has a byte for each block: the power of two plus 127 (OCP Microscaling Formats 1.0).
pub(super) fn expand_mxfp4(nibbles: &[u8], exponents: &[u8]) -> Vec<u8> {
    const MAGNITUDES: [f32; 8] = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0];
    let mut out = Vec::with_capacity(4 * nibbles.len());
    for (block, exponent) in nibbles.chunks_exact(MXFP4_BLOCK / 2).zip(exponents) {
        // In f64, so that the smallest powers are exact before the product is rounded.
        let scale = 2f64.powi(i32::from(*exponent) - 127);
        for nibble in block.iter().flat_map(|byte| [byte & 15, byte >> 4]) {
            let magnitude = f64::from(MAGNITUDES[usize::from(nibble & 7)]) * scale;
            let value = if nibble & 8 == 0 { magnitude } else { -magnitude };
            out.extend_from_slice(&bf16::from_f64(value).to_le_bytes());
        }
    }
    out
}

/// The first element of `bytes`.
pub(super) fn read(dtype: DType, bytes: &[u8]) -> f64 {
    match dtype {
        DType::Bf16 => bf16::from_le_bytes([bytes[0], bytes[1]]).to_f64(),
        DType::F16 => f16::from_le_bytes([bytes[0], bytes[1]]).to_f64(),
        DType::F32 => f32::from_le_bytes([bytes[0], bytes[1], bytes[2], bytes[3]]).into(),
    }
}

fn write(dtype: DType, x: f64, out: &mut [u8]) {
    match dtype {
        DType::Bf16 => out.copy_from_slice(&bf16::from_f64(x).to_le_bytes()),
        DType::F16 => out.copy_from_slice(&f16::from_f64(x).to_le_bytes()),
        DType::F32 => out.copy_from_slice(&(x as f32).to_le_bytes()),
    }
}

/// Scales of the blocks of a matrix, row by row.
pub(super) struct Scales {
    pub(super) values: Vec<f32>,
    /// Rows and columns of a block.
    pub(super) block: [usize; 2],
    /// Number of blocks beside each other.
    pub(super) cols: usize,
}

/// The given rows and columns of a matrix in fp8 with `matrix_cols` columns, times their scales, in bf16.
///
/// # Panics
/// Panics if `data` or `scales` do not contain them.
pub(super) fn expand_fp8(
    data: &[u8],
    matrix_cols: usize,
    scales: &Scales,
    (rows, cols): (Range<usize>, Range<usize>),
) -> Vec<u8> {
    let values: [f32; 256] = std::array::from_fn(|byte| fp8_value(byte as u8));
    let [height, width] = scales.block;
    let mut out = Vec::with_capacity(rows.len() * cols.len() * DType::Bf16.size());
    for row in rows {
        let (bytes, scales) = (&data[row * matrix_cols..], &scales.values[row / height * scales.cols..]);
        for col in cols.clone() {
            let value = values[usize::from(bytes[col])] * scales[col / width];
            out.extend_from_slice(&bf16::from_f32(value).to_le_bytes());
        }
    }
    out
}

/// The value of a number in e4m3: a sign, 4 bits of exponent with bias 7, 3 of mantissa; no infinities
/// (Micikevicius et al. 2022).
fn fp8_value(byte: u8) -> f32 {
    let (exponent, mantissa) = (i32::from(byte >> 3 & 15), f32::from(byte & 7));
    let magnitude = match (exponent, byte & 7) {
        (15, 7) => f32::NAN,
        (0, _) => mantissa / 8.0 * 2f32.powi(-6),
        _ => (1.0 + mantissa / 8.0) * 2f32.powi(exponent - 7),
    };
    if byte & 0x80 == 0 { magnitude } else { -magnitude }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_part_of_a_transposed_matrix_is_what_an_index_says() {
        let (matrix_rows, matrix_cols) = (70, 45);
        let element = |row: usize, col: usize| (row * 1000 + col) as f32;
        let stored = (0..matrix_cols).flat_map(|col| (0..matrix_rows).map(move |row| element(row, col)));
        let data: Vec<u8> = stored.flat_map(f32::to_le_bytes).collect();
        let part = transpose(&data, DType::F32, matrix_rows, 3..67, 10..45);
        let expected = (3..67).flat_map(|row| (10..45).map(move |col| element(row, col)));
        assert_eq!(part, expected.flat_map(f32::to_le_bytes).collect::<Vec<u8>>());
    }

    #[test]
    fn mxfp4_has_the_low_half_of_a_byte_first_and_a_power_of_two_for_each_block() {
        let mut nibbles = [0u8; 32];
        nibbles[0] = 0xf1; // 0.5, -6
        nibbles[16] = 0x2b; // -1.5, 1
        let values: Vec<f32> = expand_mxfp4(&nibbles, &[128, 124])
            .chunks_exact(2)
            .map(|bytes| bf16::from_le_bytes([bytes[0], bytes[1]]).to_f32())
            .collect();
        assert_eq!(
            (values.len(), &values[..3], &values[32..35]),
            (64, &[1.0, -12.0, 0.0][..], &[-0.1875, 0.125, 0.0][..])
        );
    }

    #[test]
    fn rows_of_length_one_keep_their_place_and_direction() {
        let data: Vec<u8> = [3.0f32, 4.0, 0.0, 0.0, 0.0, -2.0].into_iter().flat_map(f32::to_le_bytes).collect();
        let out = unit_rows(&data, DType::F32, 2, 1..3);
        let expected: Vec<u8> = [0.0f32, 0.0, 0.0, 0.0, 0.0, -1.0].into_iter().flat_map(f32::to_le_bytes).collect();
        assert_eq!(out, expected);
        assert_eq!(&unit_rows(&data, DType::F32, 2, 0..1)[..4], 0.6f32.to_le_bytes());
    }

    #[test]
    fn fp8_is_expanded_with_the_scale_of_its_block() {
        // 1, -1, the largest number, the smallest, 0.
        let data = [0x38, 0xb8, 0x7e, 0x01, 0x00, 0x40];
        let scales = Scales { values: vec![1.0, 2.0, 0.5, 4.0], block: [1, 2], cols: 2 };
        let expanded = expand_fp8(&data, 3, &scales, (0..2, 0..3));
        let values: Vec<f32> =
            expanded.as_chunks::<2>().0.iter().map(|bytes| bf16::from_le_bytes(*bytes).to_f32()).collect();
        assert_eq!(values, [1.0, -1.0, 896.0, 0.5 / 512.0, 0.0, 8.0]);
        assert_eq!(expand_fp8(&data, 3, &scales, (1..2, 1..3)), expanded[8..]);
    }
}
