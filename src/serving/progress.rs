//! Where the time of a request that generates text went.

use std::sync::atomic::{
    AtomicBool, AtomicU64,
    Ordering::{Acquire, Relaxed, Release},
};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use crate::statistics::Execution;

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

/// When a request left its queue, and with which others.
#[derive(Debug)]
pub(crate) struct Scheduled {
    pub at: Instant,
    pub execution: Option<Arc<Execution>>,
}

/// How far a request has come: written by the model, read by who counts.
#[derive(Debug)]
pub(crate) struct Progress {
    pub scheduled: OnceLock<Scheduled>,
    /// Nanoseconds that it took to bring the inputs to the model.
    input_ns: AtomicU64,
    /// When the model had computed its last response: nanoseconds since `created`, 0 where nobody said.
    computed_ns: AtomicU64,
    created: Instant,
    is_told: AtomicBool,
    /// Other requests that this one is answered by; what they tell, it tells.
    followed: Mutex<Vec<Arc<Progress>>>,
    /// The fields of a [`Generation`]; without a lock, as a model may tell of each token.
    told: [AtomicU64; 7],
}

/// Where a [`crate::ResponseSource`] reports how far its request has come.
#[derive(Debug, Clone)]
pub struct ProgressReporter(pub(crate) Arc<Progress>);

impl ProgressReporter {
    /// As [`crate::ResponseSender::mark_scheduled`].
    pub fn mark_scheduled(&self) {
        let _ = self.0.scheduled.set(Scheduled { at: Instant::now(), execution: None });
    }

    /// As [`crate::ResponseSender::took_input`].
    pub fn took_input(&self, time: Duration) {
        self.0.took_input(time);
    }

    /// As [`crate::ResponseSender::computed_at`].
    pub fn computed_at(&self, at: Instant) {
        self.0.computed_at(at);
    }

    /// As [`crate::ResponseSender::report`].
    pub fn report(&self, generation: Generation) {
        self.0.report(generation);
    }
}

impl Default for Progress {
    fn default() -> Self {
        Self {
            scheduled: OnceLock::new(),
            input_ns: AtomicU64::new(0),
            computed_ns: AtomicU64::new(0),
            created: Instant::now(),
            is_told: AtomicBool::new(false),
            followed: Mutex::default(),
            told: Default::default(),
        }
    }
}

impl Progress {
    pub fn took_input(&self, time: Duration) {
        self.input_ns.fetch_add(time.as_nanos() as u64, Relaxed);
    }

    /// What bringing the inputs to the model took so far.
    pub fn input(&self) -> Duration {
        Duration::from_nanos(self.input_ns.load(Relaxed))
    }

    pub fn computed_at(&self, at: Instant) {
        self.computed_ns.store(at.saturating_duration_since(self.created).as_nanos().max(1) as u64, Relaxed);
    }

    /// When a response was computed, asked once for each, before the next one is.
    pub fn take_computed(&self) -> Option<Instant> {
        match self.computed_ns.load(Relaxed) {
            0 => None,
            at => {
                self.computed_ns.store(0, Relaxed);
                Some(self.created + Duration::from_nanos(at))
            }
        }
    }

    pub fn report(&self, generation: Generation) {
        let Generation { queue, prefill, decode, prompt_tokens, cached_tokens, output_tokens, preempted } = generation;
        let times = [queue, prefill, decode].map(|time| u64::try_from(time.as_nanos()).unwrap_or(u64::MAX));
        let counts = [prompt_tokens, cached_tokens, output_tokens, preempted];
        for (field, value) in self.told.iter().zip(times.into_iter().chain(counts)) {
            field.store(value, Relaxed);
        }
        self.is_told.store(true, Release);
    }

    /// From here on this request tells what `other` does, unless it tells something itself.
    pub fn follow(&self, other: &Arc<Progress>) {
        self.followed.lock().unwrap_or_else(PoisonError::into_inner).push(other.clone());
    }

    /// The last that was told; while the model tells more, some fields may be of before.
    pub fn generation(&self) -> Option<Generation> {
        if !self.is_told.load(Acquire) {
            let followed = self.followed.lock().unwrap_or_else(PoisonError::into_inner);
            return followed.iter().rev().find_map(|other| other.generation());
        }
        let [queue, prefill, decode, prompt_tokens, cached_tokens, output_tokens, preempted] =
            self.told.each_ref().map(|field| field.load(Relaxed));
        let [queue, prefill, decode] = [queue, prefill, decode].map(Duration::from_nanos);
        Some(Generation { queue, prefill, decode, prompt_tokens, cached_tokens, output_tokens, preempted })
    }
}
