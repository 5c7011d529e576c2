//! A simulated device made of hash functions, and a test world that runs an engine against it and checks all its
//! guarantees.
//!
//! The KV entry of a position is a digest of all tokens up to it. So a block that is read by the wrong sequence, too
//! early, or after it was reused is detected at once. The next token is a function of the digest, so a stream can be
//! compared with what its sequence would generate alone.
#![allow(dead_code, unused_imports)] // Each test binary uses only a part.

mod device;
mod expected;
mod reference;
mod tokens;
mod world;

pub use device::Device;
pub use expected::Expected;
pub use reference::run_alone;
pub use tokens::{Guesser, Random, VOCAB_SIZE};
pub use world::World;
