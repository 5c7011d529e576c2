//! A request whose whole body is the data of the model's only input.

use bytes::Bytes;
use repository::ModelConfig;
use serving::{DataType, InferError, InferRequest, Name, Tensor};

use super::request::ParsedRequest;
use crate::api::triton::shapes::fit_shape;

/// Converts the whole body to the model's only input.
///
/// # Errors
/// When the model has several inputs, or the body does not determine the shape of its input.
pub fn read_raw(body: Bytes, config: &ModelConfig) -> Result<ParsedRequest, InferError> {
    let [input] = config.input.as_slice() else {
        return Err(InferError::invalid(format!(
            "[request id: <id_unknown>] Raw request must only have 1 input (found 1) to be deduced but got {} inputs in \
             '{}' model configuration",
            config.input.len(),
            config.name
        )));
    };
    if input.dims.iter().filter(|&&size| size < 0).count() > 1 {
        return Err(InferError::invalid(format!(
            "[request id: <id_unknown>] The shape of the raw input '{}' can not be deduced because there are more than one \
             variable-sized dimension",
            input.name
        )));
    }
    let datatype = DataType::from_config(input.data_type());
    let is_batched = config.max_batch_size > 0;
    let (data, count) = match datatype.and_then(DataType::size) {
        Some(size) => (body.clone(), body.len() / size),
        None if input.dims != [1] => {
            return Err(InferError::invalid(format!(
                "[request id: <id_unknown>] For BYTE datatype raw input '{}', the model must have input shape [1]",
                input.name
            )));
        }
        None => (Tensor::from_byte_strings("", &[], &[&body]).data, 1),
    };
    let tensor = Tensor {
        name: Name::from(&input.name),
        datatype: datatype.unwrap_or(DataType::Bytes),
        shape: is_batched.then_some(1).into_iter().chain(fit_shape(&input.dims, false, count)).collect(),
        data,
    };
    let expected = tensor.num_elements().zip(tensor.datatype.size()).and_then(|(count, size)| count.checked_mul(size));
    if let Some(expected) = expected.filter(|&expected| expected != body.len()) {
        // The message has the placeholder `raw_input` instead of the name of the input.
        return Err(InferError::invalid(format!(
            "[request id: <id_unknown>] input byte size mismatch for input 'raw_input' for model '{}'. Expected {expected}, got {}",
            config.name,
            body.len()
        )));
    }
    if body.is_empty() && (tensor.datatype == DataType::Bytes || tensor.num_elements() == Some(0)) {
        return Err(InferError::invalid("the request has no body, expected a JSON infer request"));
    }
    let request = InferRequest { inputs: vec![tensor], ..InferRequest::default() };
    Ok(ParsedRequest { request, outputs: Vec::new(), is_binary: true })
}
