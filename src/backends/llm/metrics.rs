//! Counters and histograms of a model. Steps and tokens only add to atomics. The one lock is taken when workers start.

use std::collections::VecDeque;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::{Duration, Instant};

use engine::{FinishReason, StepPlan};
use ipc::Backlog;
use serving::{Histogram, HistogramValues};

/// Upper bounds in seconds.
const WAITS: [f64; 15] = [0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0];
const TOKENS: [f64; 14] = [0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0];
const REQUESTS: [f64; 13] = [0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0];
const PHASES: [f64; 12] = [1e-6, 5e-6, 1e-5, 5e-5, 1e-4, 5e-4, 0.001, 0.005, 0.01, 0.05, 0.25, 1.0];
/// Upper bounds of relative errors.
const ERRORS: [f64; 8] = [0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0];
/// Upper bounds in tokens, those of TensorRT-LLM's backend.
const LENGTHS: [f64; 5] = [10.0, 50.0, 100.0, 500.0, 1000.0];

/// Labels of the reasons for which sequences end.
pub const FINISH_REASONS: [&str; 6] = ["end_id", "stop_word", "length", "cancelled", "complete", "failed"];

/// Labels of priority levels, of which 1 is the highest. 0 is for models without levels, and the last one for all lower levels.
pub const PRIORITY_LEVELS: [&str; 10] = ["0", "1", "2", "3", "4", "5", "6", "7", "8", "9"];

/// Labels of the kinds of steps.
pub const STEP_KINDS: [&str; 3] = ["prefill", "decode", "mixed"];

/// Labels of the coefficients of the scheduler's cost model.
pub const STEP_COSTS: [&str; 8] = engine::StepCosts::NAMES;

/// Labels of the phases of a step on rank 0, in order.
pub const STEP_PHASES: [&str; 6] = ["plan", "send", "mask", "wait", "settle", "deliver"];

/// Indices of [`STEP_PHASES`].
#[derive(Debug, Clone, Copy)]
pub(crate) enum Phase {
    Plan,
    Send,
    Mask,
    Wait,
    Settle,
    Deliver,
}

/// The metrics of one replica.
#[derive(Debug)]
pub(crate) struct Metrics {
    pub(crate) first_token: Histogram,
    /// The same by the priority level of the request; see [`PRIORITY_LEVELS`].
    pub(crate) first_token_of: [Histogram; PRIORITY_LEVELS.len()],
    pub(crate) inter_token: Histogram,
    pub(crate) queue: Histogram,
    pub(crate) request: Histogram,
    pub(crate) input_tokens: Histogram,
    pub(crate) output_tokens: Histogram,
    pub(crate) prefix_lookups: AtomicU64,
    pub(crate) prefix_hits: AtomicU64,
    pub(crate) cached_tokens: AtomicU64,
    pub(crate) reasoning_tokens: AtomicU64,
    ends: [AtomicU64; FINISH_REASONS.len()],
    steps: [Histogram; STEP_KINDS.len()],
    predicted: [Histogram; STEP_KINDS.len()],
    prediction_error: Histogram,
    phases: [Histogram; STEP_PHASES.len()],
    context_tokens: AtomicU64,
    start: Mutex<Start>,
}

/// The last start of the workers.
#[derive(Debug, Clone, Default)]
pub struct Start {
    /// Workers whose process runs.
    pub workers: Vec<WorkerStatus>,
    /// Phases with their durations, in order. A phase of the workers has the duration of the slowest worker.
    pub phases: Vec<(String, Duration)>,
    /// Bytes of a KV block and of a recurrent state, of all workers together.
    pub slot_bytes: [u64; 2],
}

/// One worker of a model.
#[derive(Debug, Clone, Default)]
pub struct WorkerStatus {
    /// Index among the workers of the model, which is its rank.
    pub index: u32,
    /// Process id.
    pub pid: u32,
    /// Name of its node.
    pub node: String,
    /// Its device, such as `cpu` or `cuda:0`.
    pub device: String,
    /// Size of its weights, workspace and KV blocks; 0 until they are allocated.
    pub memory_bytes: u64,
    /// Number of plans in its ring; `None` for a worker on another node.
    pub backlog: Option<Backlog>,
}

