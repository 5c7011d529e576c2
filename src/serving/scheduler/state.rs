//! Tensors that a model gives back for its sequence's next request.

use repository::ModelConfig;

use crate::{DataType, Shape, Tensor};

/// One state of a model.
#[derive(Debug, Clone)]
pub(crate) struct StateSpec {
    output: String,
    /// What a sequence starts with, under the name of the input.
    initial: Tensor,
    /// The client sees it too.
    is_output: bool,
}

impl StateSpec {
    /// Whether the model reads it from `input`.
    pub fn has_input(&self, input: &str) -> bool {
        self.initial.name == input
    }
}

/// The states a configuration declares.
pub(crate) fn specs(config: &ModelConfig) -> Vec<StateSpec> {
    let states = config.sequences().map(|sequences| sequences.state.as_slice()).unwrap_or_default();
    let spec = |state: &repository::proto::model_sequence_batching::State| {
        let dims = state.initial_state.first().map_or(&state.dims, |initial| &initial.dims);
        let batch = (config.max_batch_size > 0).then_some(1);
        let shape: Shape = batch.into_iter().chain(dims.iter().map(|&dim| dim.max(1))).collect();
        Some(StateSpec {
            output: state.output_name.clone(),
            initial: zeros(&state.input_name, DataType::from_config(state.data_type())?, shape),
            is_output: config.output.iter().any(|output| output.name == state.output_name),
        })
    };
    states.iter().filter_map(spec).collect()
}

/// What a sequence starts with.
pub(crate) fn initial(specs: &[StateSpec]) -> Vec<Tensor> {
    specs.iter().map(|spec| spec.initial.clone()).collect()
}

/// Takes the state out of a response's outputs, under the names of the inputs.
pub(crate) fn split(specs: &[StateSpec], outputs: &mut Vec<Tensor>) -> Vec<Tensor> {
    let mut state = Vec::new();
    for spec in specs {
        let Some(place) = outputs.iter().position(|tensor| tensor.name == spec.output) else { continue };
        let tensor = if spec.is_output { outputs[place].clone() } else { outputs.remove(place) };
        state.push(Tensor { name: spec.initial.name.clone(), ..tensor });
    }
    state
}

/// A tensor of zeros, or of empty strings.
pub(crate) fn zeros(name: &str, datatype: DataType, shape: Shape) -> Tensor {
    let count: usize = shape.iter().filter_map(|&size| usize::try_from(size).ok()).product();
    let data = vec![0; count * datatype.size().unwrap_or(4)].into();
    Tensor { name: name.into(), datatype, shape, data }
}
