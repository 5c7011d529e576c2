//! SentencePiece models (Kudo and Richardson 2018): normalization, BPE, unigram, byte fallback.
//!
//! Own code, because the parts of `tokenizers` give other ids: its BPE orders equal scores by merge instead of by place and has no
//! unused pieces, its unigram model adds scores in f64 and finds control pieces in text, its normalizer takes the shortest replacement
//! instead of the longest, and none of them has user-defined pieces.

mod bpe;
mod charsmap;
mod normalizer;
mod pieces;
mod proto;
mod unigram;

use prost::Message as _;

use normalizer::Normalizer;
pub(crate) use normalizer::SPACE;
pub(crate) use pieces::fallback_byte;
use pieces::{Found, Pieces};
pub(crate) use proto::PieceType;
use proto::{ModelProto, ModelType};

/// A `tokenizer.model`.
#[derive(Debug)]
pub(crate) struct SentencePiece {
    normalizer: Normalizer,
    pieces: Pieces,
    is_bpe: bool,
    unknown: u32,
    byte_ids: Option<Box<[u32; 256]>>,
    bos_id: i32,
    eos_id: i32,
}

impl SentencePiece {
    /// Reads a model.
    ///
    /// # Errors
    /// When the bytes are not a SentencePiece model, or the model has a property that is not supported.
    pub(crate) fn read(bytes: &[u8]) -> Result<Self, String> {
        let model = ModelProto::decode(bytes).map_err(|error| format!("it is no SentencePiece model ({error})"))?;
        let trainer = model.trainer_spec.clone().unwrap_or_default();
        let is_bpe = match trainer.model_type() {
            ModelType::Bpe => true,
            ModelType::Unigram => false,
            other => return Err(format!("its model type is {other:?}, expected Bpe or Unigram")),
        };
        if model.denormalizer_spec.as_ref().is_some_and(|spec| !spec.precompiled_charsmap().is_empty()) {
            return Err("it rewrites decoded text (`denormalizer_spec`), which is not supported".to_owned());
        }
        let normalizer = Normalizer::new(&model.normalizer_spec.clone().unwrap_or_default(), &trainer)
            .ok_or("its `precompiled_charsmap` is damaged")?;
        let pieces = Pieces::new(&model)?;
        let unknown = pieces.types.iter().position(|kind| *kind == PieceType::Unknown);
        let unknown = unknown.ok_or("it has no unknown piece")? as u32;
        let byte_ids = trainer.byte_fallback().then(|| pieces.byte_ids()).transpose()?;
        let (bos_id, eos_id) = (trainer.bos_id(), trainer.eos_id());
        Ok(Self { normalizer, pieces, is_bpe, unknown, byte_ids, bos_id, eos_id })
    }

    /// Appends the ids of `text` to `ids`. `with_prefix` is unset for a later part of a text, which gets no leading space from the
    /// model.
    pub(crate) fn encode_into(&self, text: &str, with_prefix: bool, ids: &mut Vec<u32>) {
        let text = self.normalizer.normalize(text, &self.pieces.user_defined, with_prefix);
        let mut found = Vec::with_capacity(text.len() / 3 + 1);
        match self.is_bpe {
            true => bpe::encode(&text, &self.pieces, &mut found),
            false => unigram::encode(&text, &self.pieces, &mut found),
        }
        let (mut start, mut after_unknown) = (0, false);
        for Found { len, id } in found {
            match (id, &self.byte_ids) {
                (Some(id), _) => ids.push(id),
                (None, Some(byte_ids)) => {
                    ids.extend(text.as_bytes()[start..start + len].iter().map(|&byte| byte_ids[usize::from(byte)]));
                }
                // Consecutive unknown characters are one unknown piece.
                (None, None) if after_unknown => {}
                (None, None) => ids.push(self.unknown),
            }
            start += len;
            after_unknown = id.is_none();
        }
    }

    pub(crate) fn len(&self) -> usize {
        self.pieces.texts.len()
    }

    /// Text and type of each piece, ordered by id.
    pub(crate) fn pieces(&self) -> impl Iterator<Item = (&str, PieceType)> {
        self.pieces.texts.iter().map(String::as_str).zip(self.pieces.types.iter().copied())
    }

    /// The id of a piece, control pieces included.
    pub(crate) fn id(&self, piece: &str) -> Option<u32> {
        let other = || self.pieces.texts.iter().position(|text| text == piece).map(|id| id as u32);
        self.pieces.by_text.get(piece).copied().or_else(other)
    }

    /// The text of a piece.
    pub(crate) fn piece(&self, id: u32) -> Option<&str> {
        self.pieces.texts.get(id as usize).map(String::as_str)
    }

    /// The pieces that the model declares as begin and end of a text.
    pub(crate) fn ends(&self) -> [Option<&str>; 2] {
        [self.bos_id, self.eos_id].map(|id| self.piece(u32::try_from(id).ok()?))
    }

    pub(crate) fn is_bpe(&self) -> bool {
        self.is_bpe
    }

    /// Whether each character is encoded: none is dropped, and none shares an unknown piece with others.
    pub(crate) fn keeps_all(&self) -> bool {
        self.normalizer.keeps_all() && self.byte_ids.is_some()
    }

    /// Whether decoding drops a leading space of the first piece, and whether it does so for each piece until there is text.
    pub(crate) fn drops_first_space(&self) -> (bool, bool) {
        let all = self.normalizer.remove_extra_whitespaces;
        (self.normalizer.add_dummy_prefix || all, all)
    }
}
