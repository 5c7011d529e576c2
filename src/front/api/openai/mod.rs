//! OpenAI's protocol (completions, chats, responses, models) and Anthropic's (messages).
//!
//! A request becomes a [`generation::GenerateRequest`] for each choice. Models without a generator, for example Python models,
//! take the same requests as tensors ([`tensor_model`]).

mod adapters;
mod anthropic;
mod anthropic_reply;
mod choices;
mod complete;
mod conversation;
mod error;
mod fields;
mod guide;
mod models;
mod not_served;
mod parameter_fields;
mod parameters;
mod prefix_cache;
mod prompt;
mod reply;
mod request;
mod respond;
mod responses;
mod responses_reply;
mod sleep;
mod tensor_model;
mod tokenizer_info;
mod tokens;
mod tools;
mod turn;
mod turn_plan;

use std::sync::Arc;

use http::header::{HeaderName, HeaderValue};
use http::{Method, StatusCode};
use hyper::body::Incoming;
use percent_encoding::percent_decode_str;
use serde_json::{Value, json};

use crate::api::request_key::drawn_number;
use crate::api::triton::http::reply::{JSON, Reply, TEXT, reply};
use crate::state::State;
use crate::transport::body::ReplyBody;
use crate::transport::restricted::Api;
pub(crate) use error::ApiError;

/// The paths of this module, for the error of an unknown one.
const PATHS: &str = "/v1/models, /v1/completions, /v1/chat/completions, /v1/completions/render, /v1/chat/completions/render, \
                     /v1/responses, /v1/messages, /v1/messages/count_tokens, /v1/load_lora_adapter, /v1/unload_lora_adapter, \
                     /tokenize, /detokenize, /tokenizer_info, /reset_prefix_cache, /sleep, /wake_up, /is_sleeping, /health, /ping and \
                     /version";

/// Client and server name a request by this header.
const REQUEST_ID: HeaderName = HeaderName::from_static("x-request-id");
/// The same for Anthropic's clients.
const ANTHROPIC_ID: HeaderName = HeaderName::from_static("request-id");

/// Whether a path belongs to this module.
pub(crate) fn is_path(path: &str) -> bool {
    let is_alone = matches!(
        path,
        "/v1"
            | "/tokenize"
            | "/detokenize"
            | "/tokenizer_info"
            | prefix_cache::RESET
            | "/health"
            | "/ping"
            | "/version"
    );
    is_alone || sleep::PATHS.contains(&path) || path.starts_with("/v1/") || not_served::ALONE.contains(&path)
}

/// Answers one request; an error is an answer too. The reply has the request's id, or a new one.
pub(crate) async fn handle(state: &Arc<State>, head: &http::request::Parts, body: Incoming) -> Reply {
    let result = answer(state, head, body).await;
    let is_anthropic = head.uri.path().starts_with("/v1/messages");
    let id = head.headers.get(REQUEST_ID).filter(|id| id.len() <= MAX_ID_BYTES).cloned();
    let id = id.or_else(|| HeaderValue::from_str(&format!("req-{:016x}", drawn_number())).ok());
    let body_of = |error: &ApiError| match is_anthropic {
        true => anthropic_reply::answered_error(error, id.as_ref()),
        false => error.json(),
    };
    let mut reply = result.unwrap_or_else(|error| error.reply_with(&body_of(&error)));
    if let Some(id) = id {
        if is_anthropic {
            reply.headers_mut().insert(ANTHROPIC_ID, id.clone());
        }
        reply.headers_mut().insert(REQUEST_ID, id);
    }
    reply
}

/// Longest request id of a client that is sent back.
const MAX_ID_BYTES: usize = 512;

