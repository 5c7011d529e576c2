//! The events that a client has of a stream. When its request is sent again, they are expected once more, and are left out.

use std::collections::BTreeMap;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::ops::Range;

use bytes::{Bytes, BytesMut};

/// Most events of a stream that is sent again: 8 bytes are kept of each.
const MAX_EVENTS: usize = 1 << 20;

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
}

/// The events of one stream. Those of different choices of an answer may come in another order the second time.
#[derive(Debug, Default)]
pub(crate) struct SentEvents {
    /// By choice; events without one have a place of their own.
    choices: BTreeMap<Option<u32>, Choice>,
    num_sent: usize,
}

#[derive(Debug, Default)]
struct Choice {
    /// The hash of each event that the client has.
    sent: Vec<u64>,
    /// Number of events received since the request was last sent.
    received: usize,
}

impl SentEvents {
    /// Whether an event that was received is to be sent. Otherwise the client has it.
    pub(crate) fn is_new(&mut self, event: &[u8]) -> Result<bool, Differs> {
        let hash = hash_of(event);
        let choice = self.choices.entry(choice_of(event)).or_default();
        let known = choice.sent.get(choice.received).copied();
        choice.received += 1;
        match known {
            Some(known) if known == hash => Ok(false),
            Some(_) => Err(Differs::Event),
            None => {
                if self.num_sent < MAX_EVENTS {
                    choice.sent.push(hash);
                    self.num_sent += 1;
                }
                Ok(true)
            }
        }
    }

    /// The request is sent again.
    pub(crate) fn begin_again(&mut self) -> Result<(), Differs> {
        if self.choices.values().any(|choice| choice.received > choice.sent.len()) {
            return Err(Differs::TooLong);
        }
        self.choices.values_mut().for_each(|choice| choice.received = 0);
        Ok(())
    }

    /// The stream has ended.
    pub(crate) fn end(&self) -> Result<(), Differs> {
        let is_short = self.choices.values().any(|choice| choice.received < choice.sent.len());
        if is_short { Err(Differs::Shorter) } else { Ok(()) }
    }
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
