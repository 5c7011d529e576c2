//! Checks that a configuration is consistent in itself. Error messages name the field and what to write instead.

use std::collections::{BTreeMap, BTreeSet};

use crate::proto::model_config::SchedulingChoice;
use crate::proto::model_ensembling::Step;
use crate::proto::model_sequence_batching::control::Kind;
use crate::proto::model_sequence_batching::{Control, StrategyChoice};
use crate::proto::{DataType, ModelConfig, ModelDynamicBatching, ModelSequenceBatching, ModelTensorReshape};

/// Limit of a state tensor's size: the initial state is allocated for each sequence.
const MAX_STATE_ELEMENTS: i64 = 1 << 28;

/// Limit of priority levels: each level has its own queue.
const MAX_PRIORITY_LEVELS: u64 = 1024;

/// Checks a configuration whose defaults are filled in.
///
/// # Errors
/// Describes the first field that is wrong.
pub(crate) fn validate(config: &ModelConfig, directory: &str) -> Result<(), String> {
    if config.name != directory {
        return Err(format!(
            "`name: \"{}\"` differs from its directory `{directory}`; rename one, or leave `name` out",
            config.name
        ));
    }
    if config.max_batch_size < 0 {
        return Err(format!("`max_batch_size` is {}; it must be 0 (no batching) or more", config.max_batch_size));
    }
    tensors(config)?;
    instance_groups(config)?;
    match &config.scheduling_choice {
        Some(SchedulingChoice::EnsembleScheduling(ensemble)) => {
            if !matches!(config.platform.as_str(), "" | "ensemble") || !config.backend.is_empty() {
                return Err("`ensemble_scheduling` needs `platform: \"ensemble\"` and no `backend`".to_owned());
            }
            graph(config, &ensemble.step)
        }
        _ if config.platform == "ensemble" => {
            Err("`platform: \"ensemble\"` needs `ensemble_scheduling { step [ … ] }`".to_owned())
        }
        _ if config.backend.is_empty() => {
            Err("neither `backend` nor `platform` is set, and no file identifies the backend; write `backend: \"…\"`"
                .to_owned())
        }
        Some(SchedulingChoice::DynamicBatching(batching)) => {
            preferred_batch_sizes(config, &batching.preferred_batch_size)?;
            priorities(batching)
        }
        Some(SchedulingChoice::SequenceBatching(sequences)) => sequence_batching(config, sequences),
        None => Ok(()),
    }
}

fn sequence_batching(config: &ModelConfig, sequences: &ModelSequenceBatching) -> Result<(), String> {
    let all = sequences.control_input.iter();
    for (name, control) in all.flat_map(|input| input.control.iter().map(move |control| (&input.name, control))) {
        control_values(name, control)?;
    }
    for state in &sequences.state {
        let name = &state.input_name;
        if state.data_type() == DataType::TypeInvalid {
            return Err(format!("state `{name}` has no `data_type`; write one such as TYPE_INT32 or TYPE_STRING"));
        }
        let initial = state.initial_state.iter().map(|initial| &initial.dims);
        if initial.chain([&state.dims]).any(|dims| num_elements(dims).is_none()) {
            return Err(format!("state `{name}` holds more than {MAX_STATE_ELEMENTS} elements; use smaller `dims`"));
        }
    }
    if let Some(StrategyChoice::Oldest(oldest)) = &sequences.strategy_choice {
        preferred_batch_sizes(config, &oldest.preferred_batch_size)?;
    }
    Ok(())
}

/// Number of elements of a tensor, with variable sizes taken as 1; `None` if there are more than [`MAX_STATE_ELEMENTS`].
fn num_elements(dims: &[i64]) -> Option<i64> {
    let count = dims.iter().try_fold(1i64, |count, &dim| count.checked_mul(dim.max(1)));
    count.filter(|&count| count <= MAX_STATE_ELEMENTS)
}

fn control_values(name: &str, control: &Control) -> Result<(), String> {
    use DataType::{TypeInt32, TypeInt64, TypeString, TypeUint32, TypeUint64};
    if control.kind() == Kind::ControlSequenceCorrid {
        if ![TypeInt32, TypeInt64, TypeString, TypeUint32, TypeUint64].contains(&control.data_type()) {
            return Err(format!(
                "control input `{name}` (CONTROL_SEQUENCE_CORRID) needs `data_type` TYPE_UINT64, TYPE_INT64, TYPE_UINT32, \
                 TYPE_INT32 or TYPE_STRING"
            ));
        }
        return Ok(());
    }
    let given = [control.int32_false_true.len(), control.fp32_false_true.len(), control.bool_false_true.len()];
    if given.iter().sum::<usize>() != 2 || !given.contains(&2) {
        return Err(format!(
            "control input `{name}` needs two values, for false and true, in one of `int32_false_true`, `fp32_false_true` \
             and `bool_false_true`"
        ));
    }
    Ok(())
}

fn preferred_batch_sizes(config: &ModelConfig, sizes: &[i32]) -> Result<(), String> {
    let too_big = |size: &&i32| **size < 1 || **size > config.max_batch_size.max(1);
    match sizes.iter().find(too_big) {
        Some(size) => Err(format!(
            "`preferred_batch_size` holds {size}; it must be between 1 and `max_batch_size` ({})",
            config.max_batch_size
        )),
        None => Ok(()),
    }
}

