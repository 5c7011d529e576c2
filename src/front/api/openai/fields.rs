//! The fields of a JSON body. Each is taken once; fields that nobody takes are refused by name.

use serde_json::{Map, Value};
use serving::{Limit, Limits};

use super::error::ApiError;
use crate::chat::UnknownFields;

/// Fields of OpenAI's endpoints for the accounting and the prompt cache of a provider. They change no answer.
pub(super) const FOR_THE_PROVIDER: [&str; 8] = [
    "user",
    "metadata",
    "store",
    "service_tier",
    "safety_identifier",
    "prompt_cache_key",
    "prompt_cache_retention",
    "prompt_cache_options",
];
/// Maximum number of values in a body, on all levels together.
const MAX_VALUES: usize = 1 << 20;
/// Unknown fields that a line of the log names at most.
const MAX_LISTED: usize = 32;
/// Memory of a value in a tree, with its name; without the text of both.
const VALUE_BYTES: usize = 192;

/// Upper bound of the memory that a body takes as a tree of values.
///
/// # Errors
/// When it has more than [`MAX_VALUES`] values.
pub(crate) fn tree_bytes(body: &[u8]) -> Result<usize, ApiError> {
    let (mut count, mut in_string, mut is_escaped) = (1, false, false);
    for byte in body {
        match byte {
            _ if is_escaped => is_escaped = false,
            b'\\' => is_escaped = in_string,
            b'"' => in_string = !in_string,
            b',' | b'[' | b'{' if !in_string => count += 1,
            _ => {}
        }
    }
    if count > MAX_VALUES {
        let words = format!("The body holds {count} values, at most {MAX_VALUES} are allowed.");
        return Err(ApiError::of_field("body", words));
    }
    // The texts are in the body, and again in the tree.
    Ok(count * VALUE_BYTES + body.len())
}

/// Checks a field's size against a limit.
///
/// # Errors
/// When it is larger; the error names the field.
pub(crate) fn check(limits: &Limits, limit: Limit, field: &'static str, found: usize) -> Result<(), ApiError> {
    limits.check(limit, found).map_err(|error| ApiError::of_field(field, error.message))
}

/// The fields of a body that were not taken yet; null counts as absent.
pub(crate) struct Fields(Map<String, Value>);

impl Fields {
    /// Reads a body.
    ///
    /// # Errors
    /// When it is not a JSON object.
    pub(crate) fn read(body: &[u8]) -> Result<Self, ApiError> {
        let invalid =
            |error: serde_json::Error| ApiError::of_field("body", format!("The body is not a JSON object: {error}."));
        serde_json::from_slice(body).map(Self).map_err(invalid)
    }

    /// The value of a field.
    pub(crate) fn take(&mut self, name: &str) -> Option<Value> {
        self.0.remove(name).filter(|value| !value.is_null())
    }

    /// The value of a field, which stays.
    pub(crate) fn peek(&self, name: &str) -> Option<&Value> {
        self.0.get(name).filter(|value| !value.is_null())
    }

    /// A string.
    pub(crate) fn text(&mut self, name: &'static str) -> Result<Option<String>, ApiError> {
        match self.take(name) {
            None => Ok(None),
            Some(Value::String(text)) => Ok(Some(text)),
            Some(_) => Err(ApiError::of_field(name, format!("`{name}` must be a string."))),
        }
    }

    /// True or false.
    pub(crate) fn flag(&mut self, name: &'static str) -> Result<Option<bool>, ApiError> {
        let invalid = || ApiError::of_field(name, format!("`{name}` must be true or false."));
        self.take(name).map(|value| value.as_bool().ok_or_else(invalid)).transpose()
    }

    /// A number from `least` to `most`.
    pub(crate) fn number(&mut self, name: &'static str, least: f64, most: f64) -> Result<Option<f64>, ApiError> {
        let Some(value) = self.take(name) else { return Ok(None) };
        let fits = |number: &f64| (least..=most).contains(number);
        let invalid =
            || ApiError::of_field(name, format!("`{name}` is {value}, expected a number from {least} to {most}."));
        value.as_f64().filter(fits).ok_or_else(invalid).map(Some)
    }

    /// A whole number from `least` to `most`.
    pub(crate) fn whole(&mut self, name: &'static str, least: i64, most: i64) -> Result<Option<i64>, ApiError> {
        let Some(value) = self.take(name) else { return Ok(None) };
        let fits = |number: &i64| (least..=most).contains(number);
        let invalid = || {
            let words = format!("`{name}` is {value}, expected a whole number from {least} to {most}.");
            ApiError::of_field(name, words)
        };
        value.as_i64().filter(fits).ok_or_else(invalid).map(Some)
    }

    /// `seed`: any whole number of 64 bits, with or without sign.
    pub(crate) fn seed(&mut self) -> Result<Option<u64>, ApiError> {
        let Some(value) = self.take("seed") else { return Ok(None) };
        let number = value.as_u64().or_else(|| value.as_i64().map(i64::cast_unsigned));
        let invalid = || ApiError::of_field("seed", format!("`seed` is {value}, expected a whole number."));
        number.ok_or_else(invalid).map(Some)
    }

    /// A list.
    pub(crate) fn list(&mut self, name: &'static str) -> Result<Option<Vec<Value>>, ApiError> {
        match self.take(name) {
            None => Ok(None),
            Some(Value::Array(items)) => Ok(Some(items)),
            Some(_) => Err(ApiError::of_field(name, format!("`{name}` must be a list."))),
        }
    }

