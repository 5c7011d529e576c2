//! What a model answered, without what differs between two equal answers: ids, times and the sizes of pieces.

use std::collections::BTreeMap;

use serde_json::Value;

/// Keys of texts that come in pieces.
const TEXTS: [&str; 9] = [
    "text",
    "content",
    "reasoning_content",
    "reasoning",
    "thinking",
    "arguments",
    "partial_json",
    "text_output",
    "delta",
];
/// Keys of values that an answer has once.
const VALUES: [&str; 5] = ["finish_reason", "stop_reason", "output_tokens", "completion_tokens", "error"];
/// Keys of lists of tokens.
pub(super) const TOKENS: [&str; 3] = ["token_ids", "output_ids", "tokens"];
/// Events of `/v1/responses` that repeat a text which came in pieces before.
const REPEATS: [&str; 2] = [".done", "response.completed"];

/// The parts of an answer, by their places such as `choices.0.delta.content`.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub(crate) struct Answer {
    parts: BTreeMap<String, String>,
    /// Of other bodies, such as binary tensors.
    raw: Option<Vec<u8>>,
}

impl Answer {
    /// The answer in a body of JSON or server-sent events.
    pub(crate) fn of(body: &[u8]) -> Self {
        let mut answer = Self::default();
        let text = std::str::from_utf8(body).unwrap_or("\u{0}");
        if let Ok(value) = serde_json::from_str(text) {
            answer.add(&value, "", "");
            return answer;
        }
        let events: Vec<Value> =
            text.lines().filter_map(|line| serde_json::from_str(line.strip_prefix("data:")?.trim()).ok()).collect();
        if events.is_empty() {
            answer.raw = Some(body.to_vec());
        }
        let repeats =
            |event: &Value| event["type"].as_str().is_some_and(|kind| REPEATS.iter().any(|end| kind.ends_with(end)));
        events.iter().filter(|event| !repeats(event)).for_each(|event| answer.add(event, "", ""));
        answer
    }

    /// The answer of a body that has no known parts.
    pub(super) fn raw(body: &[u8]) -> Self {
        Self { raw: Some(body.to_vec()), ..Self::default() }
    }

    /// Adds a piece of the text at a place.
    pub(super) fn append(&mut self, place: &str, text: &str) {
        *self.parts.entry(place.to_owned()).or_default() += text;
    }

    /// Sets the value at a place.
    pub(super) fn set(&mut self, place: &str, value: String) {
        self.parts.insert(place.to_owned(), value);
    }

    /// Adds to the count at a place.
    pub(super) fn count(&mut self, place: &str, count: u64) {
        let counted: u64 = self.parts.get(place).and_then(|text| text.parse().ok()).unwrap_or(0);
        self.set(place, (counted + count).to_string());
    }

    fn add(&mut self, value: &Value, key: &str, place: &str) {
        let inner = |name: &str| if place.is_empty() { name.to_owned() } else { format!("{place}.{name}") };
        match value {
            Value::Object(fields) => fields.iter().for_each(|(name, value)| self.add(value, name, &inner(name))),
            Value::Array(tokens) if TOKENS.contains(&key) => {
                let tokens: String = tokens.iter().map(|token| format!("{token} ")).collect();
                self.append(place, &tokens);
            }
            // A tensor's values, and token ids of other protocols.
            Value::Array(items) if key == "data" => {
                self.set(place, Value::Array(items.clone()).to_string());
            }
            Value::Array(items) => {
                for (position, item) in items.iter().enumerate() {
                    // Events of a stream name the choice.
                    let index = item["index"].as_u64().unwrap_or(position as u64);
                    self.add(item, key, &inner(&index.to_string()));
                }
            }
            Value::String(text) if TEXTS.contains(&key) => self.append(place, text),
            Value::Null => {}
            value if VALUES.contains(&key) => {
                self.set(place, value.to_string());
            }
            _ => {}
        }
    }

    /// Tokens that the server counted, if it did.
    pub(crate) fn num_tokens(&self) -> Option<u64> {
        let names = ["completion_tokens", "output_tokens"];
        let is_count = |place: &str| names.iter().any(|name| place.ends_with(name));
        self.parts.iter().filter(|(place, _)| is_count(place)).find_map(|(_, count)| count.parse().ok())
    }

    /// The first place where two answers differ: its name, and both texts from a little before the difference on.
    pub(crate) fn difference(&self, other: &Self) -> Option<(String, String, String)> {
        if self.raw != other.raw {
            let length = |answer: &Self| format!("{} bytes", answer.raw.as_ref().map_or(0, Vec::len));
            return Some(("body".to_owned(), length(self), length(other)));
        }
        let places = self.parts.keys().chain(other.parts.keys());
        let place = places.into_iter().find(|place| self.parts.get(*place) != other.parts.get(*place))?;
        let text = |answer: &Self| answer.parts.get(place).cloned().unwrap_or_default();
        let (first, second) = (text(self), text(other));
        let same = first.chars().zip(second.chars()).take_while(|(first, second)| first == second).count();
        let from = |text: &str| text.chars().skip(same.saturating_sub(12)).take(40).collect::<String>();
        Some((format!("{place} at {same}"), from(&first), from(&second)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn equal_answers_in_other_pieces_are_equal_and_another_word_is_found() {
        let stream = |texts: &[&str], id: &str| {
            let events = texts.iter().map(|text| {
                let event = serde_json::json!({"id": id, "choices": [{"index": 1, "delta": {"content": text}, "finish_reason": null}]});
                format!("data: {event}\n\n")
            });
            events.collect::<String>() + "data: [DONE]\n\n"
        };
        let first = Answer::of(stream(&["once ", "upon a ", "time"], "1").as_bytes());
        assert_eq!(first.difference(&Answer::of(stream(&["once upon", " a time"], "2").as_bytes())), None);
        let other = Answer::of(stream(&["once upon a", " tree"], "3").as_bytes());
        let expected = ("choices.1.delta.content at 13", "nce upon a time", "nce upon a tree");
        assert_eq!(
            first.difference(&other),
            Some((expected.0.to_owned(), expected.1.to_owned(), expected.2.to_owned()))
        );
    }

    #[test]
    fn tokens_values_and_other_bodies_are_compared_too() {
        let answer = |tokens: &str, reason: &str| {
            let text = format!(
                r#"{{"created":5,"choices":[{{"token_ids":{tokens},"finish_reason":"{reason}"}}],"usage":{{"completion_tokens":3}}}}"#
            );
            Answer::of(text.as_bytes())
        };
        assert_eq!(answer("[1,2,3]", "stop").difference(&answer("[1,2,3]", "stop")), None);
        assert!(answer("[1,2,3]", "stop").difference(&answer("[1,2,4]", "stop")).is_some());
        assert!(answer("[1]", "stop").difference(&answer("[1]", "length")).is_some());
        assert_eq!(answer("[1]", "stop").num_tokens(), Some(3));
        assert!(Answer::of(b"\xff1").difference(&Answer::of(b"\xff2")).is_some());
    }
}
