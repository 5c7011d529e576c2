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
mod turns;
mod world;

pub use device::Device;
pub use expected::Expected;
pub use reference::run_alone;
pub use tokens::{Guesser, Random, VOCAB_SIZE};
pub use turns::{computed, prompt, request};
pub use world::World;

/// A prompt token takes a second, and everything else no time.
pub const PROMPT_TOKENS: engine::StepCosts = engine::StepCosts {
    step: 0.0,
    decode_token: 0.0,
    decode_position: 0.0,
    prompt_token: 1.0,
    prompt_position: 0.0,
    experts: 0.0,
    guess: 0.0,
    gap: 0.0,
};

/// An engine with these limits. Where they bound the time between tokens, its costs are [`PROMPT_TOKENS`].
pub fn new_engine(config: engine::EngineConfig) -> engine::Engine {
    let is_bounded = config.max_inter_token.is_some();
    let mut engine = engine::Engine::new(config).expect("the limits of a test are valid");
    if is_bounded {
        engine.set_costs(PROMPT_TOKENS);
    }
    engine
}
