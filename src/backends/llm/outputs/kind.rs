//! What each output holds, by its name in `config.pbtxt`.

use serving::{DataType, Name, OutputDelta, Shape, Tensor};
use smallvec::SmallVec;

/// The meaning of an output.
#[derive(Debug, Clone, Copy)]
pub(super) enum Kind {
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

impl Kind {
    /// By its name in `config.pbtxt`; `None` for an output that is not known.
    pub(super) fn of(name: &str) -> Option<Self> {
        Some(match name {
            "output_ids" => Kind::OutputIds,
            "sequence_length" => Kind::SequenceLength,
            "cum_log_probs" => Kind::CumLogProbs,
            "output_log_probs" => Kind::OutputLogProbs,
            "context_logits" => Kind::ContextLogits,
            "generation_logits" => Kind::GenerationLogits,
            "batch_index" => Kind::BatchIndex,
            "sequence_index" => Kind::SequenceIndex,
            "sequence_end" => Kind::SequenceEnd,
            "num_input_tokens" => Kind::NumInputTokens,
            "num_output_tokens" => Kind::NumOutputTokens,
            "kv_cache_reused_blocks" => Kind::ReusedBlocks,
            "kv_cache_alloc_new_blocks" => Kind::NewBlocks,
            "kv_cache_alloc_total_blocks" => Kind::TotalBlocks,
            "total_draft_tokens" => Kind::DraftTokens,
            "total_accepted_draft_tokens" => Kind::AcceptedDraftTokens,
            "acceptance_rate" => Kind::AcceptanceRate,
            "arrival_time_ns" => Kind::ArrivalTime,
            "first_scheduled_time_ns" => Kind::FirstScheduledTime,
            "first_token_time_ns" => Kind::FirstTokenTime,
            "last_token_time_ns" => Kind::LastTokenTime,
            _ => return None,
        })
    }

    /// Whether its value is the same for each token of a sequence but the last.
    pub(super) fn is_steady(self) -> bool {
        matches!(
            self,
            Kind::SequenceLength | Kind::BatchIndex | Kind::SequenceIndex | Kind::SequenceEnd | Kind::NumInputTokens
        )
    }
}

/// The value of an output that is one number.
#[derive(Debug, Clone, Copy)]
pub(super) enum Number {
    I32(i32),
    I64(i64),
    F32(f32),
}

impl Number {
    /// Sets the elements of the output at `index`.
    pub(super) fn set(self, index: usize, delta: &mut OutputDelta) {
        match self {
            Number::I32(value) => delta.set(index, value.to_le_bytes()),
            Number::I64(value) => delta.set(index, value.to_le_bytes()),
            Number::F32(value) => delta.set(index, value.to_le_bytes()),
        }
    }
}

/// Where the value of an output comes from.
#[derive(Debug, Clone)]
pub(super) enum Value {
    Generated(Kind),
    Text,
    /// The same in each response.
    Given(Tensor),
}

/// What an output holds that changes with each token.
#[derive(Debug, Clone, Copy)]
pub(super) enum Change {
    Text,
    Generated(Kind),
}

/// Outputs by their indices, and what they hold.
pub(super) type Changing = SmallVec<[(usize, Change); 2]>;

/// The outputs that change from token to token, if all keep their types and shapes.
pub(super) fn changing(outputs: &[(Name, Value)]) -> Option<Changing> {
    let mut changing = SmallVec::new();
    for (index, (_, value)) in outputs.iter().enumerate() {
        match value {
            Value::Generated(Kind::ContextLogits | Kind::GenerationLogits) => return None,
            Value::Generated(kind) if kind.is_steady() => {}
            Value::Given(_) => {}
            Value::Generated(kind) => changing.push((index, Change::Generated(*kind))),
            Value::Text => changing.push((index, Change::Text)),
        }
    }
    Some(changing)
}

/// Zeros of the shape that an output has when it was not requested.
pub(super) fn stand_in(name: &str, logits_type: DataType, num_input_tokens: usize) -> Option<Tensor> {
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
