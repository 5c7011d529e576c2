//! Requests and their expected tokens.

use engine::{Request, TokenId};

use crate::device::undisturbed;
use crate::tokens::{Random, VOCAB_SIZE};

/// A request of a schedule.
pub struct Expected {
    pub request: Request,
    /// Its tokens without faults.
    pub tokens: Vec<TokenId>,
    /// The tokens that came.
    pub received: Vec<TokenId>,
    pub is_cancelled: bool,
    pub has_ended: bool,
}

impl Expected {
    /// Prompts often share a prefix: a run of one token, then a random tail.
    pub fn random(random: &mut Random) -> Self {
        let shared = TokenId(random.below(2));
        let mut prompt = vec![shared; random.below(14) as usize];
        prompt.extend((0..1 + random.below(5)).map(|_| TokenId(random.below(VOCAB_SIZE))));
        let max_tokens = 1 + random.below(14);
        let tokens = undisturbed(&prompt, max_tokens as usize);
        let (max_drafts, priority) = (random.below(4), random.below(2));
        let request = Request { prompt, max_tokens, max_drafts, priority, ..Request::default() };
        Self { request, tokens, received: Vec::new(), is_cancelled: false, has_ended: false }
    }
}
