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
pub(crate) mod endpoint;
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
mod weights;

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
use endpoint::Endpoint;
pub(crate) use error::ApiError;

/// Client and server name a request by this header.
const REQUEST_ID: HeaderName = HeaderName::from_static("x-request-id");
/// The same for Anthropic's clients.
const ANTHROPIC_ID: HeaderName = HeaderName::from_static("request-id");

/// Whether a path belongs to this module.
pub(crate) fn is_path(path: &str) -> bool {
    Endpoint::of(path).is_some() || path == "/v1" || path.starts_with("/v1/") || not_served::ALONE.contains(&path)
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
    let (endpoint, query) = (Endpoint::of(path), head.uri.query());
    let restrictions = &state.config.http_restrictions;
    let api = match endpoint.and_then(Endpoint::api) {
        Some(api) => api,
        None if head.method == Method::POST => Api::Inference,
        // As at OpenAI, a key is needed for all of `/v1` or for none of it.
        None if path.starts_with("/v1/") && restrictions.restricts(Api::Inference) => Api::Inference,
        None => Api::Metadata,
    };
    if let Err(denied) = restrictions.check(api, &head.headers) {
        return Err(ApiError::restricted(denied.header, denied.is_bearer));
    }
    let Some(endpoint) = endpoint else { return without_endpoint(state, head, path) };
    if head.method != endpoint.method() {
        let message = format!("Method {} is not allowed for {path}.", head.method);
        return Err(ApiError::of_status(StatusCode::METHOD_NOT_ALLOWED, message));
    }
    match endpoint {
        Endpoint::Models => Ok(json_reply(&models::list(state))),
        Endpoint::Completions => complete::complete(state, &head.headers, body, false).await,
        Endpoint::ChatCompletions => complete::complete(state, &head.headers, body, true).await,
        Endpoint::Responses => responses::responses(state, &head.headers, body).await,
        Endpoint::Messages => anthropic::messages(state, &head.headers, body).await,
        Endpoint::CountTokens => anthropic::count_tokens(state, &head.headers, body).await,
        Endpoint::RenderCompletions => tokens::render(state, &head.headers, body, false).await,
        Endpoint::RenderChatCompletions => tokens::render(state, &head.headers, body, true).await,
        Endpoint::Tokenize => tokens::tokenize(state, &head.headers, body).await,
        Endpoint::Detokenize => tokens::detokenize(state, &head.headers, body).await,
        Endpoint::LoadAdapter => adapters::load(state, &head.headers, body).await,
        Endpoint::UnloadAdapter => adapters::unload(state, &head.headers, body).await,
        Endpoint::Sleep => sleep::sleep(state, query).await,
        Endpoint::WakeUp => sleep::wake(state, query).await,
        Endpoint::IsSleeping => sleep::is_sleeping(state, query),
        Endpoint::UpdateWeights => Ok(weights::update(state, head, body).await),
        Endpoint::ResetPrefixCache => prefix_cache::reset(state, query).await,
        Endpoint::TokenizerInfo => tokenizer_info::tokenizer_info(state, query).await,
        Endpoint::Health | Endpoint::Ping => Ok(health(state)),
        Endpoint::Version => Ok(json_reply(&json!({"version": env!("CARGO_PKG_VERSION")}))),
    }
}

/// The answer to a path of this module that is no endpoint: a model of the list, or an error.
fn without_endpoint(state: &State, head: &http::request::Parts, path: &str) -> Result<Reply, ApiError> {
    match path.strip_prefix("/v1/models/").filter(|_| head.method == Method::GET) {
        Some(name) => {
            // Clients may send the slash of `ORG/NAME` as `%2F`.
            let name = percent_decode_str(name).decode_utf8_lossy();
            models::entry(state, &name).map(|entry| json_reply(&entry)).ok_or_else(|| ApiError::no_model(state, &name))
        }
        None => {
            let unknown = || format!("Unknown path {path}: there are {}.", Endpoint::all_paths());
            let message = not_served::message(path).unwrap_or_else(unknown);
            Err(ApiError::of_status(StatusCode::NOT_FOUND, message))
        }
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