/// A snapshot of the metrics of one replica.
#[derive(Debug, Clone, Default)]
#[allow(missing_docs)] // The fields have the names of the documented metrics. The constants are their labels.
pub struct MetricValues {
    pub first_token: HistogramValues,
    pub first_token_of: [HistogramValues; PRIORITY_LEVELS.len()],
    pub inter_token: HistogramValues,
    pub queue: HistogramValues,
    pub request: HistogramValues,
    pub input_tokens: HistogramValues,
    pub output_tokens: HistogramValues,
    pub prefix_lookups: u64,
    pub prefix_hits: u64,
    pub cached_tokens: u64,
    pub reasoning_tokens: u64,
    pub ends: [u64; FINISH_REASONS.len()],
    pub steps: [HistogramValues; STEP_KINDS.len()],
    pub predicted: [HistogramValues; STEP_KINDS.len()],
    pub prediction_error: HistogramValues,
    pub phases: [HistogramValues; STEP_PHASES.len()],
    pub context_tokens: u64,
    pub start: Start,
}

impl Default for Metrics {
    fn default() -> Self {
        Self {
            first_token: Histogram::of_times(&WAITS),
            first_token_of: std::array::from_fn(|_| Histogram::of_times(&WAITS)),
            inter_token: Histogram::of_times(&TOKENS),
            queue: Histogram::of_times(&WAITS),
            request: Histogram::of_times(&REQUESTS),
            input_tokens: Histogram::of_numbers(&LENGTHS),
            output_tokens: Histogram::of_numbers(&LENGTHS),
            prefix_lookups: AtomicU64::default(),
            prefix_hits: AtomicU64::default(),
            cached_tokens: AtomicU64::default(),
            reasoning_tokens: AtomicU64::default(),
            ends: Default::default(),
            steps: std::array::from_fn(|_| Histogram::of_times(&TOKENS)),
            predicted: std::array::from_fn(|_| Histogram::of_times(&TOKENS)),
            prediction_error: Histogram::of_times(&ERRORS),
            phases: std::array::from_fn(|_| Histogram::of_times(&PHASES)),
            context_tokens: AtomicU64::default(),
            start: Mutex::default(),
        }
    }
}

impl Metrics {
    /// Counts the end of a sequence; `None` counts a failure.
    pub(crate) fn ended(&self, reason: Option<FinishReason>) {
        let index = match reason {
            Some(FinishReason::EndId(_)) => 0,
            Some(FinishReason::StopWord) => 1,
            Some(FinishReason::Length) => 2,
            Some(FinishReason::Cancelled) => 3,
            Some(FinishReason::Complete) => 4,
            Some(FinishReason::Constraint) | None => 5,
        };
        self.ends[index].fetch_add(1, Relaxed);
    }

    /// Records the time since `started` for `phase`. Returns the current time.
    pub(crate) fn phase(&self, phase: Phase, started: Instant) -> Instant {
        let now = Instant::now();
        self.phases[phase as usize].observe((now - started).as_secs_f64());
        now
    }

    /// Changes the record of the last start.
    pub(crate) fn update_start(&self, change: impl FnOnce(&mut Start)) {
        change(&mut ipc::lock(&self.start));
    }

    /// The last start of the workers.
    pub(crate) fn start(&self) -> Start {
        ipc::lock(&self.start).clone()
    }

