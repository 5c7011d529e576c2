//! Requests with an `Idempotency-Key`: the same request with the same key is computed once, and has one answer.
//!
//! A key belongs to its path and to the API key of its client, so that no client gets another client's answer. The request goes on when its
//! client leaves, because the client will ask again.

use std::path::PathBuf;
use std::sync::Arc;

use bytes::Bytes;
use http::{HeaderMap, HeaderName, HeaderValue, Response, StatusCode};
use http_body_util::BodyExt as _;
use ring::digest::{Context, SHA256};

use crate::api::triton::http::reply::Reply;
use crate::relay::exchange::Exchange;
use crate::relay::journal::{Answer, Digest, Journals, Turn, Writer, digest_of};
use crate::relay::kept::MAX_REQUEST_BYTES;
use crate::relay::request::Protocol;
use crate::transport::body::ReplyBody;
use crate::transport::restricted::Restrictions;

/// The header of a request that may be sent again.
const IDEMPOTENCY_KEY: HeaderName = HeaderName::from_static("idempotency-key");

/// The header of an answer that was computed before.
const REPLAYED: HeaderName = HeaderName::from_static("idempotent-replayed");

/// Longest key.
const MAX_KEY_BYTES: usize = 255;

/// An `Idempotency-Key` that is refused.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
#[error("the header Idempotency-Key has {0} bytes: a key has 1 to {MAX_KEY_BYTES}")]
pub(crate) struct BadKey(usize);

/// The key among the headers of a request; `None` without one.
pub(crate) fn key_of(headers: &HeaderMap) -> Result<Option<HeaderValue>, BadKey> {
    match headers.get(IDEMPOTENCY_KEY) {
        Some(key) if !(1..=MAX_KEY_BYTES).contains(&key.len()) => Err(BadKey(key.len())),
        key => Ok(key.cloned()),
    }
}

/// What is known of requests with a key.
#[derive(Debug)]
pub(crate) struct Idempotency {
    journals: Arc<Journals>,
    /// The headers in which clients send API keys.
    key_headers: Vec<String>,
}

impl Idempotency {
    /// With the answers that an earlier relay has left in `directory`.
    pub(crate) fn new(restrictions: &Restrictions, directory: Option<PathBuf>) -> Self {
        let key_headers = restrictions.key_headers().into_iter().map(str::to_owned).collect();
        Self { journals: Journals::open(directory), key_headers }
    }

    /// The name of a request: its path, its key, and the API keys of its client.
    fn name_of(&self, head: &http::request::Parts, key: &HeaderValue) -> Digest {
        let path = head.uri.path_and_query().map_or("", |path| path.as_str());
        let mut parts = vec![path.as_bytes(), key.as_bytes()];
        for header in &self.key_headers {
            parts.push(header.as_bytes());
            parts.extend(head.headers.get_all(header).iter().map(HeaderValue::as_bytes));
        }
        digest_of(parts)
    }

    /// Answers a request with `key`.
    pub(crate) async fn answer(&self, mut exchange: Exchange, key: &HeaderValue) -> Reply {
        let protocol = Protocol::of(exchange.head.uri.path());
        let request = match digest_of_body(&exchange).await {
            Ok(Some(request)) => request,
            Ok(None) => {
                let message = format!(
                    "a request with an Idempotency-Key is kept: it may have {MAX_REQUEST_BYTES} bytes, and all together less than \
                     the relay has room for; leave the key out"
                );
                return protocol.refused(StatusCode::PAYLOAD_TOO_LARGE, &message);
            }
            Err(error) => {
                let message = format!("the body of the request broke off: {error}");
                return protocol.refused(StatusCode::BAD_REQUEST, &message);
            }
        };
        let name = self.name_of(&exchange.head, key);
        loop {
            match self.journals.begin(name, request) {
                Turn::First(writer) => {
                    exchange.key = writer.key();
                    // In a task of its own, which goes on when the client leaves.
                    let task = tokio::spawn(async move { kept(exchange.answer().await, writer).await });
                    let failed = |_| Err("the relay failed to answer; see its log".to_owned());
                    return task.await.unwrap_or_else(failed).unwrap_or_else(|message| protocol.unavailable(&message));
                }
                Turn::Again(key) => {
                    exchange.key = key;
                    return exchange.answer().await.unwrap_or_else(|message| protocol.unavailable(&message));
                }
                Turn::Wait(mut end) => drop(end.changed().await),
                Turn::Answered(answer) => return replayed(&answer),
                Turn::OtherRequest => {
                    let message = "another request had this Idempotency-Key; give each request a key of its own";
                    return protocol.refused(StatusCode::UNPROCESSABLE_ENTITY, message);
                }
                Turn::TooMany => {
                    return protocol
                        .unavailable("too many requests with an Idempotency-Key are being answered; try again later");
                }
            }
        }
    }
}

