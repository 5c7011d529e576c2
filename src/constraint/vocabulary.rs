use std::sync::Arc;

use text::Tokenizer;
use toktrie::{ApproximateTokEnv, TokEnv, TokRxInfo, TokTrie};

use crate::ConstraintError;

/// The longest token: a node of the trie counts its ancestors in 10 bits.
const MAX_TOKEN_BYTES: usize = 1000;
/// The trie numbers tokens in 24 bits, its nodes in 22.
const MAX_VOCAB: usize = 1 << 20;

/// What one token adds to a text.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Token {
    /// Bytes of text.
    Text(Vec<u8>),
    /// A special token. It is part of a constrained text only where a grammar names it, as in `<|tool|>`.
    Special(String),
    /// An id without a token. It is never allowed.
    Absent,
}

/// The tokens of a model as a trie of bytes. Cloning is cheap.
#[derive(Clone)]
pub struct Vocabulary {
    pub(crate) env: TokEnv,
    pub(crate) tokens: Arc<[Token]>,
    /// The words of the mask of all ids that have a token.
    pub(crate) present: Arc<[u32]>,
    pub(crate) end_ids: Arc<[u32]>,
}

impl Vocabulary {
    /// A vocabulary from the token of each id. `end_ids` end a text.
    ///
    /// # Errors
    /// When there are no tokens, more than 2^20, a token of more than 1000 bytes, or an end id outside the vocabulary.
    pub fn new(tokens: Vec<Token>, end_ids: &[u32]) -> Result<Self, ConstraintError> {
        let refuse = |reason: String| Err(ConstraintError::Vocabulary(reason));
        if tokens.is_empty() || tokens.len() > MAX_VOCAB {
            return refuse(format!("it has {} tokens, expected 1 to {MAX_VOCAB}", tokens.len()));
        }
        if let Some(id) = end_ids.iter().find(|&&id| id as usize >= tokens.len()) {
            return refuse(format!("end id {id} is outside its {} tokens", tokens.len()));
        }
        let words: Vec<Vec<u8>> = tokens.iter().map(spelled).collect();
        if let Some(id) = words.iter().position(|word| word.len() > MAX_TOKEN_BYTES) {
            return refuse(format!("token {id} has {} bytes, over the limit of {MAX_TOKEN_BYTES}", words[id].len()));
        }
        // The trie needs one end id. Without any, one that no text reaches stands in; every mask clears it.
        let end = end_ids.first().copied().unwrap_or(toktrie::INVALID_TOKEN);
        let mut trie = TokTrie::from(&TokRxInfo::new(words.len() as u32, end), &words);
        if !end_ids.is_empty() {
            trie = trie.with_eos_tokens(end_ids);
        }
        let env: TokEnv = Arc::new(ApproximateTokEnv::new(trie));
        let present = tokens.chunks(32).map(present_word).collect();
        Ok(Self { env, tokens: tokens.into(), present, end_ids: end_ids.into() })
    }

    /// The vocabulary of a tokenizer, for a model with `vocab_size` logits: ids that the tokenizer lacks are never allowed.
    ///
    /// # Errors
    /// As [`Self::new`].
    pub fn of(tokenizer: &Tokenizer, vocab_size: usize, end_ids: &[u32]) -> Result<Self, ConstraintError> {
        if vocab_size > MAX_VOCAB {
            return Err(ConstraintError::Vocabulary(format!("{vocab_size} tokens are over the limit of {MAX_VOCAB}")));
        }
        let special = tokenizer.special_ids();
        let token = |id: u32| match tokenizer.token_bytes(id) {
            None => Token::Absent,
            Some(bytes) if special.binary_search(&id).is_ok() => {
                Token::Special(String::from_utf8_lossy(&bytes).into_owned())
            }
            Some(bytes) => Token::Text(bytes.into_owned()),
        };
        Self::new((0..vocab_size as u32).map(token).collect(), end_ids)
    }

    /// How many token ids there are.
    pub fn size(&self) -> usize {
        self.tokens.len()
    }

    /// The ids that end a text.
    pub fn end_ids(&self) -> &[u32] {
        &self.end_ids
    }
}

/// The word of a mask that says which of up to 32 ids have a token.
fn present_word(tokens: &[Token]) -> u32 {
    tokens.iter().zip(0..).filter(|(token, _)| **token != Token::Absent).fold(0, |word, (_, bit)| word | 1 << bit)
}

/// The bytes of a token in the trie; none if no mask may contain it.
fn spelled(token: &Token) -> Vec<u8> {
    match token {
        // 0xff is part of no UTF-8 text, and marks special tokens in the trie.
        Token::Text(bytes) if bytes.first() == Some(&TokTrie::SPECIAL_TOKEN_MARKER) => Vec::new(),
        Token::Text(bytes) => bytes.clone(),
        Token::Special(name) if name.is_empty() => Vec::new(),
        Token::Special(name) => [&[TokTrie::SPECIAL_TOKEN_MARKER], name.as_bytes()].concat(),
        Token::Absent => Vec::new(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_vocabulary_that_cannot_be_used_is_refused_with_the_reason() {
        let text = |bytes: &[u8]| Token::Text(bytes.to_vec());
        let refused = |tokens: Vec<Token>, ends: &[u32]| Vocabulary::new(tokens, ends).err().unwrap().to_string();
        assert!(refused(vec![], &[]).contains("0 tokens"));
        assert!(refused(vec![text(b"a")], &[1]).contains("end id 1"));
        assert!(refused(vec![text(&[b'a'; 1001])], &[]).contains("token 0 has 1001 bytes"));
        assert_eq!(Vocabulary::new(vec![text(b"a"), Token::Absent], &[]).unwrap().size(), 2);
    }
}
