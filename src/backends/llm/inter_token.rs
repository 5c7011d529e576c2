//! Bounds of the time between two tokens of a stream, from the parameter `max_inter_token_ms`.

use std::collections::BTreeMap;
use std::time::Duration;

use repository::ModelConfig;
use serving::InferError;

use super::queue_policy::QueuePolicy;
use crate::parameters;

/// The longest bound in milliseconds.
const MAX_MS: f64 = 600_000.0;

/// Bounds of one model.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct InterTokenBounds {
    /// The bound of requests without one of their own; `None` for the engine's default.
    pub(crate) all: Option<Duration>,
    /// Bounds of single priorities of the engine.
    pub(crate) of: BTreeMap<u32, Duration>,
}

impl InterTokenBounds {
    /// Reads the parameter: milliseconds for all requests, or `LEVEL:MS` for those of a priority level, or both, joined by
    /// commas: `50,1:20`.
    ///
    /// # Errors
    /// When a bound is not a number of milliseconds above 0, or a level is not one of the model's or has two bounds.
    pub(crate) fn new(config: &ModelConfig, queue: &QueuePolicy) -> Result<Self, InferError> {
        let mut bounds = Self::default();
        for item in parameters::text(config, "max_inter_token_ms").into_iter().flat_map(|text| text.split(',')) {
            bounds.add(item.trim(), queue).map_err(|expected| {
                let message = format!("`max_inter_token_ms` has `{}`, expected {expected}", item.trim());
                InferError::invalid(format!("model `{}`: {message}", config.name))
            })?;
        }
        Ok(bounds)
    }

    fn add(&mut self, item: &str, queue: &QueuePolicy) -> Result<(), String> {
        let twice = || "one bound for each level and one for all".to_owned();
        let Some((level, ms)) = item.split_once(':') else {
            return self.all.replace(milliseconds(item)?).map_or(Ok(()), |_| Err(twice()));
        };
        let level = level.trim().parse().ok().filter(|level| (1..=queue.num_levels()).contains(level));
        let level = level.ok_or_else(|| match queue.num_levels() {
            0 => "no level: `dynamic_batching { priority_levels }` defines them".to_owned(),
            most => format!("a level from 1 to {most}"),
        })?;
        let replaced = self.of.insert(queue.priority(level), milliseconds(ms.trim())?);
        replaced.map_or(Ok(()), |_| Err(twice()))
    }
}

fn milliseconds(text: &str) -> Result<Duration, String> {
    let ms = text.parse::<f64>().ok().filter(|ms| *ms > 0.0 && *ms <= MAX_MS);
    ms.map(|ms| Duration::from_secs_f64(ms * 1e-3)).ok_or_else(|| format!("milliseconds above 0, up to {MAX_MS}"))
}

#[cfg(test)]
mod tests {
    use repository::proto::model_config::SchedulingChoice;
    use repository::proto::{ModelDynamicBatching, ModelParameter};

    use super::*;
    use crate::llm::queue_policy::LOWEST_LEVEL;

    fn bounds(value: &str, levels: u64) -> Result<InterTokenBounds, String> {
        let batching = ModelDynamicBatching { priority_levels: levels, ..Default::default() };
        let parameter = ModelParameter { string_value: value.to_owned() };
        let config = ModelConfig {
            name: "llm".to_owned(),
            parameters: [("max_inter_token_ms".to_owned(), parameter)].into(),
            scheduling_choice: Some(SchedulingChoice::DynamicBatching(batching)),
            ..Default::default()
        };
        InterTokenBounds::new(&config, &QueuePolicy::new(&config)).map_err(|error| error.to_string())
    }

    #[test]
    fn a_bound_is_for_all_requests_or_for_a_level() {
        let ms = Duration::from_millis;
        assert_eq!(bounds("", 0), Ok(InterTokenBounds::default()));
        assert_eq!(bounds("40", 0), Ok(InterTokenBounds { all: Some(ms(40)), of: [].into() }));
        assert_eq!(bounds("12.5", 3).unwrap().all, Some(Duration::from_micros(12_500)));
        // Level 1 of three is two above the lowest.
        assert_eq!(
            bounds("50, 1:20,3:200", 3),
            Ok(InterTokenBounds {
                all: Some(ms(50)),
                of: [(LOWEST_LEVEL + 2, ms(20)), (LOWEST_LEVEL, ms(200))].into()
            })
        );
    }

    #[test]
    fn a_wrong_bound_is_named_with_what_is_expected() {
        for (value, expected) in [
            ("fast", "`max_inter_token_ms` has `fast`, expected milliseconds above 0, up to 600000"),
            ("0", "has `0`, expected milliseconds above 0"),
            ("-3", "has `-3`, expected milliseconds above 0"),
            ("NaN", "has `NaN`, expected milliseconds above 0"),
            ("1e9", "has `1e9`, expected milliseconds above 0"),
            ("4:20", "has `4:20`, expected a level from 1 to 3"),
            ("0:20", "has `0:20`, expected a level from 1 to 3"),
            ("20,30", "has `30`, expected one bound for each level"),
            ("1:20,1:30", "has `1:30`, expected one bound for each level"),
        ] {
            let error = bounds(value, 3).unwrap_err();
            assert!(error.contains(expected), "{value}: {error}");
        }
        assert!(bounds("1:20", 0).unwrap_err().contains("`dynamic_batching { priority_levels }` defines them"));
    }
}
