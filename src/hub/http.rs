//! Requests to the hub: redirects, the token, and which failures are worth another attempt.

use std::io::Read;
use std::sync::Arc;
use std::time::Duration;

use serde::de::DeserializeOwned;
use ureq::http::header::{ACCEPT_ENCODING, AUTHORIZATION, HeaderMap, LOCATION, RANGE, RETRY_AFTER};
use ureq::http::{Method, Request, Response};
use ureq::tls::{Certificate, RootCerts, TlsConfig};
use ureq::{Agent, Body};

use crate::HubError;
use crate::settings::{Settings, Token};

/// Redirects of one request.
const MAX_REDIRECTS: usize = 10;
/// Bytes of a JSON answer. That of a model with thousands of files has some megabytes.
const MAX_JSON_BYTES: u64 = 32 << 20;
/// Characters of a hub's message that are shown.
const MAX_MESSAGE: usize = 300;
const CONNECT_TIMEOUT: Duration = Duration::from_secs(10);
/// Time without a byte after which a connection counts as lost.
const READ_TIMEOUT: Duration = Duration::from_secs(60);
/// Attempts in a row without progress.
pub(crate) const MAX_ATTEMPTS: u32 = 5;
/// Longest pause between two attempts.
const MAX_PAUSE: Duration = Duration::from_secs(60);

/// Why a request failed.
#[derive(Debug)]
pub(crate) enum Failure {
    /// No connection, or one that was cut.
    Connection(String),
    /// A status other than success.
    Status(Refusal),
    /// Another attempt would fail, too.
    Final(HubError),
}

/// An answer that is no success.
#[derive(Debug)]
pub(crate) struct Refusal {
    pub(crate) status: u16,
    /// `x-error-code`, such as `GatedRepo`.
    pub(crate) code: String,
    /// The hub's own words, or the status in words.
    pub(crate) message: String,
    retry_after: Option<Duration>,
}

impl Failure {
    /// Whether another attempt may succeed.
    pub(crate) fn is_passing(&self) -> bool {
        match self {
            Self::Connection(_) => true,
            Self::Status(refusal) => matches!(refusal.status, 408 | 429 | 500..=599),
            Self::Final(_) => false,
        }
    }

    /// The error for a request to `url` that is not repeated.
    pub(crate) fn into_error(self, url: &str) -> HubError {
        let url = url.to_owned();
        match self {
            Self::Connection(reason) => HubError::Unreachable { url, reason },
            Self::Status(Refusal { status, message, .. }) => HubError::Status { url, status, message },
            Self::Final(error) => error,
        }
    }

    /// The pause before attempt `number`, from 1 on.
    pub(crate) fn pause(&self, number: u32, first: Duration) -> Duration {
        let grown = first * 2u32.pow(number.clamp(1, 10) - 1);
        let wanted = match self {
            Self::Status(Refusal { retry_after: Some(wanted), .. }) => *wanted,
            _ => Duration::ZERO,
        };
        grown.max(wanted).min(MAX_PAUSE)
    }
}

/// A client of one hub.
pub(crate) struct Client {
    agent: Agent,
    endpoint: String,
    token: Option<Token>,
    retry_pause: Duration,
}

impl Client {
    pub(crate) fn new(settings: &Settings) -> Self {
        // The system's certificates, or those of SSL_CERT_FILE. Without any, only requests over TLS fail, with that as the reason.
        let found = rustls_native_certs::load_native_certs().certs;
        let roots: RootCerts = found.iter().map(|root| Certificate::from_der(root.as_ref()).to_owned()).into();
        let tls = TlsConfig::builder()
            .root_certs(roots)
            .unversioned_rustls_crypto_provider(Arc::new(rustls::crypto::ring::default_provider()))
            .build();
        let agent = Agent::config_builder()
            .http_status_as_error(false)
            .max_redirects(0)
            .max_redirects_will_error(false)
            .user_agent(concat!("trireme/", env!("CARGO_PKG_VERSION")))
            .tls_config(tls)
            .timeout_connect(Some(CONNECT_TIMEOUT))
            .timeout_per_read(Some(READ_TIMEOUT))
            .build()
            .into();
        let Settings { endpoint, token, retry_pause, .. } = settings.clone();
        Self { agent, endpoint, token, retry_pause }
    }

    pub(crate) fn endpoint(&self) -> &str {
        &self.endpoint
    }

    pub(crate) fn has_token(&self) -> bool {
        self.token.is_some()
    }

    pub(crate) fn retry_pause(&self) -> Duration {
        self.retry_pause
    }

    /// The body of `url` from byte `from` on, and the answer's status and headers.
    pub(crate) fn get(&self, url: &str, from: u64) -> Result<Response<Body>, Failure> {
        self.send(&Method::GET, url, from)
    }

    /// The headers of the first response that has the hash of a file; redirects to the place of its bytes are not followed.
    pub(crate) fn head(&self, url: &str) -> Result<HeaderMap, Failure> {
        self.repeated(|| self.send(&Method::HEAD, url, 0)).map(|response| response.into_parts().0.headers)
    }

    /// A JSON answer.
    pub(crate) fn json<T: DeserializeOwned>(&self, url: &str) -> Result<T, Failure> {
        let bytes = self.repeated(|| {
            let mut bytes = Vec::new();
            let reader = self.get(url, 0)?.into_body().into_reader();
            let read = reader.take(MAX_JSON_BYTES + 1).read_to_end(&mut bytes);
            read.map_err(|error| Failure::Connection(error.to_string())).map(|_| bytes)
        })?;
        let wrong = |reason: String| Failure::Final(HubError::Answer { url: url.to_owned(), reason });
        if bytes.len() as u64 > MAX_JSON_BYTES {
            return Err(wrong(format!("it has more than {MAX_JSON_BYTES} bytes")));
        }
        serde_json::from_slice(&bytes).map_err(|error| wrong(error.to_string()))
    }

