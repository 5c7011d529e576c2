use serde_json::Value;
use tokenizers::ModelWrapper;
use tokenizers::models::bpe::BPE;

use crate::sentencepiece::SentencePiece;

/// How many bytes of text one token may represent.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Coverage {
    /// Upper bound for the bytes of text that one token represents.
    pub max_bytes: usize,
    /// Whether `max_bytes` holds for every text. False if the tokenizer drops characters, such as repeated spaces, or encodes
    /// several unknown characters as one token.
    pub is_certain: bool,
}

/// Bytes of the longest character: an unknown character is one token.
const LONGEST_CHAR: usize = 4;

/// Factors by which Unicode normalization may shrink a text. No form composes more than 3 bytes into 1 (the jamo of a Hangul
/// syllable, the Kelvin sign in lower case), or 4 bytes with compatibility mappings (mathematical letters).
const COMPOSED: usize = 3;
const COMPATIBLE: usize = 4;

impl Coverage {
    /// Of a `tokenizer.json` whose longest token has `longest` bytes.
    pub(crate) fn of(tokenizer: &tokenizers::Tokenizer, longest: usize) -> Self {
        let as_json =
            |part: Option<Result<Value, serde_json::Error>>| part.transpose().ok().map(Option::unwrap_or_default);
        let normalizer = as_json(tokenizer.get_normalizer().map(serde_json::to_value));
        let pre_tokenizer = as_json(tokenizer.get_pre_tokenizer().map(serde_json::to_value));
        let shrinks_by = normalizer.as_ref().and_then(shrinks_by);
        let keeps_all = pre_tokenizer.as_ref().is_some_and(keeps_all);
        let is_by_bytes = pre_tokenizer.iter().chain(&normalizer).any(is_by_bytes);
        let added = tokenizer.get_added_tokens_decoder();
        let takes_spaces = added.values().any(|token| token.lstrip || token.rstrip);
        let knows_all =
            matches!(tokenizer.get_model(), ModelWrapper::BPE(model) if knows_all(tokenizer, model, is_by_bytes));
        Self {
            max_bytes: longest.max(LONGEST_CHAR) * shrinks_by.unwrap_or(1),
            is_certain: shrinks_by.is_some() && keeps_all && knows_all && !takes_spaces,
        }
    }

    /// Of a SentencePiece model whose longest token has `longest` bytes. `takes_spaces`: an added token includes the white space
    /// around it.
    pub(crate) fn of_spm(model: &SentencePiece, takes_spaces: bool, longest: usize) -> Self {
        Self { max_bytes: longest.max(LONGEST_CHAR), is_certain: model.keeps_all() && !takes_spaces }
    }
}

/// The factor by which a normalizer may shrink a text; `None` if there is no bound.
fn shrinks_by(normalizer: &Value) -> Option<usize> {
    let Some(kind) = normalizer["type"].as_str() else { return normalizer.is_null().then_some(1) };
    match kind {
        "Prepend" | "ByteLevel" => Some(1),
        "NFC" | "NFD" | "Lowercase" => Some(COMPOSED),
        "NFKC" | "NFKD" => Some(COMPATIBLE),
        "Replace" => {
            let (from, to) = (normalizer["pattern"]["String"].as_str()?, normalizer["content"].as_str()?);
            (!to.is_empty()).then(|| from.len().div_ceil(to.len()).max(1))
        }
        "Sequence" => normalizer["normalizers"].as_array()?.iter().map(shrinks_by).product(),
        _ => None,
    }
}

/// Whether a pre-tokenizer keeps every character.
fn keeps_all(pre_tokenizer: &Value) -> bool {
    let Some(kind) = pre_tokenizer["type"].as_str() else { return pre_tokenizer.is_null() };
    match kind {
        "ByteLevel" | "Digits" | "Metaspace" | "UnicodeScripts" | "FixedLength" => true,
        "Split" | "Punctuation" => pre_tokenizer["behavior"].as_str().is_some_and(|behavior| behavior != "Removed"),
        "Sequence" => pre_tokenizer["pretokenizers"].as_array().is_some_and(|steps| steps.iter().all(keeps_all)),
        _ => false,
    }
}

/// Whether a step maps each byte of a text to a character of its own.
fn is_by_bytes(step: &Value) -> bool {
    let is_one = |steps: &Value| steps.as_array().is_some_and(|steps| steps.iter().any(is_by_bytes));
    step["type"] == "ByteLevel" || is_one(&step["pretokenizers"]) || is_one(&step["normalizers"])
}

/// Whether the model has a token for every character of its input, so that it drops none and never joins several unknown ones.
fn knows_all(tokenizer: &tokenizers::Tokenizer, model: &BPE, is_by_bytes: bool) -> bool {
    let has_token = |token: String| tokenizer.token_to_id(&token).is_some();
    if is_by_bytes {
        return tokenizers::pre_tokenizers::byte_level::ByteLevel::alphabet().into_iter().all(|c| has_token(c.into()));
    }
    let has_bytes = model.byte_fallback && (0..=255u8).all(|byte| has_token(format!("<0x{byte:02X}>")));
    has_bytes || model.unk_token.is_some() && !model.fuse_unk
}
