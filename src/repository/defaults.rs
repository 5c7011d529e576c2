//! Defaults of a configuration's fields.

use crate::proto::model_config::SchedulingChoice;
use crate::proto::model_instance_group::Kind;
use crate::proto::model_optimization_policy::PinnedMemoryBuffer;
use crate::proto::model_version_policy::{Latest, PolicyChoice};
use crate::proto::{ModelConfig, ModelInstanceGroup, ModelVersionPolicy};

/// Default idle time after which a stateful sequence is ended.
const MAX_SEQUENCE_IDLE_US: u64 = 1_000_000;

/// Sets every field that is unset to its default, as `/config` shows it.
pub(crate) fn fill(config: &mut ModelConfig, name: &str) {
    if config.name.is_empty() {
        name.clone_into(&mut config.name);
    }
    drop_repeated_outputs(config);
    version_policy(config);
    if config.is_ensemble() {
        "ensemble".clone_into(&mut config.platform);
        config.model_transaction_policy.get_or_insert_default();
        return;
    }
    if config.backend.is_empty() {
        config.backend.clone_from(&config.platform);
    }
    if config.backend == "python" && config.default_model_filename.is_empty() {
        "model.py".clone_into(&mut config.default_model_filename);
    }
    let optimization = config.optimization.get_or_insert_default();
    optimization.input_pinned_memory.get_or_insert(PinnedMemoryBuffer { enable: true });
    optimization.output_pinned_memory.get_or_insert(PinnedMemoryBuffer { enable: true });
    if let Some(SchedulingChoice::SequenceBatching(sequences)) = &mut config.scheduling_choice
        && sequences.max_sequence_idle_microseconds == 0
    {
        sequences.max_sequence_idle_microseconds = MAX_SEQUENCE_IDLE_US;
    }
    instance_groups(config);
}

/// Keeps the first of several outputs with the same name: published configurations list some outputs twice.
fn drop_repeated_outputs(config: &mut ModelConfig) {
    let mut seen = std::collections::BTreeSet::new();
    config.output.retain(|output| output.name.is_empty() || seen.insert(output.name.clone()));
}

fn version_policy(config: &mut ModelConfig) {
    let policy = config.version_policy.get_or_insert_with(ModelVersionPolicy::default);
    match policy.policy_choice.get_or_insert(PolicyChoice::Latest(Latest { num_versions: 1 })) {
        PolicyChoice::Latest(latest) if latest.num_versions == 0 => latest.num_versions = 1,
        _ => {}
    }
}

fn instance_groups(config: &mut ModelConfig) {
    if config.instance_group.is_empty() {
        config.instance_group.push(ModelInstanceGroup { name: config.name.clone(), ..Default::default() });
    }
    for (index, group) in config.instance_group.iter_mut().enumerate() {
        if group.name.is_empty() {
            group.name = format!("{}_{index}", config.name);
        }
        group.count = group.count.max(1);
        if group.kind() == Kind::Auto {
            group.set_kind(if group.gpus.is_empty() { Kind::Cpu } else { Kind::Gpu });
        }
    }
}
