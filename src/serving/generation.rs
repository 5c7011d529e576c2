//! Where the time of a request that generates text went.

use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use std::sync::OnceLock;

use crate::request::Scheduled;

/// What a model that generates text tells of one request.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Generation {
    /// From the request's arrival until a step had room for it.
    pub queue: Duration,
    /// From there to the first token.
    pub prefill: Duration,
    /// From the first token to the last.
    pub decode: Duration,
    /// Tokens of the prompt.
    pub prompt_tokens: u64,
    /// Of these, found computed in the prefix cache.
    pub cached_tokens: u64,
    /// Tokens generated.
    pub output_tokens: u64,
    /// Times it gave its place up and was computed again.
    pub preempted: u64,
}

/// How far a request has come: written by the model, read by who counts.
#[derive(Debug, Default)]
pub(crate) struct Progress {
    pub scheduled: OnceLock<Scheduled>,
    generation: Mutex<Option<Generation>>,
}

impl Progress {
    pub fn report(&self, generation: Generation) {
        *self.generation.lock().unwrap_or_else(PoisonError::into_inner) = Some(generation);
    }

    pub fn generation(&self) -> Option<Generation> {
        *self.generation.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
