//! Requests that wait for a batch: priority levels, each with its bound and its timeouts.

use std::collections::{BTreeMap, VecDeque};
use std::time::{Duration, Instant};

use repository::ModelConfig;
use repository::proto::ModelQueuePolicy;
use repository::proto::model_queue_policy::TimeoutAction;

use super::batch_policy::{Choice, Grouping};
use super::{Queue, Take, Waiting};
use crate::InferError;

/// Requests that may wait at one priority level where the model's configuration sets no bound.
const MAX_WAITING: usize = 65_536;

/// The queue of a model whose requests stand for themselves.
#[derive(Debug)]
pub(crate) struct Priorities {
    /// By priority, the most urgent first.
    levels: BTreeMap<u64, Level>,
    default_priority: u64,
    grouping: Grouping,
    /// No request times out before this.
    first_deadline: Option<Instant>,
}

#[derive(Debug, Default)]
struct Level {
    policy: ModelQueuePolicy,
    waiting: VecDeque<Waiting>,
    /// Timed out, but to be served when nobody else waits at this level.
    delayed: VecDeque<Waiting>,
}

impl Priorities {
    /// The queue that `dynamic_batching` describes; without it requests run alone, in the order they come.
    pub fn new(config: &ModelConfig) -> Self {
        let Some(batching) = config.batching() else {
            let levels = BTreeMap::from([(0, Level::default())]);
            return Self { levels, default_priority: 0, grouping: Grouping::single(), first_deadline: None };
        };
        let default_policy = batching.default_queue_policy.unwrap_or_default();
        let level = |priority: u64| {
            let policy = batching.priority_queue_policy.get(&priority).copied().unwrap_or(default_policy);
            (priority, Level { policy, ..Level::default() })
        };
        // Without levels there is one, whatever number a request names.
        let (first, last) = if batching.priority_levels == 0 { (0, 0) } else { (1, batching.priority_levels) };
        Self {
            levels: (first..=last).map(level).collect(),
            default_priority: batching.default_priority_level.clamp(first, last),
            grouping: Grouping::new(config, &batching.preferred_batch_size, batching.max_queue_delay_microseconds),
            first_deadline: None,
        }
    }

    fn pop(&mut self) -> Option<Waiting> {
        self.levels.values_mut().find_map(|level| level.waiting.pop_front().or_else(|| level.delayed.pop_front()))
    }
}

impl Queue for Priorities {
    fn has_timeouts(&self) -> bool {
        let has = |level: &Level| level.policy.default_timeout_microseconds > 0 || level.policy.allow_timeout_override;
        self.levels.values().any(has)
    }

    fn push(&mut self, mut waiting: Waiting) -> Result<(), InferError> {
        let asked = waiting.request.priority;
        let priority = if self.levels.contains_key(&asked) { asked } else { self.default_priority };
        let level = self.levels.get_mut(&priority).expect("the default level is one of them");
        let limit = usize::try_from(level.policy.max_queue_size).ok().filter(|&limit| limit > 0).unwrap_or(MAX_WAITING);
        if level.len() >= limit {
            level.forget_cancelled();
        }
        if level.len() >= limit {
            return Err(InferError::unavailable("Exceeds maximum queue size"));
        }
        waiting.deadline = level.timeout(waiting.request.timeout_us).map(|timeout| waiting.since + timeout);
        self.first_deadline = earlier(self.first_deadline, waiting.deadline);
        level.waiting.push_back(waiting);
        Ok(())
    }

    fn take(&mut self, _instance: usize, now: Instant) -> Take {
        let in_order = self.levels.values().flat_map(|level| level.waiting.iter().chain(&level.delayed));
        let in_order = in_order.map(|waiting| (!waiting.responses.is_cancelled()).then_some(waiting));
        match self.grouping.choose(in_order, now) {
            Choice::Nothing => Take::Nothing,
            Choice::WaitUntil(until) => Take::WaitUntil(until),
            Choice::Run(length) => {
                let batch = (0..length).filter_map(|_| self.pop());
                Take::Batch(batch.filter(|waiting| !waiting.responses.is_cancelled()).collect())
            }
        }
    }

    fn len(&self) -> usize {
        self.levels.values().map(Level::len).sum()
    }

    fn first_deadline(&self) -> Option<Instant> {
        self.first_deadline
    }

    fn expire(&mut self, now: Instant) -> Vec<Waiting> {
        if self.first_deadline.is_none_or(|deadline| deadline > now) {
            return Vec::new();
        }
        self.first_deadline = None;
        let mut expired = Vec::new();
        for level in self.levels.values_mut() {
            let is_late = |waiting: &Waiting| waiting.deadline.is_some_and(|deadline| deadline <= now);
            let (late, waiting): (VecDeque<_>, VecDeque<_>) = level.waiting.drain(..).partition(is_late);
            level.waiting = waiting;
            match level.policy.timeout_action() {
                TimeoutAction::Reject => expired.extend(late),
                TimeoutAction::Delay => level.delayed.extend(late),
            }
            let deadlines = level.waiting.iter().map(|waiting| waiting.deadline);
            self.first_deadline = deadlines.fold(self.first_deadline, earlier);
        }
        expired
    }
}

impl Level {
    fn len(&self) -> usize {
        self.waiting.len() + self.delayed.len()
    }

    fn forget_cancelled(&mut self) {
        self.waiting.retain(|waiting| !waiting.responses.is_cancelled());
        self.delayed.retain(|waiting| !waiting.responses.is_cancelled());
    }

    /// How long a request that asks for `asked_us` may wait. It may ask for less than the default only.
    fn timeout(&self, asked_us: u64) -> Option<Duration> {
        let default_us = Some(self.policy.default_timeout_microseconds).filter(|&timeout| timeout > 0);
        let asked_us = Some(asked_us).filter(|&timeout| timeout > 0 && self.policy.allow_timeout_override);
        earlier(default_us, asked_us).map(Duration::from_micros)
    }
}

fn earlier<T: Ord>(left: Option<T>, right: Option<T>) -> Option<T> {
    match (left, right) {
        (Some(left), Some(right)) => Some(left.min(right)),
        (left, right) => left.or(right),
    }
}
