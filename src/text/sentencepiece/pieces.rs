//! The vocabulary of a SentencePiece model.

use std::collections::HashMap;

use super::proto::{self, ModelProto, PieceType};
use crate::trie::Trie;

/// The vocabulary.
#[derive(Debug)]
pub(super) struct Pieces {
    pub(super) texts: Vec<String>,
    pub(super) scores: Vec<f32>,
    pub(super) types: Vec<PieceType>,
    /// Ids of the pieces that may match text: neither control, unknown nor byte pieces.
    pub(super) by_text: HashMap<String, u32>,
    pub(super) all: Trie,
    pub(super) user_defined: Trie,
    pub(super) min_score: f32,
}

/// A part of a text and its piece; `None` for an unknown character.
pub(super) struct Found {
    pub(super) len: usize,
    pub(super) id: Option<u32>,
}

impl Pieces {
    pub(super) fn new(model: &ModelProto) -> Result<Self, String> {
        let texts: Vec<String> = model.pieces.iter().map(|piece| piece.piece().to_owned()).collect();
        let types: Vec<PieceType> = model.pieces.iter().map(proto::Piece::r#type).collect();
        let scores: Vec<f32> = model.pieces.iter().map(proto::Piece::score).collect();
        if u32::try_from(texts.len()).is_err() {
            return Err("it has more than 2^32 pieces".to_owned());
        }
        let of = |wanted: fn(PieceType) -> bool| {
            let ids = types.iter().enumerate().filter(move |(_, kind)| wanted(**kind)).map(|(id, _)| id);
            ids.map(|id| (texts[id].as_str(), id as u32))
        };
        let is_text = |kind| matches!(kind, PieceType::Normal | PieceType::UserDefined | PieceType::Unused);
        let normal = || of(|kind| kind == PieceType::Normal).map(|(_, id)| scores[id as usize]);
        Ok(Self {
            by_text: of(is_text).map(|(text, id)| (text.to_owned(), id)).collect(),
            all: Trie::new(of(is_text)),
            user_defined: Trie::new(of(|kind| kind == PieceType::UserDefined)),
            min_score: normal().fold(f32::MAX, f32::min),
            texts,
            scores,
            types,
        })
    }

    pub(super) fn is_unused(&self, id: u32) -> bool {
        self.types[id as usize] == PieceType::Unused
    }

    pub(super) fn is_user_defined(&self, id: u32) -> bool {
        self.types[id as usize] == PieceType::UserDefined
    }

    /// The piece of each byte.
    pub(super) fn byte_ids(&self) -> Result<Box<[u32; 256]>, String> {
        let mut ids = Box::new([u32::MAX; 256]);
        for (id, text) in self.texts.iter().enumerate().filter(|(id, _)| self.types[*id] == PieceType::Byte) {
            if let Some(byte) = fallback_byte(text.as_bytes()) {
                ids[usize::from(byte)] = id as u32;
            }
        }
        match ids.iter().position(|id| *id == u32::MAX) {
            Some(byte) => Err(format!("it has no piece `<0x{byte:02X}>` although it falls back to bytes")),
            None => Ok(ids),
        }
    }
}

/// The byte of a fallback token such as `<0x0A>`.
pub(crate) fn fallback_byte(token: &[u8]) -> Option<u8> {
    let hex = token.strip_prefix(b"<0x")?.strip_suffix(b">")?;
    let hex = std::str::from_utf8(hex).ok().filter(|hex| hex.len() == 2)?;
    u8::from_str_radix(hex, 16).ok()
}
