//! The types of weights, of keys and values, and of logits.

use repository::ModelConfig;
use serving::{DataType, InferError};
use supervision::{KvCacheType, WeightPrecision};

use super::{LlmDefaults, invalid};
use crate::parameters;

/// The declared type of the outputs of logits.
pub(super) fn logits_type(config: &ModelConfig) -> Result<DataType, InferError> {
    let is_logits = |name: &str| matches!(name, "context_logits" | "generation_logits");
    let mut found = None;
    for output in config.output.iter().filter(|output| is_logits(&output.name)) {
        let datatype = match DataType::from_config(output.data_type()) {
            Some(datatype @ (DataType::Fp32 | DataType::Fp16 | DataType::Bf16)) => datatype,
            _ => {
                let message = format!("output `{}` is {:?}", output.name, output.data_type());
                return Err(invalid(config, format!("{message}, expected TYPE_FP32, TYPE_FP16 or TYPE_BF16")));
            }
        };
        if found.is_some_and(|found| found != datatype) {
            return Err(invalid(config, "`context_logits` and `generation_logits` are declared with two types".into()));
        }
        found = Some(datatype);
    }
    Ok(found.unwrap_or(DataType::Fp32))
}

/// Precision of the weights of linear layers: the parameter `quantization`, or TensorRT-LLM's `weight_only_precision` and
/// `use_weight_only`, else that of the world.
pub(super) fn weight_precision(config: &ModelConfig, defaults: &LlmDefaults) -> Result<WeightPrecision, InferError> {
    let named = |key: &str| {
        let precision = parameters::text(config, key).map(str::parse::<WeightPrecision>).transpose();
        precision.map_err(|message| invalid(config, format!("parameter `{key}`: {message}")))
    };
    let weight_only = match (parameters::flag(config, "use_weight_only")?, named("weight_only_precision")?) {
        (Some(false), _) => Some(WeightPrecision::Checkpoint),
        // TensorRT-LLM's default.
        (Some(true), None) => Some(WeightPrecision::Int8),
        (_, precision) => precision,
    };
    match (named("quantization")?, weight_only) {
        (Some(one), Some(other)) if one != other => {
            let message =
                "`quantization` and `weight_only_precision` (or `use_weight_only`) differ; remove one of them";
            Err(invalid(config, message.into()))
        }
        (precision, weight_only) => Ok(precision.or(weight_only).unwrap_or(defaults.worker.weight_precision)),
    }
}

/// The type of keys and values: the parameter `kv_cache_dtype`, or TensorRT-LLM's `kv_cache_quant_algo`, else that of the world.
pub(super) fn kv_cache_type(config: &ModelConfig, defaults: &LlmDefaults) -> Result<KvCacheType, InferError> {
    let named = |key: &str| {
        let kind = parameters::text(config, key).map(str::parse::<KvCacheType>).transpose();
        kind.map_err(|message| invalid(config, format!("parameter `{key}`: {message}")))
    };
    match (named("kv_cache_dtype")?, named("kv_cache_quant_algo")?) {
        (Some(one), Some(other)) if one != other => {
            Err(invalid(config, "`kv_cache_dtype` and `kv_cache_quant_algo` differ; remove one of them".into()))
        }
        (one, other) => Ok(one.or(other).unwrap_or(defaults.worker.kv_cache_type)),
    }
}
