use std::borrow::Cow;
use std::fs;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use crate::files::Files;
use crate::spelling::{Piece, Spelling};
use crate::spm::SpmTokenizer;
use crate::tokenizer_type::TokenizerType;
use crate::{Coverage, TextError, gpt2};

/// The tokenizer of one checkpoint. It is immutable after loading; share it in an [`Arc`].
pub struct Tokenizer {
    model: Model,
    spelling: Arc<Spelling>,
    coverage: Coverage,
    roles: Roles,
}

/// The ids of the tokens that have a role in the checkpoint's files.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Roles {
    /// Begins a text.
    pub bos: Option<u32>,
    /// Ends a text.
    pub eos: Option<u32>,
    /// Pads the shorter rows of a batch.
    pub pad: Option<u32>,
}

enum Model {
    Json(Box<tokenizers::Tokenizer>),
    Spm(Box<SpmTokenizer>),
}

/// The file that a tokenizer is read from.
enum Source {
    Json(PathBuf),
    Spm(PathBuf),
    Gpt2,
}

impl Tokenizer {
    /// Reads the tokenizer of a checkpoint directory, as [`TokenizerType::Auto`] does.
    ///
    /// # Errors
    /// When the directory has no tokenizer, or one of its files cannot be read or parsed.
    pub fn from_dir(dir: &Path) -> Result<Self, TextError> {
        Self::open(dir, TokenizerType::Auto)
    }

    /// Reads the tokenizer of a checkpoint directory, or the SentencePiece model or `tokenizer.json` that `path` names.
    ///
    /// Truncation and padding in `tokenizer.json` are disabled: a server neither truncates nor pads a prompt.
    ///
    /// # Errors
    /// As [`Self::from_dir`].
    pub fn open(path: &Path, tokenizer_type: TokenizerType) -> Result<Self, TextError> {
        let (dir, source) = match path.is_file() {
            true => (path.parent().unwrap_or(Path::new("")), Source::of_file(path)),
            false => (path, Source::in_dir(path, tokenizer_type)?),
        };
        let mut tokenizer = match source {
            Source::Json(path) => Self::from_json(&path)?,
            Source::Spm(path) => {
                let model = SpmTokenizer::read(&path, &Files::of(dir)?, tokenizer_type)?;
                let spelling = Arc::new(Spelling::of_spm(&model));
                let coverage = model.coverage();
                Self { model: Model::Spm(Box::new(model)), spelling, coverage, roles: Roles::default() }
            }
            Source::Gpt2 => Self::from_tokenizers(gpt2::read(dir, &Files::of(dir)?)?, &dir.join("vocab.json"))?,
        };
        tokenizer.roles = tokenizer.find_roles(dir);
        Ok(tokenizer)
    }

    /// The roles in the files beside the tokenizer, else those in a SentencePiece model. The files are optional here, so an
    /// unreadable one counts as missing.
    fn find_roles(&self, dir: &Path) -> Roles {
        let files = Files::of(dir).ok();
        let named = |role: &str| self.token_to_id(&files.as_ref()?.role(role)?);
        let [bos, eos] = match &self.model {
            Model::Json(_) => [None; 2],
            Model::Spm(model) => model.own_ends(),
        };
        Roles { bos: named("bos_token").or(bos), eos: named("eos_token").or(eos), pad: named("pad_token") }
    }

    fn from_json(path: &Path) -> Result<Self, TextError> {
        let json = fs::read(path).map_err(|source| match source.kind() {
            ErrorKind::NotFound => no_tokenizer(path.parent().unwrap_or(path)),
            _ => TextError::Read { path: path.to_owned(), source },
        })?;
        let parse_error =
            |reason: tokenizers::Error| TextError::Parse { path: path.to_owned(), reason: reason.to_string() };
        let mut model = tokenizers::Tokenizer::from_bytes(&json).map_err(parse_error)?;
        model.with_truncation(None).map_err(parse_error)?;
        model.with_padding(None);
        Self::from_tokenizers(model, path)
    }

    fn from_tokenizers(model: tokenizers::Tokenizer, path: &Path) -> Result<Self, TextError> {
        let spelling = Arc::new(Spelling::of(&model, path)?);
        let ids = 0..spelling.vocab_size() as u32;
        let longest = ids.filter_map(|id| model.id_to_token(id)).map(|token| token.len()).max();
        let coverage = Coverage::of(&model, longest.unwrap_or(0));
        Ok(Self { model: Model::Json(Box::new(model)), spelling, coverage, roles: Roles::default() })
    }

    /// The token ids of `text`, with the checkpoint's begin and end tokens if `add_special` is set.
    ///
    /// # Errors
    /// When the tokenizer's model cannot encode the text.
    pub fn encode(&self, text: &str, add_special: bool) -> Result<Vec<u32>, TextError> {
        match &self.model {
            Model::Json(model) => {
                let encoding = model
                    .encode_fast(text, add_special)
                    .map_err(|reason| TextError::Encode { num_bytes: text.len(), reason: reason.to_string() })?;
                Ok(encoding.get_ids().to_vec())
            }
            Model::Spm(model) => Ok(model.encode(text, add_special)),
        }
    }

    /// One more than the largest token id, added tokens included. The vocabulary of the model's weights may be padded beyond it.
    pub fn vocab_size(&self) -> usize {
        self.spelling.vocab_size()
    }

    /// How many bytes of text one token may represent.
    pub fn coverage(&self) -> Coverage {
        self.coverage
    }

    /// The id of a token spelled as in the tokenizer's file, such as `</s>` or `Ġthe`.
    pub fn token_to_id(&self, token: &str) -> Option<u32> {
        match &self.model {
            Model::Json(model) => model.token_to_id(token),
            Model::Spm(model) => model.token_to_id(token),
        }
    }

