//! Checks requests against a model's configuration. The error texts are Triton's, because clients compare them.

use std::collections::HashSet;

use repository::ModelConfig;
use repository::proto::{ModelInput, ModelTensorReshape};
use smallvec::SmallVec;

use crate::{DataType, InferError, InferRequest, InferResponse, Name, Shape, Tensor};

/// A model's inputs and outputs, made once from its configuration.
#[derive(Debug)]
pub(crate) struct Signature {
    model: String,
    max_batch_size: i64,
    inputs: Vec<Input>,
    outputs: Vec<Name>,
    reshaped_outputs: Vec<ReshapedOutput>,
}

/// An output that has one shape for the client (`dims`) and another for the model (`reshape`).
#[derive(Debug)]
struct ReshapedOutput {
    name: String,
    reshape: Vec<i64>,
    dims: Vec<i64>,
}

#[derive(Debug)]
struct Input {
    name: Name,
    datatype: DataType,
    dims: Vec<i64>,
    reshape: Option<Vec<i64>>,
    optional: bool,
}

impl Signature {
    /// The signature of a checked configuration.
    pub fn new(config: &ModelConfig) -> Self {
        let reshaped = config.output.iter().filter_map(|output| {
            let reshape = output.reshape.as_ref()?.shape.clone();
            Some(ReshapedOutput { name: output.name.clone(), reshape, dims: output.dims.clone() })
        });
        Self {
            model: config.name.clone(),
            max_batch_size: i64::from(config.max_batch_size),
            inputs: config.input.iter().map(Input::new).collect(),
            outputs: config.output.iter().map(|output| Name::from(&output.name)).collect(),
            reshaped_outputs: reshaped.collect(),
        }
    }

    /// Checks a request, and changes the shapes of its inputs to those that the model expects. Returns its batch size.
    ///
    /// # Errors
    /// `InvalidArgument` with the first fault.
    pub fn check(&self, request: &mut InferRequest) -> Result<u64, InferError> {
        let within = |message: String| InferError::invalid(format!("[request id: {}] {message}", shown_id(request)));
        if let Some(output) = request.requested_outputs.iter().find(|name| !self.outputs.contains(name)) {
            let model = &self.model;
            return Err(InferError::invalid(format!("unexpected inference output '{output}' for model '{model}'")));
        }
        let Some(indices) = self.match_inputs(&request.inputs) else { return Err(self.input_names_error(request)) };
        let mut batch_size = None;
        for (tensor, &index) in request.inputs.iter().zip(&indices) {
            let input = &self.inputs[index];
            self.check_tensor(input, tensor, &mut batch_size).map_err(&within)?;
            let in_client_memory = request.client_memory.input(&tensor.name);
            let len = in_client_memory.map_or(tensor.data.len(), |slice| slice.byte_size as usize);
            check_data(tensor, len, &self.model, self.max_batch_size > 0).map_err(|error| match error {
                DataError::WithRequestId(message) => within(message),
                DataError::Plain(message) => InferError::invalid(message),
            })?;
        }
        for (tensor, &index) in request.inputs.iter_mut().zip(&indices) {
            let input = &self.inputs[index];
            if let Some(reshape) = &input.reshape {
                tensor.shape = reshaped(&tensor.shape, &input.dims, reshape, self.max_batch_size > 0);
            }
        }
        Ok(batch_size.and_then(|size| u64::try_from(size).ok()).unwrap_or(1))
    }

    /// Whether no output has a `reshape`.
    pub fn keeps_output_shapes(&self) -> bool {
        self.reshaped_outputs.is_empty()
    }

    /// Changes the shapes of a response's outputs to those that the client expects.
    pub fn restore_shapes(&self, response: &mut InferResponse) {
        for output in &self.reshaped_outputs {
            if let Some(tensor) = response.outputs.iter_mut().find(|tensor| tensor.name == output.name) {
                tensor.shape = reshaped(&tensor.shape, &output.reshape, &output.dims, self.max_batch_size > 0);
            }
        }
    }

    /// Number of dimensions of an input, without the batch.
    pub fn input_rank(&self, name: &str) -> Option<usize> {
        self.input(name).map(|input| input.dims.len())
    }

    /// Whether shapes begin with a batch dimension.
    pub fn is_batched(&self) -> bool {
        self.max_batch_size > 0
    }

    fn input(&self, name: &str) -> Option<&Input> {
        self.inputs.iter().find(|input| input.name == name)
    }

