//! Room `backends`.
pub mod llm;
