//! `/update_weights_from_disk`, as in SGLang.

use std::path::PathBuf;

use http::request::Parts;
use hyper::body::Incoming;
use serde_json::{Value, json};
use serving::{Limit, Limits, NewWeights};

use super::error::ApiError;
use super::fields::{Fields, check, tree_bytes};
use super::json_reply;
use super::sleep::Parameters;
use crate::api::triton::http::reply::Reply;
use crate::api::triton::http::request_body::{ChargedBody, read_body};
use crate::chat::UnknownFields;
use crate::state::State;

/// Fields of SGLang that say how its engine goes about it, and have no effect here.
const WITHOUT_EFFECT: [&str; 3] = ["torch_empty_cache", "recapture_cuda_graph", "token_step"];

/// Replaces the weights of a model. The reply comes when requests are served with the new ones. It has SGLang's fields; that of an error
/// has OpenAI's, too.
pub(super) async fn update(state: &State, head: &Parts, body: Incoming) -> Reply {
    match replace(state, head, body).await {
        Ok(reply) => json_reply(&reply),
        Err(error) => {
            let mut body = error.json();
            body["success"] = json!(false);
            body["message"] = body["error"]["message"].clone();
            error.reply_with(&body)
        }
    }
}

async fn replace(state: &State, head: &Parts, body: Incoming) -> Result<Value, ApiError> {
    let limits = state.server.limits();
    let Parameters { model, .. } = Parameters::read(head.uri.query(), &["model"], limits)?;
    let ChargedBody { bytes: body, charge } = read_body(state, &head.headers, body).await?;
    charge.add(tree_bytes(&body)?)?;
    let new = new_weights(&body, limits, state.config.unknown_fields)?;
    let (model, version) = state.server.replace_weights(model.as_deref(), new).await?;
    let message = format!("Model `{model}` is served with weights of version `{version}`.");
    Ok(json!({"success": true, "message": message, "weight_version": version}))
}

fn new_weights(body: &[u8], limits: &Limits, unknown: UnknownFields) -> Result<NewWeights, ApiError> {
    let mut fields = Fields::read(body)?;
    let mut text = |field: &'static str| -> Result<Option<String>, ApiError> {
        let text = fields.text(field)?;
        text.iter().try_for_each(|text| check(limits, Limit::NameBytes, field, text.len()))?;
        match text.as_deref() {
            Some("") => Err(ApiError::of_field(field, format!("`{field}` is empty."))),
            _ => Ok(text),
        }
    };
    let missing =
        || ApiError::of_field("model_path", "`model_path` is missing: it names the directory of a checkpoint.");
    let checkpoint = text("model_path")?.map(PathBuf::from).ok_or_else(missing)?;
    let version = text("weight_version")?;
    let aborts_requests = fields.flag("abort_all_requests")?.unwrap_or(false);
    let is_false = |value: &Value| *value == false;
    let is_format = |value: &Value| *value == "auto" || *value == "safetensors";
    fields.refuse_unless("load_format", is_format, "the format is `auto` or `safetensors`")?;
    fields.refuse_unless(
        "flush_cache",
        |value| *value == true,
        "what was computed with the old weights is forgotten",
    )?;
    fields.refuse_unless("is_async", is_false, "the answer comes when the new weights are served")?;
    fields.refuse_unless("keep_pause", is_false, "requests are served with the new weights at once")?;
    fields.ignore(&WITHOUT_EFFECT);
    fields.finish(unknown)?;
    Ok(NewWeights { checkpoint, version, aborts_requests })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(body: &Value) -> Result<NewWeights, ApiError> {
        new_weights(body.to_string().as_bytes(), &Limits::default(), UnknownFields::Refuse)
    }

    #[test]
    fn fields_of_sglang_are_read_and_others_are_refused_by_name() {
        let new = NewWeights { checkpoint: "step-7".into(), version: None, aborts_requests: false };
        assert_eq!(read(&json!({"model_path": "step-7"})), Ok(new.clone()));
        let all = json!({
            "model_path": "step-7", "load_format": "auto", "abort_all_requests": true, "weight_version": "7", "is_async": false,
            "torch_empty_cache": true, "keep_pause": false, "recapture_cuda_graph": false, "token_step": 7, "flush_cache": true,
            "manifest": null,
        });
        assert_eq!(read(&all), Ok(NewWeights { version: Some("7".to_owned()), aborts_requests: true, ..new }));
        for (field, value) in [
            ("model_path", json!(null)),
            ("model_path", json!("")),
            ("weight_version", json!("v".repeat(100_000))),
            ("load_format", json!("dummy")),
            ("flush_cache", json!(false)),
            ("is_async", json!(true)),
            ("keep_pause", json!(true)),
            ("manifest", json!({})),
            ("model", json!("llm")),
        ] {
            let mut body = json!({"model_path": "step-7"});
            body[field] = value;
            assert_eq!(read(&body).unwrap_err().json()["error"]["param"], field);
        }
    }
}
