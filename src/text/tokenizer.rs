use std::fs;
use std::io::ErrorKind;
use std::path::Path;
use std::sync::Arc;

use crate::spelling::Spelling;
use crate::{Detokenizer, TextError};

/// The tokenizer of one checkpoint. Share it in an [`Arc`]: nothing in it changes after loading.
pub struct Tokenizer {
    inner: tokenizers::Tokenizer,
    spelling: Arc<Spelling>,
}

impl Tokenizer {
    /// Reads `tokenizer.json` of a checkpoint directory.
    ///
    /// Truncation and padding that the file may ask for are switched off: a server neither shortens nor pads a prompt.
    pub fn from_dir(dir: &Path) -> Result<Self, TextError> {
        let path = dir.join("tokenizer.json");
        let json = fs::read(&path).map_err(|source| match source.kind() {
            ErrorKind::NotFound => TextError::NoTokenizer { dir: dir.to_owned(), hint: hint_for(dir) },
            _ => TextError::Read { path: path.clone(), source },
        })?;
        let parse_error =
            |reason: tokenizers::Error| TextError::Parse { path: path.clone(), reason: reason.to_string() };
        let mut inner = tokenizers::Tokenizer::from_bytes(&json).map_err(parse_error)?;
        inner.with_truncation(None).map_err(parse_error)?;
        inner.with_padding(None);
        let spelling = Arc::new(Spelling::of(&inner, &path)?);
        Ok(Self { inner, spelling })
    }

    /// The token ids of `text`, with the checkpoint's own begin and end tokens if `add_special` is set.
    pub fn encode(&self, text: &str, add_special: bool) -> Result<Vec<u32>, TextError> {
        let encoding = self
            .inner
            .encode_fast(text, add_special)
            .map_err(|reason| TextError::Encode { num_bytes: text.len(), reason: reason.to_string() })?;
        Ok(encoding.get_ids().to_vec())
    }

    /// The text of a whole sequence: what a [`Detokenizer`] gives in pieces. Ids that name no token give no text.
    pub fn decode(&self, ids: &[u32], skip_special: bool) -> String {
        let mut detokenizer = Detokenizer::with_spelling(Arc::clone(&self.spelling), skip_special);
        let mut text = String::new();
        for &id in ids {
            detokenizer.push_into(id, &mut text);
        }
        detokenizer.finish_into(&mut text);
        text
    }

    /// One more than the largest token id, added tokens included. A model's own vocabulary may be padded beyond it.
    pub fn vocab_size(&self) -> usize {
        self.spelling.vocab_size()
    }

    /// The id of a token spelled as in `tokenizer.json`, such as `</s>` or `Ġthe`.
    pub fn token_to_id(&self, token: &str) -> Option<u32> {
        self.inner.token_to_id(token)
    }

    /// The spelling of a token as in `tokenizer.json`.
    pub fn id_to_token(&self, id: u32) -> Option<String> {
        self.inner.id_to_token(id)
    }

    /// The ids of all special tokens, ascending.
    pub fn special_ids(&self) -> Vec<u32> {
        (0..self.vocab_size() as u32).filter(|&id| self.spelling.is_special(id)).collect()
    }

    pub(crate) fn spelling(&self) -> &Arc<Spelling> {
        &self.spelling
    }
}

/// What to add to the words about a missing `tokenizer.json`.
fn hint_for(dir: &Path) -> &'static str {
    if dir.join("tokenizer.model").exists() {
        " (a SentencePiece `tokenizer.model` is there: convert it with `AutoTokenizer.from_pretrained(dir).save_pretrained(dir)` of transformers)"
    } else if !dir.exists() {
        " (the directory does not exist)"
    } else {
        ""
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const WORDS: &str = r#"{"version":"1.0","truncation":{"max_length":1,"strategy":"LongestFirst","stride":0,"direction":"Right"},
        "added_tokens":[{"id":2,"content":"<s>","single_word":false,"lstrip":false,"rstrip":false,"normalized":false,"special":true}],
        "model":{"type":"WordLevel","vocab":{"a":0,"b":1,"<s>":2},"unk_token":"a"},"pre_tokenizer":{"type":"Whitespace"}}"#;

    fn load(json: &str) -> Result<Tokenizer, TextError> {
        let dir = tempfile::tempdir().unwrap();
        fs::write(dir.path().join("tokenizer.json"), json).unwrap();
        Tokenizer::from_dir(dir.path())
    }

    #[test]
    fn a_tokenizer_is_shared_between_threads() {
        fn shared<T: Send + Sync>() {}
        shared::<Tokenizer>();
    }

    #[test]
    fn a_prompt_is_not_truncated_although_the_file_asks_for_it() {
        let tokenizer = load(WORDS).unwrap();
        assert_eq!(tokenizer.encode("a b b a", false).unwrap(), [0, 1, 1, 0]);
    }

    #[test]
    fn special_tokens_are_known_and_skipped_on_request() {
        let tokenizer = load(WORDS).unwrap();
        assert_eq!((tokenizer.vocab_size(), tokenizer.special_ids()), (3, vec![2]));
        assert_eq!(tokenizer.token_to_id("<s>"), Some(2));
        assert_eq!(tokenizer.decode(&[2, 0, 1], true), "a b");
        assert_eq!(tokenizer.decode(&[2, 0, 1], false), "<s> a b");
        assert_eq!(tokenizer.decode(&[0, 77, 1], false), "a b");
    }

    #[test]
    fn a_missing_file_is_named_with_what_to_do() {
        let dir = tempfile::tempdir().unwrap();
        let message = Tokenizer::from_dir(dir.path()).err().unwrap().to_string();
        assert!(message.contains("has no `tokenizer.json`"), "{message}");
        fs::write(dir.path().join("tokenizer.model"), b"").unwrap();
        let message = Tokenizer::from_dir(dir.path()).err().unwrap().to_string();
        assert!(message.contains("save_pretrained"), "{message}");
    }

    #[test]
    fn a_broken_file_and_a_wild_id_are_errors() {
        let message = load("{\"version\"").err().unwrap().to_string();
        assert!(message.contains("tokenizer.json") && message.contains("copy it from the checkpoint"), "{message}");
        let message = load(&WORDS.replace("\"b\":1", "\"b\":4000000000")).err().unwrap().to_string();
        assert!(message.contains("token id 4000000000"), "{message}");
    }
}
