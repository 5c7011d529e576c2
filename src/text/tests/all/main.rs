//! Tests of tokenizers and chat templates. They are one program, so that the crate is linked once.

mod chat_template_limits;
mod chat_templates;
mod golden_tokens;
mod sentencepiece;
mod streaming;
