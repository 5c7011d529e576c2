//! `/v1/load_lora_adapter` and `/v1/unload_lora_adapter`, as in vLLM.

use std::path::Path;

use http::{HeaderMap, StatusCode};
use hyper::body::Incoming;
use serving::{Limit, Limits};

use super::error::ApiError;
use super::fields::{Fields, check, tree_bytes};
use crate::api::triton::http::reply::{Reply, TEXT, reply};
use crate::api::triton::http::request_body::{ChargedBody, read_body};
use crate::state::State;

/// Loads an adapter from a folder of this machine.
pub(super) async fn load(state: &State, headers: &HeaderMap, body: Incoming) -> Result<Reply, ApiError> {
    let ChargedBody { bytes: body, charge } = read_body(state, headers, body).await?;
    charge.add(tree_bytes(&body)?)?;
    let mut fields = Fields::read(&body)?;
    let limits = state.server.limits();
    let name = required(&mut fields, limits, "lora_name")?;
    let path = required(&mut fields, limits, "lora_path")?;
    let model = optional(&mut fields, limits, "base_model_name")?;
    if fields.flag("load_inplace")?.unwrap_or(false) {
        let message = "`load_inplace` is not served: unload the adapter first.";
        return Err(ApiError::of_field("load_inplace", message));
    }
    fields.finish(state.config.unknown_fields)?;
    state.server.load_adapter(model.as_deref(), &name, Path::new(&path)).await?;
    tracing::info!(adapter = name, path, "an adapter was loaded");
    Ok(done(format!("Success: LoRA adapter '{name}' added successfully.")))
}

/// Removes an adapter, after the requests that use it.
pub(super) async fn unload(state: &State, headers: &HeaderMap, body: Incoming) -> Result<Reply, ApiError> {
    let ChargedBody { bytes: body, charge } = read_body(state, headers, body).await?;
    charge.add(tree_bytes(&body)?)?;
    let mut fields = Fields::read(&body)?;
    let name = required(&mut fields, state.server.limits(), "lora_name")?;
    // vLLM's number of the adapter, which its name determines.
    fields.whole("lora_int_id", 0, i64::from(i32::MAX))?;
    fields.finish(state.config.unknown_fields)?;
    state.server.unload_adapter(&name).await?;
    tracing::info!(adapter = name, "an adapter was unloaded");
    Ok(done(format!("Success: LoRA adapter '{name}' removed successfully.")))
}

fn optional(fields: &mut Fields, limits: &Limits, field: &'static str) -> Result<Option<String>, ApiError> {
    let text = fields.text(field)?;
    text.iter().try_for_each(|text| check(limits, Limit::NameBytes, field, text.len()))?;
    Ok(text)
}

fn required(fields: &mut Fields, limits: &Limits, field: &'static str) -> Result<String, ApiError> {
    let missing = || {
        ApiError::of_field(
            field,
            format!("`{field}` is missing: `lora_name` names the adapter, `lora_path` its folder."),
        )
    };
    optional(fields, limits, field)?.filter(|text| !text.is_empty()).ok_or_else(missing)
}

fn done(message: String) -> Reply {
    reply(StatusCode::OK, TEXT, message.into_bytes())
}
