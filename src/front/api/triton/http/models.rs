//! Metadata, configuration and statistics over HTTP.

use serving::{InferError, ModelStatistics, Server, StatisticDuration, TensorMetadata};

use crate::api::triton::http::json_writer::JsonWriter;
use crate::api::triton::http::route::ModelPath;

/// `GET /v2`
pub fn server_metadata(server: &Server) -> Vec<u8> {
    let metadata = server.server_metadata();
    let mut writer = JsonWriter::with_capacity(512);
    writer.begin_object();
    writer.member("name", metadata.name.as_bytes());
    writer.member("version", metadata.version.as_bytes());
    writer.key("extensions");
    strings(&mut writer, &metadata.extensions);
    writer.end_object();
    writer.finish()
}

/// `GET /v2/models/M[/versions/V]`
///
/// # Errors
/// When the model is not ready.
pub fn model_metadata(server: &Server, model: ModelPath<'_>) -> Result<Vec<u8>, InferError> {
    let metadata = server.model_metadata(model.name, model.version)?;
    let mut writer = JsonWriter::with_capacity(1024);
    writer.begin_object();
    writer.member("name", metadata.name.as_bytes());
    writer.key("versions");
    strings(&mut writer, &metadata.versions);
    writer.member("platform", metadata.platform.as_bytes());
    writer.key("inputs");
    tensors(&mut writer, &metadata.inputs);
    writer.key("outputs");
    tensors(&mut writer, &metadata.outputs);
    writer.end_object();
    Ok(writer.finish())
}

fn strings(writer: &mut JsonWriter, values: &[String]) {
    writer.begin_array();
    values.iter().for_each(|value| writer.string(value.as_bytes()));
    writer.end_array();
}

fn tensors(writer: &mut JsonWriter, tensors: &[TensorMetadata]) {
    writer.begin_array();
    for tensor in tensors {
        writer.begin_object();
        writer.member("name", tensor.name.as_bytes());
        writer.member("datatype", tensor.datatype.name().as_bytes());
        writer.key("shape");
        writer.integers(&tensor.shape);
        writer.end_object();
    }
    writer.end_array();
}

/// `GET /v2/models/M[/versions/V]/config`
///
/// # Errors
/// When the model is not ready.
pub fn model_config(server: &Server, model: ModelPath<'_>) -> Result<Vec<u8>, InferError> {
    Ok(repository::to_json(&*server.model_config(model.name, model.version)?).into_bytes())
}

/// `GET /v2/models/M[/versions/V]/stats` and `/v2/models/stats`
///
/// # Errors
/// When the model is not ready.
pub fn statistics(server: &Server, model: ModelPath<'_>) -> Result<Vec<u8>, InferError> {
    let models = server.model_statistics(model.name, model.version)?;
    let mut writer = JsonWriter::with_capacity(1024 * models.len());
    writer.begin_object();
    writer.key("model_stats");
    writer.begin_array();
    models.iter().for_each(|model| model_statistics(&mut writer, model));
    writer.end_array();
    writer.end_object();
    Ok(writer.finish())
}

fn model_statistics(writer: &mut JsonWriter, model: &ModelStatistics) {
    writer.begin_object();
    writer.member("name", model.name.as_bytes());
    writer.member("version", model.version.as_bytes());
    writer.key("last_inference");
    writer.integer(model.last_inference_ms);
    writer.key("inference_count");
    writer.integer(model.inference_count);
    writer.key("execution_count");
    writer.integer(model.execution_count);
    let inference = &model.inference;
    let parts = [
        ("success", inference.success),
        ("fail", inference.fail),
        ("queue", inference.queue),
        ("compute_input", inference.compute_input),
        ("compute_infer", inference.compute_infer),
        ("compute_output", inference.compute_output),
        ("cache_hit", inference.cache_hit),
        ("cache_miss", inference.cache_miss),
    ];
    writer.key("inference_stats");
    writer.begin_object();
    durations(writer, &parts);
    writer.end_object();
    writer.key("response_stats");
    writer.begin_object();
    for (index, response) in model.responses.iter().enumerate() {
        let parts = [
            ("compute_infer", response.compute_infer),
            ("compute_output", response.compute_output),
            ("success", response.success),
            ("fail", response.fail),
            ("empty_response", response.empty_response),
            ("cancel", response.cancel),
        ];
        writer.key(&index.to_string());
        writer.begin_object();
        durations(writer, &parts);
        writer.end_object();
    }
    writer.end_object();
    writer.key("batch_stats");
    writer.begin_array();
    for batch in &model.batches {
        let parts = [
            ("compute_input", batch.compute_input),
            ("compute_infer", batch.compute_infer),
            ("compute_output", batch.compute_output),
        ];
        writer.begin_object();
        writer.key("batch_size");
        writer.integer(batch.batch_size);
        durations(writer, &parts);
        writer.end_object();
    }
    writer.end_array();
    writer.key("memory_usage");
    writer.begin_array();
    for memory in &model.memory {
        writer.begin_object();
        writer.key("type");
        writer.string(memory.kind.as_bytes());
        writer.key("id");
        writer.integer(memory.id);
        writer.key("byte_size");
        writer.integer(memory.num_bytes);
        writer.end_object();
    }
    writer.end_array();
    writer.end_object();
}

fn durations(writer: &mut JsonWriter, parts: &[(&str, StatisticDuration)]) {
    for (name, duration) in parts {
        writer.key(name);
        writer.begin_object();
        writer.key("count");
        writer.integer(duration.count);
        writer.key("ns");
        writer.integer(duration.ns);
        writer.end_object();
    }
}