    /// An object.
    pub(crate) fn object(&mut self, name: &'static str) -> Result<Option<Map<String, Value>>, ApiError> {
        match self.take(name) {
            None => Ok(None),
            Some(Value::Object(fields)) => Ok(Some(fields)),
            Some(_) => Err(ApiError::of_field(name, format!("`{name}` must be an object."))),
        }
    }

    /// A text or a list of at most `most` texts, each within the limit for words. Empty texts are left out.
    pub(crate) fn texts(&mut self, name: &'static str, most: usize, limits: &Limits) -> Result<Vec<String>, ApiError> {
        let invalid = || ApiError::of_field(name, format!("`{name}` must be text or a list of at most {most} texts."));
        let texts: Vec<String> = match self.take(name) {
            None => Vec::new(),
            Some(Value::String(text)) => vec![text],
            Some(Value::Array(items)) if items.len() <= most => {
                let text = |item| match item {
                    Value::String(text) => Some(text),
                    _ => None,
                };
                items.into_iter().map(text).collect::<Option<_>>().ok_or_else(invalid)?
            }
            Some(_) => return Err(invalid()),
        };
        texts.iter().try_for_each(|text| check(limits, Limit::WordBytes, name, text.len()))?;
        Ok(texts.into_iter().filter(|text| !text.is_empty()).collect())
    }

    /// A list of at most `most` token ids.
    pub(crate) fn token_ids(&mut self, name: &'static str, most: usize) -> Result<Option<Vec<u32>>, ApiError> {
        let Some(items) = self.list(name)? else { return Ok(None) };
        if items.len() > most {
            let words = format!("`{name}` holds {} token ids, at most {most} are allowed.", items.len());
            return Err(ApiError::of_field(name, words));
        }
        token_ids(name, &items).map(Some)
    }

    /// Takes fields that have no effect on an answer.
    pub(crate) fn ignore(&mut self, names: &[&str]) {
        names.iter().for_each(|name| drop(self.0.remove(*name)));
    }

    /// Takes fields that are supported only with a value that has no effect; others are refused.
    pub(crate) fn refuse_unless(
        &mut self,
        name: &'static str,
        is_neutral: impl FnOnce(&Value) -> bool,
        why: &str,
    ) -> Result<(), ApiError> {
        match self.take(name).is_none_or(|value| is_neutral(&value)) {
            true => Ok(()),
            false => Err(ApiError::of_field(name, format!("`{name}` is not supported: {why}."))),
        }
    }

    /// Ends reading. The fields that remain are not known.
    ///
    /// # Errors
    /// When there is one, unless they are to be ignored.
    pub(crate) fn finish(self, unknown: UnknownFields) -> Result<(), ApiError> {
        let names: Vec<String> =
            self.0.into_iter().filter(|(_, value)| !value.is_null()).map(|(name, _)| name).collect();
        match (unknown, names.first()) {
            (_, None) => Ok(()),
            (UnknownFields::Ignore, Some(_)) => {
                tracing::warn!(fields = listed(&names), "a request has fields that are not known; they are ignored");
                Ok(())
            }
            (UnknownFields::Refuse, Some(name)) => {
                let words = format!(
                    "`{name}` is not known to this endpoint; leave it out, or start the server with \
                     `--unknown-fields=ignore`."
                );
                Err(ApiError::of_field(name.clone(), words))
            }
        }
    }
}

/// Names for a line of the log: the first ones, and how many follow.
fn listed(names: &[String]) -> String {
    let shown = names.iter().take(MAX_LISTED).map(|name| crate::api::status::shown(name));
    let listed = shown.collect::<Vec<_>>().join(", ");
    match names.len().saturating_sub(MAX_LISTED) {
        0 => listed,
        more => format!("{listed} and {more} more"),
    }
}

/// Token ids of a JSON list.
pub(crate) fn token_ids(name: &'static str, items: &[Value]) -> Result<Vec<u32>, ApiError> {
    let id = |item: &Value| item.as_u64().and_then(|id| u32::try_from(id).ok());
    let invalid = || ApiError::of_field(name, format!("`{name}` must be a list of token ids, whole numbers from 0."));
    items.iter().map(id).collect::<Option<_>>().ok_or_else(invalid)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_are_counted_outside_of_strings() {
        let bytes =
            |body: &str| tree_bytes(body.as_bytes()).map_err(|error| error.json()["error"]["message"].to_string());
        let body = r#"{"a": "[,,{\",,", "b": [1, 2]}"#;
        assert_eq!(bytes(body), Ok(5 * VALUE_BYTES + body.len()));
        assert!(bytes(&format!("[{}]", "0,".repeat(2_000_000))).unwrap_err().contains("values, at most 1048576"));
    }

    #[test]
    fn fields_that_nobody_takes_are_named() {
        let mut fields = Fields::read(br#"{"known": 1, "temprature": 0.5, "absent": null}"#).unwrap();
        assert_eq!(fields.whole("known", 0, 5), Ok(Some(1)));
        let error = fields.finish(UnknownFields::Refuse).unwrap_err().json();
        assert_eq!(error["error"]["param"], "temprature");
        assert!(error["error"]["message"].as_str().unwrap().contains("`temprature` is not known"));
        let fields = Fields::read(br#"{"temprature": 0.5}"#).unwrap();
        assert_eq!(fields.finish(UnknownFields::Ignore), Ok(()));
        let names: Vec<String> = (0..34).map(|at| format!("f{at}")).collect();
        assert_eq!(listed(&names[..2]), "f0, f1");
        assert!(listed(&names).starts_with("f0, f1, ") && listed(&names).ends_with(", f31 and 2 more"));
        assert!(Fields::read(b"[]").is_err());
    }
}
