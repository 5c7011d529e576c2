//! Progress of a request: when it was scheduled, and how the time of generating text divides.

use std::sync::atomic::{
    AtomicBool, AtomicU64,
    Ordering::{Acquire, Relaxed, Release},
};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use crate::outcome::Execution;

/// Times and token counts that a model reports for a request that generates text.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Generation {
    /// From the request's arrival until its first step was scheduled.
    pub queue: Duration,
    /// From the first step to the first token.
    pub prefill: Duration,
    /// From the first token to the last.
    pub decode: Duration,
    /// Number of tokens in the prompt.
    pub prompt_tokens: u64,
    /// Tokens of the prompt that were found in the prefix cache.
    pub cached_tokens: u64,
    /// Number of generated tokens.
    pub output_tokens: u64,
    /// How often the request was preempted and computed again.
    pub preempted: u64,
}

/// When a request left its queue, and the execution that it is part of.
#[derive(Debug)]
pub(crate) struct Scheduled {
    pub at: Instant,
    pub execution: Option<Arc<Execution>>,
}

/// Progress of a request. The model writes it, and the metrics read it.
#[derive(Debug)]
pub(crate) struct Progress {
    pub scheduled: OnceLock<Scheduled>,
    /// Nanoseconds that copying the inputs to the model took.
    input_ns: AtomicU64,
    /// When the model had computed its last response, in nanoseconds since `created`; 0 for unknown.
    computed_ns: AtomicU64,
    created: Instant,
    /// Whether `generation` holds a report.
    is_reported: AtomicBool,
    /// Requests that answer this one. Their reports stand for this request while it has none of its own.
    sources: Mutex<Vec<Arc<Progress>>>,
    /// The fields of a [`Generation`]. They need no lock, because a model may report for each token.
    generation: [AtomicU64; 7],
    /// Output tokens that the reader of the text has recognised as reasoning.
    reasoning_tokens: AtomicU64,
}

/// A [`crate::ResponseSource`] reports the progress of its request here, and so does the reader of a text.
#[derive(Debug, Clone)]
pub struct ProgressReporter(pub(crate) Arc<Progress>);

impl ProgressReporter {
    /// Marks the end of queueing, like [`crate::ResponseSender::mark_scheduled`].
    pub fn mark_scheduled(&self) {
        let _ = self.0.scheduled.set(Scheduled { at: Instant::now(), execution: None });
    }

    /// Adds input time, like [`crate::ResponseSender::add_input_time`].
    pub fn add_input_time(&self, time: Duration) {
        self.0.add_input_time(time);
    }

    /// Sets when the next response was computed, like [`crate::ResponseSender::set_computed_at`].
    pub fn set_computed_at(&self, at: Instant) {
        self.0.set_computed_at(at);
    }

    /// Reports times and token counts, like [`crate::ResponseSender::report`].
    pub fn report(&self, generation: Generation) {
        self.0.report(generation);
    }

    /// Counts output tokens as reasoning, which only the reader of the text can recognise.
    pub fn add_reasoning_tokens(&self, count: u64) {
        self.0.reasoning_tokens.fetch_add(count, Relaxed);
    }

    /// Output tokens that were counted as reasoning.
    pub fn reasoning_tokens(&self) -> u64 {
        self.0.reasoning_tokens()
    }
}

impl Default for Progress {
    fn default() -> Self {
        Self {
            scheduled: OnceLock::new(),
            input_ns: AtomicU64::new(0),
            computed_ns: AtomicU64::new(0),
            created: Instant::now(),
            is_reported: AtomicBool::new(false),
            sources: Mutex::default(),
            generation: Default::default(),
            reasoning_tokens: AtomicU64::new(0),
        }
    }
}

impl Progress {
    pub fn add_input_time(&self, time: Duration) {
        self.input_ns.fetch_add(time.as_nanos() as u64, Relaxed);
    }

    /// Time that copying the inputs to the model took so far.
    pub fn input(&self) -> Duration {
        Duration::from_nanos(self.input_ns.load(Relaxed))
    }

    pub fn set_computed_at(&self, at: Instant) {
        self.computed_ns.store(at.saturating_duration_since(self.created).as_nanos().max(1) as u64, Relaxed);
    }

    /// When the last response was computed; resets it. Called once for each response, before the next one is computed.
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
        for (field, value) in self.generation.iter().zip(times.into_iter().chain(counts)) {
            field.store(value, Relaxed);
        }
        self.is_reported.store(true, Release);
    }

    /// Output tokens that were counted as reasoning.
    pub fn reasoning_tokens(&self) -> u64 {
        self.reasoning_tokens.load(Relaxed)
    }

    /// Uses the reports of `other` from now on, as long as this request has no report of its own.
    pub fn report_progress_of(&self, other: &Arc<Progress>) {
        self.sources.lock().unwrap_or_else(PoisonError::into_inner).push(other.clone());
    }

    /// The last report. While the model writes the next one, some fields may be older than others.
    pub fn generation(&self) -> Option<Generation> {
        if !self.is_reported.load(Acquire) {
            let sources = self.sources.lock().unwrap_or_else(PoisonError::into_inner);
            return sources.iter().rev().find_map(|other| other.generation());
        }
        let [queue, prefill, decode, prompt_tokens, cached_tokens, output_tokens, preempted] =
            self.generation.each_ref().map(|field| field.load(Relaxed));
        let [queue, prefill, decode] = [queue, prefill, decode].map(Duration::from_nanos);
        Some(Generation { queue, prefill, decode, prompt_tokens, cached_tokens, output_tokens, preempted })
    }
}
