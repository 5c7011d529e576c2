//! Kinds of outputs and their values.

use serving::{DataType, Name, OutputDelta, Shape, Tensor};
use smallvec::SmallVec;

/// An output of the model.
#[derive(Debug, Clone, Copy)]
pub(super) enum OutputKind {
    OutputIds,
    SequenceLength,
    CumLogProbs,
    OutputLogProbs,
    ContextLogits,
    GenerationLogits,
    BatchIndex,
    SequenceIndex,
    SequenceEnd,
    NumInputTokens,
    NumOutputTokens,
    ReusedBlocks,
    NewBlocks,
    TotalBlocks,
    DraftTokens,
    AcceptedDraftTokens,
    AcceptanceRate,
    ArrivalTime,
    FirstScheduledTime,
    FirstTokenTime,
    LastTokenTime,
}

impl OutputKind {
    /// The kind of an output by its name in `config.pbtxt`; `None` for an unknown one.
    pub(super) fn of(name: &str) -> Option<Self> {
        Some(match name {
            "output_ids" => OutputKind::OutputIds,
            "sequence_length" => OutputKind::SequenceLength,
            "cum_log_probs" => OutputKind::CumLogProbs,
            "output_log_probs" => OutputKind::OutputLogProbs,
            "context_logits" => OutputKind::ContextLogits,
            "generation_logits" => OutputKind::GenerationLogits,
            "batch_index" => OutputKind::BatchIndex,
            "sequence_index" => OutputKind::SequenceIndex,
            "sequence_end" => OutputKind::SequenceEnd,
            "num_input_tokens" => OutputKind::NumInputTokens,
            "num_output_tokens" => OutputKind::NumOutputTokens,
            "kv_cache_reused_blocks" => OutputKind::ReusedBlocks,
            "kv_cache_alloc_new_blocks" => OutputKind::NewBlocks,
            "kv_cache_alloc_total_blocks" => OutputKind::TotalBlocks,
            "total_draft_tokens" => OutputKind::DraftTokens,
            "total_accepted_draft_tokens" => OutputKind::AcceptedDraftTokens,
            "acceptance_rate" => OutputKind::AcceptanceRate,
            "arrival_time_ns" => OutputKind::ArrivalTime,
            "first_scheduled_time_ns" => OutputKind::FirstScheduledTime,
            "first_token_time_ns" => OutputKind::FirstTokenTime,
            "last_token_time_ns" => OutputKind::LastTokenTime,
            _ => return None,
        })
    }

    /// Whether all responses of a sequence except the last have the same value.
    pub(super) fn is_steady(self) -> bool {
        matches!(
            self,
            OutputKind::SequenceLength
                | OutputKind::BatchIndex
                | OutputKind::SequenceIndex
                | OutputKind::SequenceEnd
                | OutputKind::NumInputTokens
        )
    }
}

/// The value of a scalar output.
#[derive(Debug, Clone, Copy)]
pub(super) enum Number {
    I32(i32),
    I64(i64),
    F32(f32),
}

impl Number {
    /// Sets the value of the output at `index`.
    pub(super) fn set(self, index: usize, delta: &mut OutputDelta) {
        match self {
            Number::I32(value) => delta.set(index, value.to_le_bytes()),
            Number::I64(value) => delta.set(index, value.to_le_bytes()),
            Number::F32(value) => delta.set(index, value.to_le_bytes()),
        }
    }
}

/// The source of an output's value.
#[derive(Debug, Clone)]
pub(super) enum Value {
    Generated(OutputKind),
    Text,
    /// A constant.
    Given(Tensor),
}

/// The value of an output that changes with each token.
#[derive(Debug, Clone, Copy)]
pub(super) enum Change {
    Text,
    Generated(OutputKind),
}

/// Outputs by their indices, with their values.
pub(super) type Changing = SmallVec<[(usize, Change); 2]>;

/// The outputs that change with each token; `None` if the type or shape of one changes.
pub(super) fn changing(outputs: &[(Name, Value)]) -> Option<Changing> {
    let mut changing = SmallVec::new();
    for (index, (_, value)) in outputs.iter().enumerate() {
        match value {
            Value::Generated(OutputKind::ContextLogits | OutputKind::GenerationLogits) => return None,
            Value::Generated(kind) if kind.is_steady() => {}
            Value::Given(_) => {}
            Value::Generated(kind) => changing.push((index, Change::Generated(*kind))),
            Value::Text => changing.push((index, Change::Text)),
        }
    }
    Some(changing)
}

/// Zeros for an output that was not requested.
pub(super) fn placeholder(name: &str, logits_type: DataType, num_input_tokens: usize) -> Option<Tensor> {
    let (datatype, shape): (DataType, &[i64]) = match name {
        "cum_log_probs" => (DataType::Fp32, &[1, 1]),
        "output_log_probs" => (DataType::Fp32, &[1, 1, num_input_tokens as i64]),
        "context_logits" => (logits_type, &[1, 1, 1]),
        "generation_logits" => (logits_type, &[1, 1, 1, 1]),
        _ => return None,
    };
    let num_bytes = datatype.size()? * shape.iter().product::<i64>() as usize;
    Some(Tensor { name: name.into(), datatype, shape: Shape::from_slice(shape), data: vec![0; num_bytes].into() })
}
