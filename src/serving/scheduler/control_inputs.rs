//! Control inputs: they give a model the start, end, readiness and id of a request's sequence.

use repository::ModelConfig;
use repository::proto::ModelSequenceBatching;
use repository::proto::model_sequence_batching::Control as ControlConfig;
use repository::proto::model_sequence_batching::control::Kind;

use crate::{CorrelationId, DataType, InferRequest, Tensor};

/// The control inputs of a model.
#[derive(Debug)]
pub(crate) struct ControlInputs {
    controls: Vec<Control>,
    /// Shape of one element, with the batch dimension where the model has one.
    shape: Vec<i64>,
}

#[derive(Debug)]
struct Control {
    input: String,
    value: ControlValue,
}

#[derive(Debug)]
enum ControlValue {
    /// The tensors for false and true.
    Flag { kind: Kind, values: Box<[Tensor; 2]> },
    /// The sequence's id, of this type.
    Id(DataType),
}

impl ControlInputs {
    pub fn new(config: &ModelConfig, sequences: &ModelSequenceBatching) -> Self {
        let shape = if config.max_batch_size > 0 { vec![1, 1] } else { vec![1] };
        let inputs = sequences.control_input.iter();
        let all = inputs.flat_map(|input| input.control.iter().map(|control| (input.name.clone(), control)));
        let controls = all.map(|(input, control)| Control { value: ControlValue::new(control, &input, &shape), input });
        Self { controls: controls.collect(), shape: shape.clone() }
    }

    /// Whether `input` is a control input.
    pub fn has(&self, input: &str) -> bool {
        self.controls.iter().any(|control| control.input == input)
    }

    /// Adds the control inputs to a request. `is_ready` is false for a null request, which only fills a slot.
    pub fn add_to(&self, request: &mut InferRequest, is_ready: bool) {
        for control in &self.controls {
            let tensor = match &control.value {
                ControlValue::Id(datatype) => {
                    id_tensor(&control.input, *datatype, &self.shape, &request.correlation_id)
                }
                ControlValue::Flag { kind, values } => {
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

impl ControlValue {
    fn new(control: &ControlConfig, input: &str, shape: &[i64]) -> Self {
        if control.kind() == Kind::ControlSequenceCorrid {
            return ControlValue::Id(DataType::from_config(control.data_type()).unwrap_or(DataType::Uint64));
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
        ControlValue::Flag { kind: control.kind(), values: Box::new([make(0), make(1)]) }
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

/// The number for a text id. The hash (FNV-1a) is the same in every process.
fn hash(text: &str) -> u64 {
    text.bytes().fold(0xcbf2_9ce4_8422_2325, |hash, byte| (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3))
}
