//! The numbers that an answer depends on beside its request: those of its ids, the time of its creation, and the seed of a request
//! without one. The relay ([`crate::relay`]) chooses them for each request, so that a request that it sends again gets the same answer.

use std::cell::Cell;
use std::fmt;
use std::time::{SystemTime, UNIX_EPOCH};

use http::header::{HeaderMap, HeaderName, HeaderValue};

/// The header by which the relay sends a key. Other clients' headers of this name have no effect.
pub(crate) const HEADER: HeaderName = HeaderName::from_static("trireme-request-key");

tokio::task_local! {
    static DRAWS: Draws;
}

/// The numbers of one request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct RequestKey {
    number: u64,
    /// Seconds since 1970.
    created: u64,
}

/// A key, and how many numbers were drawn from it.
struct Draws {
    key: RequestKey,
    count: Cell<u64>,
}

impl RequestKey {
    /// The key of a new request.
    pub(crate) fn new() -> Self {
        let since = since_1970();
        Self { number: mix(since.as_nanos() as u64), created: since.as_secs() }
    }

    /// The value of [`HEADER`].
    pub(crate) fn header(self) -> HeaderValue {
        HeaderValue::from_str(&self.to_string()).expect("digits and a dash are allowed in a header")
    }

    /// The key among the headers of a request; `None` without one or if it is malformed.
    pub(crate) fn of(headers: &HeaderMap) -> Option<Self> {
        Self::parse(headers.get(HEADER)?.to_str().ok()?)
    }

    /// Reads the text of a key; `None` if it is malformed.
    pub(crate) fn parse(text: &str) -> Option<Self> {
        let (number, created) = text.split_once('-')?;
        Some(Self { number: u64::from_str_radix(number, 16).ok()?, created: created.parse().ok()? })
    }

    /// Runs the handler of a request, which draws its numbers from this key.
    pub(crate) async fn scope<F: Future>(self, handler: F) -> F::Output {
        DRAWS.scope(Draws { key: self, count: Cell::new(0) }, handler).await
    }
}

impl fmt::Display for RequestKey {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "{:016x}-{}", self.number, self.created)
    }
}

/// A different number for each request, and for each draw within one.
pub(crate) fn drawn_number() -> u64 {
    let of_key = DRAWS.try_with(|draws| {
        let count = draws.count.replace(draws.count.get() + 1);
        mix(draws.key.number.wrapping_add(count))
    });
    of_key.unwrap_or_else(|_| mix(since_1970().as_nanos() as u64))
}

/// The time of an answer's creation in seconds since 1970.
pub(crate) fn created() -> u64 {
    DRAWS.try_with(|draws| draws.key.created).unwrap_or_else(|_| since_1970().as_secs())
}

fn since_1970() -> std::time::Duration {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default()
}

/// Spreads a number over all bits.
fn mix(number: u64) -> u64 {
    number.wrapping_mul(0x9e37_79b9_7f4a_7c15)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_request_that_is_sent_again_draws_the_same_numbers() {
        let key = RequestKey::new();
        let mut headers = HeaderMap::new();
        assert_eq!(RequestKey::of(&headers), None);
        headers.insert(HEADER, key.header());
        assert_eq!(RequestKey::of(&headers), Some(key));
        let draw = || async { (drawn_number(), drawn_number(), created()) };
        let first = key.scope(draw()).await;
        assert_ne!(first.0, first.1);
        assert_eq!(first.2, key.created);
        assert_eq!(RequestKey::of(&headers).unwrap().scope(draw()).await, first);
        assert_ne!(draw().await.0, first.0, "without a key, numbers differ");
    }
}
