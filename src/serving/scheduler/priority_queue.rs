//! The queue of stateless models: priority levels, each with a size limit and timeouts.

use std::collections::{BTreeMap, VecDeque};
use std::time::{Duration, Instant};

use repository::ModelConfig;
use repository::proto::ModelQueuePolicy;
use repository::proto::model_queue_policy::TimeoutAction;

use super::batch_policy::{BatchDecision, BatchPolicy};
use super::queue::{NextBatch, Queue, QueuedRequest};
use crate::InferError;

/// Size limit of a priority level where the model's configuration sets none.
const MAX_WAITING: usize = 65_536;

/// The queue of a model without sequences.
#[derive(Debug)]
pub(crate) struct PriorityQueue {
    /// By priority, the highest priority (lowest number) first.
    levels: BTreeMap<u64, Level>,
    default_priority: u64,
    policy: BatchPolicy,
    /// No request times out before this time.
    first_deadline: Option<Instant>,
}

#[derive(Debug, Default)]
struct Level {
    policy: ModelQueuePolicy,
    waiting: VecDeque<QueuedRequest>,
    /// Requests that timed out with action DELAY. They are served when no other request waits at this level.
    delayed: VecDeque<QueuedRequest>,
}

impl PriorityQueue {
    /// The queue that `dynamic_batching` configures. Without it each request runs alone, in the order of arrival.
    pub fn new(config: &ModelConfig) -> Self {
        let Some(batching) = config.batching() else {
            let levels = BTreeMap::from([(0, Level::default())]);
            return Self { levels, default_priority: 0, policy: BatchPolicy::single(), first_deadline: None };
        };
        let default_policy = batching.default_queue_policy.unwrap_or_default();
        let level = |priority: u64| {
            let policy = batching.priority_queue_policy.get(&priority).copied().unwrap_or(default_policy);
            (priority, Level { policy, ..Level::default() })
        };
        // Without configured levels there is one level for all priorities.
        let (first, last) = if batching.priority_levels == 0 { (0, 0) } else { (1, batching.priority_levels) };
        Self {
            levels: (first..=last).map(level).collect(),
            default_priority: batching.default_priority_level.clamp(first, last),
            policy: BatchPolicy::new(config, &batching.preferred_batch_size, batching.max_queue_delay_microseconds),
            first_deadline: None,
        }
    }

    fn pop(&mut self) -> Option<QueuedRequest> {
        self.levels.values_mut().find_map(|level| level.waiting.pop_front().or_else(|| level.delayed.pop_front()))
    }
}

impl Queue for PriorityQueue {
    fn has_timeouts(&self) -> bool {
        let has = |level: &Level| level.policy.default_timeout_microseconds > 0 || level.policy.allow_timeout_override;
        self.levels.values().any(has)
    }

    fn push(&mut self, mut queued: QueuedRequest) -> Result<(), InferError> {
        let requested = queued.request.priority;
        let priority = if self.levels.contains_key(&requested) { requested } else { self.default_priority };
        let level = self.levels.get_mut(&priority).expect("the default level is one of them");
        let limit = usize::try_from(level.policy.max_queue_size).ok().filter(|&limit| limit > 0).unwrap_or(MAX_WAITING);
        if level.len() >= limit {
            level.remove_cancelled();
        }
        if level.len() >= limit {
            return Err(InferError::unavailable("Exceeds maximum queue size"));
        }
        queued.deadline = level.timeout(queued.request.timeout_us).map(|timeout| queued.arrived + timeout);
        self.first_deadline = earlier(self.first_deadline, queued.deadline);
        level.waiting.push_back(queued);
        Ok(())
    }

    fn take(&mut self, _instance: usize, now: Instant) -> NextBatch {
        let in_order = self.levels.values().flat_map(|level| level.waiting.iter().chain(&level.delayed));
        let in_order = in_order.map(|queued| (!queued.responses.is_cancelled()).then_some(queued));
        match self.policy.decide(in_order, now) {
            BatchDecision::Empty => NextBatch::Empty,
            BatchDecision::WaitUntil(until) => NextBatch::WaitUntil(until),
            BatchDecision::Run(length) => {
                let batch = (0..length).filter_map(|_| self.pop());
                NextBatch::Run(batch.filter(|queued| !queued.responses.is_cancelled()).collect())
            }
        }
    }

    fn len(&self) -> usize {
        self.levels.values().map(Level::len).sum()
    }

    fn first_deadline(&self) -> Option<Instant> {
        self.first_deadline
    }

    fn expire(&mut self, now: Instant) -> Vec<QueuedRequest> {
        if self.first_deadline.is_none_or(|deadline| deadline > now) {
            return Vec::new();
        }
        self.first_deadline = None;
        let mut expired = Vec::new();
        for level in self.levels.values_mut() {
            let is_late = |queued: &QueuedRequest| queued.deadline.is_some_and(|deadline| deadline <= now);
            let (late, waiting): (VecDeque<_>, VecDeque<_>) = level.waiting.drain(..).partition(is_late);
            level.waiting = waiting;
            match level.policy.timeout_action() {
                TimeoutAction::Reject => expired.extend(late),
                TimeoutAction::Delay => level.delayed.extend(late),
            }
            let deadlines = level.waiting.iter().map(|queued| queued.deadline);
            self.first_deadline = deadlines.fold(self.first_deadline, earlier);
        }
        expired
    }
}

impl Level {
    fn len(&self) -> usize {
        self.waiting.len() + self.delayed.len()
    }

    fn remove_cancelled(&mut self) {
        self.waiting.retain(|queued| !queued.responses.is_cancelled());
        self.delayed.retain(|queued| !queued.responses.is_cancelled());
    }

    /// How long a request may wait that sets a timeout of `requested_us` (0 for none). A request can shorten the default and not extend it.
    fn timeout(&self, requested_us: u64) -> Option<Duration> {
        let default_us = Some(self.policy.default_timeout_microseconds).filter(|&timeout| timeout > 0);
        let requested_us = Some(requested_us).filter(|&timeout| timeout > 0 && self.policy.allow_timeout_override);
        earlier(default_us, requested_us).map(Duration::from_micros)
    }
}

fn earlier<T: Ord>(left: Option<T>, right: Option<T>) -> Option<T> {
    match (left, right) {
        (Some(left), Some(right)) => Some(left.min(right)),
        (left, right) => left.or(right),
    }
}
