//! Weights of the CPU device, most of them used directly in the mapped checkpoint.

use kernels::cpu::{Matrix, Norm, WeightType, read_weights};
use ops::{DType, DeviceError, WeightSlice};

use super::Linear;

/// A weight of the model.
pub enum CpuWeight {
    /// A linear layer or a head.
    Linear(Linear),
    /// An embedding table; `first_row` is the index of its first row in the whole table.
    #[allow(missing_docs)] // Fields are named by the line above.
    Matrix { matrix: Matrix, first_row: usize },
    /// An RMS norm's weight.
    Vector(Vec<f32>),
    /// A norm's weight and bias.
    #[allow(missing_docs)] // Fields are named by the line above.
    LayerNorm { weight: Vec<f32>, bias: Vec<f32> },
}

impl CpuWeight {
    pub(crate) fn matrix(&self) -> (&Matrix, usize) {
        match self {
            CpuWeight::Matrix { matrix, first_row } => (matrix, *first_row),
            _ => panic!("the weight is no table"),
        }
    }

    pub(crate) fn linear(&self) -> &Linear {
        match self {
            CpuWeight::Linear(linear) => linear,
            _ => panic!("the weight is no linear layer's"),
        }
    }

    pub(crate) fn norm(&self) -> Norm<'_> {
        match self {
            CpuWeight::Vector(weight) => Norm::Rms { weight },
            CpuWeight::LayerNorm { weight, bias } => Norm::Layer { weight, bias },
            CpuWeight::Linear(_) | CpuWeight::Matrix { .. } => panic!("a matrix is no norm's weight"),
        }
    }

    /// The weight of an RMS norm.
    pub(crate) fn vector(&self) -> &[f32] {
        match self {
            CpuWeight::Vector(weight) => weight,
            _ => panic!("the weight is no vector"),
        }
    }
}

fn weight_type(dtype: DType) -> WeightType {
    match dtype {
        DType::Bf16 => WeightType::Bf16,
        DType::F16 => WeightType::F16,
        DType::F32 => WeightType::F32,
    }
}

/// Stacks slices without copying them.
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
        let row_bytes = part.matrix_cols * dtype.size();
        let first = part.rows.start * row_bytes + part.cols.start * dtype.size();
        matrix.stack(&part.data[first..], part.rows.len(), row_bytes);
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
    let mut vector = vec![0.0; slice.cols.len()];
    let first = slice.cols.start * size;
    read_weights(weight_type(slice.dtype), &slice.data[first..first + vector.len() * size], &mut vector);
    Ok(vector)
}

/// Bytes of memory that the system can give without swapping (`MemAvailable` of `/proc/meminfo`, page cache included);
/// 0 if unknown.
pub fn available_memory() -> u64 {
    let text = std::fs::read_to_string("/proc/meminfo").unwrap_or_default();
    let line = text.lines().find_map(|line| line.strip_prefix("MemAvailable:"));
    let kilobytes = line.and_then(|rest| rest.trim().trim_end_matches(" kB").parse::<u64>().ok());
    kilobytes.unwrap_or(0) * 1024
}