    /// A snapshot.
    pub(crate) fn read(&self) -> MetricValues {
        MetricValues {
            first_token: self.first_token.read(),
            first_token_of: self.first_token_of.each_ref().map(Histogram::read),
            inter_token: self.inter_token.read(),
            queue: self.queue.read(),
            request: self.request.read(),
            input_tokens: self.input_tokens.read(),
            output_tokens: self.output_tokens.read(),
            prefix_lookups: self.prefix_lookups.load(Relaxed),
            prefix_hits: self.prefix_hits.load(Relaxed),
            cached_tokens: self.cached_tokens.load(Relaxed),
            reasoning_tokens: self.reasoning_tokens.load(Relaxed),
            ends: self.ends.each_ref().map(|count| count.load(Relaxed)),
            steps: self.steps.each_ref().map(Histogram::read),
            predicted: self.predicted.each_ref().map(Histogram::read),
            prediction_error: self.prediction_error.read(),
            phases: self.phases.each_ref().map(Histogram::read),
            context_tokens: self.context_tokens.load(Relaxed),
            start: self.start(),
        }
    }
}

/// Indices into [`STEP_KINDS`] of the steps in flight, oldest first.
#[derive(Debug, Default)]
pub(crate) struct StepKinds(VecDeque<usize>);

impl StepKinds {
    /// Adds the step of a new plan.
    pub(crate) fn planned(&mut self, plan: &StepPlan, metrics: &Metrics) {
        // Prefills are first in a plan. A last chunk of one token counts as a decode.
        let has_drafts = |row| plan.drafts.iter().any(|(drafted, _)| *drafted == row);
        let prefills =
            plan.work.iter().take_while(|work| !work.samples || work.num_tokens > 1 && !has_drafts(work.row));
        let (num_prefills, tokens) =
            prefills.fold((0, 0), |(count, sum), work| (count + 1, sum + u64::from(work.num_tokens)));
        metrics.context_tokens.store(tokens, Relaxed);
        self.0.push_back(match (num_prefills, plan.work.len()) {
            (0, _) => 1,
            (prefills, all) if prefills == all => 0,
            _ => 2,
        });
    }

    /// Records the oldest step. `time` is the time since the previous step was done, or since this step was sent to idle workers.
    /// `predicted` is the time in seconds that the scheduler expected, if it knew any step before.
    pub(crate) fn settled(&mut self, time: Duration, predicted: Option<f64>, metrics: &Metrics) {
        let Some(kind) = self.0.pop_front() else { return };
        let seconds = time.as_secs_f64();
        metrics.steps[kind].observe(seconds);
        if let Some(predicted) = predicted {
            metrics.predicted[kind].observe(predicted);
            metrics.prediction_error.observe((predicted - seconds).abs() / seconds.max(1e-9));
        }
    }

    /// Drops the steps in flight.
    pub(crate) fn clear(&mut self) {
        self.0.clear();
    }
}

#[cfg(test)]
mod tests {
    use engine::{RowId, RowWork, TokenId};

    use super::*;

    fn work(row: u32, num_tokens: u32, samples: bool) -> RowWork {
        RowWork { row: RowId(row), start: 0, num_tokens, samples, num_guesses: 0 }
    }

    #[test]
    fn a_step_is_of_the_kind_of_its_work() {
        let metrics = Metrics::default();
        let mut kinds = StepKinds::default();
        let drafts = vec![(RowId(1), vec![TokenId(5), TokenId(6)])];
        let plans = [
            (vec![work(0, 8, false), work(1, 4, true)], vec![]),
            (vec![work(0, 1, true)], vec![]),
            (vec![work(1, 3, true), work(0, 1, true)], drafts),
            (vec![work(0, 8, true), work(1, 1, true)], vec![]),
        ];
        for (work, drafts) in plans {
            kinds.planned(&StepPlan { work, drafts, ..StepPlan::default() }, &metrics);
        }
        assert_eq!(metrics.read().context_tokens, 8);
        (0..3).for_each(|_| kinds.settled(Duration::from_millis(2), Some(1e-3), &metrics));
        kinds.settled(Duration::from_millis(2), None, &metrics);
        let read = metrics.read();
        assert_eq!(read.steps.map(|steps| steps.count), [1, 2, 1]);
        assert_eq!(read.predicted.map(|steps| steps.count), [1, 2, 0]);
        assert_eq!((read.prediction_error.count, read.prediction_error.sum), (3, 1.5));
    }
}
