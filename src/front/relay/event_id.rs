//! The ids of a stream's events. A client that has lost its connection sends the last one as `Last-Event-ID` with the same request, and
//! gets the events after it.
//!
//! An id has all that this takes: the numbers that the answer depends on, how many events the client has, and their hash. So nothing
//! has to be kept for it, and it is of use to any relay in front of the same model.

use std::hash::{DefaultHasher, Hash, Hasher};

use http::{HeaderMap, HeaderName};

use crate::api::request_key::RequestKey;

/// Most events of a stream that is sent again: 8 bytes are kept of each.
pub(crate) const MAX_EVENTS: usize = 1 << 20;

/// The header of a request for the rest of a stream.
const LAST_EVENT_ID: HeaderName = HeaderName::from_static("last-event-id");

/// Longest id that is read.
const MAX_BYTES: usize = 1024;

/// Most choices of a stream whose events have ids, and one place for events without a choice.
const MAX_PLACES: usize = 1 + 128;

/// The events of a stream up to one of them.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct EventId {
    /// The numbers that the answer draws.
    pub(crate) key: RequestKey,
    /// Number of events without a choice, then of those of each choice.
    pub(crate) counts: Vec<usize>,
    /// The sum of the [`part_of_hash`] of each place with events.
    pub(crate) hash: u64,
}

/// Why a `Last-Event-ID` cannot be used.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
pub(crate) enum BadEventId {
    #[error("the header Last-Event-ID has {0} bytes, and ids of events have {MAX_BYTES} at most; leave it out")]
    TooLong(usize),
    #[error(
        "the header Last-Event-ID is not the id of an event of this server; leave it out to have the stream from its \
         beginning"
    )]
    Malformed,
    #[error(
        "the header Last-Event-ID names an event behind number {MAX_EVENTS}, and such a stream does not go on; leave it out"
    )]
    TooFar,
}

impl EventId {
    /// The id among the headers of a request; `None` without one.
    pub(crate) fn of(headers: &HeaderMap) -> Result<Option<Self>, BadEventId> {
        let Some(text) = headers.get(LAST_EVENT_ID) else { return Ok(None) };
        if text.len() > MAX_BYTES {
            return Err(BadEventId::TooLong(text.len()));
        }
        let text = text.to_str().map_err(|_| BadEventId::Malformed)?;
        Self::parse(text).map(Some)
    }

    fn parse(text: &str) -> Result<Self, BadEventId> {
        let parse = || {
            let (key, rest) = text.split_at_checked(text.match_indices('-').nth(1)?.0)?;
            let (hash, counts) = rest[1..].split_once('-')?;
            let counts: Option<Vec<usize>> = counts.split('.').map(|count| count.parse().ok()).collect();
            let counts = counts.filter(|counts| counts.len() <= MAX_PLACES)?;
            Some(Self { key: RequestKey::parse(key)?, counts, hash: u64::from_str_radix(hash, 16).ok()? })
        };
        let id = parse().ok_or(BadEventId::Malformed)?;
        let num_events = id.counts.iter().fold(0, |sum: usize, count| sum.saturating_add(*count));
        if num_events > MAX_EVENTS { Err(BadEventId::TooFar) } else { Ok(id) }
    }

    /// The text, for the `id` of an event; `None` for a stream of too many choices.
    pub(crate) fn text(&self) -> Option<String> {
        if self.counts.len() > MAX_PLACES {
            return None;
        }
        let counts: Vec<String> = self.counts.iter().map(usize::to_string).collect();
        Some(format!("{}-{:016x}-{}", self.key, self.hash, counts.join("."))).filter(|text| text.len() <= MAX_BYTES)
    }
}

/// The part of the events of one place in the hash of all. It does not depend on the order of events of different places.
pub(crate) fn part_of_hash(place: usize, chain: u64) -> u64 {
    hash_of((place, chain))
}

/// The hash of all events of a place, the last of which has the hash `event`.
pub(crate) fn chained(chain: u64, event: u64) -> u64 {
    hash_of((chain, event))
}

fn hash_of(value: impl Hash) -> u64 {
    let mut hasher = DefaultHasher::new();
    value.hash(&mut hasher);
    hasher.finish()
}

/// Adds the line of an id to an event, which ends with an empty line.
pub(crate) fn with_id(event: &[u8], id: &str) -> Vec<u8> {
    let lines = event.strip_suffix(b"\n").unwrap_or(event);
    [lines, b"id: ", id.as_bytes(), b"\n\n"].concat()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(text: &str) -> Result<Option<EventId>, BadEventId> {
        EventId::of(&HeaderMap::from_iter([(LAST_EVENT_ID, text.parse().unwrap())]))
    }

    #[test]
    fn an_id_is_read_as_it_is_written() {
        for counts in [vec![0, 12], vec![7], vec![1, 2, 3]] {
            let id = EventId { key: RequestKey::new(), counts, hash: 0xab };
            assert_eq!(of(&id.text().unwrap()), Ok(Some(id)));
        }
        assert_eq!(EventId::of(&HeaderMap::new()), Ok(None));
        assert_eq!(with_id(b"data: 1\n\n", "5"), b"data: 1\nid: 5\n\n");
    }

    #[test]
    fn ids_of_others_and_ids_out_of_bounds_are_refused() {
        for text in ["", "5", "a-b", "1-2-3", "1-2-3-", "1-2-3-4.x", "x-2-3-4", "1-2-3--4", "1-2-3-4.-5"] {
            assert_eq!(of(text), Err(BadEventId::Malformed), "{text}");
        }
        assert_eq!(of(&format!("1-2-3-{}", MAX_EVENTS + 1)), Err(BadEventId::TooFar));
        assert_eq!(of(&format!("1-2-3-{0}.{0}", usize::MAX)), Err(BadEventId::TooFar));
        assert_eq!(of(&format!("1-2-3-1{}", ".1".repeat(MAX_PLACES))), Err(BadEventId::Malformed));
        assert_eq!(of(&"1".repeat(MAX_BYTES + 1)), Err(BadEventId::TooLong(MAX_BYTES + 1)));
        let wide = EventId { key: RequestKey::new(), counts: vec![1; MAX_PLACES + 1], hash: 0 };
        assert_eq!(wide.text(), None);
    }
}