fn priorities(batching: &ModelDynamicBatching) -> Result<(), String> {
    let levels = batching.priority_levels;
    if levels > MAX_PRIORITY_LEVELS {
        return Err(format!("`priority_levels` is {levels}; at most {MAX_PRIORITY_LEVELS} are supported"));
    }
    if levels > 0 && !(1..=levels).contains(&batching.default_priority_level) {
        return Err(format!(
            "`default_priority_level` is {}; it must be between 1 and `priority_levels` ({levels})",
            batching.default_priority_level
        ));
    }
    match batching.priority_queue_policy.keys().find(|level| !(1..=levels).contains(level)) {
        Some(level) => Err(format!(
            "`priority_queue_policy` has key {level}; it must be between 1 and `priority_levels` ({levels})"
        )),
        None => Ok(()),
    }
}

fn tensors(config: &ModelConfig) -> Result<(), String> {
    let mut names = BTreeSet::new();
    for input in &config.input {
        tensor("input", &input.name, input.data_type(), &input.dims, input.reshape.as_ref(), config.max_batch_size)?;
        if !names.insert(&input.name) {
            return Err(format!("input `{}` is listed twice; keep one of them", input.name));
        }
    }
    config.output.iter().try_for_each(|output| {
        tensor("output", &output.name, output.data_type(), &output.dims, output.reshape.as_ref(), config.max_batch_size)
    })
}

fn tensor(
    kind: &str,
    name: &str,
    data_type: DataType,
    dims: &[i64],
    reshape: Option<&ModelTensorReshape>,
    max_batch_size: i32,
) -> Result<(), String> {
    if name.is_empty() {
        return Err(format!("an {kind} has no `name`"));
    }
    if data_type == DataType::TypeInvalid {
        return Err(format!("{kind} `{name}` has no `data_type`; write one such as TYPE_INT32 or TYPE_STRING"));
    }
    if dims.is_empty() && reshape.is_none() {
        return Err(format!("{kind} `{name}` has no `dims`; write `dims: [ -1 ]` for one of any length"));
    }
    if let Some(dim) = dims.iter().find(|&&dim| dim == 0 || dim < -1) {
        return Err(format!("{kind} `{name}` has {dim} in `dims`; each must be at least 1, or -1 for any size"));
    }
    let Some(reshape) = reshape else { return Ok(()) };
    if reshape.shape.is_empty() && max_batch_size == 0 && dims.iter().any(|&dim| dim != 1) {
        return Err(format!("{kind} `{name}` reshapes {dims:?} to an empty shape; that needs dims of 1"));
    }
    let fixed = |shape: &[i64]| shape.iter().filter(|&&dim| dim > 0).try_fold(1i64, |all, &dim| all.checked_mul(dim));
    let variable = |shape: &[i64]| shape.iter().filter(|&&dim| dim == -1).count();
    if variable(dims) != variable(&reshape.shape) || fixed(dims) != fixed(&reshape.shape) {
        return Err(format!(
            "{kind} `{name}` reshapes {dims:?} to {:?}, which holds another number of elements",
            reshape.shape
        ));
    }
    Ok(())
}

fn instance_groups(config: &ModelConfig) -> Result<(), String> {
    let mut names = BTreeSet::new();
    match config.instance_group.iter().find(|group| !names.insert(&group.name)) {
        Some(group) => Err(format!("two instance groups are called `{}`; rename one", group.name)),
        None => Ok(()),
    }
}

/// Checks an ensemble's graph: each tensor has exactly one source, every output has a source, and there are no cycles.
fn graph(config: &ModelConfig, steps: &[Step]) -> Result<(), String> {
    if steps.is_empty() {
        return Err("`ensemble_scheduling` has no `step`".to_owned());
    }
    let mut sources: BTreeMap<&str, Option<usize>> =
        config.input.iter().map(|input| (input.name.as_str(), None)).collect();
    for (index, step) in steps.iter().enumerate() {
        let model = &step.model_name;
        if model.is_empty() {
            return Err(format!("step {} of the ensemble has no `model_name`", index + 1));
        }
        if *model == config.name {
            return Err(format!("step {} of the ensemble is the ensemble itself", index + 1));
        }
        if step.output_map.is_empty() {
            return Err(format!("the step of `{model}` has no `output_map`, so nothing can use its outputs"));
        }
        for tensor in step.output_map.values() {
            if sources.insert(tensor, Some(index)).is_some() {
                return Err(format!("ensemble tensor `{tensor}` is produced twice, the second time by `{model}`"));
            }
        }
    }
    for (step, (input, tensor)) in steps.iter().flat_map(|step| step.input_map.iter().map(move |map| (step, map))) {
        if !sources.contains_key(tensor.as_str()) {
            return Err(format!(
                "input `{input}` of the step of `{}` takes ensemble tensor `{tensor}`, which is neither an input of the \
                 ensemble nor produced by a step",
                step.model_name
            ));
        }
    }
    for output in &config.output {
        if !matches!(sources.get(output.name.as_str()), Some(Some(_))) {
            return Err(format!("ensemble output `{}` is produced by no step; add it to an `output_map`", output.name));
        }
    }
    acyclic(steps, &sources)
}

fn acyclic(steps: &[Step], sources: &BTreeMap<&str, Option<usize>>) -> Result<(), String> {
    let mut done = vec![false; steps.len()];
    loop {
        let ready =
            |step: &Step| step.input_map.values().all(|tensor| sources[tensor.as_str()].is_none_or(|at| done[at]));
        let next: Vec<usize> = (0..steps.len()).filter(|&index| !done[index] && ready(&steps[index])).collect();
        if next.is_empty() {
            break;
        }
        next.into_iter().for_each(|index| done[index] = true);
    }
    match done.iter().position(|done| !done) {
        Some(index) => Err(format!("the step of `{}` depends on its own outputs, in a cycle", steps[index].model_name)),
        None => Ok(()),
    }
}
