//! Encodes text as token ids, and decodes token ids to text one token at a time.
//!
//! [`Tokenizer`] reads a checkpoint's `tokenizer.json`, SentencePiece `tokenizer.model`, or `vocab.json` with `merges.txt`.
//! [`Detokenizer`] turns one sequence's tokens into text as they arrive, [`StopText`] cuts that text before a stop string, and
//! [`ChatTemplate`] renders a conversation as a prompt. Token ids are plain `u32`: this crate depends on no other of the project.
//! Sampling, end ids and scheduling belong to `engine`.
//!
//! ```
//! # let dir = tempfile::tempdir()?;
//! # let json = r#"{"version":"1.0","added_tokens":[],"model":{"type":"WordLevel","vocab":{"hello":0,"world":1},"unk_token":"hello"},
//! #   "pre_tokenizer":{"type":"Whitespace"}}"#;
//! # std::fs::write(dir.path().join("tokenizer.json"), json)?;
//! # let checkpoint = dir.path();
//! use std::sync::Arc;
//! use text::{Detokenizer, Tokenizer};
//!
//! let tokenizer = Arc::new(Tokenizer::from_dir(checkpoint)?);
//! let ids = tokenizer.encode("hello world", true)?;
//!
//! let mut detokenizer = Detokenizer::new(Arc::clone(&tokenizer), true);
//! let mut text = String::new();
//! for id in ids {
//!     detokenizer.push_into(id, &mut text);
//! }
//! detokenizer.finish_into(&mut text);
//! assert_eq!(text, "hello world");
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
#![forbid(unsafe_code)]

mod added;
mod chat;
mod coverage;
mod detokenizer;
mod error;
mod files;
mod gpt2;
mod sentencepiece;
mod spelling;
mod spm;
mod stop;
mod tokenizer;
mod tokenizer_type;
mod trie;

pub use chat::{ChatRequest, ChatTemplate};
pub use coverage::Coverage;
pub use detokenizer::Detokenizer;
pub use error::TextError;
pub use stop::StopText;
pub use tokenizer::{Roles, Tokenizer};
pub use tokenizer_type::TokenizerType;
