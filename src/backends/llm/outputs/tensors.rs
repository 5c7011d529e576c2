//! The tensors of a response.

use std::ops::Range;
use std::time::{Duration, UNIX_EPOCH};

use engine::{BlockUsage, DraftUsage};
use serving::{Name, Shape, Tensor, Timestamp};
use smallvec::SmallVec;

use super::Responses;
use super::kind::{Number, OutputKind};
use super::sequence::{Output, longest};

impl Responses {
    /// The new text of some sequences.
    pub(super) fn text(&self, name: &Name, indices: Range<usize>) -> Tensor {
        let texts: SmallVec<[&str; 4]> = self.sequences[indices].iter().map(|output| output.text.as_str()).collect();
        let (nested, list) = ([1, texts.len() as i64], [texts.len() as i64]);
        let is_nested = self.texts.as_ref().is_some_and(|texts| texts.is_nested);
        Tensor::from_byte_strings(name.clone(), if is_nested { &nested[..] } else { &list }, &texts)
    }

    /// One output of some sequences, except logits. The shape begins with a batch of 1. Sequences use the dimension of beams.
    pub(super) fn output(&self, name: &Name, kind: OutputKind, indices: Range<usize>) -> Tensor {
        let sequences = &self.sequences[indices.clone()];
        let name = name.clone();
        let row = [1, sequences.len() as i64];
        match kind {
            OutputKind::OutputIds => self.output_ids(name, sequences),
            OutputKind::SequenceLength => {
                let length = |output: &Output| (self.prompt.len() + output.pending.len()) as i32;
                Tensor::from_i32(name, &row, &sequences.iter().map(length).collect::<SmallVec<[i32; 4]>>())
            }
            OutputKind::CumLogProbs => {
                let sum = |output: &Output| output.cumulative_log_prob as f32;
                Tensor::from_f32(name, &row, &sequences.iter().map(sum).collect::<SmallVec<[f32; 4]>>())
            }
            OutputKind::OutputLogProbs => output_log_probs(name, sequences),
            // A detokenizer flushes its incomplete text when a sequence ends.
            OutputKind::SequenceEnd => Tensor::from_bool(name, &[1, 1], &[sequences.iter().all(|output| output.ended)]),
            _ => match self.number(kind, indices) {
                Number::I32(value) => Tensor::from_i32(name, &[1, 1], &[value]),
                Number::I64(value) => Tensor::from_i64(name, &[1, 1], &[value]),
                Number::F32(value) => Tensor::from_f32(name, &[1, 1], &[value]),
            },
        }
    }

    /// The value of a scalar output of some sequences together.
    pub(super) fn number(&self, kind: OutputKind, indices: Range<usize>) -> Number {
        let first = indices.start;
        let sequences = &self.sequences[indices];
        let count = |value: usize| Number::I32(value as i32);
        let time = |at: Option<Timestamp>| Number::I64(self.unix_ns(at));
        let blocks = |count: fn(&BlockUsage) -> u32| sequences.iter().map(|of| count(&of.blocks)).sum::<u32>();
        let drafts = |count: fn(&DraftUsage) -> u32| sequences.iter().map(|of| count(&of.drafts)).sum::<u32>();
        match kind {
            OutputKind::BatchIndex => count(0),
            OutputKind::SequenceIndex => count(first),
            OutputKind::NumInputTokens => count(self.num_input_tokens),
            OutputKind::NumOutputTokens => count(sequences.iter().map(|output| output.num_tokens).sum()),
            OutputKind::ReusedBlocks => count(blocks(|blocks| blocks.num_reused) as usize),
            OutputKind::NewBlocks => count(blocks(|blocks| blocks.num_allocated) as usize),
            OutputKind::TotalBlocks => count(blocks(|blocks| blocks.num_reused + blocks.num_allocated) as usize),
            OutputKind::DraftTokens => count(drafts(|drafts| drafts.num_drafted) as usize),
            OutputKind::AcceptedDraftTokens => count(drafts(|drafts| drafts.num_accepted) as usize),
            OutputKind::AcceptanceRate => {
                let (num_accepted, num_drafted) =
                    (drafts(|drafts| drafts.num_accepted), drafts(|drafts| drafts.num_drafted));
                Number::F32(num_accepted as f32 / (num_drafted as f32).max(1.0))
            }
            OutputKind::ArrivalTime => time(Some(self.arrived.0)),
            OutputKind::FirstScheduledTime => time(sequences.iter().filter_map(|output| output.first_scheduled).min()),
            OutputKind::FirstTokenTime => time(sequences.iter().filter_map(|output| output.first_token).min()),
            OutputKind::LastTokenTime => time(sequences.iter().filter_map(|output| output.last_token).max()),
            OutputKind::OutputIds
            | OutputKind::SequenceLength
            | OutputKind::CumLogProbs
            | OutputKind::OutputLogProbs
            | OutputKind::SequenceEnd
            | OutputKind::ContextLogits
            | OutputKind::GenerationLogits => unreachable!("{kind:?} is not one number"),
        }
    }

    /// `[1, sequences, tokens, V]` of the tokens in this response.
    pub(super) fn generation_logits(&mut self, name: &Name, indices: Range<usize>) -> Tensor {
        let form = self.logits_form;
        let sequences = &mut self.sequences[indices];
        let (width, mut data) = (longest(sequences), Vec::new());
        for output in sequences.iter_mut() {
            let count = output.pending.len();
            output.logits.take_generation(form, output.num_tokens - count, count, width, &mut data);
        }
        let shape = Shape::from([1, sequences.len() as i64, width as i64, form.vocab_size as i64]);
        Tensor { name: name.clone(), datatype: form.datatype, shape, data: data.into() }
    }

    pub(super) fn output_ids(&self, name: Name, sequences: &[Output]) -> Tensor {
        let width = self.prompt.len() + longest(sequences);
        let mut ids = SmallVec::<[i32; 8]>::with_capacity(sequences.len() * width);
        for (row, output) in sequences.iter().enumerate() {
            ids.extend(self.prompt.iter().map(|id| id.0 as i32));
            ids.extend(output.pending.iter().map(|token| token.token.0 as i32));
            ids.resize((row + 1) * width, self.padding.0 as i32);
        }
        Tensor::from_i32(name, &[1, sequences.len() as i64, width as i64], &ids)
    }

    /// Nanoseconds since 1970; 0 for `None`.
    pub(super) fn unix_ns(&self, at: Option<Timestamp>) -> i64 {
        let Some(at) = at else { return 0 };
        let since_1970 = self.arrived.1.duration_since(UNIX_EPOCH).unwrap_or_default();
        (since_1970 + Duration::from_nanos(at.ns_since(self.arrived.0))).as_nanos().try_into().unwrap_or(i64::MAX)
    }
}

fn output_log_probs(name: Name, sequences: &[Output]) -> Tensor {
    let width = longest(sequences);
    let mut values = Vec::with_capacity(sequences.len() * width);
    for (row, output) in sequences.iter().enumerate() {
        values.extend(output.pending.iter().map(|token| token.logprob.unwrap_or(0.0)));
        values.resize((row + 1) * width, 0.0);
    }
    Tensor::from_f32(name, &[1, sequences.len() as i64, width as i64], &values)
}
