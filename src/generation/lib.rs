//! Generation of text: what requests of all protocols become, and how generated tokens become text.
//!
//! A checkpoint's tokenizer is loaded once ([`tokenizer`]). A [`TextDecoder`] says how a model turns its tokens into text.
#![forbid(unsafe_code)]

mod decoder;
mod tokenizers;

pub use decoder::TextDecoder;
pub use tokenizers::{open_tokenizer, tokenizer};
