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
const TOKENS: [&str; 9] = [
    "prompt",
    "input",
    "input_ids",
    "input_id",
    "input_tokens",
    "decoder_input_ids",
    "draft_input_ids",
    "tokens",
    "tokens_batch",
];
/// What every token becomes.
pub const TOKEN: i64 = 100;

/// Whether the integers of a field or tensor of this name are tokens of a text.
pub fn is_token_list(name: &str) -> bool {
    TOKENS.iter().any(|key| name.eq_ignore_ascii_case(key))
}

/// A body of JSON without its texts; `None` for other bodies.
pub(crate) fn body(bytes: &[u8]) -> Option<Body> {
    let mut value: Value = serde_json::from_slice(bytes).ok()?;
    redact(&mut value, "");
    Some(Body::Text(value.to_string()))
}

fn redact(value: &mut Value, key: &str) {
    match value {
        Value::String(text) if !PLAIN.contains(&key) => *text = covered(text),
        Value::Array(items) => items.iter_mut().for_each(|item| redact(item, key)),
        Value::Object(fields) => {
            let tensor = fields.get("name").and_then(Value::as_str).unwrap_or_default().to_owned();
            let has_tokens = is_token_list(&tensor);
            fields.iter_mut().for_each(|(key, value)| {
                redact(value, if key == "data" && has_tokens { &tensor } else { key });
            });
        }
        Value::Number(number) if is_token_list(key) && number.is_i64() => *value = TOKEN.into(),
        _ => {}
    }
}

/// A text with an `x` for every letter. Spaces and punctuation stay, so that a text keeps its words.
pub fn covered(text: &str) -> String {
    let cover = |char: char| match char {
        char if char.is_numeric() => '0',
        char if char.is_alphabetic() => 'x',
        char if char.is_ascii() => char,
        _ => 'x',
    };
    text.chars().map(cover).collect()
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
        let given = r#"{"inputs":[{"name":"input_ids","data":[[5,6]]},{"name":"model","data":["Bob"]},{"name":"top_k","data":[5]}]}"#;
        let expected = r#"{"inputs":[{"name":"input_ids","data":[[100,100]]},{"name":"model","data":["xxx"]},{"name":"top_k","data":[5]}]}"#;
        assert_eq!(body(given.as_bytes()), Some(Body::Text(expected.to_owned())));
    }
}
