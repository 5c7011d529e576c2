//! Replies of the HTTP port: content types, errors, and CORS headers.

use http::header::{
    ACCEPT, ACCEPT_ENCODING, ACCESS_CONTROL_ALLOW_HEADERS, ACCESS_CONTROL_ALLOW_METHODS, ACCESS_CONTROL_ALLOW_ORIGIN,
    ACCESS_CONTROL_EXPOSE_HEADERS, ACCESS_CONTROL_MAX_AGE, ACCESS_CONTROL_REQUEST_HEADERS, CONTENT_LENGTH,
    CONTENT_TYPE, HeaderMap, HeaderValue, VARY, WWW_AUTHENTICATE,
};
use http::{Response, StatusCode};
use hyper::body::Body as _;
use serving::InferError;

use crate::api::status::{http_status, shown};
use crate::api::triton::http::json_writer::JsonWriter;
use crate::transport::body::ReplyBody;
use crate::transport::restricted::Denied;

/// An HTTP response of the front.
pub type Reply = Response<ReplyBody>;

pub(crate) const JSON: HeaderValue = HeaderValue::from_static("application/json");
pub(crate) const TEXT: HeaderValue = HeaderValue::from_static("text/plain");
pub(crate) const BINARY: HeaderValue = HeaderValue::from_static("application/octet-stream");
pub(crate) const BEARER: HeaderValue = HeaderValue::from_static("Bearer");
pub(crate) const EVENTS: HeaderValue = HeaderValue::from_static("text/event-stream; charset=utf-8");

pub(crate) fn reply(status: StatusCode, content_type: HeaderValue, body: impl Into<ReplyBody>) -> Reply {
    let mut reply = Response::new(body.into());
    *reply.status_mut() = status;
    reply.headers_mut().insert(CONTENT_TYPE, content_type);
    reply
}

/// The reply to a question about health. `name`: what was asked, for a client that reads JSON, as the protocol's specification
/// says; others get Triton's empty body.
pub(crate) fn probe(is_fine: bool, otherwise: StatusCode, name: Option<&str>) -> Reply {
    let status = if is_fine { StatusCode::OK } else { otherwise };
    match name {
        Some(name) => reply(status, JSON, format!("{{\"{name}\":{is_fine}}}").into_bytes()),
        None => reply(status, TEXT, ReplyBody::empty()),
    }
}

/// Whether the client says that it reads JSON.
pub(crate) fn wants_json(headers: &HeaderMap) -> bool {
    let kinds = headers.get_all(ACCEPT).iter().filter_map(|kinds| kinds.to_str().ok()).flat_map(|it| it.split(','));
    let mut names = kinds.map(|kind| kind.split(';').next().unwrap_or_default().trim());
    names.any(|name| matches!(name, "application/json" | "application/*" | "*/*"))
}

/// The reply without its body, for a HEAD request. `content-length` stays that of the body.
pub(crate) fn without_body(reply: Reply) -> Reply {
    let (mut head, body) = reply.into_parts();
    if let Some(length) = body.size_hint().exact() {
        head.headers.insert(CONTENT_LENGTH, length.into());
    }
    Response::from_parts(head, ReplyBody::empty())
}

pub(crate) fn plain_error(status: StatusCode, message: &str) -> Reply {
    reply(status, TEXT, error_text(message))
}

/// The reply to a request without the key of a restricted API.
pub(crate) fn denial(denied: Denied<'_>) -> Reply {
    let words = format!("This API is restricted, expecting header '{}'", denied.header);
    if !denied.is_bearer {
        return plain_error(StatusCode::FORBIDDEN, &words);
    }
    let mut reply = plain_error(StatusCode::UNAUTHORIZED, &words);
    reply.headers_mut().insert(WWW_AUTHENTICATE, BEARER);
    reply
}

/// The reply to a failed `infer` request. As in Triton, its content type is `text/plain`.
pub(crate) fn model_error(error: &InferError) -> Reply {
    plain_error(http_status(error.kind), &error.message)
}

/// The reply to an `infer` request in an unsupported coding, with the supported ones.
pub(crate) fn unknown_coding(error: &InferError) -> Reply {
    let mut reply = model_error(error);
    reply.headers_mut().insert(ACCEPT_ENCODING, HeaderValue::from_static("gzip, deflate"));
    reply
}

pub(crate) fn error_reply(error: &InferError) -> Reply {
    reply(http_status(error.kind), JSON, error_text(&error.message))
}

pub(crate) fn json_reply(text: Vec<u8>) -> Reply {
    reply(StatusCode::OK, JSON, text)
}

/// The body of an error reply: `{"error": message}`.
pub fn error_text(message: &str) -> Vec<u8> {
    let message = shown(message);
    let mut writer = JsonWriter::with_capacity(message.len() + 16);
    writer.begin_object();
    writer.member("error", message.as_bytes());
    writer.end_object();
    writer.finish()
}

/// The reply to a CORS preflight request.
pub(crate) fn preflight(origin: HeaderValue, headers: &HeaderMap) -> Reply {
    let mut reply = reply(StatusCode::NO_CONTENT, TEXT, ReplyBody::empty());
    let allowed = reply.headers_mut();
    allow_origin(allowed, origin);
    allowed.insert(ACCESS_CONTROL_ALLOW_METHODS, HeaderValue::from_static("GET, HEAD, POST, OPTIONS"));
    if let Some(names) = headers.get(ACCESS_CONTROL_REQUEST_HEADERS) {
        allowed.insert(ACCESS_CONTROL_ALLOW_HEADERS, names.clone());
    }
    allowed.insert(ACCESS_CONTROL_MAX_AGE, HeaderValue::from_static("600"));
    reply
}

/// Adds the CORS headers for pages of `origin`.
pub(crate) fn allow_origin(headers: &mut HeaderMap, origin: HeaderValue) {
    headers.insert(ACCESS_CONTROL_ALLOW_ORIGIN, origin);
    headers.append(VARY, HeaderValue::from_static("origin"));
    headers.insert(ACCESS_CONTROL_EXPOSE_HEADERS, HeaderValue::from_static("x-request-id, retry-after"));
}
