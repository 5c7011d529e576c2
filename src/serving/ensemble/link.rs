//! Links an ensemble: checks that its steps fit their models.

use std::collections::BTreeMap;

use repository::ModelConfig;

use super::graph::{Graph, Step, Wire};
use super::text_plan::TextPlan;
use crate::InferError;
use crate::lifecycle::LoadCause;
use crate::registry::Registry;

/// Checks an ensemble's configuration against its models, and sets whether it is decoupled: it is if one of its models is.
///
/// # Errors
/// When a model is not loaded, or a step does not fit its model. The message is the reason in the repository index.
pub(crate) fn link(config: &mut ModelConfig, registry: &Registry) -> Result<(), LoadCause> {
    let graph = Graph::new(config);
    let mut types = BTreeMap::new();
    for input in &config.input {
        types.insert(slot_of(&graph.inputs, &input.name), (input.data_type, format!("input `{}`", input.name)));
    }
    let mut models = Vec::new();
    for step in &graph.steps {
        let model = registry.resolve_number(&step.model, step.version).map_err(|error| {
            LoadCause::ComposingModel(InferError::invalid(format!(
                "ensemble '{}' depends on '{}' which has no loaded version: {}",
                graph.name, step.model, error.message
            )))
        })?;
        check_step(step, &model.config, &mut types).map_err(InferError::invalid)?;
        models.push(model);
    }
    for output in &config.output {
        same_type(
            &mut types,
            slot_of(&graph.outputs, &output.name),
            output.data_type,
            format!("output `{}`", output.name),
        )
        .map_err(InferError::invalid)?;
    }
    if let Some(plan) = TextPlan::of(&graph).filter(|plan| plan.detokenizer_of(&graph, &models).is_some()) {
        let [generator, detokenizer] = [plan.generator, plan.detokenizer].map(|step| graph.steps[step].model.as_str());
        tracing::info!(ensemble = graph.name, generator, detokenizer, "steps of the ensemble are served as one");
    }
    let is_decoupled = models.iter().any(|model| model.is_decoupled);
    config.model_transaction_policy.get_or_insert_default().decoupled = is_decoupled;
    Ok(())
}

fn slot_of(wires: &[Wire], name: &str) -> usize {
    wires.iter().find(|wire| wire.name == name).map_or(usize::MAX, |wire| wire.slot)
}

type Types = BTreeMap<usize, (i32, String)>;

fn check_step(step: &Step, config: &ModelConfig, types: &mut Types) -> Result<(), String> {
    let model = &step.model;
    for wire in &step.inputs {
        let input = config.input.iter().find(|input| input.name == wire.name);
        let input =
            input.ok_or_else(|| format!("`input_map` names `{}`, which is no input of `{model}`", wire.name))?;
        same_type(types, wire.slot, input.data_type, format!("input `{}` of `{model}`", wire.name))?;
    }
    let mapped = |name: &String| step.inputs.iter().any(|wire| wire.name == *name);
    if let Some(input) = config.input.iter().find(|input| !input.optional && !mapped(&input.name)) {
        return Err(format!("the step of `{model}` has no `input_map` for `{}`, which `{model}` requires", input.name));
    }
    for wire in &step.outputs {
        let output = config.output.iter().find(|output| output.name == wire.name);
        let output =
            output.ok_or_else(|| format!("`output_map` names `{}`, which is no output of `{model}`", wire.name))?;
        same_type(types, wire.slot, output.data_type, format!("output `{}` of `{model}`", wire.name))?;
    }
    Ok(())
}

fn same_type(types: &mut Types, slot: usize, data_type: i32, place: String) -> Result<(), String> {
    let (known, first) = types.entry(slot).or_insert_with(|| (data_type, place.clone()));
    if *known == data_type {
        return Ok(());
    }
    let name = |data_type: i32| {
        repository::proto::DataType::try_from(data_type).map_or("TYPE_INVALID", |data_type| data_type.as_str_name())
    };
    Err(format!("{place} is {}, but {first}, which is the same tensor, is {}", name(data_type), name(*known)))
}
