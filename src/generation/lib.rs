//! Generation of text: what requests of all protocols become, and how generated tokens become text.
//!
//! Every protocol's request becomes a [`GenerateRequest`], and is answered by a stream of [`GenerateEvent`]s. A checkpoint's tokenizer is
//! loaded once ([`tokenizer`]). A [`TextDecoder`] says how a model turns its tokens into text.
#![forbid(unsafe_code)]

mod constrain;
mod decoder;
mod event;
mod generator;
mod request;
mod sequence_text;
mod timestamp;
mod tokenizers;

pub use constrain::{Constraints, Guide, Preface, ReasoningBudget};
pub use constraint::{ConstraintError, ConstraintSpec, StartAfter, close_objects};
pub use decoder::TextDecoder;
pub use event::{Delta, GenerateEvent, Logits, LogitsPosition, PromptLogprob, Tokens};
pub use generator::{Generator, SamplingDefaults};
pub use request::{GenerateRequest, InvalidRequest, StopTexts, TextOptions};
pub use sequence_text::SequenceText;
pub use timestamp::Timestamp;
pub use tokenizers::{open_tokenizer, tokenizer};
