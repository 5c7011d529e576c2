//! What talks to a running server: `trireme client` and `trireme bench`.
#![forbid(unsafe_code)]