    /// The index in `inputs` of each tensor; `None` where a tensor is unknown or duplicate, or a required one is missing.
    fn match_inputs(&self, given: &[Tensor]) -> Option<SmallVec<[usize; 8]>> {
        let mut is_given: SmallVec<[bool; 32]> = SmallVec::from_elem(false, self.inputs.len());
        let index_of = |tensor: &Tensor| {
            let index = self.inputs.iter().position(|input| input.name == tensor.name)?;
            (!std::mem::replace(&mut is_given[index], true)).then_some(index)
        };
        let indices = given.iter().map(index_of).collect::<Option<_>>()?;
        let has_all = self.inputs.iter().zip(&is_given).all(|(input, is_given)| *is_given || input.optional);
        has_all.then_some(indices)
    }

    /// The error where [`Signature::match_inputs`] returned `None`.
    fn input_names_error(&self, request: &InferRequest) -> InferError {
        let within = |message: String| InferError::invalid(format!("[request id: {}] {message}", shown_id(request)));
        let model = &self.model;
        let given = &request.inputs;
        let mut seen = HashSet::with_capacity(given.len());
        if let Some(tensor) = given.iter().find(|tensor| !seen.insert(&*tensor.name)) {
            return within(format!("input '{}' already exists in request", tensor.name));
        }
        let missing = || self.inputs.iter().filter(|input| !input.optional && request.input(&input.name).is_none());
        let unexpected = || given.iter().filter(|tensor| self.input(&tensor.name).is_none());
        if given.len() > self.inputs.len() {
            return within(format!(
                "{} but got {} inputs for model '{model}'. Got input(s) [{}], but the model does not take \
                 input(s) [{}].",
                self.expected_count(),
                given.len(),
                quoted(given.iter().map(|tensor| &tensor.name)),
                quoted(unexpected().map(|tensor| &tensor.name)),
            ));
        }
        if let Some(tensor) = unexpected().next() {
            return InferError::invalid(format!("unexpected inference input '{}' for model '{model}'", tensor.name));
        }
        within(format!(
            "{} but got {} inputs for model '{model}'. Got input(s) [{}], but missing required \
             input(s) [{}]. Please provide all required input(s).",
            self.expected_count(),
            given.len(),
            quoted(given.iter().map(|tensor| &tensor.name)),
            quoted(missing().map(|input| &input.name)),
        ))
    }

    fn expected_count(&self) -> String {
        match (self.inputs.iter().filter(|input| !input.optional).count(), self.inputs.len()) {
            (required, all) if required == all => format!("expected {all} inputs"),
            (required, all) => format!("expected number of inputs between {required} and {all}"),
        }
    }

    /// Checks type, batch dimension and shape. The caller puts the request's id in front of an error.
    fn check_tensor(&self, input: &Input, tensor: &Tensor, batch_size: &mut Option<i64>) -> Result<(), String> {
        let (name, model) = (&input.name, &self.model);
        if tensor.datatype != input.datatype {
            return Err(format!(
                "inference input '{name}' data-type is '{}', but model '{model}' expects '{}'",
                tensor.datatype.name(),
                input.datatype.name()
            ));
        }
        let mut shape = tensor.shape.as_slice();
        if self.max_batch_size > 0 {
            let (&batch, rest) = shape.split_first().ok_or_else(|| {
                format!("input '{name}' has no shape but model requires batch dimension for '{model}'")
            })?;
            if *batch_size.get_or_insert(batch) != batch {
                return Err(format!("input '{name}' batch size does not match other inputs for '{model}'"));
            }
            if batch > self.max_batch_size {
                return Err(format!("inference request batch-size must be <= {} for '{model}'", self.max_batch_size));
            }
            shape = rest;
        }
        if tensor.shape.iter().any(|&size| size < 0) {
            let shape = listed(&tensor.shape);
            return Err(format!(
                "All input dimensions should be specified for input '{name}' for model '{model}', got {shape}"
            ));
        }
        let fits = |(&size, &dim): (&i64, &i64)| dim == -1 || dim == size;
        if shape.len() != input.dims.len() || !shape.iter().zip(&input.dims).all(fits) {
            return Err(self.unexpected_shape(input, tensor));
        }
        Ok(())
    }

    fn unexpected_shape(&self, input: &Input, tensor: &Tensor) -> String {
        let batched = self.max_batch_size > 0;
        let expected: Vec<i64> = batched.then_some(-1).into_iter().chain(input.dims.iter().copied()).collect();
        let note = if batched {
            "NOTE: Setting a non-zero max_batch_size in the model config requires a batch dimension to be prepended to each \
             input shape. If you want to specify the full shape including the batch dim in your input dims config, try setting \
             max_batch_size to zero. See the model configuration docs for more info on max_batch_size."
        } else {
            ""
        };
        format!(
            "unexpected shape for input '{}' for model '{}'. Expected {}, got {}. {note}",
            input.name,
            self.model,
            listed(&expected),
            listed(&tensor.shape)
        )
    }
}