/// Reads the whole body. `None` if it cannot be kept.
async fn digest_of_body(exchange: &Exchange) -> hyper::Result<Option<Digest>> {
    let (mut body, mut context) = (exchange.body.read(), Context::new(&SHA256));
    while let Some(frame) = body.frame().await {
        if let Some(data) = frame?.data_ref() {
            context.update(data);
        }
        if !exchange.body.is_kept() {
            return Ok(None);
        }
    }
    let mut found = Digest::default();
    found.copy_from_slice(context.finish().as_ref());
    Ok(Some(found))
}

/// Keeps an answer that is here as a whole. Errors are forgotten, so that the request is computed when it comes again.
async fn kept(answered: Result<Reply, String>, writer: Writer) -> Result<Reply, String> {
    let reply = answered?;
    if reply.status() != StatusCode::OK {
        return Ok(reply);
    }
    let (head, body) = reply.into_parts();
    let ReplyBody::Parts(parts) = body else {
        writer.keep_numbers();
        return Ok(Response::from_parts(head, body));
    };
    let body = Bytes::from(Vec::from(parts).concat());
    writer.keep(Answer { headers: head.headers.clone(), body: body.clone() });
    Ok(Response::from_parts(head, body.into()))
}

fn replayed(answer: &Answer) -> Reply {
    let mut reply = Response::new(answer.body.clone().into());
    *reply.headers_mut() = answer.headers.clone();
    reply.headers_mut().insert(REPLAYED, HeaderValue::from_static("true"));
    reply
}

#[cfg(test)]
mod tests {
    use super::*;

    fn head(path: &str, headers: &[(&'static str, &str)]) -> http::request::Parts {
        let mut request = http::Request::builder().uri(path);
        for (name, value) in headers {
            request = request.header(*name, *value);
        }
        request.body(()).unwrap().into_parts().0
    }

    #[test]
    fn a_key_belongs_to_its_path_and_to_the_api_key_of_its_client() {
        let mut restrictions = Restrictions::default();
        restrictions.add("inference:team-key=secret", |value| Ok(vec![value.to_owned()])).unwrap();
        let idempotency = Idempotency::new(&restrictions, None);
        let name = |path: &str, headers: &[(&'static str, &str)], key: &'static str| {
            idempotency.name_of(&head(path, headers), &HeaderValue::from_static(key))
        };
        let names = [
            name("/v1/completions", &[], "k"),
            name("/v1/completions", &[], "l"),
            name("/v1/chat/completions", &[], "k"),
            name("/v1/completions", &[("authorization", "Bearer a")], "k"),
            name("/v1/completions", &[("authorization", "Bearer b")], "k"),
            name("/v1/completions", &[("x-api-key", "a")], "k"),
            name("/v1/completions", &[("team-key", "a")], "k"),
        ];
        for (at, one) in names.iter().enumerate() {
            assert!(!names[at + 1..].contains(one), "{at}");
        }
        assert_eq!(names[0], name("/v1/completions", &[("user-agent", "x")], "k"));
    }

    #[test]
    fn keys_out_of_bounds_are_refused() {
        let of = |key: &str| key_of(&HeaderMap::from_iter([(IDEMPOTENCY_KEY, key.parse().unwrap())]));
        assert_eq!(of(""), Err(BadKey(0)));
        assert_eq!(of(&"k".repeat(MAX_KEY_BYTES + 1)), Err(BadKey(MAX_KEY_BYTES + 1)));
        assert!(matches!(of(&"k".repeat(MAX_KEY_BYTES)), Ok(Some(_))));
        assert_eq!(key_of(&HeaderMap::new()), Ok(None));
    }
}
