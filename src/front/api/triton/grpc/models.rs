//! Metadata and statistics of models as protocol messages, and the parameters of load and unload.

use std::collections::BTreeMap;

use serving::{InferError, LoadOverrides};

use crate::api::triton::grpc::proto::model_metadata_response::TensorMetadata;
use crate::api::triton::grpc::proto::model_repository_parameter::ParameterChoice;
use crate::api::triton::grpc::proto::{
    InferBatchStatistics, InferResponseStatistics, InferStatistics, MemoryUsage, ModelMetadataResponse,
    ModelRepositoryParameter, ModelStatistics, StatisticDuration,
};

type Parameters = BTreeMap<String, ModelRepositoryParameter>;

/// The metadata of a model.
pub fn metadata(metadata: serving::ModelMetadata) -> ModelMetadataResponse {
    let tensors = |tensors: Vec<serving::TensorMetadata>| {
        let tensors = tensors.into_iter().map(|tensor| TensorMetadata {
            name: tensor.name,
            datatype: tensor.datatype.name().to_owned(),
            shape: tensor.shape,
        });
        tensors.collect()
    };
    ModelMetadataResponse {
        name: metadata.name,
        versions: metadata.versions,
        platform: metadata.platform,
        inputs: tensors(metadata.inputs),
        outputs: tensors(metadata.outputs),
    }
}

/// The statistics of a model.
pub fn statistics(model: serving::ModelStatistics) -> ModelStatistics {
    let inference = &model.inference;
    let inference_stats = InferStatistics {
        success: duration(inference.success),
        fail: duration(inference.fail),
        queue: duration(inference.queue),
        compute_input: duration(inference.compute_input),
        compute_infer: duration(inference.compute_infer),
        compute_output: duration(inference.compute_output),
        cache_hit: duration(inference.cache_hit),
        cache_miss: duration(inference.cache_miss),
    };
    let batch_stats = model.batches.iter().map(|batch| InferBatchStatistics {
        batch_size: batch.batch_size,
        compute_input: duration(batch.compute_input),
        compute_infer: duration(batch.compute_infer),
        compute_output: duration(batch.compute_output),
    });
    let response_stats = model.responses.iter().enumerate().map(|(index, response)| {
        let statistics = InferResponseStatistics {
            compute_infer: duration(response.compute_infer),
            compute_output: duration(response.compute_output),
            success: duration(response.success),
            fail: duration(response.fail),
            empty_response: duration(response.empty_response),
            cancel: duration(response.cancel),
        };
        (index.to_string(), statistics)
    });
    ModelStatistics {
        last_inference: model.last_inference_ms,
        inference_count: model.inference_count,
        execution_count: model.execution_count,
        inference_stats: Some(inference_stats),
        batch_stats: batch_stats.collect(),
        memory_usage: model.memory.iter().map(memory_usage).collect(),
        response_stats: response_stats.collect(),
        name: model.name,
        version: model.version,
    }
}

fn memory_usage(memory: &serving::MemoryUsage) -> MemoryUsage {
    MemoryUsage { r#type: memory.kind.to_owned(), id: memory.id, byte_size: memory.num_bytes }
}

fn duration(duration: serving::StatisticDuration) -> Option<StatisticDuration> {
    Some(StatisticDuration { count: duration.count, ns: duration.ns })
}

/// Reads the parameters of a load request.
///
/// # Errors
/// When a parameter is unknown or has an invalid type.
pub fn load_overrides(parameters: Parameters) -> Result<LoadOverrides, InferError> {
    let mut overrides = LoadOverrides::default();
    for (key, parameter) in parameters {
        match (key.strip_prefix("file:"), parameter.parameter_choice) {
            (None, Some(ParameterChoice::StringParam(config))) if key == "config" => overrides.config = Some(config),
            (None, _) if key == "config" => return Err(wrong_load_type(&key, "string_param")),
            (Some(file), Some(ParameterChoice::BytesParam(bytes))) => {
                overrides.files.insert(file.to_owned(), bytes);
            }
            (Some(_), _) => return Err(wrong_load_type(&key, "bytes_param")),
            (None, _) => return Err(InferError::invalid(format!("unrecognized load parameter '{key}'."))),
        }
    }
    Ok(overrides)
}

/// Reads the `unload_dependents` parameter of an unload request.
///
/// # Errors
/// When it is not a boolean.
pub fn unload_dependents(parameters: Parameters) -> Result<bool, InferError> {
    let mut wanted = false;
    for (key, parameter) in parameters {
        match parameter.parameter_choice {
            Some(ParameterChoice::BoolParam(value)) if key == "unload_dependents" => wanted = value,
            _ if key == "unload_dependents" => {
                return Err(InferError::invalid(format!(
                    "invalid value type for '{key}' parameter, expected bool_param."
                )));
            }
            _ => {} // Unknown parameters are ignored, as over HTTP.
        }
    }
    Ok(wanted)
}

fn wrong_load_type(key: &str, expected: &str) -> InferError {
    InferError::invalid(format!("invalid value type for load parameter '{key}', expected {expected}."))
}
