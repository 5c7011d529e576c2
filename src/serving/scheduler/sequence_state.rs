//! Tensors that a model gives back for its sequence's next request.

use std::path::{Component, Path};

use bytes::Bytes;
use repository::ModelConfig;
use repository::proto::model_sequence_batching::{State, initial_state::StateData};

use crate::{DataType, InferError, Shape, Tensor};

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

/// The states a configuration declares. What they start with may lie in files of the model's folder `initial_state`.
///
/// # Errors
/// When such a file cannot be read, or is not of the state's size.
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

/// The elements of `tensor` from a file: raw, strings behind their lengths.
fn from_file(tensor: &Tensor, file: &str, model_dir: &Path) -> Result<Bytes, InferError> {
    let state = &tensor.name;
    if file.is_empty() || !Path::new(file).components().all(|part| matches!(part, Component::Normal(_))) {
        let words = format!("`data_file` `{file}` of state `{state}` is not a name below `initial_state/`");
        return Err(InferError::invalid(words));
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
