//! Tests of tokenizers and chat templates. They are one program, so that the crate is linked once. Tests with a limit of time are
//! programs of their own, because nothing else runs beside them.

mod chat_templates;
mod golden_tokens;
mod streaming;
