//! The events that a client has of a stream. When its request is sent again, they are expected once more, and are left out.

use std::collections::BTreeMap;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::ops::Range;

use bytes::{Bytes, BytesMut};

use crate::api::request_key::RequestKey;
use crate::relay::event_id::{self, EventId, MAX_EVENTS};

/// Counts in the first events that depend on what the prefix cache holds, and so differ after a restart.
const COUNTS: [&[u8]; 4] =
    [b"\"cached_tokens\":", b"\"cache_read_input_tokens\":", b"\"cache_creation_input_tokens\":", b"\"input_tokens\":"];

/// Why a stream cannot go on after its request was sent again.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
pub(crate) enum Differs {
    #[error("the server was started again and gave another answer than before it died; send the request again")]
    Event,
    #[error(
        "the server was started again, and the answer ended before what was sent before it died; send the request again"
    )]
    Shorter,
    #[error(
        "the server died, and a stream of more than {MAX_EVENTS} events is not started again; send the request again"
    )]
    TooLong,
    #[error(
        "the events before the one of Last-Event-ID differ from those of this answer: the request or the model is another; send \
         the request again without Last-Event-ID"
    )]
    Resumed,
}

/// The events of one stream. Those of different choices of an answer may come in another order the second time.
#[derive(Debug, Default)]
pub(crate) struct SentEvents {
    /// By choice; events without one have a place of their own.
    choices: BTreeMap<Option<u32>, Choice>,
    num_sent: usize,
    /// What is missing to the events that the client has from an earlier connection; `None` once they were seen.
    earlier: Option<Earlier>,
}

#[derive(Debug, Default)]
struct Choice {
    /// The hash of each event that the client has.
    sent: Vec<u64>,
    /// Number of events received since the request was last sent.
    received: usize,
    /// Number of events that the client has from an earlier connection.
    num_earlier: usize,
    /// Number of events that were received at all, and the hash of all of them.
    num_seen: usize,
    chain: u64,
}

/// Events that the client has from an earlier connection, and that were not received on this one yet.
#[derive(Debug)]
struct Earlier {
    num_choices: usize,
    hash: u64,
}

impl SentEvents {
    /// The client has the events up to `id` from an earlier connection.
    pub(crate) fn after(id: &EventId) -> Self {
        let choices = id.counts.iter().enumerate().filter(|(_, count)| **count > 0).map(|(place, count)| {
            let index = place.checked_sub(1).and_then(|index| u32::try_from(index).ok());
            (index, Choice { num_earlier: *count, ..Choice::default() })
        });
        let choices: BTreeMap<_, _> = choices.collect();
        let earlier = Some(Earlier { num_choices: choices.len(), hash: id.hash }).filter(|_| !choices.is_empty());
        Self { choices, num_sent: 0, earlier }
    }

    /// Whether an event that was received is to be sent. Otherwise the client has it.
    pub(crate) fn is_new(&mut self, event: &[u8]) -> Result<bool, Differs> {
        let (hash, index) = (hash_of(event), choice_of(event));
        let choice = self.choices.entry(index).or_default();
        let known = choice.sent.get(choice.received).copied();
        choice.received += 1;
        match known {
            Some(known) if known == hash => return Ok(false),
            Some(_) => return Err(Differs::Event),
            None => {}
        }
        if self.num_sent < MAX_EVENTS {
            choice.sent.push(hash);
            self.num_sent += 1;
        }
        choice.num_seen += 1;
        choice.chain = event_id::chained(choice.chain, hash);
        if choice.num_seen > choice.num_earlier {
            return Ok(true);
        }
        if let (Some(earlier), true) = (&mut self.earlier, choice.num_seen == choice.num_earlier) {
            earlier.hash = earlier.hash.wrapping_sub(event_id::part_of_hash(place_of(index), choice.chain));
            earlier.num_choices -= 1;
            if earlier.num_choices == 0 {
                let is_same = earlier.hash == 0;
                self.earlier = None;
                return if is_same { Ok(false) } else { Err(Differs::Resumed) };
            }
        }
        Ok(false)
    }

