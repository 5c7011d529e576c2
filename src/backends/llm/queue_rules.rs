//! How requests wait for their first step: `dynamic_batching` of the model's configuration, as Triton reads it.

use std::collections::BTreeMap;
use std::time::Duration;

use repository::ModelConfig;
use repository::proto::ModelQueuePolicy;
use repository::proto::model_config::SchedulingChoice;
use repository::proto::model_queue_policy::TimeoutAction;

/// Priority levels and timeouts of one model.
#[derive(Debug, Clone, Default)]
pub(crate) struct QueueRules {
    /// Levels are `1..=num_levels`, the first is served first; 0 when requests have no priority.
    num_levels: u64,
    default_level: u64,
    default_policy: ModelQueuePolicy,
    policies: BTreeMap<u64, ModelQueuePolicy>,
}

/// How long a request may wait for its first step.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Timeout {
    pub(crate) after: Duration,
    /// It is refused then; otherwise others of its level are served before it.
    pub(crate) rejects: bool,
}

impl QueueRules {
    pub(crate) fn new(config: &ModelConfig) -> Self {
        let Some(SchedulingChoice::DynamicBatching(batching)) = &config.scheduling_choice else {
            return Self::default();
        };
        if batching.priority_queue_policy.values().any(|policy| policy.max_queue_size > 0) {
            tracing::warn!(model = %config.name, "`max_queue_size` of a priority level has no effect: that of `default_queue_policy` counts requests of all levels");
        }
        let num_levels = batching.priority_levels;
        Self {
            num_levels,
            default_level: if num_levels == 0 { 0 } else { batching.default_priority_level.clamp(1, num_levels) },
            default_policy: batching.default_queue_policy.unwrap_or_default(),
            policies: batching.priority_queue_policy.clone(),
        }
    }

    /// Most requests that wait; 0 where the configuration does not say.
    pub(crate) fn max_queue(&self) -> usize {
        self.default_policy.max_queue_size as usize
    }

    /// The engine's priority, higher is earlier, of a request that names this level; 0 and unknown ones get the default.
    pub(crate) fn priority(&self, asked: u64) -> u32 {
        u32::try_from(self.num_levels - self.level(asked)).unwrap_or(u32::MAX)
    }

    /// The timeout of a request that names this level and asks for this many microseconds; 0 asks for none. It may ask for
    /// less than the configuration's, and only where that allows it.
    pub(crate) fn timeout(&self, asked_level: u64, asked_us: u64) -> Option<Timeout> {
        let policy = self.policies.get(&self.level(asked_level)).unwrap_or(&self.default_policy);
        let allowed = if policy.allow_timeout_override { asked_us } else { 0 };
        let micros = [policy.default_timeout_microseconds, allowed].into_iter().filter(|&micros| micros > 0).min()?;
        let rejects = policy.timeout_action() == TimeoutAction::Reject;
        Some(Timeout { after: Duration::from_micros(micros), rejects })
    }

    fn level(&self, asked: u64) -> u64 {
        if (1..=self.num_levels).contains(&asked) { asked } else { self.default_level }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rules() -> QueueRules {
        let policy = |micros, allow_timeout_override, action: TimeoutAction| ModelQueuePolicy {
            timeout_action: action as i32,
            default_timeout_microseconds: micros,
            allow_timeout_override,
            max_queue_size: 7,
        };
        QueueRules {
            num_levels: 3,
            default_level: 2,
            default_policy: policy(500, true, TimeoutAction::Reject),
            policies: BTreeMap::from([(3, policy(100, false, TimeoutAction::Delay))]),
        }
    }

    #[test]
    fn the_first_level_is_served_first_and_others_than_the_levels_mean_the_default() {
        assert_eq!([1, 2, 3].map(|level| rules().priority(level)), [2, 1, 0]);
        assert_eq!([0, 4, u64::MAX].map(|level| rules().priority(level)), [1, 1, 1]);
        assert_eq!([0, 1, 9].map(|level| QueueRules::default().priority(level)), [0, 0, 0]);
    }

    #[test]
    fn a_request_may_ask_for_a_shorter_timeout_where_its_level_allows_it() {
        let timeout = |micros, rejects| Some(Timeout { after: Duration::from_micros(micros), rejects });
        assert_eq!(rules().timeout(1, 0), timeout(500, true));
        assert_eq!(rules().timeout(0, 20), timeout(20, true));
        assert_eq!(rules().timeout(2, 900), timeout(500, true));
        assert_eq!(rules().timeout(3, 20), timeout(100, false));
        assert_eq!(QueueRules::default().timeout(0, 20), None);
    }
}
