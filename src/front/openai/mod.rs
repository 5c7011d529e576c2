//! OpenAI's protocol: `/v1/models`, `/v1/completions`, `/v1/chat/completions`.
//!
//! A request becomes a [`generation::GenerateRequest`] for each choice. Models without a generator, for example Python models,
//! take the same requests as tensors ([`tensor_model`]).

mod choices;
mod complete;
mod error;
mod fields;
mod models;
mod parameters;
mod prompt;
mod reply;
mod tensor_model;

use std::sync::Arc;

use http::{Method, StatusCode};
use hyper::body::Incoming;
use serde_json::Value;
use serving::InferError;

use crate::kserve_http::{JSON, Reply, reply};
use crate::restricted::Api;
use crate::state::State;
pub(crate) use error::ApiError;
pub use fields::UnknownFields;

/// Turns conversations into prompts. The caller of the front provides it, because it knows where chat templates are.
pub trait ChatPrompts: Send + Sync {
    /// The prompt of a conversation for `model`, special tokens spelled out.
    ///
    /// # Errors
    /// When the model has no chat template, or it refuses the conversation.
    fn prompt(&self, model: &str, messages: &[Value]) -> Result<String, InferError>;
}

/// A place for [`ChatPrompts`] among plain settings.
#[derive(Clone, Default)]
pub struct Chat(pub Option<Arc<dyn ChatPrompts>>);

impl std::fmt::Debug for Chat {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.debug_tuple("Chat").field(&self.0.is_some()).finish()
    }
}

/// Whether a path is OpenAI's.
pub(crate) fn is_path(path: &str) -> bool {
    path == "/v1" || path.starts_with("/v1/")
}

/// Answers one request; an error is an answer too.
pub(crate) async fn handle(state: &Arc<State>, head: &http::request::Parts, body: Incoming) -> Reply {
    let result = answer(state, head, body).await;
    result.unwrap_or_else(|error| error.reply_with(&error.json()))
}

async fn answer(state: &Arc<State>, head: &http::request::Parts, body: Incoming) -> Result<Reply, ApiError> {
    let path = head.uri.path().trim_end_matches('/');
    let (is_post, is_get) = (head.method == Method::POST, head.method == Method::GET);
    let api = if is_post { Api::Inference } else { Api::Metadata };
    if let Err(denied) = state.config.http_restrictions.check(api, &head.headers) {
        return Err(ApiError::restricted(&denied.header, denied.is_bearer));
    }
    match path {
        "/v1/models" if is_get => Ok(json_reply(&models::list(state))),
        "/v1/completions" if is_post => complete::complete(state, &head.headers, body, false).await,
        "/v1/chat/completions" if is_post => complete::complete(state, &head.headers, body, true).await,
        "/v1/completions" | "/v1/chat/completions" | "/v1/models" => {
            let message = format!("Method {} is not allowed for {path}.", head.method);
            Err(ApiError::of_status(StatusCode::METHOD_NOT_ALLOWED, message))
        }
        _ => match path.strip_prefix("/v1/models/").filter(|_| is_get) {
            Some(name) => {
                models::entry(state, name).map(|entry| json_reply(&entry)).ok_or_else(|| ApiError::no_model(name))
            }
            None => {
                let message =
                    format!("Unknown path {path}: there are /v1/models, /v1/completions and /v1/chat/completions.");
                Err(ApiError::of_status(StatusCode::NOT_FOUND, message))
            }
        },
    }
}

fn json_reply(value: &Value) -> Reply {
    reply(StatusCode::OK, JSON, value.to_string().into_bytes())
}
