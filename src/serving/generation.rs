//! Where the time of a request that generates text went.

use std::sync::OnceLock;
use std::sync::atomic::{
    AtomicBool, AtomicU64,
    Ordering::{Acquire, Relaxed, Release},
};
use std::time::Duration;

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
    is_told: AtomicBool,
    /// The fields of a [`Generation`]; without a lock, as a model may tell of each token.
    told: [AtomicU64; 7],
}

impl Progress {
    pub fn report(&self, generation: Generation) {
        let Generation { queue, prefill, decode, prompt_tokens, cached_tokens, output_tokens, preempted } = generation;
        let times = [queue, prefill, decode].map(|time| u64::try_from(time.as_nanos()).unwrap_or(u64::MAX));
        let counts = [prompt_tokens, cached_tokens, output_tokens, preempted];
        for (field, value) in self.told.iter().zip(times.into_iter().chain(counts)) {
            field.store(value, Relaxed);
        }
        self.is_told.store(true, Release);
    }

    /// The last that was told; while the model tells more, some fields may be of before.
    pub fn generation(&self) -> Option<Generation> {
        if !self.is_told.load(Acquire) {
            return None;
        }
        let [queue, prefill, decode, prompt_tokens, cached_tokens, output_tokens, preempted] =
            self.told.each_ref().map(|field| field.load(Relaxed));
        let [queue, prefill, decode] = [queue, prefill, decode].map(Duration::from_nanos);
        Some(Generation { queue, prefill, decode, prompt_tokens, cached_tokens, output_tokens, preempted })
    }
}
