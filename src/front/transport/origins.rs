//! Protection against cross-site requests.
//!
//! A web page can make a browser send requests to any server, including one on the user's machine, although it cannot read the
//! responses. Requests from pages of other origins are refused unless the origin is allowed. Clients other than browsers send
//! no `Origin`.

use std::str::FromStr;

use http::header::{HOST, HeaderMap, HeaderName, HeaderValue, ORIGIN};
use http::{Method, Uri};

const SEC_FETCH_SITE: HeaderName = HeaderName::from_static("sec-fetch-site");

/// Origins that are allowed in addition to the server's own.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Origins {
    all: bool,
    listed: Vec<String>,
}

impl FromStr for Origins {
    type Err = String;

    /// Parses a list such as `https://example.org,http://localhost:3000`, or `*` for all origins.
    fn from_str(text: &str) -> Result<Self, String> {
        let mut origins = Self::default();
        for origin in text.split(',').map(str::trim).filter(|origin| !origin.is_empty()) {
            if origin == "*" {
                origins.all = true;
            } else if origin != "null" && authority(origin).is_none_or(|rest| rest.is_empty() || rest.contains('/')) {
                return Err(format!("`{origin}` is no origin, expected `SCHEME://HOST[:PORT]`, `null` or `*`"));
            } else {
                origins.listed.push(origin.to_owned());
            }
        }
        Ok(origins)
    }
}

impl Origins {
    /// The origin of a request if it is allowed, for `Access-Control-Allow-Origin`. `None` for other origins and for clients that
    /// send none.
    pub fn cors(&self, headers: &HeaderMap) -> Option<HeaderValue> {
        let origin = headers.get(ORIGIN)?;
        let text = origin.to_str().ok()?;
        let is_allowed = self.all || self.listed.iter().any(|listed| listed.eq_ignore_ascii_case(text));
        is_allowed.then(|| origin.clone())
    }

    /// Checks the origin of a request. `GET` and `HEAD` are always allowed, because they change nothing and are cheap.
    ///
    /// # Errors
    /// When the origin is not allowed, with the message for the client.
    pub fn check(&self, method: &Method, uri: &Uri, headers: &HeaderMap) -> Result<(), String> {
        if self.all || matches!(*method, Method::GET | Method::HEAD) {
            return Ok(());
        }
        let Some(origin) = headers.get(ORIGIN) else {
            return match headers.get(SEC_FETCH_SITE) {
                Some(site) if site == "cross-site" => Err(refusal("another site")),
                _ => Ok(()),
            };
        };
        let origin = origin.to_str().unwrap_or("?");
        let host = || headers.get(HOST)?.to_str().ok();
        let own = uri.authority().map(|authority| authority.as_str()).or_else(host);
        let is_own = authority(origin).zip(own).is_some_and(|(origin, own)| origin.eq_ignore_ascii_case(own));
        if is_own || self.listed.iter().any(|listed| listed.eq_ignore_ascii_case(origin)) {
            return Ok(());
        }
        let shown: String = origin.chars().filter(|it| !it.is_control()).take(256).collect();
        Err(refusal(&format!("'{shown}'")))
    }
}

fn authority(origin: &str) -> Option<&str> {
    origin.split_once("://").map(|(_, authority)| authority)
}

fn refusal(origin: &str) -> String {
    format!("a web page of {origin} may not send this request; the server allows origins with --http-allowed-origins")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn allows(allowed: &str, method: Method, headers: &[(HeaderName, &str)]) -> bool {
        let origins: Origins = allowed.parse().unwrap();
        let headers = headers.iter().map(|(name, value)| (name.clone(), value.parse().unwrap())).collect();
        origins.check(&method, &Uri::from_static("/v2/logging"), &headers).is_ok()
    }

    #[test]
    fn a_page_of_another_server_is_refused_unless_it_is_allowed() {
        let host = (HOST, "localhost:8000");
        let from = |origin| [host.clone(), (ORIGIN, origin)];
        assert!(allows("", Method::POST, std::slice::from_ref(&host)), "clients other than browsers");
        assert!(allows("", Method::POST, &from("http://localhost:8000")));
        assert!(allows("", Method::POST, &from("https://LocalHost:8000")), "behind a proxy that terminates TLS");
        assert!(allows("", Method::GET, &from("http://evil.example")));
        for origin in
            ["http://evil.example", "http://localhost:3000", "null", "x", "http://localhost:8000.evil.example"]
        {
            assert!(!allows("", Method::POST, &from(origin)), "{origin}");
            assert!(allows("*", Method::POST, &from(origin)), "{origin}");
        }
        assert!(allows("http://a, http://localhost:3000", Method::POST, &from("http://localhost:3000")));
        assert!(!allows("http://localhost:3000", Method::DELETE, &from("https://localhost:3000")));
        assert!(allows("null", Method::PUT, &from("null")));
        assert!(!allows("", Method::POST, &[host.clone(), (SEC_FETCH_SITE, "cross-site")]));
        assert!(allows("", Method::POST, &[host, (SEC_FETCH_SITE, "same-origin")]));
    }

    #[test]
    fn an_invalid_origin_is_refused_by_name() {
        for text in ["example.org", "http://", "http://a/b"] {
            assert!(text.parse::<Origins>().unwrap_err().contains(&format!("`{text}` is no origin")));
        }
    }
}
