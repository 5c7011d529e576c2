//! Shared memory, trace and log settings over HTTP.

use serving::InferError;

use crate::base64;
use crate::http_route::MemoryKind;
use crate::json::{self, Value, in_field};
use crate::json_writer::JsonWriter;
use crate::kserve_grpc::cuda_memory_unsupported;
use crate::settings::{LogValue, TRACE_KEYS, TraceChanges};
use crate::state::State;

/// `GET …sharedmemory[/region/N]/status`
///
/// # Errors
/// When there is no such region.
pub fn memory_status(state: &State, kind: MemoryKind, region: &str) -> Result<Vec<u8>, InferError> {
    let regions = match kind {
        MemoryKind::System => state.memory.status(region)?,
        MemoryKind::Cuda => Vec::new(),
    };
    let mut writer = JsonWriter::with_capacity(128);
    writer.begin_array();
    for region in regions {
        writer.begin_object();
        writer.member("name", region.name.as_bytes());
        writer.member("key", region.key.as_bytes());
        writer.key("offset");
        writer.integer(region.offset);
        writer.key("byte_size");
        writer.integer(region.byte_size);
        writer.end_object();
    }
    writer.end_array();
    Ok(writer.finish())
}

/// `POST …sharedmemory/region/N/register`
///
/// # Errors
/// When a field is missing or wrong, or the memory cannot be had.
pub fn register_memory(state: &State, kind: MemoryKind, region: &str, body: &[u8]) -> Result<(), InferError> {
    let root = json::parse(body)?;
    let required = |field: &str| {
        root.member(field)
            .ok_or_else(|| InferError::invalid(format!("Shared memory register request has no '{field}' field")))
    };
    if kind == MemoryKind::Cuda {
        let handle = required("raw_handle")?.required("b64")?.as_str()?;
        base64::decode(handle).ok_or_else(|| InferError::invalid("failed to decode raw_handle: not base64"))?;
        return Err(cuda_memory_unsupported());
    }
    let key = required("key")?.as_str()?;
    let offset = root.member("offset").map_or(Ok(0), Value::as_u64)?;
    state.memory.register(region, key, offset, required("byte_size")?.as_u64()?)
}

/// Answers `trace/setting`, after the changes in `body` if there are any.
///
/// # Errors
/// When the body is wrong, or there is no such model.
pub fn trace(state: &State, model: &str, body: &[u8]) -> Result<Vec<u8>, InferError> {
    let mut changes = TraceChanges::new();
    if !body.is_empty() {
        let root = json::parse(body)?;
        for (key, value) in root.as_object()? {
            changes.push((key.to_string(), trace_values(key, value)?));
        }
    }
    let values = state.update_trace(model, changes)?;
    let mut writer = JsonWriter::with_capacity(256);
    writer.begin_object();
    for key in TRACE_KEYS {
        let values = &values[key];
        writer.key(key);
        if key == "trace_level" {
            writer.begin_array();
            values.iter().for_each(|value| writer.string(value.as_bytes()));
            writer.end_array();
        } else {
            writer.string(values.first().map_or("", String::as_str).as_bytes());
        }
    }
    writer.end_object();
    Ok(writer.finish())
}

/// `None` clears the setting.
fn trace_values(key: &str, value: &Value<'_>) -> Result<Option<Vec<String>>, InferError> {
    let named = |error| in_field(key, error);
    match value {
        Value::Null => Ok(None),
        Value::Array(array) => {
            let mut values = Vec::new();
            array.for_each(|value| {
                values.push(value.as_str().map_err(named)?.to_owned());
                Ok(())
            })?;
            Ok(Some(values))
        }
        Value::Number(text) => Ok(Some(vec![(*text).to_owned()])),
        value => Ok(Some(vec![value.as_str().map_err(named)?.to_owned()])),
    }
}

/// Answers `logging`, after the changes in `body` if there are any.
///
/// # Errors
/// When the body is wrong, or a setting cannot change.
pub fn logging(state: &State, body: &[u8]) -> Result<Vec<u8>, InferError> {
    let mut changes = Vec::new();
    if !body.is_empty() {
        let root = json::parse(body)?;
        for (key, value) in root.as_object()? {
            changes.push((key.to_string(), log_value(key, value)?));
        }
    }
    let values = state.log.update(changes)?;
    let mut writer = JsonWriter::with_capacity(256);
    writer.begin_object();
    for (key, value) in &values {
        writer.key(key);
        match value {
            LogValue::Bool(value) => writer.boolean(*value),
            LogValue::Uint(value) => writer.integer(value),
            LogValue::String(value) => writer.string(value.as_bytes()),
        }
    }
    writer.end_object();
    Ok(writer.finish())
}

fn log_value(key: &str, value: &Value<'_>) -> Result<LogValue, InferError> {
    match value {
        Value::Bool(value) => Ok(LogValue::Bool(*value)),
        Value::Number(_) => {
            let number = value.as_u64()?;
            let fits = u32::try_from(number).map(LogValue::Uint);
            fits.map_err(|_| InferError::invalid(format!("'{key}' is {number}, expected at most {}", u32::MAX)))
        }
        value => Ok(LogValue::String(value.as_str()?.to_owned())),
    }
}
