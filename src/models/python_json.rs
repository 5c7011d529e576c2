//! JSON as Python writes it: with `Infinity`, `-Infinity` and `NaN`, which JSON does not have.

use std::borrow::Cow;

use serde::de::DeserializeOwned;

/// The names of such numbers. A name stands before those that it contains.
const NUMBERS: [&str; 3] = ["-Infinity", "Infinity", "NaN"];

/// Reads JSON in which a number may be infinite or not a number. Such a one is read as the object `{"__float__": "Infinity"}`, as
/// newer versions of transformers write it.
///
/// # Errors
/// When it is not JSON, or not a `T`.
pub fn from_python_json<T: DeserializeOwned>(text: &[u8]) -> serde_json::Result<T> {
    serde_json::from_slice(&with_objects(text))
}

fn with_objects(text: &[u8]) -> Cow<'_, [u8]> {
    let mut out = Vec::new();
    let (mut is_string, mut at, mut copied) = (false, 0, 0);
    while at < text.len() {
        let number = NUMBERS.iter().find(|number| !is_string && text[at..].starts_with(number.as_bytes()));
        if let Some(number) = number {
            out.extend_from_slice(&text[copied..at]);
            out.extend_from_slice(format!(r#"{{"__float__": "{number}"}}"#).as_bytes());
            at += number.len();
            copied = at;
            continue;
        }
        match text[at] {
            b'"' => is_string = !is_string,
            b'\\' if is_string => at += 1,
            _ => {}
        }
        at += 1;
    }
    if copied == 0 {
        return Cow::Borrowed(text);
    }
    out.extend_from_slice(&text[copied..]);
    Cow::Owned(out)
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    #[test]
    fn numbers_that_json_does_not_have_are_objects_and_strings_stay() {
        let text = br#"{"limit": [0.0, Infinity], "low": -Infinity, "none":NaN, "Infinity": "a \" NaN, \\", "x": -1}"#;
        let expected = json!({
            "limit": [0.0, {"__float__": "Infinity"}], "low": {"__float__": "-Infinity"}, "none": {"__float__": "NaN"},
            "Infinity": "a \" NaN, \\", "x": -1,
        });
        assert_eq!(from_python_json::<Value>(text).unwrap(), expected);
        for wrong in ["", "Infinit", "[Infinity", "\"\\", "{\"a\": InfinityInfinity}", "NaN1"] {
            assert!(from_python_json::<Value>(wrong.as_bytes()).is_err(), "{wrong}");
        }
    }
}
