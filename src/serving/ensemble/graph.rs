//! The graph of an ensemble: steps, and the slots for tensors between them.

use std::collections::BTreeMap;

use repository::ModelConfig;
use smallvec::SmallVec;

use super::text::TextPlan;
use crate::{InferError, Name};

/// Some steps, by their places in the graph.
pub(super) type Steps = SmallVec<[usize; 8]>;

/// The steps and the slots for tensors between them.
#[derive(Debug)]
pub(super) struct Graph {
    pub(super) name: String,
    pub(super) num_tensors: usize,
    pub(super) inputs: Vec<Wire>,
    pub(super) outputs: Vec<Wire>,
    pub(super) steps: Vec<Step>,
    /// Set where its wires are those of a text ensemble.
    pub(super) text: Option<TextPlan>,
}

/// A tensor of a model, and the slot that stands for it in the ensemble.
#[derive(Debug)]
pub(super) struct Wire {
    pub(super) name: Name,
    pub(super) slot: usize,
}

#[derive(Debug)]
pub(super) struct Step {
    pub(super) model: Name,
    pub(super) version: Option<i64>,
    pub(super) inputs: Vec<Wire>,
    pub(super) outputs: Vec<Wire>,
    /// Steps that make this one's inputs.
    pub(super) sources: Vec<usize>,
}

impl Step {
    /// Whether the tensor of the wire's slot is one of its outputs.
    pub(super) fn makes(&self, wire: &Wire) -> bool {
        self.outputs.iter().any(|made| made.slot == wire.slot)
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
                sources: Vec::new(),
            })
            .collect();
        for index in 0..steps.len() {
            let is_source = |source: &Step| steps[index].inputs.iter().any(|taken| source.makes(taken));
            let sources = (0..steps.len()).filter(|&source| is_source(&steps[source])).collect();
            steps[index].sources = sources;
        }
        let graph = Self { name: config.name.clone(), num_tensors: slots.len(), inputs, outputs, steps, text: None };
        Self { text: TextPlan::of(&graph), ..graph }
    }

    pub(super) fn within(&self, error: InferError) -> InferError {
        InferError::new(error.kind, format!("in ensemble '{}', {}", self.name, error.message))
    }

    /// The steps that the outputs `asked` need, all of them if none is named. A step that no output of the ensemble needs is
    /// run for what else it does.
    pub(super) fn needed(&self, asked: &[Name]) -> Steps {
        let serves = |step: usize, wire: &Wire| {
            let is_behind = |maker: usize| maker == step || self.is_behind(maker, step);
            (0..self.steps.len()).any(|maker| self.steps[maker].makes(wire) && is_behind(maker))
        };
        let is_asked = |wire: &&Wire| asked.is_empty() || asked.contains(&wire.name);
        let is_needed = |&step: &usize| {
            self.outputs.iter().filter(is_asked).any(|wire| serves(step, wire))
                || !self.outputs.iter().any(|wire| serves(step, wire))
        };
        (0..self.steps.len()).filter(|step| asked.is_empty() || is_needed(step)).collect()
    }

    /// Whether `step` needs what `source` makes, directly or through others.
    pub(super) fn is_behind(&self, step: usize, source: usize) -> bool {
        self.steps[step].sources.iter().any(|&before| before == source || self.is_behind(before, source))
    }
}
