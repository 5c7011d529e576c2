//! Decodes the tokens of one sequence, and searches its text for stop texts.

use std::sync::Arc;

use engine::TokenId;
use text::{Detokenizer, StopText, Tokenizer};

/// The detokenizer of one sequence, and the search for stop texts in its text.
pub struct StopSearch {
    detokenizer: Detokenizer,
    search: StopText,
    has_texts: bool,
    /// Bytes of text of all tokens so far.
    text_len: usize,
    /// Reused buffer for the text of one token.
    piece: String,
}

impl StopSearch {
    /// A search for `texts`, of which empty ones are ignored, before the first token of a sequence.
    pub fn new(tokenizer: &Arc<Tokenizer>, skip_special_tokens: bool, texts: &[String]) -> Self {
        Self {
            detokenizer: Detokenizer::new(Arc::clone(tokenizer), skip_special_tokens),
            search: StopText::new(texts.iter().cloned()),
            has_texts: texts.iter().any(|text| !text.is_empty()),
            text_len: 0,
            piece: String::new(),
        }
    }

    /// Starts after the token `before`, because a token may have another text at the start of a text.
    pub fn after(mut self, before: TokenId) -> Self {
        let mut dropped = String::new();
        self.detokenizer.push_into(before.0, &mut dropped);
        self.detokenizer.finish_into(&mut dropped);
        self
    }

    /// Decodes the prompt before the sequence, and appends its text, which is not searched, to `text`. A character that the prompt
    /// begins is completed by the sequence.
    pub fn decode_prompt(&mut self, prompt: &[TokenId], text: &mut String) {
        prompt.iter().for_each(|token| self.detokenizer.push_into(token.0, text));
    }

    /// Whether there are texts to search for.
    pub fn has_texts(&self) -> bool {
        self.has_texts
    }

    /// Bytes of text of all tokens so far, including text that is withheld.
    pub fn text_len(&self) -> usize {
        self.text_len
    }

    /// Adds a token. Appends the text that cannot belong to a stop text any more to `free`.
    ///
    /// Returns the index of the stop text that ends the sequence here; do not push again then.
    pub fn push(&mut self, token: TokenId, free: &mut String) -> Option<usize> {
        if !self.has_texts {
            let before = free.len();
            self.detokenizer.push_into(token.0, free);
            self.text_len += free.len() - before;
            return None;
        }
        self.piece.clear();
        self.detokenizer.push_into(token.0, &mut self.piece);
        self.text_len += self.piece.len();
        self.search.push(&self.piece, free)
    }

    /// Ends the text. Appends the rest of it to `free`, or returns the stop text that its last characters complete.
    pub fn finish(&mut self, free: &mut String) -> Option<usize> {
        self.piece.clear();
        self.detokenizer.finish_into(&mut self.piece);
        self.text_len += self.piece.len();
        let found = self.search.push(&self.piece, free);
        if found.is_none() {
            self.search.finish(free);
        }
        found
    }
}
