use std::collections::HashMap;
use std::sync::{Mutex, PoisonError};

use llguidance::Matcher;

/// Compiled grammars by their specification. When a new one does not fit, all are dropped.
pub(crate) struct Cache {
    entries: Mutex<Entries>,
    max_bytes: usize,
}

#[derive(Default)]
struct Entries {
    matchers: HashMap<String, Matcher>,
    bytes: usize,
}

/// Minimum memory of a compiled grammar, in addition to its description.
const BASE_BYTES: usize = 64 << 10;
/// A compiled grammar occupies a small multiple of its description.
const GROWTH: usize = 32;

impl Cache {
    pub(crate) fn new(max_bytes: usize) -> Self {
        Self { entries: Mutex::default(), max_bytes }
    }

    /// A copy that shares no state with the cached grammar.
    pub(crate) fn get(&self, key: &str) -> Option<Matcher> {
        let entries = self.entries.lock().unwrap_or_else(PoisonError::into_inner);
        entries.matchers.get(key).map(Matcher::deep_clone)
    }

    pub(crate) fn insert(&self, key: String, matcher: &Matcher) {
        let bytes = BASE_BYTES + GROWTH * key.len();
        if bytes > self.max_bytes {
            return;
        }
        let mut entries = self.entries.lock().unwrap_or_else(PoisonError::into_inner);
        if entries.bytes + bytes > self.max_bytes {
            *entries = Entries::default();
        }
        if entries.matchers.insert(key, matcher.deep_clone()).is_none() {
            entries.bytes += bytes;
        }
    }

    #[cfg(test)]
    pub(crate) fn len(&self) -> usize {
        self.entries.lock().unwrap_or_else(PoisonError::into_inner).matchers.len()
    }
}
