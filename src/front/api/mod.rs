//! The protocols of clients.

pub(crate) mod openai;
pub(crate) mod page;
pub(crate) mod request_effect;
pub(crate) mod request_key;
pub(crate) mod status;
pub(crate) mod triton;