    /// The spelling of a token as in the tokenizer's file.
    pub fn id_to_token(&self, id: u32) -> Option<String> {
        match &self.model {
            Model::Json(model) => model.id_to_token(id),
            Model::Spm(model) => model.id_to_token(id).map(str::to_owned),
        }
    }

    /// The tokens that begin, end and pad a text, where the checkpoint's files name them.
    pub fn roles(&self) -> Roles {
        self.roles
    }

    /// The ids of all special tokens, ascending.
    pub fn special_ids(&self) -> Vec<u32> {
        (0..self.vocab_size() as u32).filter(|&id| self.spelling.is_special(id)).collect()
    }

    /// The bytes that a token adds inside a text, or the spelling of a special token; `None` for an id without a token.
    pub fn token_bytes(&self, id: u32) -> Option<Cow<'_, [u8]>> {
        self.spelling.piece(id, false, false).map(|piece| match piece {
            Piece::Bytes(bytes) => Cow::Borrowed(bytes),
            Piece::FallbackByte(byte) => Cow::Owned(vec![byte]),
        })
    }

    pub(crate) fn spelling(&self) -> &Arc<Spelling> {
        &self.spelling
    }
}

impl Source {
    fn of_file(path: &Path) -> Self {
        match path.extension().is_some_and(|extension| extension == "json") {
            true => Self::Json(path.to_owned()),
            false => Self::Spm(path.to_owned()),
        }
    }

    fn in_dir(dir: &Path, tokenizer_type: TokenizerType) -> Result<Self, TextError> {
        let file = |name: &str| Some(dir.join(name)).filter(|path| path.is_file());
        let json = || file("tokenizer.json").map(Self::Json);
        let spm = || ["tokenizer.model", "spiece.model"].into_iter().find_map(file).map(Self::Spm);
        let gpt2 = || file("vocab.json").and(file("merges.txt")).map(|_| Self::Gpt2);
        let found = match tokenizer_type {
            TokenizerType::Auto => json().or_else(spm).or_else(gpt2),
            TokenizerType::Llama | TokenizerType::T5 => spm().or_else(json),
        };
        found.ok_or_else(|| no_tokenizer(dir))
    }
}

fn no_tokenizer(dir: &Path) -> TextError {
    TextError::NoTokenizer { dir: dir.to_owned(), hint: if dir.exists() { "" } else { " (it does not exist)" } }
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
    fn roles_are_those_of_the_files() {
        let dir = tempfile::tempdir().unwrap();
        fs::write(dir.path().join("tokenizer.json"), WORDS).unwrap();
        assert_eq!(Tokenizer::from_dir(dir.path()).unwrap().roles(), Roles::default());
        fs::write(dir.path().join("tokenizer_config.json"), br#"{"bos_token":{"content":"<s>"},"eos_token":"b"}"#)
            .unwrap();
        let roles = Tokenizer::from_dir(dir.path()).unwrap().roles();
        assert_eq!(roles, Roles { bos: Some(2), eos: Some(1), pad: None });
        fs::write(dir.path().join("tokenizer_config.json"), b"{").unwrap();
        assert_eq!(Tokenizer::from_dir(dir.path()).unwrap().roles(), Roles::default());
    }

    #[test]
    fn a_missing_file_is_named_with_what_to_do() {
        let dir = tempfile::tempdir().unwrap();
        let message = Tokenizer::from_dir(dir.path()).err().unwrap().to_string();
        assert!(message.contains("has no `tokenizer.json`"), "{message}");
        fs::write(dir.path().join("tokenizer.model"), b"no model").unwrap();
        let message = Tokenizer::from_dir(dir.path()).err().unwrap().to_string();
        assert!(message.contains("tokenizer.model") && message.contains("no SentencePiece model"), "{message}");
        fs::write(dir.path().join("vocab.json"), b"{}").unwrap();
        fs::write(dir.path().join("merges.txt"), b"").unwrap();
        fs::write(dir.path().join("tokenizer_config.json"), br#"{"tokenizer_class":"RobertaTokenizer"}"#).unwrap();
        fs::remove_file(dir.path().join("tokenizer.model")).unwrap();
        let message = Tokenizer::from_dir(dir.path()).err().unwrap().to_string();
        assert!(message.contains("RobertaTokenizer") && message.contains("GPT2Tokenizer"), "{message}");
    }

    #[test]
    fn a_file_of_tiktoken_is_refused_with_what_to_take_instead() {
        let dir = tempfile::tempdir().unwrap();
        fs::write(dir.path().join("tokenizer.model"), "IQ== 0\nIg== 1\nIw== 2\n").unwrap();
        let message = Tokenizer::from_dir(dir.path()).err().unwrap().to_string();
        assert!(message.contains("tiktoken's ranks") && message.contains("take `tokenizer.json`"), "{message}");
        fs::write(dir.path().join("tokenizer.model"), "neither 1 thing").unwrap();
        let message = Tokenizer::from_dir(dir.path()).err().unwrap().to_string();
        assert!(message.contains("it is no SentencePiece model"), "{message}");
    }

    #[test]
    fn a_broken_file_and_a_wild_id_are_errors() {
        let message = load("{\"version\"").err().unwrap().to_string();
        assert!(message.contains("tokenizer.json") && message.contains("copy it from the checkpoint"), "{message}");
        let message = load(&WORDS.replace("\"b\":1", "\"b\":4000000000")).err().unwrap().to_string();
        assert!(message.contains("token id 4000000000"), "{message}");
    }
}
