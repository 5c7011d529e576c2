//! Requests that run one after the other.

use engine::{Request, TokenId};

use super::{Random, VOCAB_SIZE, World};

/// A prompt of random tokens.
pub fn prompt(seed: u64, len: usize) -> Vec<TokenId> {
    let mut random = Random(seed);
    (0..len).map(|_| TokenId(random.below(VOCAB_SIZE))).collect()
}

/// A greedy request.
pub fn request(prompt: Vec<TokenId>, max_tokens: u32) -> Request {
    Request { prompt, max_tokens, ..Request::default() }
}

/// Runs a request to its end. Returns the number of positions computed.
pub fn computed(world: &mut World, request: Request) -> usize {
    world.submit(request).unwrap();
    let mut computed = 0;
    while !world.engine.is_idle() {
        computed += world.plan_tokens();
        world.settle();
    }
    computed
}
