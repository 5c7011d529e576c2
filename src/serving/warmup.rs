//! Warm-up requests, which a model answers before it serves. They spare the first client one-time initialisation.

use std::path::{Component, Path};

use bytes::Bytes;
use repository::ModelConfig;
use repository::proto::ModelWarmup;
use repository::proto::model_warmup::{Input, input::InputDataType};

use crate::check::Signature;
use crate::scheduler::{self, ControlInputs, StateSpec};
use crate::{
    Backend, BatchedRequest, CorrelationId, DataType, InferError, InferRequest, ResponseStream, Shape, Tensor,
};

/// Elements of a generated input, at most.
const MAX_ELEMENTS: usize = 1 << 28;

/// Sends the warm-up requests of the configuration to each instance of a backend.
///
/// # Errors
/// When a request cannot be made, or the model returns an error.
pub(crate) async fn run(
    config: &ModelConfig,
    states: &[StateSpec],
    model_dir: &Path,
    backend: &dyn Backend,
) -> Result<(), InferError> {
    // A sample with batch size 0 is disabled.
    for warmup in config.model_warmup.iter().filter(|warmup| warmup.batch_size > 0) {
        let explain = |error: InferError| {
            InferError::new(error.kind, format!("failed to run warmup sample '{}': {}", warmup.name, error.message))
        };
        let request = request(config, states, warmup, model_dir).map_err(explain)?;
        for _ in 0..warmup.count.max(1) {
            run_sample(backend, &request).await.map_err(explain)?;
        }
    }
    Ok(())
}

async fn run_sample(backend: &dyn Backend, request: &InferRequest) -> Result<(), InferError> {
    if backend.num_instances() == 0 {
        return read_until_final(backend.infer(request.clone())?).await;
    }
    for instance in 0..backend.num_instances() {
        let (responses, stream) = ResponseStream::channel(1);
        let batch = vec![BatchedRequest { request: request.clone(), responses }];
        let (_, answered) = futures::join!(backend.execute(instance, batch), read_until_final(stream));
        answered?;
    }
    Ok(())
}

async fn read_until_final(mut stream: ResponseStream) -> Result<(), InferError> {
    while let Some(response) = stream.next_response().await {
        if response?.is_final {
            return Ok(());
        }
    }
    Err(InferError::internal("the model stopped answering before its final response"))
}

fn request(
    config: &ModelConfig,
    states: &[StateSpec],
    warmup: &ModelWarmup,
    model_dir: &Path,
) -> Result<InferRequest, InferError> {
    let batch = (config.max_batch_size > 0).then_some(i64::from(warmup.batch_size));
    let tensor = |(name, input): (&String, &Input)| {
        let shape = batch.into_iter().chain(input.dims.iter().copied()).collect();
        input_tensor(name, input, shape, model_dir)
    };
    let mut request = InferRequest {
        model_name: config.name.as_str().into(),
        inputs: warmup.inputs.iter().map(tensor).collect::<Result<_, _>>()?,
        correlation_id: CorrelationId::Number(1),
        sequence_start: true,
        sequence_end: true,
        ..InferRequest::default()
    };
    Signature::new(config).check(&mut request)?;
    if let Some(sequences) = config.sequences() {
        ControlInputs::new(config, sequences).add_to(&mut request, true);
        request.inputs.extend(scheduler::initial_states(states));
    }
    Ok(request)
}

fn input_tensor(name: &str, input: &Input, shape: Shape, model_dir: &Path) -> Result<Tensor, InferError> {
    let datatype = DataType::from_config(input.data_type())
        .ok_or_else(|| InferError::invalid(format!("input `{name}` has no `data_type`")))?;
    let mut tensor = Tensor { name: name.into(), datatype, shape, data: Bytes::new() };
    let count = tensor.num_elements().filter(|&count| count <= MAX_ELEMENTS).ok_or_else(|| {
        InferError::invalid(format!("input `{name}` has shape {:?}; each size must be given", tensor.shape))
    })?;
    tensor.data = match &input.input_data_type {
        Some(InputDataType::InputDataFile(file)) => {
            if !Path::new(file).components().all(|part| matches!(part, Component::Normal(_))) {
                return Err(InferError::invalid(format!("`input_data_file` `{file}` is not a name below `warmup/`")));
            }
            let path = model_dir.join("warmup").join(file);
            let read = std::fs::read(&path);
            read.map_err(|error| InferError::invalid(format!("cannot read {}: {error}", path.display())))?.into()
        }
        Some(InputDataType::RandomData(true)) => random_data(datatype, count),
        None => {
            let message = format!("warmup setting expects input '{name}' to have input_data_type set");
            return Err(InferError::invalid(message));
        }
        Some(_) => vec![0; count * datatype.size().unwrap_or(4)].into(),
    };
    Ok(tensor)
}

/// Random elements: integers over their whole range, floating-point numbers from 0 to 1, strings of eight letters.
fn random_data(datatype: DataType, count: usize) -> Bytes {
    // A Weyl sequence with a mixing function: simple, and the same in every run.
    let mut state = 0u64;
    let mut next = || {
        state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mixed = (state ^ (state >> 32)).wrapping_mul(0xd6e8_feb8_6659_fd93);
        mixed ^ (mixed >> 32)
    };
    let mut bytes = Vec::with_capacity(count * datatype.size().unwrap_or(12));
    for _ in 0..count {
        let number = next();
        let fraction = number as f64 / u64::MAX as f64;
        match datatype {
            DataType::Bool => bytes.push(u8::from(number & 1 == 1)),
            DataType::Fp32 => bytes.extend((fraction as f32).to_le_bytes()),
            DataType::Fp64 => bytes.extend(fraction.to_le_bytes()),
            // From 0.5 to 1: a fixed exponent with a random mantissa.
            DataType::Fp16 => bytes.extend((0x3800 | (number as u16 & 0x03ff)).to_le_bytes()),
            DataType::Bf16 => bytes.extend((0x3f00 | (number as u16 & 0x007f)).to_le_bytes()),
            DataType::Bytes => {
                bytes.extend(8u32.to_le_bytes());
                bytes.extend(number.to_le_bytes().map(|byte| b'a' + byte % 26));
            }
            _ => bytes.extend(&number.to_le_bytes()[..datatype.size().unwrap_or(8)]),
        }
    }
    bytes.into()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn random_data_fits_its_type() {
        for datatype in DataType::ALL {
            let data = random_data(datatype, 100);
            let tensor = Tensor { name: "x".into(), datatype, shape: Shape::from_slice(&[100]), data };
            match datatype.size() {
                Some(size) => assert_eq!(tensor.data.len(), 100 * size),
                None => assert_eq!(tensor.to_byte_strings().unwrap().len(), 100),
            }
        }
        let floats = Tensor {
            name: "x".into(),
            datatype: DataType::Fp32,
            shape: Shape::from_slice(&[100]),
            data: random_data(DataType::Fp32, 100),
        };
        assert!(floats.to_f32().unwrap().iter().all(|value| (0.0..=1.0).contains(value)));
    }
}
