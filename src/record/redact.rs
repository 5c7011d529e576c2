//! Bodies without their texts: the same shape and lengths, so that they take a server about as long.

use serde_json::Value;

use crate::Body;

/// Keys whose strings are no texts of users.
const PLAIN: [&str; 12] = [
    "model",
    "role",
    "type",
    "name",
    "datatype",
    "tool_choice",
    "encoding_format",
    "object",
    "tool_call_id",
    "call_id",
    "id",
    "reasoning_effort",
];
/// Keys whose integers are tokens.
const TOKENS: [&str; 4] = ["prompt", "input", "input_ids", "tokens"];
/// What every token becomes.
const TOKEN: i64 = 100;

/// A body of JSON without its texts; `None` for other bodies.
pub(crate) fn body(bytes: &[u8]) -> Option<Body> {
    let mut value: Value = serde_json::from_slice(bytes).ok()?;
    redact(&mut value, "");
    Some(Body::Text(value.to_string()))
}

fn redact(value: &mut Value, key: &str) {
    match value {
        Value::String(text) if !PLAIN.contains(&key) => *text = text.chars().map(covered).collect(),
        Value::Array(items) => items.iter_mut().for_each(|item| redact(item, key)),
        Value::Object(fields) => fields.iter_mut().for_each(|(key, value)| redact(value, key)),
        Value::Number(number) if TOKENS.contains(&key) && number.is_i64() => *value = TOKEN.into(),
        _ => {}
    }
}

/// Spaces and punctuation stay, so that a text keeps its words.
fn covered(char: char) -> char {
    match char {
        char if char.is_numeric() => '0',
        char if char.is_alphabetic() => 'x',
        char if char.is_ascii() => char,
        _ => 'x',
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn texts_and_tokens_are_covered_and_the_rest_of_a_body_stays() {
        let given = r#"{"model":"m","messages":[{"role":"user","content":"Héllo 42, Bob!"}],"temperature":0.5,"prompt":[5,6],"n":2}"#;
        let expected = r#"{"model":"m","messages":[{"role":"user","content":"xxxxx 00, xxx!"}],"temperature":0.5,"prompt":[100,100],"n":2}"#;
        assert_eq!(body(given.as_bytes()), Some(Body::Text(expected.to_owned())));
        assert_eq!(body(b"\xff binary"), None);
    }
}
