use std::path::Path;

use crate::added::{AddedTokens, Segment};
use crate::files::{AddedToken, Files, MAX_TOKEN_ID};
use crate::sentencepiece::{PieceType, SentencePiece};
use crate::tokenizer_type::TokenizerType;
use crate::{Coverage, TextError};

/// Number of T5's sentinel tokens where `extra_ids` does not set it.
const T5_EXTRA_IDS: u64 = 100;

/// Whether a file is tiktoken's: lines of a token in base64 and its rank.
fn is_tiktoken(bytes: &[u8]) -> bool {
    let line = bytes.split(|byte| *byte == b'\n').next().unwrap_or_default();
    let Some((token, rank)) = std::str::from_utf8(line).ok().and_then(|line| line.trim_end().split_once(' ')) else {
        return false;
    };
    let is_base64 = |char: char| char.is_ascii_alphanumeric() || "+/=".contains(char);
    !token.is_empty() && token.chars().all(is_base64) && rank.parse::<u32>().is_ok()
}

/// A SentencePiece model with the added tokens of its checkpoint.
pub(crate) struct SpmTokenizer {
    model: SentencePiece,
    added: AddedTokens,
    bos: Option<u32>,
    eos: Option<u32>,
    /// Whether the text after an added token gets the space that the model puts before a text.
    prefixes_all: bool,
}

impl SpmTokenizer {
    /// Reads the model at `path`; `files` are those of its directory.
    pub(crate) fn read(path: &Path, files: &Files, tokenizer_type: TokenizerType) -> Result<Self, TextError> {
        let bytes = std::fs::read(path).map_err(|source| TextError::Read { path: path.to_owned(), source })?;
        let parse_error = |reason| match is_tiktoken(&bytes) {
            true => TextError::Tiktoken { path: path.to_owned() },
            false => TextError::Parse { path: path.to_owned(), reason },
        };
        let model = SentencePiece::read(&bytes).map_err(parse_error)?;
        let rules = Rules::of(&model, files, tokenizer_type);
        let added = added_tokens(&model, files, &rules);
        if let Some(&(id, _)) = added.iter().find(|(id, _)| *id > MAX_TOKEN_ID) {
            return Err(TextError::TokenId { path: path.to_owned(), id, max: MAX_TOKEN_ID });
        }
        let added = AddedTokens::new(added);
        let id =
            |token: &Option<String>| token.as_deref().and_then(|token| added.id(token).or_else(|| model.id(token)));
        let (bos, eos) = (id(&rules.bos).filter(|_| rules.adds_bos), id(&rules.eos).filter(|_| rules.adds_eos));
        Ok(Self { bos, eos, prefixes_all: rules.prefixes_all, added, model })
    }

    pub(crate) fn encode(&self, text: &str, add_special: bool) -> Vec<u32> {
        let mut ids = Vec::with_capacity(text.len() / 3 + 2);
        ids.extend(self.bos.filter(|_| add_special));
        for (index, segment) in self.added.split(text).into_iter().enumerate() {
            match segment {
                Segment::Text(text) => self.model.encode_into(text, index == 0 || self.prefixes_all, &mut ids),
                Segment::Token(id) => ids.push(id),
            }
        }
        ids.extend(self.eos.filter(|_| add_special));
        ids
    }

    pub(crate) fn coverage(&self) -> Coverage {
        let (pieces, added) = (self.model.pieces().map(|(piece, _)| piece), self.added.tokens());
        let contents = added.iter().map(|(_, token)| token.content.as_str());
        let longest = pieces.chain(contents).map(str::len).max().unwrap_or(0);
        let takes_spaces = added.iter().any(|(_, token)| token.lstrip || token.rstrip);
        Coverage::of_spm(&self.model, takes_spaces, longest)
    }

    /// The ids of the pieces that the model declares as begin and end of a text.
    pub(crate) fn own_ends(&self) -> [Option<u32>; 2] {
        self.model.ends().map(|piece| self.token_to_id(piece?))
    }

    pub(crate) fn model(&self) -> &SentencePiece {
        &self.model
    }