    /// The id of the last new event.
    pub(crate) fn id(&self, key: RequestKey) -> EventId {
        // Choices whose earlier events have not all come again are in what is left of the earlier hash.
        let mut id = EventId { key, counts: vec![0], hash: self.earlier.as_ref().map_or(0, |earlier| earlier.hash) };
        for (index, choice) in &self.choices {
            let place = place_of(*index);
            if place >= id.counts.len() {
                id.counts.resize(place + 1, 0);
            }
            id.counts[place] = choice.num_seen.max(choice.num_earlier);
            if choice.num_seen >= choice.num_earlier {
                id.hash = id.hash.wrapping_add(event_id::part_of_hash(place, choice.chain));
            }
        }
        id
    }

    /// The request is sent again.
    pub(crate) fn begin_again(&mut self) -> Result<(), Differs> {
        if self.choices.values().any(|choice| choice.num_seen > choice.sent.len()) {
            return Err(Differs::TooLong);
        }
        self.choices.values_mut().for_each(|choice| choice.received = 0);
        Ok(())
    }

    /// The stream has ended.
    pub(crate) fn end(&self) -> Result<(), Differs> {
        let is_short = self.choices.values().any(|choice| choice.received < choice.num_seen.max(choice.num_earlier));
        if is_short { Err(Differs::Shorter) } else { Ok(()) }
    }
}

/// The place of a choice in an [`EventId`].
fn place_of(choice: Option<u32>) -> usize {
    choice.map_or(0, |index| index as usize + 1)
}

/// Divides a stream of bytes into its events, each with the empty line that ends it.
#[derive(Debug, Default)]
pub(crate) struct EventReader {
    buffer: BytesMut,
    /// Number of bytes without an end of an event.
    searched: usize,
}

impl EventReader {
    /// Adds received bytes.
    pub(crate) fn push(&mut self, bytes: &[u8]) {
        self.buffer.extend_from_slice(bytes);
    }

    /// The next whole event.
    pub(crate) fn next(&mut self) -> Option<Bytes> {
        let start = self.searched.saturating_sub(1);
        match self.buffer[start..].windows(2).position(|two| two == b"\n\n") {
            Some(at) => {
                self.searched = 0;
                Some(self.buffer.split_to(start + at + 2).freeze())
            }
            None => {
                self.searched = self.buffer.len();
                None
            }
        }
    }

    /// Forgets the part of an event that was received.
    pub(crate) fn clear(&mut self) {
        (self.searched, self.buffer) = (0, BytesMut::new());
    }
}

/// The choice of an event in OpenAI's form.
fn choice_of(event: &[u8]) -> Option<u32> {
    const INDEX: &[u8] = b"\"choices\":[{\"index\":";
    let start = event.windows(INDEX.len()).position(|part| part == INDEX)? + INDEX.len();
    let digits = event[start..].iter().take_while(|byte| byte.is_ascii_digit());
    Some(digits.fold(0, |number, digit| number.wrapping_mul(10).wrapping_add(u32::from(digit - b'0'))))
}

fn hash_of(event: &[u8]) -> u64 {
    let mut hasher = DefaultHasher::new();
    let mut rest = event;
    while let Some(count) = next_count(rest) {
        rest[..count.start].hash(&mut hasher);
        rest = &rest[count.end..];
    }
    rest.hash(&mut hasher);
    hasher.finish()
}

