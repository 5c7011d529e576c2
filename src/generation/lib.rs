//! Text generation: typed requests and events that all protocols share, and the decoding of tokens.
//!
//! The adapter of a protocol converts a request to a [`GenerateRequest`], and a stream of [`GenerateEvent`]s to responses. A checkpoint's
//! tokenizer is loaded once ([`tokenizer`]). A [`TextDecoder`] has the settings with which tokens are decoded.
#![forbid(unsafe_code)]

mod cache_salt;
mod constrain;
mod decoder;
mod event;
mod generator;
pub mod input_names;
mod request;
mod sequence_text;
mod stop_search;
mod timestamp;
mod tokenizers;

pub use cache_salt::{MAX_CACHE_SALT_CHARS, cache_salt};
pub use constrain::{Constraints, Guide, Preface, ReasoningBudget};
pub use constraint::{ConstraintError, ConstraintSpec, StartAfter, close_objects};
pub use decoder::TextDecoder;
pub use event::{Delta, GenerateEvent, Logits, LogitsPosition, PromptLogprob, Tokens};
pub use generator::{Generator, RequestBounds, SamplingDefaults};
pub use request::{GenerateRequest, InvalidRequest, StopTexts, TextOptions};
pub use sequence_text::SequenceText;
pub use stop_search::StopSearch;
pub use timestamp::Timestamp;
pub use tokenizers::{open_tokenizer, tokenizer};
