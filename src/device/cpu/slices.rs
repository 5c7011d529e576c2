//! Converts slices of the checkpoint to matrices and vectors.

use kernels::cpu::{Matrix, WeightType, read_weights};
use ops::{DType, DeviceError, WeightSlice};

fn weight_type(dtype: DType) -> WeightType {
    match dtype {
        DType::Bf16 => WeightType::Bf16,
        DType::F16 => WeightType::F16,
        DType::F32 => WeightType::F32,
    }
}

/// Stacks slices. Only those whose rows are stored in another order are copied; copies stay in memory until the process
/// ends.
pub(crate) fn matrix(parts: &[WeightSlice<'_>], bias: &[WeightSlice<'_>]) -> Result<Matrix, DeviceError> {
    let (dtype, cols) = (parts[0].dtype, parts[0].cols.len());
    let mut matrix = Matrix::new(weight_type(dtype), cols);
    for part in parts {
        if part.dtype != dtype || part.cols.len() != cols {
            return Err(DeviceError::Unsupported {
                what: format!("`{}` beside `{}`", part.name, parts[0].name),
                found: format!("{:?} with {} columns", part.dtype, part.cols.len()),
                expected: format!("{dtype:?} with {cols} columns"),
            });
        }
        let (row_bytes, taken) = (part.matrix_cols * dtype.size(), part.cols.len() * dtype.size());
        let start = |row: usize| row * row_bytes + part.cols.start * dtype.size();
        if part.head_order.is_none() {
            matrix.stack(&part.data[start(part.rows.start)..], part.rows.len(), row_bytes);
            continue;
        }
        let rows = part.rows.clone().map(|row| &part.data[start(part.stored(row))..][..taken]);
        let copy: &'static [u8] = rows.collect::<Vec<_>>().concat().leak();
        matrix.stack(copy, part.rows.len(), taken);
    }
    if !bias.is_empty() {
        let parts = bias.iter().map(vector).collect::<Result<Vec<_>, _>>()?;
        matrix.set_bias(parts.concat());
    }
    Ok(matrix)
}

/// A vector, converted to f32.
pub(crate) fn vector(slice: &WeightSlice<'_>) -> Result<Vec<f32>, DeviceError> {
    let size = slice.dtype.size();
    let mut stored = vec![0.0; slice.cols.len()];
    let first = slice.cols.start;
    let bytes = &slice.data[first * size..slice.cols.end * size];
    read_weights(weight_type(slice.dtype), bytes, &mut stored);
    Ok(slice.cols.clone().map(|index| stored[slice.stored(index) - first]).collect())
}
