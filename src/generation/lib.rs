//! Generation of text: what requests of all protocols become, and how generated tokens become text.
//!
//! What happens to a request is a stream of [`GenerateEvent`]s, whatever protocol it came by. A checkpoint's tokenizer is
//! loaded once ([`tokenizer`]). A [`TextDecoder`] says how a model turns its tokens into text.
#![forbid(unsafe_code)]

mod decoder;
mod event;
mod timestamp;
mod tokenizers;

pub use decoder::TextDecoder;
pub use event::{Delta, GenerateEvent, Logits, LogitsPosition, Tokens};
pub use timestamp::Timestamp;
pub use tokenizers::{open_tokenizer, tokenizer};
