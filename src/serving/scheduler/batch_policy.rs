//! Which of the waiting requests make the next batch, and when.

use std::time::{Duration, Instant};

use repository::ModelConfig;

use super::Waiting;
use crate::{InferRequest, Name};

/// How a model wants its batches.
#[derive(Debug, Clone)]
pub(crate) struct Grouping {
    /// Rows of the largest batch.
    max_rows: u64,
    /// Sizes worth sending before the delay is over, without the requests beyond them.
    preferred: Vec<u64>,
    /// Rows worth sending before the delay is over.
    enough: u64,
    /// How long the oldest request may wait for others.
    delay: Duration,
    /// Inputs that may differ in shape within a batch.
    ragged: Vec<Name>,
}

/// What to do with the requests that wait.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Choice {
    /// Nobody waits.
    Nothing,
    /// More may come until then.
    WaitUntil(Instant),
    /// The first so many make a batch.
    Run(usize),
}

impl Grouping {
    /// Batches of up to `max_batch_size` rows, of the `preferred` sizes, or full where that is empty.
    pub fn new(config: &ModelConfig, preferred: &[i32], delay_us: u64) -> Self {
        let max_rows = u64::try_from(config.max_batch_size).unwrap_or(0).max(1);
        let preferred: Vec<u64> = preferred.iter().filter_map(|&size| u64::try_from(size).ok()).collect();
        let ragged = config.input.iter().filter(|input| input.allow_ragged_batch).map(|input| Name::from(&input.name));
        Self {
            max_rows,
            enough: preferred.iter().copied().max().unwrap_or(max_rows),
            preferred,
            delay: Duration::from_micros(delay_us),
            ragged: ragged.collect(),
        }
    }

    /// One request at a time.
    pub fn single() -> Self {
        Self { max_rows: 0, preferred: Vec::new(), enough: 0, delay: Duration::ZERO, ragged: Vec::new() }
    }

    /// No batch waits for more rows than `enough`.
    pub fn enough_at(self, enough: u64) -> Self {
        Self { enough: self.enough.min(enough), ..self }
    }

    /// The next batch out of `waiting`, which is in order of service, with `None` for those that count for nothing.
    pub fn choose<'a>(&self, waiting: impl Iterator<Item = Option<&'a Waiting>>, now: Instant) -> Choice {
        let mut batch = Pending::default();
        for (place, next) in waiting.enumerate() {
            let Some(next) = next else { continue };
            if !batch.takes(self, next) {
                batch.is_closed = true;
                break;
            }
            batch.add(place, next);
            if self.preferred.contains(&batch.num_rows) {
                batch.preferred = Some(batch.length);
            }
        }
        let Some(oldest) = batch.oldest else { return Choice::Nothing };
        let until = oldest + self.delay;
        let is_late = now >= until;
        match batch.preferred {
            Some(length) if !is_late || self.delay.is_zero() => Choice::Run(length),
            _ if is_late || batch.is_closed || batch.num_rows >= self.enough => Choice::Run(batch.length),
            _ => Choice::WaitUntil(until),
        }
    }

    /// Whether two requests can be rows of one batch: the same inputs, of the same shape but for the batch dimension.
    fn fits(&self, first: &InferRequest, next: &InferRequest) -> bool {
        first.inputs.len() == next.inputs.len()
            && first.inputs.iter().all(|tensor| {
                next.input(&tensor.name).is_some_and(|other| {
                    tensor.shape.get(1..) == other.shape.get(1..) || self.ragged.contains(&tensor.name)
                })
            })
    }
}

/// A batch while it is put together.
#[derive(Default)]
struct Pending<'a> {
    first: Option<&'a Waiting>,
    num_rows: u64,
    length: usize,
    oldest: Option<Instant>,
    /// Length at the largest preferred size met.
    preferred: Option<usize>,
    /// Whoever is next does not fit.
    is_closed: bool,
}

impl<'a> Pending<'a> {
    fn takes(&self, grouping: &Grouping, next: &Waiting) -> bool {
        self.first.is_none_or(|first| {
            self.num_rows + next.num_rows <= grouping.max_rows && grouping.fits(&first.request, &next.request)
        })
    }

    fn add(&mut self, place: usize, next: &'a Waiting) {
        self.first.get_or_insert(next);
        self.num_rows += next.num_rows;
        self.length = place + 1;
        self.oldest = Some(self.oldest.map_or(next.since, |oldest| oldest.min(next.since)));
    }
}
