//! The JSON files beside a tokenizer: which tokens are special, and which are put around a text.

use std::collections::BTreeMap;
use std::io::ErrorKind;
use std::path::Path;

use serde_json::Value;

use crate::TextError;

/// What `tokenizer_config.json`, `special_tokens_map.json` and `added_tokens.json` of a directory say; `Null` for a file
/// that is not there.
pub(crate) struct Files {
    pub(crate) config: Value,
    special_tokens_map: Value,
    added_tokens: Value,
}

/// A token that is found in a text before the tokenizer's own model sees it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct AddedToken {
    pub(crate) content: String,
    pub(crate) special: bool,
    /// Takes the white space before it along.
    pub(crate) lstrip: bool,
    /// Takes the white space behind it along.
    pub(crate) rstrip: bool,
    /// Not a part of a longer word.
    pub(crate) single_word: bool,
    /// Found in the text as normalised rather than as it came.
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

    /// The content of `bos_token` or another token with a role.
    pub(crate) fn role(&self, key: &str) -> Option<String> {
        [&self.config, &self.special_tokens_map].into_iter().find_map(|file| content(file.get(key)?))
    }

    /// The tokens with a role, by their names.
    pub(crate) fn named_tokens(&self) -> Vec<(&'static str, String)> {
        ["bos_token", "eos_token", "unk_token", "pad_token"]
            .into_iter()
            .filter_map(|role| Some((role, self.role(role)?)))
            .collect()
    }

    /// All added tokens, with the ids that the files give them.
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

    /// Every token that either file gives a role.
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

    /// As the files write it; `None` for a mere string.
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

/// A token's text, be it written as a string or as an object.
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
