//! Converts slices of the checkpoint to matrices and vectors.

use std::sync::Mutex;

use kernels::cpu::{Matrix, Pool, WeightType, read_weights};
use ops::{DType, DeviceError, WeightData, WeightSlice};

/// Rows that a thread computes before it takes the next ones.
const ROWS_AT_ONCE: usize = 16;

fn weight_type(dtype: DType) -> WeightType {
    match dtype {
        DType::Bf16 => WeightType::Bf16,
        DType::F16 => WeightType::F16,
        DType::F32 => WeightType::F32,
    }
}

/// Whether the rows of a slice are computed, or stored in another order. They are copied then.
pub(crate) fn is_computed(slice: &WeightSlice<'_>) -> bool {
    slice.head_order.is_some() || matches!(slice.data, WeightData::Computed(_))
}

/// Stacks slices. Only those of [`is_computed`] are copied.
pub(crate) fn matrix(
    pool: &mut Pool,
    parts: &[WeightSlice<'_>],
    bias: &[WeightSlice<'_>],
) -> Result<Matrix, DeviceError> {
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
        match &part.data {
            WeightData::Stored(bytes) if part.head_order.is_none() => {
                let start = part.rows.start * row_bytes + part.cols.start * dtype.size();
                matrix.stack(bytes.slice(start..), part.rows.len(), row_bytes);
            }
            _ => matrix.stack(copied(pool, part, taken), part.rows.len(), taken),
        }
    }
    if !bias.is_empty() {
        let parts = bias.iter().map(vector).collect::<Result<Vec<_>, _>>()?;
        matrix.set_bias(parts.concat());
    }
    Ok(matrix)
}

/// The rows of a slice with `row_bytes` bytes each.
fn copied(pool: &mut Pool, slice: &WeightSlice<'_>, row_bytes: usize) -> Vec<u8> {
    let mut copy = vec![0; slice.rows.len() * row_bytes];
    let rows: Vec<Mutex<&mut [u8]>> = copy.chunks_exact_mut(row_bytes).map(Mutex::new).collect();
    pool.each(rows.len(), ROWS_AT_ONCE, |range| {
        for index in range {
            slice.read_row(slice.rows.start + index, &mut ipc::lock(&rows[index]));
        }
    });
    drop(rows);
    copy
}

/// A vector, converted to f32.
pub(crate) fn vector(slice: &WeightSlice<'_>) -> Result<Vec<f32>, DeviceError> {
    let mut stored = vec![0.0; slice.cols.len()];
    let first = slice.cols.start;
    read_weights(weight_type(slice.dtype), slice.vector_bytes(), &mut stored);
    Ok(slice.cols.clone().map(|index| stored[slice.stored(index) - first]).collect())
}