    /// Repeats a request that fails for a reason that may pass.
    fn repeated<T>(&self, request: impl Fn() -> Result<T, Failure>) -> Result<T, Failure> {
        let mut attempt = 1;
        loop {
            match request() {
                Err(failure) if failure.is_passing() && attempt < MAX_ATTEMPTS => {
                    std::thread::sleep(failure.pause(attempt, self.retry_pause));
                    attempt += 1;
                }
                result => return result,
            }
        }
    }

    fn send(&self, method: &Method, url: &str, from: u64) -> Result<Response<Body>, Failure> {
        let mut url = url.to_owned();
        for _ in 0..=MAX_REDIRECTS {
            let response = self.send_once(method, &url, from)?;
            let status = response.status().as_u16();
            let location = response.headers().get(LOCATION).filter(|_| matches!(status, 301..=303 | 307 | 308));
            let Some(location) = location else {
                return if status < 300 { Ok(response) } else { Err(Failure::Status(refusal(response))) };
            };
            let next = location.to_str().ok().and_then(|location| resolve(&url, location));
            let next = next.ok_or_else(|| {
                let reason = "its redirect leads to no address, or from https to http".to_owned();
                Failure::Final(HubError::Answer { url: url.clone(), reason })
            })?;
            if *method == Method::HEAD && (response.headers().contains_key("x-linked-etag") || !has_origin(&next, &url))
            {
                return Ok(response);
            }
            url = next;
        }
        Err(Failure::Final(HubError::Answer { url, reason: format!("it redirects more than {MAX_REDIRECTS} times") }))
    }

    fn send_once(&self, method: &Method, url: &str, from: u64) -> Result<Response<Body>, Failure> {
        let mut request = Request::builder().method(method).uri(url).header(ACCEPT_ENCODING, "identity");
        if from > 0 {
            request = request.header(RANGE, format!("bytes={from}-"));
        }
        // Files are on other hosts, which get no token.
        if let Some(Token(token)) = self.token.as_ref().filter(|_| has_origin(url, &self.endpoint)) {
            request = request.header(AUTHORIZATION, format!("Bearer {token}"));
        }
        let wrong = |reason: String| Failure::Final(HubError::Answer { url: url.to_owned(), reason });
        let request = request.body(()).map_err(|error| wrong(error.to_string()))?;
        self.agent.run(request).map_err(|error| match error {
            ureq::Error::BadUri(_) | ureq::Error::Http(_) | ureq::Error::InvalidProxyUrl => wrong(error.to_string()),
            error => Failure::Connection(error.to_string()),
        })
    }
}

fn refusal(response: Response<Body>) -> Refusal {
    let header = |name: &str| response.headers().get(name).and_then(|value| value.to_str().ok()).unwrap_or_default();
    let status = response.status();
    let words = match header("x-error-message") {
        "" => status.canonical_reason().unwrap_or("no reason"),
        message => message,
    };
    let seconds = header(RETRY_AFTER.as_str()).parse().ok().map(Duration::from_secs);
    Refusal {
        status: status.as_u16(),
        code: header("x-error-code").to_owned(),
        message: words.chars().filter(|character| !character.is_control()).take(MAX_MESSAGE).collect(),
        retry_after: seconds,
    }
}

/// Scheme, host and port of an address.
fn origin(url: &str) -> Option<(&str, &str)> {
    let (scheme, rest) = url.split_once("://")?;
    let host = rest.split(['/', '?', '#']).next()?;
    (matches!(scheme, "http" | "https") && !host.is_empty()).then_some((scheme, host))
}

fn has_origin(url: &str, other: &str) -> bool {
    origin(url).is_some_and(|its| Some(its) == origin(other))
}

/// The address that a redirect from `url` leads to; `None` if it has another scheme, or leaves TLS.
fn resolve(url: &str, location: &str) -> Option<String> {
    let (scheme, host) = origin(url)?;
    let next = match location {
        _ if location.starts_with("//") => format!("{scheme}:{location}"),
        _ if location.starts_with('/') => format!("{scheme}://{host}{location}"),
        _ => location.to_owned(),
    };
    let (next_scheme, _) = origin(&next)?;
    (next_scheme == "https" || scheme == "http").then_some(next)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn redirects_are_resolved_and_do_not_leave_tls() {
        let from = "https://hub:8/a/b?c";
        assert_eq!(resolve(from, "/d").as_deref(), Some("https://hub:8/d"));
        assert_eq!(resolve(from, "//cdn/d").as_deref(), Some("https://cdn/d"));
        assert_eq!(resolve(from, "https://cdn/d").as_deref(), Some("https://cdn/d"));
        assert_eq!(resolve("http://hub/a", "http://cdn/d").as_deref(), Some("http://cdn/d"));
        for refused in ["http://cdn/d", "file:///etc/passwd", "d/e", "https://"] {
            assert_eq!(resolve(from, refused), None, "{refused}");
        }
    }

    #[test]
    fn the_token_belongs_to_scheme_host_and_port() {
        assert!(has_origin("https://hub/a", "https://hub"));
        for other in ["http://hub/a", "https://hub:8/a", "https://hub.evil/a", "https://evil/https://hub", "hub"] {
            assert!(!has_origin(other, "https://hub"), "{other}");
        }
    }

    #[test]
    fn pauses_grow_to_a_bound() {
        let failure = Failure::Connection(String::new());
        let second = Duration::from_secs(1);
        assert_eq!([1, 2, 3].map(|number| failure.pause(number, second).as_secs()), [1, 2, 4]);
        assert_eq!(failure.pause(100, second), MAX_PAUSE);
    }
}
