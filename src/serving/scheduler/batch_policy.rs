//! Decides which waiting requests form the next batch, and when it runs.

use std::time::{Duration, Instant};

use repository::ModelConfig;

use super::queue::QueuedRequest;
use crate::{InferRequest, Name};

/// Batch sizes and delay of one model.
#[derive(Debug, Clone)]
pub(crate) struct BatchPolicy {
    /// Number of rows of the largest batch.
    max_rows: u64,
    /// Batches of these sizes run before the delay is over, without further requests.
    preferred: Vec<u64>,
    /// A batch with this many rows runs before the delay is over.
    sufficient_rows: u64,
    /// How long the oldest request waits for further requests.
    delay: Duration,
    /// Inputs whose shapes may differ within a batch.
    ragged: Vec<Name>,
}

/// What to do with the waiting requests.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum BatchDecision {
    /// No request waits.
    Empty,
    /// Wait for further requests until this time.
    WaitUntil(Instant),
    /// The first waiting requests, as many as this, form a batch.
    Run(usize),
}

impl BatchPolicy {
    /// Batches of up to `max_batch_size` rows. They run early at the `preferred` sizes, or when full if there are none.
    pub fn new(config: &ModelConfig, preferred: &[i32], delay_us: u64) -> Self {
        let max_rows = u64::try_from(config.max_batch_size).unwrap_or(0).max(1);
        let preferred: Vec<u64> = preferred.iter().filter_map(|&size| u64::try_from(size).ok()).collect();
        let ragged = config.input.iter().filter(|input| input.allow_ragged_batch).map(|input| Name::from(&input.name));
        Self {
            max_rows,
            sufficient_rows: preferred.iter().copied().max().unwrap_or(max_rows),
            preferred,
            delay: Duration::from_micros(delay_us),
            ragged: ragged.collect(),
        }
    }

    /// Batches of one request each.
    pub fn single() -> Self {
        Self { max_rows: 0, preferred: Vec::new(), sufficient_rows: 0, delay: Duration::ZERO, ragged: Vec::new() }
    }

    /// Lowers the number of rows at which a batch runs early to at most `num_rows`.
    pub fn with_max_sufficient_rows(self, num_rows: u64) -> Self {
        Self { sufficient_rows: self.sufficient_rows.min(num_rows), ..self }
    }

    /// Decides on the next batch. `waiting` is in the order of service, with `None` for cancelled requests.
    pub fn decide<'a>(&self, waiting: impl Iterator<Item = Option<&'a QueuedRequest>>, now: Instant) -> BatchDecision {
        let mut batch = BatchBuilder::default();
        for (index, next) in waiting.enumerate() {
            let Some(next) = next else { continue };
            if !batch.accepts(self, next) {
                batch.is_closed = true;
                break;
            }
            batch.add(index, next);
            if self.preferred.contains(&batch.num_rows) {
                batch.preferred = Some(batch.length);
            }
        }
        let Some(oldest) = batch.oldest else { return BatchDecision::Empty };
        let deadline = oldest + self.delay;
        let is_due = now >= deadline;
        match batch.preferred {
            Some(length) if !is_due || self.delay.is_zero() => BatchDecision::Run(length),
            _ if is_due || batch.is_closed || batch.num_rows >= self.sufficient_rows => {
                BatchDecision::Run(batch.length)
            }
            _ => BatchDecision::WaitUntil(deadline),
        }
    }

    /// Whether two requests can be in one batch: they have the same inputs, with equal shapes except for the batch dimension.
    fn fits(&self, first: &InferRequest, next: &InferRequest) -> bool {
        first.inputs.len() == next.inputs.len()
            && first.inputs.iter().all(|tensor| {
                next.input(&tensor.name).is_some_and(|other| {
                    tensor.shape.get(1..) == other.shape.get(1..) || self.ragged.contains(&tensor.name)
                })
            })
    }
}

/// A batch that is being formed.
#[derive(Default)]
struct BatchBuilder<'a> {
    first: Option<&'a QueuedRequest>,
    num_rows: u64,
    /// Number of waiting requests up to the last one in the batch.
    length: usize,
    oldest: Option<Instant>,
    /// `length` at the largest preferred size so far.
    preferred: Option<usize>,
    /// Whether the next request does not fit.
    is_closed: bool,
}

impl<'a> BatchBuilder<'a> {
    fn accepts(&self, policy: &BatchPolicy, next: &QueuedRequest) -> bool {
        self.first.is_none_or(|first| {
            self.num_rows + next.num_rows <= policy.max_rows && policy.fits(&first.request, &next.request)
        })
    }

    fn add(&mut self, index: usize, next: &'a QueuedRequest) {
        self.first.get_or_insert(next);
        self.num_rows += next.num_rows;
        self.length = index + 1;
        self.oldest = Some(self.oldest.map_or(next.arrived, |oldest| oldest.min(next.arrived)));
    }
}
