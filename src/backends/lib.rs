//! Backends, which run models: language models, tokenizers, detokenizers, models in Python, and `identity`.
//!
//! [`builtin`] has the backends that need only their configuration. [`llm::LlmFactory`] needs the workers of a world, and
//! [`python::PythonFactory`] starts processes. [`layouts::Layouts`] serves repositories that were made for other servers. Each
//! factory implements `serving::BackendFactory` under a name that `config.pbtxt` gives as `backend`.
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
mod padding;
mod parameters;
pub mod python;
mod tensor_values;
mod tokenize;
mod words;

use std::collections::HashMap;
use std::sync::Arc;

use serving::BackendFactory;

/// The backends that need only their configuration, by name.
pub fn builtin() -> HashMap<String, Arc<dyn BackendFactory>> {
    let backends: [(&str, Arc<dyn BackendFactory>); 3] = [
        ("detokenize", Arc::new(detokenize::DetokenizeFactory)),
        ("identity", Arc::new(identity::IdentityFactory)),
        ("tokenize", Arc::new(tokenize::TokenizeFactory)),
    ];
    backends.map(|(name, factory)| (name.to_owned(), factory)).into()
}
