//! The protocols that clients speak.

pub(crate) mod openai;
pub(crate) mod status;
pub(crate) mod triton;
