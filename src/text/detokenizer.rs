use std::sync::Arc;

use crate::Tokenizer;
use crate::spelling::{Piece, Spelling, Stream};

/// Turns the tokens of one sequence into text as they arrive.
///
/// The pieces joined, [`finish`](Self::finish) included, are exactly the text of the whole sequence. A piece is always
/// valid UTF-8: the bytes of an incomplete character are held until the next token. They become U+FFFD only at the end, or when
/// the next token shows that they are not part of a character. With the byte fallback of a `tokenizer.json`, a run of byte tokens is
/// held until the token after it, because one invalid byte makes the whole run invalid; with a SentencePiece model, bytes are
/// held only until their character is complete. A token costs a copy of its bytes.
pub struct Detokenizer {
    spelling: Arc<Spelling>,
    skip_special: bool,
    text: Text,
}

/// State of a text between two tokens.
struct Text {
    at_start: bool,
    /// Bytes that are not yet valid text.
    held: Vec<u8>,
    /// Leading characters that may still be stripped.
    strip_left: usize,
}

impl Tokenizer {
    /// The text of a whole sequence: the pieces of a [`Detokenizer`] joined. Unknown ids add no text.
    pub fn decode(&self, ids: &[u32], skip_special: bool) -> String {
        let mut detokenizer = Detokenizer::with_spelling(Arc::clone(self.spelling()), skip_special);
        let mut text = String::new();
        for &id in ids {
            detokenizer.push_into(id, &mut text);
        }
        detokenizer.finish_into(&mut text);
        text
    }
}

impl Detokenizer {
    /// Starts a text; `skip_special` leaves out special tokens such as `</s>`.
    pub fn new(tokenizer: Arc<Tokenizer>, skip_special: bool) -> Self {
        Self::with_spelling(Arc::clone(tokenizer.spelling()), skip_special)
    }

    pub(crate) fn with_spelling(spelling: Arc<Spelling>, skip_special: bool) -> Self {
        let strip_left = match spelling.stream {
            Stream::Text { strip: Some((_, count)) } => count,
            _ => 0,
        };
        Self { spelling, skip_special, text: Text { at_start: true, held: Vec::new(), strip_left } }
    }

    /// The text that `token` completes, if any. A token outside the vocabulary adds nothing.
    pub fn push(&mut self, token: u32) -> Option<String> {
        let mut text = String::new();
        self.push_into(token, &mut text);
        (!text.is_empty()).then_some(text)
    }

    /// Like [`push`](Self::push), but appends to `out`.
    pub fn push_into(&mut self, token: u32, out: &mut String) {
        let Self { spelling, skip_special, text } = self;
        if let Some(piece) = spelling.piece(token, text.at_start, *skip_special) {
            text.push(piece, spelling.stream, out);
        }
    }

    /// Ends the text and returns the held bytes, with U+FFFD for an incomplete character. Call it once.
    pub fn finish(&mut self) -> String {
        let mut text = String::new();
        self.finish_into(&mut text);
        text
    }

    /// Like [`finish`](Self::finish), but appends to `out`.
    pub fn finish_into(&mut self, out: &mut String) {
        self.text.finish(self.spelling.stream, out);
    }
}

impl Text {
    fn push(&mut self, piece: Piece<'_>, stream: Stream, out: &mut String) {
        let no_text = matches!(piece, Piece::Bytes(bytes) if bytes.is_empty());
        self.at_start &= no_text && matches!(stream, Stream::Pieces { all_spaces: true });
        match (piece, stream) {
            (Piece::Bytes(bytes), Stream::Pieces { .. }) => {
                self.end_bytes(out);
                out.push_str(std::str::from_utf8(bytes).expect("pieces are strings"));
            }
            (Piece::FallbackByte(byte), Stream::Pieces { .. }) => {
                self.held.push(byte);
                self.take_characters(out);
            }
            (Piece::Bytes(bytes), Stream::Bytes) => self.push_bytes(bytes, out),
            (Piece::Bytes(bytes), Stream::Text { .. }) => {
                self.end_byte_run(stream, out);
                self.emit(std::str::from_utf8(bytes).expect("pieces of text are made of strings"), stream, out);
            }
            (Piece::FallbackByte(byte), _) => self.held.push(byte),
        }
    }

    fn finish(&mut self, stream: Stream, out: &mut String) {
        match stream {
            Stream::Bytes if self.held.is_empty() => {}
            Stream::Bytes => {
                // The held bytes are one incomplete character, never two.
                self.held.clear();
                out.push(char::REPLACEMENT_CHARACTER);
            }
            Stream::Text { .. } => self.end_byte_run(stream, out),
            Stream::Pieces { .. } => self.end_bytes(out),
        }
    }

    /// Emits the complete characters among the held bytes, and U+FFFD for each byte that cannot be part of a character.
    fn take_characters(&mut self, out: &mut String) {
        while !self.held.is_empty() {
            let done = match std::str::from_utf8(&self.held) {
                Ok(text) => {
                    out.push_str(text);
                    self.held.len()
                }
                Err(error) if error.error_len().is_none() => return,
                Err(_) => {
                    out.push(char::REPLACEMENT_CHARACTER);
                    1
                }
            };
            self.held.drain(..done);
        }
    }

    /// Ends a run of bytes: each held byte is part of no character.
    fn end_bytes(&mut self, out: &mut String) {
        out.extend(self.held.drain(..).map(|_| char::REPLACEMENT_CHARACTER));
    }

    fn push_bytes(&mut self, bytes: &[u8], out: &mut String) {
        if self.held.is_empty() {
            let rest = emit_utf8(bytes, out);
            self.held.extend_from_slice(rest);
        } else {
            let mut held = std::mem::take(&mut self.held);
            held.extend_from_slice(bytes);
            let done = held.len() - emit_utf8(&held, out).len();
            held.drain(..done);
            self.held = held;
        }
    }

    fn end_byte_run(&mut self, stream: Stream, out: &mut String) {
        if self.held.is_empty() {
            return;
        }
        let mut held = std::mem::take(&mut self.held);
        match std::str::from_utf8(&held) {
            Ok(text) => self.emit(text, stream, out),
            Err(_) => (0..held.len()).for_each(|_| self.emit("\u{FFFD}", stream, out)),
        }
        held.clear();
        self.held = held;
    }

    fn emit(&mut self, mut text: &str, stream: Stream, out: &mut String) {
        if let Stream::Text { strip: Some((stripped, _)) } = stream {
            while self.strip_left > 0 && !text.is_empty() {
                match text.strip_prefix(stripped) {
                    Some(rest) => (text, self.strip_left) = (rest, self.strip_left - 1),
                    None => self.strip_left = 0,
                }
            }
        }
        out.push_str(text);
    }
}

/// Appends `bytes` to `out` like `String::from_utf8_lossy`, but returns an incomplete last character.
fn emit_utf8<'a>(mut bytes: &'a [u8], out: &mut String) -> &'a [u8] {
    loop {
        let error = match std::str::from_utf8(bytes) {
            Ok(text) => {
                out.push_str(text);
                return &[];
            }
            Err(error) => error,
        };
        let (valid, rest) = bytes.split_at(error.valid_up_to());
        out.push_str(std::str::from_utf8(valid).expect("the bytes before the error are valid"));
        match error.error_len() {
            None => return rest,
            Some(len) => {
                out.push(char::REPLACEMENT_CHARACTER);
                bytes = &rest[len..];
            }
        }
    }
}
