//! Names of models on a hub.

use std::fmt;
use std::str::FromStr;

use crate::HubError;

/// The revision of a name without one.
const DEFAULT_REVISION: &str = "main";

/// Longest `ORG/NAME`, as on the hub.
const MAX_ID_BYTES: usize = 96;

/// Longest revision.
const MAX_REVISION_BYTES: usize = 200;

/// `ORG/NAME@REVISION`. Old models have a `NAME` alone.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ModelName {
    id: String,
    revision: String,
}

impl ModelName {
    /// The same model at a branch, tag or commit.
    ///
    /// # Errors
    /// When `revision` cannot be the name of one.
    pub fn at(self, revision: &str) -> Result<Self, HubError> {
        let wrong =
            |reason: &str| HubError::Name { text: format!("{}@{revision}", self.id), reason: reason.to_owned() };
        let is_allowed = |byte: u8| byte.is_ascii_alphanumeric() || b"._-/+".contains(&byte);
        if revision.is_empty() || revision.len() > MAX_REVISION_BYTES || !revision.bytes().all(is_allowed) {
            return Err(wrong("its revision has a form that the hub does not use"));
        }
        // A revision becomes a path in the cache.
        if revision.split('/').any(|part| part.is_empty() || part.starts_with('.') || part.ends_with(".lock")) {
            return Err(wrong("a part of its revision is empty, begins with a dot or ends with `.lock`"));
        }
        Ok(Self { revision: revision.to_owned(), ..self })
    }

    /// `ORG/NAME`.
    pub fn id(&self) -> &str {
        &self.id
    }

    /// `NAME`.
    pub fn short(&self) -> &str {
        self.id.rsplit_once('/').map_or(self.id.as_str(), |(_, name)| name)
    }

    /// Branch, tag or commit.
    pub fn revision(&self) -> &str {
        &self.revision
    }

    /// Whether the revision is the full hash of a commit, which never changes.
    pub(crate) fn is_commit(&self) -> bool {
        is_commit(&self.revision)
    }
}

/// Whether `text` is the full hash of a commit.
pub(crate) fn is_commit(text: &str) -> bool {
    text.len() == 40 && text.bytes().all(|byte| matches!(byte, b'0'..=b'9' | b'a'..=b'f'))
}

impl FromStr for ModelName {
    type Err = HubError;

    fn from_str(text: &str) -> Result<Self, HubError> {
        let (id, revision) = text.split_once('@').unwrap_or((text, DEFAULT_REVISION));
        let wrong = |reason: &str| HubError::Name { text: text.to_owned(), reason: reason.to_owned() };
        let parts: Vec<&str> = id.split('/').collect();
        if parts.len() > 2 || parts.iter().any(|part| part.is_empty()) {
            return Err(wrong("it does not have one or two parts"));
        }
        if id.len() > MAX_ID_BYTES {
            return Err(wrong("it is longer than 96 characters"));
        }
        let is_allowed = |byte: u8| byte.is_ascii_alphanumeric() || b"._-".contains(&byte);
        if !parts.iter().all(|part| part.bytes().all(is_allowed)) {
            return Err(wrong("it has characters other than letters, digits, `.`, `_` and `-`"));
        }
        let is_bent = |part: &&str| part.starts_with(['-', '.']) || part.ends_with(['-', '.']);
        if parts.iter().any(is_bent) || id.contains("--") || id.contains("..") {
            return Err(wrong("a part begins or ends with `-` or `.`, or has `--` or `..`"));
        }
        Self { id: id.to_owned(), revision: String::new() }.at(revision)
    }
}

impl fmt::Display for ModelName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.revision.as_str() {
            DEFAULT_REVISION => f.write_str(&self.id),
            revision => write!(f, "{}@{revision}", self.id),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_have_an_id_and_a_revision() {
        let name: ModelName = "Qwen/Qwen3-0.6B@refs/pr/1".parse().unwrap();
        assert_eq!((name.id(), name.short(), name.revision()), ("Qwen/Qwen3-0.6B", "Qwen3-0.6B", "refs/pr/1"));
        assert_eq!(name.to_string(), "Qwen/Qwen3-0.6B@refs/pr/1");
        let name: ModelName = "gpt2".parse().unwrap();
        assert_eq!((name.short(), name.revision(), name.to_string()), ("gpt2", "main", "gpt2".to_owned()));
        assert!(!name.is_commit() && name.at(&"a1".repeat(20)).unwrap().is_commit());
    }

    #[test]
    fn what_could_leave_the_cache_is_no_name() {
        for text in
            ["", "/", "a/", "/a", "../a", "a/..", "a/b/c", "a--b/c", "a/b c", "./a", "a/b@", "a/b@../c", "a/b@x/.."]
        {
            let error = text.parse::<ModelName>().unwrap_err().to_string();
            assert!(error.contains("ORG/NAME"), "{text}: {error}");
        }
        for text in ["a/b@/c", "a/b@c//d", "a/b@.c", "a/b@x y", &format!("a/{}", "b".repeat(96))] {
            assert!(text.parse::<ModelName>().is_err(), "{text}");
        }
    }
}
