//! Weights of the CPU device, most of them used directly in the mapped checkpoint.

use kernels::cpu::{Matrix, Norm, WeightType, read_weights};
use ops::{DType, DeviceError, NormKind, NormSlices, WeightSlice};

use super::Linear;
use super::experts::Experts;

/// A weight of the model.
pub enum CpuWeight {
    /// A linear layer or a head.
    Linear(Linear),
    /// An embedding table; `first_row` is the index of its first row in the whole table.
    #[allow(missing_docs)] // Fields are named by the line above.
    Matrix { matrix: Matrix, first_row: usize },
    /// The experts of a layer.
    Experts(Experts),
    /// An RMS norm's gain.
    RmsNorm(Vec<f32>),
    /// A layer norm's gain and bias.
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
            CpuWeight::RmsNorm(weight) => Norm::Rms { weight },
            CpuWeight::LayerNorm { weight, bias } => Norm::Layer { weight, bias },
            _ => panic!("the weight is no norm's"),
        }
    }

    pub(crate) fn experts(&self) -> &Experts {
        match self {
            CpuWeight::Experts(experts) => experts,
            _ => panic!("the weight is no layer of experts"),
        }
    }

    /// The gain of a norm.
    pub(crate) fn gain(&self) -> &[f32] {
        match self {
            CpuWeight::RmsNorm(weight) | CpuWeight::LayerNorm { weight, .. } => weight,
            _ => panic!("the weight is no norm's"),
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

/// A norm's gain and bias, with its offset and factor applied.
pub(crate) fn norm(norm: &NormSlices<'_>) -> Result<CpuWeight, DeviceError> {
    let read = |slice: &Option<WeightSlice<'_>>| slice.as_ref().map(vector).transpose();
    let mut weight = read(&norm.weight)?.unwrap_or_else(|| vec![1.0; norm.width]);
    weight.iter_mut().for_each(|weight| *weight = (*weight + norm.offset) * norm.factor);
    Ok(match norm.kind {
        NormKind::Rms => CpuWeight::RmsNorm(weight),
        NormKind::Layer => {
            let mut bias = read(&norm.bias)?.unwrap_or_else(|| vec![0.0; norm.width]);
            bias.iter_mut().for_each(|bias| *bias *= norm.factor);
            CpuWeight::LayerNorm { weight, bias }
        }
    })
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

/// Bytes of memory that the system can give without swapping (`MemAvailable` of `/proc/meminfo`, page cache included);
/// 0 if unknown.
pub fn available_memory() -> u64 {
    let text = std::fs::read_to_string("/proc/meminfo").unwrap_or_default();
    let line = text.lines().find_map(|line| line.strip_prefix("MemAvailable:"));
    let kilobytes = line.and_then(|rest| rest.trim().trim_end_matches(" kB").parse::<u64>().ok());
    kilobytes.unwrap_or(0) * 1024
}
