//! What answers requests: the LLM engine, tokenizer and detokenizer around it, and an echo to measure against.
//!
//! [`builtin`] lists the backends that need nothing but their configuration; [`llm::LlmFactory`] needs the workers of a
//! world and is made by who has them; [`layouts::Layouts`] serves repositories made for other servers. Each implements `serving::BackendFactory` under the name that `config.pbtxt` gives
//! as `backend`.
#![forbid(unsafe_code)]

pub mod chat;
mod checkpoint;
mod detokenize;
mod encoder;
#[cfg(feature = "fuzzing")]
pub mod fuzz;
mod identity;
pub mod layouts;
pub mod llm;
mod parameters;
pub mod python;
mod tokenize;
mod words;

use std::collections::HashMap;
use std::sync::Arc;

use serving::BackendFactory;

/// The backends that need nothing but their configuration, by name.
pub fn builtin() -> HashMap<String, Arc<dyn BackendFactory>> {
    let backends: [(&str, Arc<dyn BackendFactory>); 3] = [
        ("detokenize", Arc::new(detokenize::DetokenizeFactory)),
        ("identity", Arc::new(identity::IdentityFactory)),
        ("tokenize", Arc::new(tokenize::TokenizeFactory)),
    ];
    backends.map(|(name, factory)| (name.to_owned(), factory)).into()
}
