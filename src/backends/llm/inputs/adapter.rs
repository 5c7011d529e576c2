//! The adapter of a request: by name, or by TensorRT-LLM's inputs.

use bytes::Bytes;
use ops::DType;
use serving::{ADAPTER_PARAMETER, DataType, InferError, InferRequest, Parameter};

use crate::tensor_values::{scalar, values};

/// An adapter by TensorRT-LLM's inputs.
#[derive(Debug, Clone)]
pub(crate) struct TaskAdapter {
    /// `lora_task_id`.
    pub(crate) id: u64,
    /// `lora_config` and `lora_weights`; without them the id is that of an adapter that was sent before.
    pub(crate) tensors: Option<TaskTensors>,
}

/// The weights of an adapter: see [`models::AdapterTensors`].
#[derive(Debug, Clone)]
pub(crate) struct TaskTensors {
    pub(crate) config: Vec<[i32; 3]>,
    pub(crate) weights: Bytes,
    pub(crate) dtype: DType,
    pub(crate) row_len: usize,
}

/// The adapter that a request names.
pub(super) fn name(request: &InferRequest) -> Result<Option<String>, InferError> {
    match request.parameters.get(ADAPTER_PARAMETER) {
        None => Ok(None),
        Some(Parameter::String(name)) => Ok(Some(name.clone()).filter(|name| !name.is_empty())),
        Some(other) => Err(InferError::invalid(format!(
            "parameter `{ADAPTER_PARAMETER}` is {other:?}, expected the name of an adapter"
        ))),
    }
}

/// The adapter that TensorRT-LLM's inputs of a request describe; `None` without `lora_task_id`.
///
/// # Errors
/// When one of the inputs is missing beside another, or has another type or shape.
pub(crate) fn task(request: &InferRequest) -> Result<Option<TaskAdapter>, InferError> {
    let tensors = match (request.input("lora_config"), request.input("lora_weights")) {
        (None, None) => None,
        (Some(config), Some(weights)) => {
            let numbers: Vec<i64> = values(config)?;
            let (rows, rest) = numbers.as_chunks::<3>();
            let is_table = rest.is_empty() && config.shape.last() == Some(&3);
            let row =
                |row: &[i64; 3]| Some([row[0].try_into().ok()?, row[1].try_into().ok()?, row[2].try_into().ok()?]);
            let rows = rows.iter().map(row).collect::<Option<Vec<[i32; 3]>>>().filter(|_| is_table);
            let dtype = match weights.datatype {
                DataType::Bf16 => Some(DType::Bf16),
                DataType::Fp16 => Some(DType::F16),
                DataType::Fp32 => Some(DType::F32),
                _ => None,
            };
            let dtype = dtype.ok_or_else(|| {
                InferError::invalid(format!(
                    "`lora_weights` is {}, expected FP16, BF16 or FP32",
                    weights.datatype.name()
                ))
            })?;
            let row_len = weights.shape.last().and_then(|&len| usize::try_from(len).ok()).unwrap_or(0);
            let config = rows.ok_or_else(|| {
                InferError::invalid("`lora_config` must have rows of three numbers: module, layer, rank")
            })?;
            Some(TaskTensors { config, weights: weights.data.clone(), dtype, row_len })
        }
        (config, _) => {
            let (given, other) =
                if config.is_some() { ("lora_config", "lora_weights") } else { ("lora_weights", "lora_config") };
            return Err(InferError::invalid(format!("input `{given}` is given without `{other}`; send both")));
        }
    };
    match (scalar::<i64>(request, &["lora_task_id"])?, tensors) {
        (None, None) => Ok(None),
        (None, Some(_)) => {
            Err(InferError::invalid("`lora_weights` needs the input `lora_task_id`, which names the adapter"))
        }
        (Some(id), tensors) => Ok(Some(TaskAdapter { id: id as u64, tensors })),
    }
}
