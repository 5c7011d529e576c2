use std::path::Path;

use serde_json::Value;
use tokenizers::{Decoder, DecoderWrapper};

use crate::TextError;
use crate::files::MAX_TOKEN_ID;
use crate::sentencepiece::{PieceType, SPACE, fallback_byte};
use crate::spm::SpmTokenizer;

const SUPPORTED: &str = "`ByteLevel`, `Metaspace`, `WordPiece`, none, or a `Sequence` of `Replace`, `ByteFallback`, `Fuse` and a leading `Strip`";

/// The bytes that each token adds to a text. They are computed once at load, so that decoding a token costs one copy.
pub(crate) struct Spelling {
    pub(crate) stream: Stream,
    kinds: Vec<Kind>,
    /// Bytes of each token anywhere but at the start.
    inner: Pieces,
    /// Bytes of each token at the start of a text, if the decoder treats that place differently.
    first: Option<Pieces>,
}

/// How the pieces of a text are joined.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Stream {
    /// Arbitrary bytes that form UTF-8 together; invalid parts become U+FFFD as in `String::from_utf8_lossy`.
    Bytes,
    /// Strings, and runs of fallback bytes. A run is valid UTF-8 as a whole, or each of its bytes becomes U+FFFD. `strip` removes
    /// a leading character up to so many times.
    Text { strip: Option<(char, usize)> },
    /// SentencePiece's rules: strings and fallback bytes; a byte that is part of no character becomes U+FFFD. The leading space of
    /// the first piece is dropped; with `all_spaces`, that of each piece until there is text.
    Pieces { all_spaces: bool },
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Kind {
    Absent,
    Plain,
    Special,
    /// One byte of a character outside the vocabulary, written as `<0x0A>`.
    Byte,
}

impl Kind {
    fn of(piece: PieceType) -> Self {
        match piece {
            PieceType::Control | PieceType::Unknown => Kind::Special,
            PieceType::Byte => Kind::Byte,
            PieceType::Normal | PieceType::UserDefined | PieceType::Unused => Kind::Plain,
        }
    }
}

/// The part of a text that one token adds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Piece<'a> {
    Bytes(&'a [u8]),
    FallbackByte(u8),
}

impl Spelling {
    /// Computes the pieces of all tokens of `tokenizer`, which was read from `path`.
    pub(crate) fn of(tokenizer: &tokenizers::Tokenizer, path: &Path) -> Result<Self, TextError> {
        let max_id = tokenizer.get_vocab(true).into_values().max().unwrap_or(0);
        if max_id > MAX_TOKEN_ID {
            return Err(TextError::TokenId { path: path.to_owned(), id: max_id, max: MAX_TOKEN_ID });
        }
        let rule = Rule::of(tokenizer.get_decoder()).map_err(|decoder| TextError::Decoder {
            path: path.to_owned(),
            decoder,
            expected: SUPPORTED,
        })?;
        let mut spelling = Self {
            stream: rule.stream(),
            kinds: Vec::with_capacity(max_id as usize + 1),
            inner: Pieces::default(),
            first: rule.has_first().then(Pieces::default),
        };
        for id in 0..=max_id {
            spelling.add(tokenizer, &rule, id);
        }
        Ok(spelling)
    }

    /// The pieces of a SentencePiece model and the tokens added to it.
    pub(crate) fn of_spm(tokenizer: &SpmTokenizer) -> Self {
        let model = tokenizer.model();
        let (drops_first, all_spaces) = model.drops_first_space();
        let len = tokenizer.added().iter().map(|(id, _)| *id as usize + 1).fold(model.len(), usize::max);
        let mut tokens: Vec<(Kind, String)> =
            model.pieces().map(|(piece, kind)| (Kind::of(kind), piece.into())).collect();
        tokens.resize(len, (Kind::Absent, String::new()));
        for token in &mut tokens {
            token.1 = token.1.replace(SPACE, " ");
        }
        for (id, token) in tokenizer.added() {
            let kind = if token.special { Kind::Special } else { Kind::Plain };
            tokens[*id as usize] = (kind, token.content.clone());
        }
        let (mut inner, mut first) = (Pieces::default(), Pieces::default());
        for (kind, text) in &tokens {
            inner.push(text.as_bytes());
            let drops = drops_first && *kind == Kind::Plain;
            first.push(if drops { text.strip_prefix(' ').unwrap_or(text) } else { text }.as_bytes());
        }
        let kinds = tokens.iter().map(|(kind, _)| *kind).collect();
        Self { stream: Stream::Pieces { all_spaces }, kinds, inner, first: Some(first) }
    }

