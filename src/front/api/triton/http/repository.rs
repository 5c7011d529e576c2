//! The model repository over HTTP: index, load, unload.

use serving::{InferError, Limit, LoadOverrides, Server};

use crate::api::triton::http::base64;
use crate::api::triton::http::json::{self, Value};
use crate::api::triton::http::json_writer::JsonWriter;

/// `POST /v2/repository/index`
///
/// # Errors
/// When the body is not JSON, or `ready` is not a boolean.
pub fn index(server: &Server, body: &[u8]) -> Result<Vec<u8>, InferError> {
    let root = if body.is_empty() { Value::Null } else { json::parse(body, server.limits())? };
    let ready_only = root.member("ready").map_or(Ok(false), Value::as_bool)?;
    let mut writer = JsonWriter::with_capacity(1024);
    writer.begin_array();
    for model in server.repository_index(ready_only) {
        writer.begin_object();
        let state = model.state.name();
        let members =
            [("name", model.name.as_str()), ("version", &model.version), ("state", state), ("reason", &model.reason)];
        for (key, value) in members.into_iter().filter(|(_, value)| !value.is_empty()) {
            writer.member(key, value.as_bytes());
        }
        writer.end_object();
    }
    writer.end_array();
    Ok(writer.finish())
}

/// `POST /v2/repository/models/M/load`
///
/// # Errors
/// When the body is invalid, or the model cannot be loaded.
pub async fn load(server: &Server, model: &str, body: &[u8]) -> Result<(), InferError> {
    let mut overrides = LoadOverrides::default();
    for_each_parameter(server, body, |key, value| {
        match key.strip_prefix("file:") {
            Some(file) => {
                let bytes = base64::decode(value.as_str()?)
                    .ok_or_else(|| InferError::invalid(format!("parameter '{key}' is not base64")))?;
                overrides.files.insert(file.to_owned(), bytes.into());
            }
            None if key == "config" => overrides.config = Some(value.as_str()?.to_owned()),
            None => {
                value.as_str()?;
                return Err(InferError::internal("unexpected error on creating Triton parameter"));
            }
        }
        Ok(())
    })?;
    server.load_model(model, overrides).await
}

/// `POST /v2/repository/models/M/unload`. Unknown parameters are ignored.
///
/// # Errors
/// When the body is invalid, or the control mode does not allow unloading.
pub async fn unload(server: &Server, model: &str, body: &[u8]) -> Result<(), InferError> {
    let mut unload_dependents = false;
    for_each_parameter(server, body, |key, value| {
        if key == "unload_dependents" {
            unload_dependents = value.as_bool()?;
        }
        Ok(())
    })?;
    server.unload_model(model, unload_dependents).await
}

fn for_each_parameter(
    server: &Server,
    body: &[u8],
    mut visit: impl FnMut(&str, &Value<'_>) -> Result<(), InferError>,
) -> Result<(), InferError> {
    if body.is_empty() {
        return Ok(());
    }
    let root = json::parse(body, server.limits())?;
    let Some(parameters) = root.member("parameters") else { return Ok(()) };
    let parameters = parameters.as_object()?;
    server.limits().check(Limit::Parameters, parameters.len())?;
    parameters.iter().try_for_each(|(key, value)| {
        server.limits().check(Limit::NameBytes, key.len())?;
        visit(key, value)
    })
}