    pub(crate) fn added(&self) -> &[(u32, AddedToken)] {
        self.added.tokens()
    }

    pub(crate) fn token_to_id(&self, token: &str) -> Option<u32> {
        self.added.id(token).or_else(|| self.model.id(token))
    }

    pub(crate) fn id_to_token(&self, id: u32) -> Option<&str> {
        self.added.content(id).or_else(|| self.model.piece(id))
    }
}

/// Settings that follow from the tokenizer's class unless its files set them.
struct Rules {
    is_t5: bool,
    adds_bos: bool,
    adds_eos: bool,
    prefixes_all: bool,
    bos: Option<String>,
    eos: Option<String>,
}

impl Rules {
    fn of(model: &SentencePiece, files: &Files, tokenizer_type: TokenizerType) -> Self {
        let class = files.class();
        let is_t5 = tokenizer_type == TokenizerType::T5
            || tokenizer_type == TokenizerType::Auto && class.ends_with("T5Tokenizer");
        let is_llama = !is_t5
            && (tokenizer_type == TokenizerType::Llama
                || matches!(class, "LlamaTokenizer" | "CodeLlamaTokenizer" | "TokenizersBackend")
                || class.is_empty() && model.is_bpe());
        // Tokenizer classes in a checkpoint's own code pass each part of the text to SentencePiece as a text of its own.
        let is_legacy = files.flag("legacy").unwrap_or(!is_llama) && tokenizer_type != TokenizerType::Llama;
        let [bos, eos] = model.ends().map(|piece| piece.map(str::to_owned));
        Self {
            is_t5,
            adds_bos: !is_t5 && files.flag("add_bos_token").unwrap_or(model.is_bpe()),
            adds_eos: files.flag("add_eos_token").unwrap_or(is_t5),
            prefixes_all: is_t5 || is_legacy,
            bos: files.role("bos_token").or(bos),
            eos: files.role("eos_token").or(eos),
        }
    }
}

/// The tokens of the JSON files, the model's begin, end and unknown pieces, and T5's sentinel tokens.
fn added_tokens(model: &SentencePiece, files: &Files, rules: &Rules) -> Vec<(u32, AddedToken)> {
    let mut tokens = files.added();
    let unknown = model.pieces().find(|(_, kind)| *kind == PieceType::Unknown).map(|(piece, _)| piece.to_owned());
    let padding = rules.is_t5.then(|| "<pad>".to_owned());
    for token in [unknown, rules.bos.clone(), rules.eos.clone(), padding].into_iter().flatten() {
        if !tokens.iter().any(|(_, known)| known.content == token) && model.id(&token).is_some() {
            tokens.push((None, AddedToken::plain(token, true)));
        }
    }
    if rules.is_t5 && !tokens.iter().any(|(_, token)| token.content.starts_with("<extra_id_")) {
        let extra_ids = files.config.get("extra_ids").and_then(serde_json::Value::as_u64).unwrap_or(T5_EXTRA_IDS);
        let extra_ids = extra_ids.min(u64::from(MAX_TOKEN_ID)) as u32;
        for index in 0..extra_ids {
            let id = model.len() as u32 + extra_ids - 1 - index;
            tokens.push((Some(id), AddedToken::plain(format!("<extra_id_{index}>"), true)));
        }
    }
    with_ids(model, tokens)
}

/// Assigns an id to each token without one: that of the piece with the same text, else the next free id.
fn with_ids(model: &SentencePiece, mut tokens: Vec<(Option<u32>, AddedToken)>) -> Vec<(u32, AddedToken)> {
    for (id, token) in &mut tokens {
        *id = id.or_else(|| model.id(&token.content));
    }
    let largest = tokens.iter().filter_map(|(id, _)| *id).max();
    let mut next = largest.map_or(0, |id| id.saturating_add(1)).max(model.len() as u32);
    let mut next_id = || {
        next += 1;
        next - 1
    };
    tokens.into_iter().map(|(id, token)| (id.unwrap_or_else(&mut next_id), token)).collect()
}
