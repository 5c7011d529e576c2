//! The page at `/` and `/ui`: status, playground, reference of the API and snippets for clients.
//!
//! Its files are part of the program and need no key. In the browser it calls the API as any other client does, with the same keys,
//! and it changes nothing on the server.

mod status;

use bytes::Bytes;
use http::header::{
    CACHE_CONTROL, CONTENT_SECURITY_POLICY, HeaderName, HeaderValue, LOCATION, REFERRER_POLICY, X_CONTENT_TYPE_OPTIONS,
    X_FRAME_OPTIONS,
};
use http::request::Parts;
use http::{Method, StatusCode};

use crate::api::triton::http::reply::{JSON, Reply, denial, plain_error, reply};
use crate::state::State;
use crate::transport::restricted::Api;

/// A file of the page: its path, its content type and its content.
type File = (&'static str, &'static str, &'static str);

const HTML: &str = "text/html; charset=utf-8";
const CSS: &str = "text/css; charset=utf-8";
const JAVASCRIPT: &str = "text/javascript; charset=utf-8";

const FILES: [File; 12] = [
    ("/", HTML, include_str!("index.html")),
    ("/ui", HTML, include_str!("index.html")),
    ("/ui/page.css", CSS, include_str!("page.css")),
    ("/ui/icon.svg", "image/svg+xml", include_str!("icon.svg")),
    ("/ui/main.js", JAVASCRIPT, include_str!("main.js")),
    ("/ui/http.js", JAVASCRIPT, include_str!("http.js")),
    ("/ui/dom.js", JAVASCRIPT, include_str!("dom.js")),
    ("/ui/figures.js", JAVASCRIPT, include_str!("figures.js")),
    ("/ui/status.js", JAVASCRIPT, include_str!("status.js")),
    ("/ui/playground.js", JAVASCRIPT, include_str!("playground.js")),
    ("/ui/answer.js", JAVASCRIPT, include_str!("answer.js")),
    ("/ui/clients.js", JAVASCRIPT, include_str!("clients.js")),
];
/// The two files that are not in `FILES`' folder.
const REFERENCE: [File; 2] = [
    ("/ui/reference.js", JAVASCRIPT, include_str!("reference.js")),
    ("/ui/openapi.json", "application/json", include_str!(concat!(env!("OUT_DIR"), "/openapi.json"))),
];
const STATUS: &str = "/ui/status.json";

/// Only files of this server are loaded, no other page may frame this one, and nothing inline runs.
const POLICY: &str = "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; base-uri 'none'; \
                      form-action 'none'; frame-ancestors 'none'";
const HEADERS: [(HeaderName, &str); 5] = [
    (CONTENT_SECURITY_POLICY, POLICY),
    (X_CONTENT_TYPE_OPTIONS, "nosniff"),
    (X_FRAME_OPTIONS, "DENY"),
    (REFERRER_POLICY, "no-referrer"),
    // The files change with the program.
    (CACHE_CONTROL, "no-cache"),
];

/// Whether a path belongs to the page.
pub(crate) fn is_path(path: &str) -> bool {
    path == "/" || path == "/ui" || path.starts_with("/ui/")
}

/// Answers one request.
pub(crate) fn handle(state: &State, head: &Parts) -> Reply {
    let mut reply = answer(state, head);
    for (name, value) in HEADERS {
        reply.headers_mut().insert(name, HeaderValue::from_static(value));
    }
    reply
}

fn answer(state: &State, head: &Parts) -> Reply {
    let path = head.uri.path();
    let file = FILES.iter().chain(&REFERENCE).find(|(known, ..)| *known == path);
    if file.is_none() && !matches!(path, STATUS | "/ui/") {
        return plain_error(StatusCode::NOT_FOUND, "Not Found");
    }
    if !matches!(head.method, Method::GET | Method::HEAD) {
        return plain_error(StatusCode::METHOD_NOT_ALLOWED, "Method Not Allowed");
    }
    match file {
        Some(&(_, kind, content)) => {
            reply(StatusCode::OK, HeaderValue::from_static(kind), Bytes::from_static(content.as_bytes()))
        }
        None if path == STATUS => status_reply(state, head),
        None => to_page(),
    }
}

/// The status shows what metadata and metrics show, so it needs the keys of both.
fn status_reply(state: &State, head: &Parts) -> Reply {
    let restrictions = &state.config.http_restrictions;
    let checked = [Api::Metadata, Api::Metrics].into_iter().try_for_each(|api| restrictions.check(api, &head.headers));
    match checked {
        Ok(()) => reply(StatusCode::OK, JSON, status::status(state, &head.headers).to_string().into_bytes()),
        Err(denied) => denial(denied),
    }
}

/// The files' addresses are relative, and wrong below `/ui/`.
fn to_page() -> Reply {
    let mut reply = plain_error(StatusCode::PERMANENT_REDIRECT, "See ../ui");
    reply.headers_mut().insert(LOCATION, HeaderValue::from_static("../ui"));
    reply
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_root_and_ui_are_paths_of_the_page() {
        for path in ["/", "/ui", "/ui/", "/ui/main.js", "/ui/nothing"] {
            assert!(is_path(path), "{path}");
        }
        for path in ["", "/v2", "/v1/models", "/uix", "/metrics", "//"] {
            assert!(!is_path(path), "{path}");
        }
    }

    #[test]
    fn the_page_names_no_other_host_and_has_nothing_inline() {
        for (path, kind, content) in FILES {
            let hosts =
                content.match_indices("://").map(|(at, _)| &content[at.saturating_sub(8)..content.len().min(at + 24)]);
            let foreign: Vec<&str> =
                hosts.filter(|found| !found.contains("www.w3.org") && !found.contains("${")).collect();
            assert!(foreign.is_empty(), "{path}: {foreign:?}");
            if kind == HTML {
                let inline = [" style=", "<style", "<script>", " onclick=", "javascript:"];
                assert_eq!(inline.into_iter().find(|word| content.contains(word)), None, "{path}");
            }
        }
    }

    #[test]
    fn the_reference_is_the_description_of_the_documents() {
        let reference: serde_json::Value = serde_json::from_str(REFERENCE[1].2).unwrap();
        let yaml = include_str!("../../../../docs/openapi.yaml");
        let paths = reference["paths"].as_object().unwrap();
        let in_yaml = yaml.lines().filter_map(|line| line.strip_prefix("  /")?.strip_suffix(':'));
        assert_eq!(paths.keys().map(|path| &path[1..]).collect::<Vec<_>>(), in_yaml.collect::<Vec<_>>());
        assert_eq!(reference["components"]["schemas"]["Sampling"]["properties"]["n"]["maximum"], 128);
    }
}
