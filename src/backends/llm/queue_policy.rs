//! Priorities, timeouts and bounds of queued requests, from `dynamic_batching` of the model's configuration.

use std::collections::BTreeMap;
use std::time::Duration;

use repository::ModelConfig;
use repository::proto::ModelQueuePolicy;
use repository::proto::model_config::SchedulingChoice;
use repository::proto::model_queue_policy::TimeoutAction;

/// The bound for `max_queue_size: 0`, which means no bound in Triton. Its benchmarks stay below this one.
const MAX_WAITING: usize = 65_536;

/// The engine's priority of the lowest level. OpenAI's `priority` moves a request below it or above it.
pub(crate) const LOWEST_LEVEL: u32 = 1 << 20;

/// Priority levels, timeouts and bounds of one model.
#[derive(Debug, Clone, Default)]
pub(crate) struct QueuePolicy {
    /// Levels are `1..=num_levels`, and level 1 has the highest priority; 0 when requests have no priority.
    num_levels: u64,
    default_level: u64,
    default_policy: Option<ModelQueuePolicy>,
    policies: BTreeMap<u64, ModelQueuePolicy>,
}

/// The timeout of a request that waits for its first step.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Timeout {
    pub(crate) after: Duration,
    /// Whether the request is refused after the timeout. Otherwise it is moved after others of its level.
    pub(crate) rejects: bool,
}

/// Maximum numbers of requests that wait for their first step.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct QueueBounds {
    pub(crate) total: usize,
    pub(crate) each: usize,
    /// Bounds of single priorities of the engine.
    pub(crate) of: BTreeMap<u32, usize>,
}

impl QueuePolicy {
    pub(crate) fn new(config: &ModelConfig) -> Self {
        let Some(SchedulingChoice::DynamicBatching(batching)) = &config.scheduling_choice else {
            return Self::default();
        };
        let num_levels = batching.priority_levels;
        Self {
            num_levels,
            default_level: if num_levels == 0 { 0 } else { batching.default_priority_level.clamp(1, num_levels) },
            default_policy: batching.default_queue_policy,
            policies: batching.priority_queue_policy.clone(),
        }
    }

    /// Maximum numbers of waiting requests: in total, for each priority, and for priorities with a bound of their own. As in Triton,
    /// each level has its own queue. `default` is the bound of levels without a policy.
    pub(crate) fn bounds(&self, default: usize) -> QueueBounds {
        let bound = |policy: &ModelQueuePolicy| match policy.max_queue_size as usize {
            0 => MAX_WAITING,
            size => size,
        };
        let each = self.default_policy.as_ref().map_or(default, bound);
        let own = self.policies.iter().filter(|(level, _)| (1..=self.num_levels).contains(level));
        let of: BTreeMap<u32, usize> = own.map(|(&level, policy)| (self.priority(level), bound(policy))).collect();
        let num_others = usize::try_from(self.num_levels.max(1)).unwrap_or(usize::MAX) - of.len();
        let total = of.values().fold(each.saturating_mul(num_others), |sum, bound| sum.saturating_add(*bound));
        QueueBounds { total: total.min(i32::MAX as usize), each, of }
    }

    /// Number of priority levels; 0 when requests have no priority.
    pub(crate) fn num_levels(&self) -> u64 {
        self.num_levels
    }

    /// The engine's priority of a level; higher is served first. 0 and unknown levels get the default.
    pub(crate) fn priority(&self, requested: u64) -> u32 {
        u32::try_from(self.num_levels - self.level(requested)).unwrap_or(u32::MAX).saturating_add(LOWEST_LEVEL)
    }

    /// The timeout of a request with this level and this requested timeout in microseconds, 0 for none. A request can only shorten the
    /// configured timeout, and only where the policy allows it.
    pub(crate) fn timeout(&self, requested_level: u64, requested_us: u64) -> Option<Timeout> {
        let policy = self.policies.get(&self.level(requested_level)).or(self.default_policy.as_ref())?;
        let allowed = if policy.allow_timeout_override { requested_us } else { 0 };
        let micros = [policy.default_timeout_microseconds, allowed].into_iter().filter(|&micros| micros > 0).min()?;
        let rejects = policy.timeout_action() == TimeoutAction::Reject;
        Some(Timeout { after: Duration::from_micros(micros), rejects })
    }

    /// The level of a request: 0 and unknown levels get the default.
    pub(crate) fn level(&self, requested: u64) -> u64 {
        if (1..=self.num_levels).contains(&requested) { requested } else { self.default_level }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rules() -> QueuePolicy {
        let policy = |micros, allow_timeout_override, action: TimeoutAction| ModelQueuePolicy {
            timeout_action: action as i32,
            default_timeout_microseconds: micros,
            allow_timeout_override,
            max_queue_size: 7,
        };
        QueuePolicy {
            num_levels: 3,
            default_level: 2,
            default_policy: Some(policy(500, true, TimeoutAction::Reject)),
            policies: BTreeMap::from([(3, policy(100, false, TimeoutAction::Delay))]),
        }
    }

    #[test]
    fn the_first_level_is_served_first_and_others_than_the_levels_mean_the_default() {
        let above_lowest =
            |rules: QueuePolicy, levels: [u64; 3]| levels.map(|level| rules.priority(level) - LOWEST_LEVEL);
        assert_eq!(above_lowest(rules(), [1, 2, 3]), [2, 1, 0]);
        assert_eq!(above_lowest(rules(), [0, 4, u64::MAX]), [1, 1, 1]);
        assert_eq!(above_lowest(QueuePolicy::default(), [0, 1, 9]), [0, 0, 0]);
    }

    #[test]
    fn each_level_has_a_queue_of_its_own() {
        let bounds = |total, each, of: &[(u32, usize)]| {
            let of = of.iter().map(|&(above, bound)| (LOWEST_LEVEL + above, bound)).collect();
            QueueBounds { total, each, of }
        };
        assert_eq!(rules().bounds(100), bounds(21, 7, &[(0, 7)]));
        assert_eq!(QueuePolicy::default().bounds(100), bounds(100, 100, &[]));
        let mut rules = rules();
        rules.default_policy = None;
        rules.policies.insert(1, ModelQueuePolicy { max_queue_size: 2, ..ModelQueuePolicy::default() });
        rules.policies.insert(9, ModelQueuePolicy { max_queue_size: 1, ..ModelQueuePolicy::default() });
        assert_eq!(rules.bounds(100), bounds(109, 100, &[(2, 2), (0, 7)]));
        rules.default_policy = Some(ModelQueuePolicy::default());
        assert_eq!(rules.bounds(100).each, MAX_WAITING);
        rules.num_levels = u64::MAX;
        assert_eq!(rules.bounds(100).total, i32::MAX as usize);
    }

    #[test]
    fn a_request_may_ask_for_a_shorter_timeout_where_its_level_allows_it() {
        let timeout = |micros, rejects| Some(Timeout { after: Duration::from_micros(micros), rejects });
        assert_eq!(rules().timeout(1, 0), timeout(500, true));
        assert_eq!(rules().timeout(0, 20), timeout(20, true));
        assert_eq!(rules().timeout(2, 900), timeout(500, true));
        assert_eq!(rules().timeout(3, 20), timeout(100, false));
        assert_eq!(QueuePolicy::default().timeout(0, 20), None);
    }
}
