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

fn read(dtype: DType, bytes: &[u8]) -> f64 {
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
    fn rows_of_length_one_keep_their_place_and_direction() {
        let data: Vec<u8> = [3.0f32, 4.0, 0.0, 0.0, 0.0, -2.0].into_iter().flat_map(f32::to_le_bytes).collect();
        let out = unit_rows(&data, DType::F32, 2, 1..3);
        let expected: Vec<u8> = [0.0f32, 0.0, 0.0, 0.0, 0.0, -1.0].into_iter().flat_map(f32::to_le_bytes).collect();
        assert_eq!(out, expected);
        assert_eq!(&unit_rows(&data, DType::F32, 2, 0..1)[..4], 0.6f32.to_le_bytes());
    }
}