    fn add(&mut self, tokenizer: &tokenizers::Tokenizer, rule: &Rule, id: u32) {
        let added = tokenizer.get_added_vocabulary();
        // Added tokens first, as in `Tokenizer::decode` of the crate.
        let token = added.simple_id_to_token(id).or_else(|| tokenizers::Model::id_to_token(tokenizer.get_model(), id));
        let Some(token) = token else {
            self.kinds.push(Kind::Absent);
            self.inner.push(b"");
            self.first.iter_mut().for_each(|pieces| pieces.push(b""));
            return;
        };
        let special = added.is_special_token(&token);
        let bytes = rule.inner(&token);
        let is_byte = !special && rule.has_byte_fallback() && fallback_byte(&bytes).is_some();
        self.kinds.push(match (special, is_byte) {
            (true, _) => Kind::Special,
            (false, true) => Kind::Byte,
            (false, false) => Kind::Plain,
        });
        self.inner.push(&bytes);
        if let Some(first) = &mut self.first {
            first.push(&rule.first(&token));
        }
    }

    /// The part that token `id` adds at the start of a text, or later in it; `None` if it adds nothing.
    pub(crate) fn piece(&self, id: u32, at_start: bool, skip_special: bool) -> Option<Piece<'_>> {
        let kind = *self.kinds.get(id as usize)?;
        let pieces = self.first.as_ref().filter(|_| at_start).unwrap_or(&self.inner);
        let bytes = pieces.get(id as usize);
        match kind {
            Kind::Absent => None,
            Kind::Special if skip_special => None,
            Kind::Byte => fallback_byte(bytes).map(Piece::FallbackByte),
            Kind::Plain | Kind::Special => Some(Piece::Bytes(bytes)),
        }
    }

    pub(crate) fn vocab_size(&self) -> usize {
        self.kinds.len()
    }

    pub(crate) fn is_special(&self, id: u32) -> bool {
        self.kinds.get(id as usize) == Some(&Kind::Special)
    }
}

/// Byte strings by index, in one allocation.
#[derive(Default)]
struct Pieces {
    bytes: Vec<u8>,
    ends: Vec<u32>,
}

impl Pieces {
    fn push(&mut self, piece: &[u8]) {
        self.bytes.extend_from_slice(piece);
        self.ends.push(u32::try_from(self.bytes.len()).expect("a vocabulary of 2^24 short tokens is below 4 GiB"));
    }

    fn get(&self, index: usize) -> &[u8] {
        let start = if index == 0 { 0 } else { self.ends[index - 1] };
        &self.bytes[start as usize..self.ends[index] as usize]
    }
}

/// The decoder of a `tokenizer.json`; only decoders whose text can be streamed.
enum Rule<'a> {
    /// Byte-level BPE: each character of a token represents one byte.
    ByteLevel { byte_of_char: Vec<Option<u8>> },
    /// `Metaspace`, `WordPiece`: the text of a token depends only on the token and on whether it is the first.
    ByPosition(&'a DecoderWrapper),
    /// No decoder: tokens are joined with one space.
    Spaced,
    /// SentencePiece as a sequence of decoders: each token is rewritten alone, then byte fallback, fusion, and stripping.
    Rewritten { steps: Vec<DecoderWrapper>, byte_fallback: bool, strip: Option<(char, usize)> },
}

