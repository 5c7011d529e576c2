//! Shared memory, trace and log settings over HTTP.

use std::sync::Arc;

use bytes::Bytes;
use serving::{InferError, Limit, Limits};

use crate::api::triton::http::base64;
use crate::api::triton::http::json::{self, Value};
use crate::api::triton::http::json_writer::JsonWriter;
use crate::api::triton::shared_memory::{MemoryKind, run_device_work};
use crate::state::State;
use crate::telemetry::log_settings::{LogFormat, LogValue};
use crate::telemetry::trace_settings::{TRACE_KEYS, TraceChanges};

/// Size of a `cudaIpcMemHandle_t`.
const CUDA_HANDLE_BYTES: usize = 64;

/// `GET …sharedmemory[/region/N]/status`
///
/// # Errors
/// When the region does not exist.
pub fn memory_status(state: &State, kind: MemoryKind, region: &str) -> Result<Vec<u8>, InferError> {
    let mut writer = JsonWriter::with_capacity(128);
    writer.begin_array();
    match kind {
        MemoryKind::System => {
            for region in state.memory.status(region)? {
                writer.begin_object();
                writer.member("name", region.name.as_bytes());
                writer.member("key", region.key.as_bytes());
                writer.key("offset");
                writer.integer(region.offset);
                writer.key("byte_size");
                writer.integer(region.byte_size);
                writer.end_object();
            }
        }
        MemoryKind::Cuda => {
            for region in state.memory.cuda_status(region)? {
                writer.begin_object();
                writer.member("name", region.name.as_bytes());
                writer.key("device_id");
                writer.integer(region.device);
                writer.key("byte_size");
                writer.integer(region.byte_size);
                writer.end_object();
            }
        }
    }
    writer.end_array();
    Ok(writer.finish())
}

/// `POST …sharedmemory/region/N/register`
///
/// # Errors
/// When a field is absent or invalid, or the memory cannot be opened.
pub async fn register_memory(
    state: &Arc<State>,
    kind: MemoryKind,
    region: &str,
    body: &[u8],
) -> Result<(), InferError> {
    if region.is_empty() {
        let memory = if kind == MemoryKind::Cuda { "cuda" } else { "system" };
        return Err(InferError::invalid(format!(
            "'region name' is necessary to register {memory} shared memory region"
        )));
    }
    let root = json::parse(body, state.server.limits())?;
    let required = |field: &str| {
        root.member(field)
            .ok_or_else(|| InferError::invalid(format!("Shared memory register request has no '{field}' field")))
    };
    if kind == MemoryKind::Cuda {
        let handle = required("raw_handle")?.required("b64")?.as_str()?;
        let number = |field: &str| {
            let absent = || InferError::internal(format!("attempt to access non-existing object member '{field}'"));
            root.member(field).ok_or_else(absent)?.as_u64()
        };
        let (device, byte_size) = (number("device_id")?, number("byte_size")?);
        let handle = base64::decode(handle)
            .filter(|handle| handle.len() == CUDA_HANDLE_BYTES)
            .ok_or_else(|| InferError::invalid("'raw_handle' must be a valid base64 encoded cudaIpcMemHandle_t"))?;
        let (state, region) = (Arc::clone(state), region.to_owned());
        let device = i64::try_from(device).unwrap_or(-1);
        return run_device_work(move || state.memory.register_cuda(&region, &handle, device, byte_size)).await;
    }
    let key = required("key")?.as_str()?;
    let offset = root.member("offset").map_or(Ok(0), Value::as_u64)?;
    state.memory.register(region, key, offset, required("byte_size")?.as_u64()?)
}

/// `trace/setting`: applies the changes of a body, and returns all settings.
///
/// # Errors
/// When the body is invalid, or the model does not exist.
pub fn trace(state: &State, model: &str, body: Option<&Bytes>) -> Result<Vec<u8>, InferError> {
    let mut changes = TraceChanges::new();
    state.update_trace(model, TraceChanges::new())?; // The error of an unknown model precedes that of an invalid body.
    if let Some(body) = body
        && let Value::Object(members) = json::parse(body, state.server.limits())?
    {
        for (key, value) in members.iter().filter(|(key, _)| TRACE_KEYS.contains(&key.as_ref())) {
            changes.push((key.to_string(), trace_values(key, value, state.server.limits())?));
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
fn trace_values(key: &str, value: &Value<'_>, limits: &Limits) -> Result<Option<Vec<String>>, InferError> {
    match value {
        Value::Null => Ok(None),
        value if key == "trace_level" => {
            let mut values = Vec::new();
            value.as_array()?.for_each(|value| {
                limits.check(Limit::Parameters, values.len() + 1)?;
                values.push(value.as_str()?.to_owned());
                Ok(())
            })?;
            Ok(Some(values))
        }
        value => Ok(Some(vec![value.as_str()?.to_owned()])),
    }
}

/// `logging`: applies the changes of a body, and returns all settings.
///
/// # Errors
/// When the body is invalid, or a setting cannot be changed.
pub fn logging(state: &State, body: Option<&Bytes>) -> Result<Vec<u8>, InferError> {
    let mut changes = Vec::new();
    if let Some(body) = body
        && let Value::Object(members) = json::parse(body, state.server.limits())?
    {
        for (key, value) in &members {
            changes.extend(log_value(key, value)?.map(|value| (key.to_string(), value)));
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

/// The value of a setting; `None` for an unknown setting.
fn log_value(key: &str, value: &Value<'_>) -> Result<Option<LogValue>, InferError> {
    Ok(Some(match key {
        "log_info" | "log_warning" | "log_error" => LogValue::Bool(value.as_bool()?),
        "log_verbose_level" => {
            let number = value.as_u64()?;
            LogValue::Uint(
                u32::try_from(number)
                    .map_err(|_| InferError::invalid(format!("'{key}' is {number}, expected at most {}", u32::MAX)))?,
            )
        }
        "log_file" => LogValue::String(String::new()), // Every value is refused later.
        "log_format" => {
            let name = value.as_str()?;
            let unknown = |_| InferError::unavailable(format!("invalid argument for --log_format, got: {name}"));
            name.parse::<LogFormat>().map_err(unknown)?;
            LogValue::String(name.to_owned())
        }
        _ => return Ok(None),
    }))
}
