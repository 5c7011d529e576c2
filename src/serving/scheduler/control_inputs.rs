//! Inputs that tell a model where in its sequence a request stands.

use repository::ModelConfig;
use repository::proto::ModelSequenceBatching;
use repository::proto::model_sequence_batching::Control as ControlConfig;
use repository::proto::model_sequence_batching::control::Kind;

use crate::{CorrelationId, DataType, InferRequest, Tensor};

/// The control inputs of a model.
#[derive(Debug)]
pub(crate) struct Controls {
    controls: Vec<Control>,
    /// One element, with the batch dimension where the model has one.
    shape: Vec<i64>,
}

#[derive(Debug)]
struct Control {
    input: String,
    signal: Signal,
}

#[derive(Debug)]
enum Signal {
    /// Tensors for false and true.
    Flag { kind: Kind, values: Box<[Tensor; 2]> },
    /// The sequence's id.
    Id(DataType),
}

impl Controls {
    pub fn new(config: &ModelConfig, sequences: &ModelSequenceBatching) -> Self {
        let shape = if config.max_batch_size > 0 { vec![1, 1] } else { vec![1] };
        let inputs = sequences.control_input.iter();
        let all = inputs.flat_map(|input| input.control.iter().map(|control| (input.name.clone(), control)));
        let controls = all.map(|(input, control)| Control { signal: Signal::new(control, &input, &shape), input });
        Self { controls: controls.collect(), shape: shape.clone() }
    }

    /// Whether `input` is one of them.
    pub fn has(&self, input: &str) -> bool {
        self.controls.iter().any(|control| control.input == input)
    }

    /// Adds the control inputs to a request; `is_ready` is false for one that only fills a slot.
    pub fn write(&self, request: &mut InferRequest, is_ready: bool) {
        for control in &self.controls {
            let tensor = match &control.signal {
                Signal::Id(datatype) => id_tensor(&control.input, *datatype, &self.shape, &request.correlation_id),
                Signal::Flag { kind, values } => {
                    let is_set = match kind {
                        Kind::ControlSequenceStart => request.sequence_start,
                        Kind::ControlSequenceEnd => request.sequence_end,
                        _ => is_ready,
                    };
                    values[usize::from(is_set)].clone()
                }
            };
            request.inputs.push(tensor);
        }
    }
}

impl Signal {
    fn new(control: &ControlConfig, input: &str, shape: &[i64]) -> Self {
        if control.kind() == Kind::ControlSequenceCorrid {
            return Signal::Id(DataType::from_config(control.data_type()).unwrap_or(DataType::Uint64));
        }
        let make = |index: usize| match control {
            ControlConfig { int32_false_true, .. } if int32_false_true.len() == 2 => {
                Tensor::from_i32(input, shape, &int32_false_true[index..=index])
            }
            ControlConfig { fp32_false_true, .. } if fp32_false_true.len() == 2 => {
                Tensor::from_f32(input, shape, &fp32_false_true[index..=index])
            }
            ControlConfig { bool_false_true, .. } if bool_false_true.len() == 2 => {
                Tensor::from_bool(input, shape, &bool_false_true[index..=index])
            }
            _ => Tensor::from_i32(input, shape, &[i32::from(index == 1)]),
        };
        Signal::Flag { kind: control.kind(), values: Box::new([make(0), make(1)]) }
    }
}

fn id_tensor(input: &str, datatype: DataType, shape: &[i64], id: &CorrelationId) -> Tensor {
    if datatype == DataType::Bytes {
        let text = match id {
            CorrelationId::Number(number) => number.to_string(),
            CorrelationId::Text(text) => text.clone(),
        };
        return Tensor::from_byte_strings(input, shape, &[text]);
    }
    let number = match id {
        CorrelationId::Number(number) => *number,
        CorrelationId::Text(text) => hash(text),
    };
    let size = datatype.size().unwrap_or(8).min(8);
    let data = number.to_le_bytes()[..size].to_vec().into();
    Tensor { name: input.into(), datatype, shape: shape.into(), data }
}

/// A number for a text id, the same in every process (FNV-1a).
fn hash(text: &str) -> u64 {
    text.bytes().fold(0xcbf2_9ce4_8422_2325, |hash, byte| (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3))
}
