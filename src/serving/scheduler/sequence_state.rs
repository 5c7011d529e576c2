//! States: tensors that a model returns, and gets again with the next request of the sequence.

use std::path::{Component, Path};

use bytes::Bytes;
use repository::ModelConfig;
use repository::proto::model_sequence_batching::{State, initial_state::StateData};

use crate::{DataType, InferError, Shape, Tensor};

/// A state that a model's configuration declares.
#[derive(Debug, Clone)]
pub(crate) struct StateSpec {
    output: String,
    /// The value at the start of a sequence, with the name of the input.
    initial: Tensor,
    /// Whether the client gets the state too, as an output.
    is_output: bool,
}

impl StateSpec {
    /// Whether `input` is the state's input.
    pub fn has_input(&self, input: &str) -> bool {
        self.initial.name == input
    }
}

/// Reads the states of a configuration. Initial values may be in files of the model's folder `initial_state`.
///
/// # Errors
/// When such a file cannot be read, or has the wrong size.
pub(crate) fn read(config: &ModelConfig, model_dir: &Path) -> Result<Vec<StateSpec>, InferError> {
    let states = config.sequences().map(|sequences| sequences.state.as_slice()).unwrap_or_default();
    states.iter().filter_map(|state| spec(config, state, model_dir).transpose()).collect()
}

fn spec(config: &ModelConfig, state: &State, model_dir: &Path) -> Result<Option<StateSpec>, InferError> {
    let Some(datatype) = DataType::from_config(state.data_type()) else { return Ok(None) };
    let initial = state.initial_state.first();
    let dims = initial.map_or(&state.dims, |initial| &initial.dims);
    let batch = (config.max_batch_size > 0).then_some(1);
    let shape: Shape = batch.into_iter().chain(dims.iter().map(|&dim| dim.max(1))).collect();
    let mut tensor = zeros(&state.input_name, datatype, shape);
    if let Some(StateData::DataFile(file)) = initial.and_then(|initial| initial.state_data.as_ref()) {
        tensor.data = from_file(&tensor, file, model_dir)?;
    }
    let is_output = config.output.iter().any(|output| output.name == state.output_name);
    Ok(Some(StateSpec { output: state.output_name.clone(), initial: tensor, is_output }))
}

/// The elements of `tensor` from a file, encoded like [`Tensor::data`].
fn from_file(tensor: &Tensor, file: &str, model_dir: &Path) -> Result<Bytes, InferError> {
    let state = &tensor.name;
    if file.is_empty() || !Path::new(file).components().all(|part| matches!(part, Component::Normal(_))) {
        let message = format!("`data_file` `{file}` of state `{state}` is not a name below `initial_state/`");
        return Err(InferError::invalid(message));
    }
    let path = model_dir.join("initial_state").join(file);
    let unreadable = |error| InferError::invalid(format!("cannot read {}: {error}", path.display()));
    let data = Bytes::from(std::fs::read(&path).map_err(unreadable)?);
    let found = match tensor.datatype.size() {
        Some(size) => (data.len() % size == 0).then_some(data.len() / size),
        None => Tensor { data: data.clone(), ..tensor.clone() }.to_byte_strings().map(|texts| texts.len()),
    };
    let expected = tensor.num_elements();
    if found != expected {
        return Err(InferError::invalid(format!(
            "{} does not hold the {} elements of state `{state}`",
            path.display(),
            expected.unwrap_or(0)
        )));
    }
    Ok(data)
}

/// The states at the start of a sequence.
pub(crate) fn initial_states(specs: &[StateSpec]) -> Vec<Tensor> {
    specs.iter().map(|spec| spec.initial.clone()).collect()
}

/// Takes the states from a response's outputs, and renames them to their inputs.
pub(crate) fn take_states(specs: &[StateSpec], outputs: &mut Vec<Tensor>) -> Vec<Tensor> {
    let mut state = Vec::new();
    for spec in specs {
        let Some(index) = outputs.iter().position(|tensor| tensor.name == spec.output) else { continue };
        let tensor = if spec.is_output { outputs[index].clone() } else { outputs.remove(index) };
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