async fn answer(state: &Arc<State>, head: &http::request::Parts, body: Incoming) -> Result<Reply, ApiError> {
    let path = head.uri.path().trim_end_matches('/');
    let (is_post, is_get) = (head.method == Method::POST, head.method == Method::GET);
    let restrictions = &state.config.http_restrictions;
    let api = match path {
        "/health" | "/ping" => Api::Health,
        prefix_cache::RESET => Api::ModelRepository,
        _ if adapters::PATHS.contains(&path) || sleep::PATHS.contains(&path) => Api::ModelRepository,
        _ if is_post => Api::Inference,
        // As at OpenAI, a key is needed for all of `/v1` or for none of it.
        _ if path.starts_with("/v1/") && restrictions.restricts(Api::Inference) => Api::Inference,
        _ => Api::Metadata,
    };
    if let Err(denied) = restrictions.check(api, &head.headers) {
        return Err(ApiError::restricted(denied.header, denied.is_bearer));
    }
    match path {
        "/v1/models" if is_get => Ok(json_reply(&models::list(state))),
        "/v1/completions" if is_post => complete::complete(state, &head.headers, body, false).await,
        "/v1/chat/completions" if is_post => complete::complete(state, &head.headers, body, true).await,
        "/v1/responses" if is_post => responses::responses(state, &head.headers, body).await,
        "/v1/messages" if is_post => anthropic::messages(state, &head.headers, body).await,
        "/v1/messages/count_tokens" if is_post => anthropic::count_tokens(state, &head.headers, body).await,
        "/v1/completions/render" if is_post => tokens::render(state, &head.headers, body, false).await,
        "/v1/chat/completions/render" if is_post => tokens::render(state, &head.headers, body, true).await,
        "/tokenize" if is_post => tokens::tokenize(state, &head.headers, body).await,
        "/detokenize" if is_post => tokens::detokenize(state, &head.headers, body).await,
        adapters::LOAD if is_post => adapters::load(state, &head.headers, body).await,
        adapters::UNLOAD if is_post => adapters::unload(state, &head.headers, body).await,
        sleep::SLEEP if is_post => sleep::sleep(state, head.uri.query()).await,
        sleep::WAKE if is_post => sleep::wake(state, head.uri.query()).await,
        sleep::IS_SLEEPING if is_get => sleep::is_sleeping(state, head.uri.query()),
        prefix_cache::RESET if is_post => prefix_cache::reset(state, head.uri.query()).await,
        "/tokenizer_info" if is_get => tokenizer_info::tokenizer_info(state, head.uri.query()).await,
        "/health" | "/ping" if is_get => Ok(health(state)),
        "/version" if is_get => Ok(json_reply(&json!({"version": env!("CARGO_PKG_VERSION")}))),
        adapters::LOAD
        | adapters::UNLOAD
        | sleep::SLEEP
        | sleep::WAKE
        | sleep::IS_SLEEPING
        | prefix_cache::RESET
        | "/v1/completions"
        | "/v1/chat/completions"
        | "/v1/models"
        | "/v1/responses"
        | "/v1/messages"
        | "/v1/messages/count_tokens"
        | "/v1/completions/render"
        | "/v1/chat/completions/render"
        | "/tokenize"
        | "/detokenize"
        | "/tokenizer_info"
        | "/health"
        | "/ping"
        | "/version" => {
            let message = format!("Method {} is not allowed for {path}.", head.method);
            Err(ApiError::of_status(StatusCode::METHOD_NOT_ALLOWED, message))
        }
        _ => match path.strip_prefix("/v1/models/").filter(|_| is_get) {
            Some(name) => {
                // Clients may send the slash of `ORG/NAME` as `%2F`.
                let name = percent_decode_str(name).decode_utf8_lossy();
                models::entry(state, &name).map(|entry| json_reply(&entry)).ok_or_else(|| ApiError::no_model(&name))
            }
            None => {
                let unknown = || format!("Unknown path {path}: there are {PATHS}.");
                let message = not_served::message(path).unwrap_or_else(unknown);
                Err(ApiError::of_status(StatusCode::NOT_FOUND, message))
            }
        },
    }
}

/// 200 when a model can run a step now, otherwise 503.
fn health(state: &State) -> Reply {
    let status = if models::can_answer(state) { StatusCode::OK } else { StatusCode::SERVICE_UNAVAILABLE };
    reply(status, TEXT, ReplyBody::empty())
}

fn json_reply(value: &Value) -> Reply {
    reply(StatusCode::OK, JSON, value.to_string().into_bytes())
}