impl Input {
    fn new(input: &ModelInput) -> Self {
        let reshape = |reshape: &ModelTensorReshape| reshape.shape.clone();
        Self {
            name: Name::from(&input.name),
            datatype: DataType::from_config(input.data_type()).expect("validated: each input has a type"),
            dims: input.dims.clone(),
            reshape: input.reshape.as_ref().map(reshape),
            optional: input.optional,
        }
    }
}

enum DataError {
    /// A message that is shown with the request's id in front.
    WithRequestId(String),
    /// A message that is shown alone.
    Plain(String),
}

impl From<String> for DataError {
    fn from(message: String) -> Self {
        Self::WithRequestId(message)
    }
}

/// Checks that `len`, the number of bytes of data, fits the tensor's type and shape.
fn check_data(tensor: &Tensor, len: usize, model: &str, batched: bool) -> Result<(), DataError> {
    let name = &tensor.name;
    let overflow = || {
        let shape = listed(&tensor.shape);
        format!("input '{name}' for model '{model}' has shape {shape}, more elements than memory can hold")
    };
    if batched && tensor.shape.first() == Some(&0) {
        let one: Option<usize> = Tensor { shape: tensor.shape[1..].into(), ..tensor.clone() }.num_elements();
        let expected =
            one.and_then(|count| count.checked_mul(tensor.datatype.size().unwrap_or(4))).ok_or_else(overflow)?;
        return Err(size_mismatch(tensor, len, model, expected.max(1)).into());
    }
    let count = tensor.num_elements().ok_or_else(overflow)?;
    let Some(size) = tensor.datatype.size() else { return check_strings(tensor, model, count) };
    let expected = count.checked_mul(size).ok_or_else(overflow)?;
    if expected != len {
        return Err(size_mismatch(tensor, len, model, expected).into());
    }
    Ok(())
}

fn size_mismatch(tensor: &Tensor, len: usize, model: &str, expected: usize) -> String {
    format!("input byte size mismatch for input '{}' for model '{model}'. Expected {expected}, got {len}", tensor.name)
}

fn check_strings(tensor: &Tensor, model: &str, expected: usize) -> Result<(), DataError> {
    let of_input = format!("inference input '{}' for model '{model}'", tensor.name);
    let (mut rest, mut found) = (tensor.data.as_ref(), 0usize);
    while !rest.is_empty() {
        let (length, tail) = rest.split_first_chunk::<4>().ok_or_else(|| {
            format!(
                "incomplete string length indicator for {of_input}, expecting 4 bytes but only {} bytes available. Please \
                 make sure the string length indicator is in one buffer.",
                rest.len()
            )
        })?;
        found += 1;
        if found > expected {
            let message = format!("unexpected number of string elements {found} for {of_input}, expecting {expected}");
            return Err(message.into());
        }
        let length = u32::from_le_bytes(*length) as usize;
        rest = tail.get(length..).ok_or_else(|| {
            DataError::Plain(format!(
                "incomplete string data for inference input '{}', expecting string of length {length} but only {} bytes \
                 available",
                tensor.name,
                tail.len()
            ))
        })?;
    }
    if found < expected {
        return Err(format!("expected {expected} string elements for {of_input}, got {found}").into());
    }
    Ok(())
}

/// Maps `shape` from the pattern `from` to the pattern `to`: each -1 in `to` gets the size at the next -1 in `from`.
fn reshaped(shape: &[i64], from: &[i64], to: &[i64], batched: bool) -> Shape {
    let (batch, sizes) = shape.split_at(usize::from(batched && !shape.is_empty()));
    if sizes.len() != from.len() {
        return shape.into();
    }
    let mut variable = sizes.iter().zip(from).filter(|&(_, &dim)| dim == -1).map(|(&size, _)| size);
    let sizes = to.iter().map(|&dim| if dim == -1 { variable.next().unwrap_or(1) } else { dim });
    batch.iter().copied().chain(sizes).collect()
}

fn shown_id(request: &InferRequest) -> &str {
    if request.id.is_empty() { "<id_unknown>" } else { &request.id }
}

/// Names that an error lists at most. Further names are only counted.
const MAX_LISTED: usize = 32;

fn quoted<'a>(mut names: impl Iterator<Item = &'a Name>) -> String {
    let listed: Vec<String> = names.by_ref().take(MAX_LISTED).map(|name| format!("'{name}'")).collect();
    let more = match names.count() {
        0 => String::new(),
        count => format!(" and {count} more"),
    };
    listed.join(",") + &more
}

fn listed(shape: &[i64]) -> String {
    let sizes: Vec<String> = shape.iter().map(i64::to_string).collect();
    format!("[{}]", sizes.join(","))
}
