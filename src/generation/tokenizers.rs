//! Tokenizers, each loaded once however many models use it.

use std::collections::HashMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::{Arc, LazyLock, Mutex, PoisonError, Weak};
use std::time::SystemTime;

use text::{TextError, Tokenizer, TokenizerType};

/// Files that a tokenizer is made of.
const FILES: [&str; 12] = [
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "spiece.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "generation_config.json",
    "config.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "chat_template.json",
];

/// The source of a tokenizer. Changed files have another key, so that a reload of a model reads them again.
#[derive(PartialEq, Eq, Hash)]
struct Key {
    path: PathBuf,
    kind: String,
    files: Vec<Option<(u64, SystemTime)>>,
}

/// Those in use. One that no model uses any more is dropped with its last user.
static LOADED: LazyLock<Mutex<HashMap<Key, Weak<Tokenizer>>>> = LazyLock::new(Mutex::default);

/// The tokenizer of the checkpoint in `dir`.
///
/// # Errors
/// As [`Tokenizer::from_dir`].
pub fn tokenizer(dir: &Path) -> Result<Arc<Tokenizer>, TextError> {
    shared(dir, "", || Tokenizer::from_dir(dir))
}

/// The tokenizer at `path`, a directory or a file, read by the rules of `kind`.
///
/// # Errors
/// As [`Tokenizer::open`].
pub fn open_tokenizer(path: &Path, kind: TokenizerType) -> Result<Arc<Tokenizer>, TextError> {
    shared(path, &format!("{kind:?}"), || Tokenizer::open(path, kind))
}

fn shared(
    path: &Path,
    kind: &str,
    load: impl FnOnce() -> Result<Tokenizer, TextError>,
) -> Result<Arc<Tokenizer>, TextError> {
    let key = Key::of(path, kind);
    let known = || LOADED.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some(tokenizer) = known().get(&key).and_then(Weak::upgrade) {
        return Ok(tokenizer);
    }
    // Without the lock, because loading may take seconds. Of two concurrent loads, the first result is kept.
    let tokenizer = Arc::new(load()?);
    let mut known = known();
    known.retain(|_, tokenizer| tokenizer.strong_count() > 0);
    if let Some(other) = known.get(&key).and_then(Weak::upgrade) {
        return Ok(other);
    }
    known.insert(key, Arc::downgrade(&tokenizer));
    Ok(tokenizer)
}

impl Key {
    fn of(path: &Path, kind: &str) -> Self {
        let path = fs::canonicalize(path).unwrap_or_else(|_| path.to_owned());
        let stamp = |path: PathBuf| {
            let found = fs::metadata(path).ok()?;
            Some((found.len(), found.modified().ok()?))
        };
        let dir = if path.is_dir() { path.as_path() } else { path.parent().unwrap_or(Path::new("")) };
        let mut files: Vec<_> = FILES.iter().map(|file| stamp(dir.join(file))).collect();
        files.push(stamp(path.clone()));
        Self { path, kind: kind.to_owned(), files }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn write(dir: &Path, words: &[&str]) {
        let vocab: serde_json::Map<_, _> =
            words.iter().enumerate().map(|(id, word)| ((*word).to_owned(), id.into())).collect();
        let json = serde_json::json!({"version": "1.0", "added_tokens": [],
            "model": {"type": "WordLevel", "vocab": vocab, "unk_token": words[0]}});
        fs::write(dir.join("tokenizer.json"), json.to_string()).unwrap();
    }

    #[test]
    fn models_of_one_directory_share_a_tokenizer_until_its_files_change() {
        let dir = tempfile::tempdir().unwrap();
        write(dir.path(), &["a", "b"]);
        let first = tokenizer(dir.path()).unwrap();
        let second = tokenizer(&dir.path().join(".")).unwrap();
        assert!(Arc::ptr_eq(&first, &second));
        write(dir.path(), &["a", "b", "c"]);
        let third = tokenizer(dir.path()).unwrap();
        assert!(!Arc::ptr_eq(&first, &third));
        assert_eq!((first.vocab_size(), third.vocab_size()), (2, 3));
        drop((first, second));
        let fourth = tokenizer(dir.path()).unwrap();
        assert!(Arc::ptr_eq(&third, &fourth));
    }
}
