//! The JSON files beside a tokenizer: which tokens are special, and which begin and end a text.

use std::collections::BTreeMap;
use std::io::ErrorKind;
use std::path::Path;

use serde_json::Value;

use crate::TextError;

/// A larger id means a damaged file; the largest vocabularies have some 2^18 tokens.
pub(crate) const MAX_TOKEN_ID: u32 = (1 << 24) - 1;

/// Contents of `tokenizer_config.json`, `special_tokens_map.json` and `added_tokens.json` of a directory; `Null` for a missing
/// file.
pub(crate) struct Files {
    pub(crate) config: Value,
    special_tokens_map: Value,
    added_tokens: Value,
}

/// A token that is matched in a text before the tokenizer's model encodes the rest.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct AddedToken {
    pub(crate) content: String,
    pub(crate) special: bool,
    /// The white space before it belongs to the token.
    pub(crate) lstrip: bool,
    /// The white space after it belongs to the token.
    pub(crate) rstrip: bool,
    /// Matches only as a word of its own.
    pub(crate) single_word: bool,
    /// Matched in the normalized text instead of the original.
    pub(crate) normalized: bool,
}

impl Files {
    pub(crate) fn of(dir: &Path) -> Result<Self, TextError> {
        Ok(Self {
            config: read(dir, "tokenizer_config.json")?,
            special_tokens_map: read(dir, "special_tokens_map.json")?,
            added_tokens: read(dir, "added_tokens.json")?,
        })
    }

    /// A flag of `tokenizer_config.json`.
    pub(crate) fn flag(&self, key: &str) -> Option<bool> {
        self.config.get(key).and_then(Value::as_bool)
    }

    /// `tokenizer_class` without the `Fast` that names the same tokenizer.
    pub(crate) fn class(&self) -> &str {
        let class = self.config.get("tokenizer_class").and_then(Value::as_str).unwrap_or_default();
        class.strip_suffix("Fast").unwrap_or(class)
    }

    /// The content of the token with a role such as `bos_token`.
    pub(crate) fn role(&self, key: &str) -> Option<String> {
        [&self.config, &self.special_tokens_map].into_iter().find_map(|file| content(file.get(key)?))
    }

    /// The tokens that chat templates refer to by name.
    pub(crate) fn named_tokens(&self) -> Vec<(&'static str, String)> {
        ["bos_token", "eos_token", "unk_token", "pad_token"]
            .into_iter()
            .filter_map(|role| Some((role, self.role(role)?)))
            .collect()
    }

    /// All added tokens, each with its id where a file states one.
    pub(crate) fn added(&self) -> Vec<(Option<u32>, AddedToken)> {
        let mut by_content: BTreeMap<String, (Option<u32>, AddedToken)> = BTreeMap::new();
        let id = |value: &Value| value.as_u64().and_then(|id| u32::try_from(id).ok());
        for (content, value) in self.added_tokens.as_object().into_iter().flatten() {
            by_content.insert(content.clone(), (id(value), AddedToken::plain(content.clone(), false)));
        }
        for (key, value) in self.config.get("added_tokens_decoder").and_then(Value::as_object).into_iter().flatten() {
            if let Some(token) = AddedToken::of(value) {
                by_content.insert(token.content.clone(), (key.parse().ok(), token));
            }
        }
        for (role, value) in self.roles() {
            let Some(content) = content(value) else { continue };
            let token = AddedToken::of(value).unwrap_or_else(|| AddedToken::plain(content.clone(), true));
            let known = by_content.entry(content).or_insert((None, token));
            known.1.special |= role != "extra";
        }
        by_content.into_values().collect()
    }

    /// Every token that has a role in either file.
    fn roles(&self) -> impl Iterator<Item = (&str, &Value)> {
        [&self.config, &self.special_tokens_map].into_iter().filter_map(Value::as_object).flatten().flat_map(
            |(key, value)| {
                let listed = matches!(&key[..], "additional_special_tokens" | "extra_special_tokens");
                let one = (key.ends_with("_token") && (value.is_string() || value.is_object())).then_some(value);
                let list = listed.then(|| value.as_array()).flatten().into_iter().flatten();
                one.into_iter().chain(list).map(move |value| (&key[..], value))
            },
        )
    }
}

impl AddedToken {
    pub(crate) fn plain(content: String, special: bool) -> Self {
        Self { content, special, lstrip: false, rstrip: false, single_word: false, normalized: !special }
    }

    /// Reads the object form of a token; `None` for a string.
    fn of(value: &Value) -> Option<Self> {
        let flag = |key: &str| value.get(key).and_then(Value::as_bool);
        let special = flag("special").unwrap_or(false);
        Some(Self {
            content: value.get("content")?.as_str()?.to_owned(),
            special,
            lstrip: flag("lstrip").unwrap_or(false),
            rstrip: flag("rstrip").unwrap_or(false),
            single_word: flag("single_word").unwrap_or(false),
            normalized: flag("normalized").unwrap_or(!special),
        })
    }
}

/// A token's text, from its string or object form.
fn content(value: &Value) -> Option<String> {
    let content = value.as_str().or_else(|| value.get("content")?.as_str())?;
    Some(content.to_owned()).filter(|content| !content.is_empty())
}

fn read(dir: &Path, name: &str) -> Result<Value, TextError> {
    let path = dir.join(name);
    match std::fs::read(&path) {
        Ok(json) => serde_json::from_slice(&json).map_err(|error| TextError::Parse { path, reason: error.to_string() }),
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(Value::Null),
        Err(source) => Err(TextError::Read { path, source }),
    }
}