/// The digits of the next of [`COUNTS`].
fn next_count(text: &[u8]) -> Option<Range<usize>> {
    // Most events have none of them.
    let first = text.windows(7).position(|part| part == b"_tokens")?;
    let begin_of = |name: &&[u8]| text.windows(name.len()).position(|part| part == *name).map(|at| at + name.len());
    let start = COUNTS.iter().filter_map(begin_of).min().filter(|start| *start > first)?;
    let digits = text[start..].iter().take_while(|byte| byte.is_ascii_digit() || **byte == b' ').count();
    Some(start..start + digits)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn receive(events: &mut SentEvents, texts: &[&str]) -> Result<Vec<bool>, Differs> {
        texts.iter().map(|text| events.is_new(text.as_bytes())).collect()
    }

    #[test]
    fn events_that_the_client_has_are_left_out_and_later_ones_are_new() {
        let mut events = SentEvents::default();
        assert_eq!(receive(&mut events, &["a", "b"]), Ok(vec![true, true]));
        events.begin_again().unwrap();
        assert_eq!(events.end(), Err(Differs::Shorter));
        assert_eq!(receive(&mut events, &["a", "b", "c"]), Ok(vec![false, false, true]));
        assert_eq!(events.end(), Ok(()));
        events.begin_again().unwrap();
        assert_eq!(receive(&mut events, &["a", "x"]), Err(Differs::Event));
    }

    #[test]
    fn a_client_gets_the_events_after_the_last_one_that_it_has() {
        let key = RequestKey::new();
        let event = |choice: u32, text: &str| format!(r#"data: {{"choices":[{{"index":{choice},"text":"{text}"}}]}}"#);
        let [a, b, c, d] = [event(0, "a"), event(1, "b"), event(1, "c"), "data: [DONE]".to_owned()];
        let mut first = SentEvents::default();
        assert_eq!(receive(&mut first, &[&a, &b]), Ok(vec![true, true]));
        let id = first.id(key);
        assert_eq!(id.counts, [0, 1, 1]);

        // The choices come in another order, and the server dies in between.
        let mut next = SentEvents::after(&id);
        assert_eq!(receive(&mut next, &[&b]), Ok(vec![false]));
        next.begin_again().unwrap();
        assert_eq!(receive(&mut next, &[&b, &c]), Ok(vec![false, true]));
        let early = next.id(key);
        assert_eq!(receive(&mut SentEvents::after(&early), &[&a, &b, &c, &d]), Ok(vec![false, false, false, true]));
        assert_eq!(next.end(), Err(Differs::Shorter));
        assert_eq!(receive(&mut next, &[&a, &d]), Ok(vec![false, true]));
        assert_eq!(next.end(), Ok(()));
        let all = next.id(key);
        assert_eq!(all.counts, [1, 1, 2]);
        assert_eq!(receive(&mut SentEvents::after(&all), &[&a, &b, &c, &d]), Ok(vec![false; 4]));

        let mut other = SentEvents::after(&id);
        assert_eq!(receive(&mut other, &[&a, &c]), Err(Differs::Resumed));
        assert_eq!(SentEvents::after(&id).end(), Err(Differs::Shorter));
    }

    #[test]
    fn choices_may_come_in_another_order() {
        let event = |choice: u32, text: &str| format!(r#"data: {{"choices":[{{"index":{choice},"text":"{text}"}}]}}"#);
        let [a, b, c] = [event(0, "a"), event(1, "b"), event(1, "c")];
        let mut events = SentEvents::default();
        assert_eq!(receive(&mut events, &[&a, &b]), Ok(vec![true, true]));
        events.begin_again().unwrap();
        assert_eq!(receive(&mut events, &[&b, &c, &a]), Ok(vec![false, true, false]));
        assert_eq!(events.end(), Ok(()));
        events.begin_again().unwrap();
        assert_eq!(receive(&mut events, &[&c]), Err(Differs::Event));
    }

    #[test]
    fn counts_of_the_prefix_cache_may_differ_and_nothing_else() {
        let event = |cached: u32, output: u32| {
            format!(
                r#"data: {{"usage":{{"input_tokens": {cached},"output_tokens":{output},"cached_tokens":{cached}}}}}"#
            )
        };
        assert_eq!(hash_of(event(7, 1).as_bytes()), hash_of(event(123, 1).as_bytes()));
        assert_ne!(hash_of(event(7, 1).as_bytes()), hash_of(event(7, 2).as_bytes()));
    }

    #[test]
    fn a_stream_of_bytes_is_divided_wherever_it_was_cut() {
        let stream = b"data: 1\n\nevent: e\ndata: 2\n\ndata: 3";
        for cut in 1..stream.len() {
            let mut reader = EventReader::default();
            let mut found = Vec::new();
            for part in [&stream[..cut], &stream[cut..]] {
                reader.push(part);
                found.extend(std::iter::from_fn(|| reader.next()));
            }
            assert_eq!(found, [&b"data: 1\n\n"[..], b"event: e\ndata: 2\n\n"], "cut at {cut}");
        }
    }
}
