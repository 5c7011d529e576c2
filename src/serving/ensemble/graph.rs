//! The graph of an ensemble: its steps, and a slot for each tensor between them.

use std::collections::BTreeMap;

use repository::ModelConfig;
use smallvec::SmallVec;

use crate::{InferError, Name};

/// A set of steps, by their indices in the graph.
pub(super) type Steps = SmallVec<[usize; 8]>;

/// The graph of an ensemble.
#[derive(Debug)]
pub(super) struct Graph {
    pub(super) name: String,
    pub(super) num_tensors: usize,
    pub(super) inputs: Vec<Wire>,
    pub(super) outputs: Vec<Wire>,
    pub(super) steps: Vec<Step>,
}

/// Connects an input or output of a model to a slot.
#[derive(Debug)]
pub(super) struct Wire {
    /// Name of the input or output in the model.
    pub(super) name: Name,
    pub(super) slot: usize,
}

#[derive(Debug)]
pub(super) struct Step {
    pub(super) model: Name,
    pub(super) version: Option<i64>,
    pub(super) inputs: Vec<Wire>,
    pub(super) outputs: Vec<Wire>,
    /// Steps that produce inputs of this step.
    pub(super) producers: Vec<usize>,
}

impl Step {
    /// Whether one of the step's outputs is in the wire's slot.
    pub(super) fn produces(&self, wire: &Wire) -> bool {
        self.outputs.iter().any(|output| output.slot == wire.slot)
    }
}

impl Graph {
    pub(super) fn new(config: &ModelConfig) -> Self {
        let steps = config.ensemble().map(|ensemble| ensemble.step.as_slice()).unwrap_or_default();
        let mut slots = BTreeMap::new();
        let mut wire = |name: &String, tensor: &String| {
            let next = slots.len();
            Wire { name: name.into(), slot: *slots.entry(tensor.clone()).or_insert(next) }
        };
        let inputs = config.input.iter().map(|input| wire(&input.name, &input.name)).collect();
        let outputs: Vec<Wire> = config.output.iter().map(|output| wire(&output.name, &output.name)).collect();
        let mut steps: Vec<Step> = steps
            .iter()
            .map(|step| Step {
                model: step.model_name.as_str().into(),
                version: (step.model_version > 0).then_some(step.model_version),
                inputs: step.input_map.iter().map(|(name, tensor)| wire(name, tensor)).collect(),
                outputs: step.output_map.iter().map(|(name, tensor)| wire(name, tensor)).collect(),
                producers: Vec::new(),
            })
            .collect();
        for index in 0..steps.len() {
            let is_producer = |other: &Step| steps[index].inputs.iter().any(|input| other.produces(input));
            let producers = (0..steps.len()).filter(|&other| is_producer(&steps[other])).collect();
            steps[index].producers = producers;
        }
        Self { name: config.name.clone(), num_tensors: slots.len(), inputs, outputs, steps }
    }

    /// Adds the ensemble's name to an error of a step.
    pub(super) fn within(&self, error: InferError) -> InferError {
        InferError::new(error.kind, format!("in ensemble '{}', {}", self.name, error.message))
    }

    /// The steps that the requested outputs need; all steps if none is named. Steps that no output of the ensemble needs are
    /// included, because they may have side effects.
    pub(super) fn needed(&self, requested: &[Name]) -> Steps {
        let serves = |step: usize, wire: &Wire| {
            let depends_on_step = |other: usize| other == step || self.is_downstream(other, step);
            (0..self.steps.len()).any(|other| self.steps[other].produces(wire) && depends_on_step(other))
        };
        let is_requested = |wire: &&Wire| requested.is_empty() || requested.contains(&wire.name);
        let is_needed = |&step: &usize| {
            self.outputs.iter().filter(is_requested).any(|wire| serves(step, wire))
                || !self.outputs.iter().any(|wire| serves(step, wire))
        };
        (0..self.steps.len()).filter(|step| requested.is_empty() || is_needed(step)).collect()
    }

    /// Whether `step` needs outputs of `source`, directly or through other steps.
    pub(super) fn is_downstream(&self, step: usize, source: usize) -> bool {
        self.steps[step].producers.iter().any(|&producer| producer == source || self.is_downstream(producer, source))
    }
}
