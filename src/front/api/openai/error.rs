//! Errors in OpenAI's form.

use std::borrow::Cow;

use http::StatusCode;
use http::header::{HeaderValue, RETRY_AFTER, WWW_AUTHENTICATE};
use serde_json::{Value, json};
use serving::{ErrorKind, InferError, STOPPING};

use crate::api::status::{http_status, shown};
use crate::api::triton::http::reply::{BEARER, JSON, Reply, reply};
use crate::state::State;

/// OpenAI's code for a key that is missing or wrong.
const INVALID_KEY: &str = "invalid_api_key";

/// Seconds after which a client that was refused for lack of room may try again.
const RETRY_SECONDS: HeaderValue = HeaderValue::from_static("1");

/// An error of a request to an OpenAI or Anthropic endpoint.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct ApiError {
    pub(super) status: StatusCode,
    code: Option<&'static str>,
    param: Option<Cow<'static, str>>,
    pub(super) message: String,
    /// Set when a prompt is too long: its tokens, and how many the model takes.
    pub(super) overflow: Option<(usize, usize)>,
}

impl ApiError {
    /// A request with an invalid field.
    pub(crate) fn of_field(param: impl Into<Cow<'static, str>>, message: impl Into<String>) -> Self {
        let (status, param) = (StatusCode::BAD_REQUEST, Some(param.into()));
        Self { status, code: None, param, message: message.into(), overflow: None }
    }

    /// A prompt of `found` tokens, of which the model takes `most`. Clients recognise the error by its code and its words.
    pub(super) fn context_overflow(found: usize, most: usize) -> Self {
        let message = format!(
            "This model's maximum context length is {} tokens, and the prompt is too long: it has {found} tokens.",
            most + 1
        );
        let code = Some("context_length_exceeded");
        Self { code, overflow: Some((found, most)), ..Self::of_field("prompt", message) }
    }

    /// An error without a field.
    pub(super) fn of_status(status: StatusCode, message: impl Into<String>) -> Self {
        Self { status, code: None, param: None, message: message.into(), overflow: None }
    }

    /// A model that does not serve. A server that stops has unloaded its models.
    pub(super) fn no_model(state: &State, model: &str) -> Self {
        if state.is_draining() {
            return InferError::unavailable(STOPPING).into();
        }
        let message =
            format!("The model `{model}` does not exist or answers no text; `GET /v1/models` lists those that do.");
        let (status, code) = (StatusCode::NOT_FOUND, Some("model_not_found"));
        Self { status, code, param: Some("model".into()), message, overflow: None }
    }

    /// A request without the key that an API requires. `is_bearer`: the key is sent as OpenAI's clients send it.
    pub(super) fn restricted(header: &str, is_bearer: bool) -> Self {
        let message = format!("This API is restricted, expecting header '{header}'");
        let (status, code) = (StatusCode::UNAUTHORIZED, is_bearer.then_some(INVALID_KEY));
        Self { status, code, param: None, message, overflow: None }
    }

    /// OpenAI's name for the kind of error.
    fn kind(&self) -> &'static str {
        match self.status {
            status if status.is_server_error() => "server_error",
            StatusCode::TOO_MANY_REQUESTS => "rate_limit_error",
            _ => "invalid_request_error",
        }
    }

    /// The body of the reply, and of an event in a stream.
    pub(crate) fn json(&self) -> Value {
        json!({"error": {"message": shown(&self.message), "type": self.kind(), "param": self.param, "code": self.code}})
    }

    /// The reply with the error as `body`.
    pub(super) fn reply_with(&self, body: &Value) -> Reply {
        let mut reply = reply(self.status, JSON, body.to_string().into_bytes());
        if self.code == Some(INVALID_KEY) {
            reply.headers_mut().insert(WWW_AUTHENTICATE, BEARER);
        }
        if matches!(self.status, StatusCode::SERVICE_UNAVAILABLE | StatusCode::TOO_MANY_REQUESTS) {
            reply.headers_mut().insert(RETRY_AFTER, RETRY_SECONDS);
        }
        reply
    }
}

impl From<InferError> for ApiError {
    fn from(error: InferError) -> Self {
        let status = match error.kind {
            ErrorKind::Unsupported => StatusCode::BAD_REQUEST,
            kind => http_status(kind),
        };
        Self::of_status(status, error.message)
    }
}
