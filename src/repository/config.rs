//! Queries of a model's configuration.

use crate::proto::model_config::SchedulingChoice;
use crate::proto::model_instance_group::Kind;
use crate::proto::{ModelConfig, ModelDynamicBatching, ModelEnsembling, ModelInstanceGroup, ModelSequenceBatching};

/// Fills in the defaults of a configuration that a backend has completed, and validates it again.
///
/// # Errors
/// Describes the first field that is wrong.
pub fn recheck(mut config: ModelConfig) -> Result<ModelConfig, String> {
    let name = config.name.clone();
    crate::defaults::fill(&mut config, &name);
    crate::validate::validate(&config, &name)?;
    Ok(config)
}

impl ModelConfig {
    /// The graph of an ensemble; `None` for a model that a backend executes.
    pub fn ensemble(&self) -> Option<&ModelEnsembling> {
        match &self.scheduling_choice {
            Some(SchedulingChoice::EnsembleScheduling(ensemble)) => Some(ensemble),
            _ => None,
        }
    }

    /// The settings of the dynamic batcher, if the model uses it.
    pub fn batching(&self) -> Option<&ModelDynamicBatching> {
        match &self.scheduling_choice {
            Some(SchedulingChoice::DynamicBatching(batching)) => Some(batching),
            _ => None,
        }
    }

    /// The settings of the sequence batcher, if the model is stateful.
    pub fn sequences(&self) -> Option<&ModelSequenceBatching> {
        match &self.scheduling_choice {
            Some(SchedulingChoice::SequenceBatching(sequences)) => Some(sequences),
            _ => None,
        }
    }

    /// Number of instances, which execute concurrently, over all instance groups.
    pub fn num_instances(&self) -> usize {
        let instances = |group: &ModelInstanceGroup| {
            let count = usize::try_from(group.count).unwrap_or(0).max(1);
            if group.kind() == Kind::Gpu { count.saturating_mul(group.gpus.len().max(1)) } else { count }
        };
        self.instance_group.iter().map(instances).fold(0, usize::saturating_add).max(1)
    }

    /// Whether this is an ensemble.
    pub fn is_ensemble(&self) -> bool {
        self.platform == "ensemble" || self.ensemble().is_some()
    }

    /// Whether a request may have any number of responses.
    pub fn is_decoupled(&self) -> bool {
        self.model_transaction_policy.as_ref().is_some_and(|policy| policy.decoupled)
    }

    /// The string value of a parameter; `None` if it is missing or empty.
    pub fn parameter(&self, name: &str) -> Option<&str> {
        self.parameters.get(name).map(|parameter| parameter.string_value.as_str()).filter(|value| !value.is_empty())
    }
}