impl<'a> Rule<'a> {
    /// # Errors
    /// The name of a decoder that cannot be streamed.
    fn of(decoder: Option<&'a DecoderWrapper>) -> Result<Self, String> {
        match decoder {
            None => Ok(Self::Spaced),
            Some(DecoderWrapper::ByteLevel(_)) => Ok(Self::ByteLevel { byte_of_char: byte_of_char() }),
            Some(decoder @ (DecoderWrapper::Metaspace(_) | DecoderWrapper::WordPiece(_))) => {
                Ok(Self::ByPosition(decoder))
            }
            Some(DecoderWrapper::Sequence(sequence)) => match sequence.get_decoders() {
                [only] => Self::of(Some(only)),
                steps => Self::rewritten(steps),
            },
            Some(step) => Self::rewritten(std::slice::from_ref(step)),
        }
    }

    fn rewritten(decoders: &[DecoderWrapper]) -> Result<Self, String> {
        let (mut steps, mut byte_fallback, mut fused, mut strip) = (Vec::new(), false, false, None);
        for decoder in decoders {
            match decoder {
                DecoderWrapper::Fuse(_) => fused = true,
                DecoderWrapper::Strip(ends) if fused && ends.stop == 0 && strip.is_none() => {
                    strip = Some((ends.content, ends.start));
                }
                DecoderWrapper::Replace(_) | DecoderWrapper::Strip(_) if !fused && !byte_fallback => {
                    steps.push(decoder.clone());
                }
                DecoderWrapper::ByteFallback(_) if !fused => byte_fallback = true,
                other => return Err(name_of(other)),
            }
        }
        Ok(Self::Rewritten { steps, byte_fallback, strip })
    }

    fn stream(&self) -> Stream {
        match self {
            Self::ByteLevel { .. } => Stream::Bytes,
            Self::ByPosition(_) | Self::Spaced => Stream::Text { strip: None },
            Self::Rewritten { strip, .. } => Stream::Text { strip: *strip },
        }
    }

    fn has_first(&self) -> bool {
        matches!(self, Self::ByPosition(_) | Self::Spaced)
    }

    fn has_byte_fallback(&self) -> bool {
        matches!(self, Self::Rewritten { byte_fallback: true, .. })
    }

    fn first(&self, token: &str) -> Vec<u8> {
        match self {
            Self::ByPosition(decoder) => decode_last(decoder, vec![token.to_owned()]),
            _ => token.as_bytes().to_vec(),
        }
    }

    fn inner(&self, token: &str) -> Vec<u8> {
        match self {
            Self::ByteLevel { byte_of_char } => {
                let bytes = token.chars().map(|c| *byte_of_char.get(c as usize)?).collect::<Option<Vec<u8>>>();
                bytes.unwrap_or_else(|| token.as_bytes().to_vec())
            }
            Self::ByPosition(decoder) => decode_last(decoder, vec![String::new(), token.to_owned()]),
            Self::Spaced => format!(" {token}").into_bytes(),
            Self::Rewritten { steps, .. } => steps.iter().fold(token.as_bytes().to_vec(), |bytes, step| {
                let text = String::from_utf8(bytes).expect("each step gives a string");
                decode_last(step, vec![text])
            }),
        }
    }
}

/// Decodes `tokens` with a decoder that maps each token to one text, and returns the last text; the token itself on failure.
fn decode_last(decoder: &DecoderWrapper, tokens: Vec<String>) -> Vec<u8> {
    let token = tokens.last().cloned();
    let decoded = decoder.decode_chain(tokens).ok().and_then(|mut texts| texts.pop());
    decoded.or(token).unwrap_or_default().into_bytes()
}

/// The alphabet of byte-level BPE (Radford et al. 2019): a printable Latin-1 character represents its own byte; U+0100 and the
/// following characters represent the other 68 bytes in order.
fn byte_of_char() -> Vec<Option<u8>> {
    let mut bytes = vec![None; 0x100 + 68];
    let mut next = 0x100;
    for byte in 0..=u8::MAX {
        let printable = matches!(byte, b'!'..=b'~' | 0xA1..=0xAC | 0xAE..=0xFF);
        let index = if printable { usize::from(byte) } else { next };
        next += usize::from(!printable);
        bytes[index] = Some(byte);
    }
    bytes
}

fn name_of(decoder: &DecoderWrapper) -> String {
    let json = serde_json::to_value(decoder).unwrap_or(Value::Null);
    json.get("type").and_then(Value::as_str).unwrap_or("unknown").to_owned()
}
