//! Raw logits of one sequence. They arrive in parts before the tokens that are chosen from them, and are returned as tensors.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use generation::LogitsPosition;
use half::{bf16, f16};
use serving::{DataType, InferError, Limit, Limits, Name, Shape, Tensor};

/// Counts the bytes of logits that rank 0 may have to buffer for requests in flight.
#[derive(Debug, Default)]
pub(crate) struct LogitsBudget(AtomicU64);

/// One request's part of a budget. It is returned when dropped.
#[derive(Debug)]
pub(crate) struct LogitsCharge {
    budget: Arc<LogitsBudget>,
    bytes: u64,
}

impl LogitsBudget {
    /// Takes `bytes`; `None` for 0 bytes.
    ///
    /// # Errors
    /// When `bytes`, or the sum of all requests, exceeds [`Limit::LogitsBytes`].
    pub(crate) fn charge(self: &Arc<Self>, limits: &Limits, bytes: u64) -> Result<Option<LogitsCharge>, InferError> {
        if bytes == 0 {
            return Ok(None);
        }
        let allowed = limits.get(Limit::LogitsBytes);
        if bytes > allowed {
            return Err(Limit::LogitsBytes.refuse(bytes, allowed));
        }
        let fits = |taken: u64| taken.checked_add(bytes).filter(|&sum| sum <= allowed);
        match self.0.fetch_update(Relaxed, Relaxed, fits) {
            Ok(_) => Ok(Some(LogitsCharge { budget: Arc::clone(self), bytes })),
            Err(taken) => Err(Limit::LogitsBytes.refuse_for_now(bytes, taken, allowed)),
        }
    }
}

impl Drop for LogitsCharge {
    fn drop(&mut self) {
        self.budget.0.fetch_sub(self.bytes, Relaxed);
    }
}

/// Type and row length of returned logits.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct LogitsForm {
    /// FP32, FP16 or BF16.
    pub(crate) datatype: DataType,
    /// `V`.
    pub(crate) vocab_size: usize,
}

/// Logits that no response has returned yet, converted to the returned type.
#[derive(Debug, Clone, Default)]
pub(crate) struct Logits {
    /// `[prompt, V]`, as far as received; empty once it was returned.
    context: Vec<u8>,
    is_context_returned: bool,
    /// `[V]` of each token of the output.
    generation: BTreeMap<u32, Vec<u8>>,
}

impl LogitsForm {
    fn row_bytes(self) -> usize {
        self.vocab_size * self.datatype.size().expect("logits have a type of fixed size")
    }

    fn append(self, values: &[f32], out: &mut Vec<u8>) {
        match self.datatype {
            DataType::Fp16 => out.extend(values.iter().flat_map(|&value| f16::from_f32(value).to_le_bytes())),
            DataType::Bf16 => out.extend(values.iter().flat_map(|&value| bf16::from_f32(value).to_le_bytes())),
            _ => out.extend(values.iter().flat_map(|value| value.to_le_bytes())),
        }
    }
}

impl Logits {
    /// Stores part of a row. A row that is computed again, after a preemption or a rejected draft, replaces the earlier one, unless that
    /// is a row of a prompt that was returned.
    pub(crate) fn keep(&mut self, form: LogitsForm, part: &generation::Logits) {
        if self.is_context_returned && matches!(part.position, LogitsPosition::Prompt(_)) {
            return;
        }
        let element = form.row_bytes() / form.vocab_size;
        let start = part.first_token as usize * element;
        let row = match part.position {
            LogitsPosition::Output(token) => self.generation.entry(token).or_default(),
            LogitsPosition::Prompt(_) => &mut self.context,
        };
        let start = match part.position {
            LogitsPosition::Output(_) => start,
            LogitsPosition::Prompt(position) => position as usize * form.row_bytes() + start,
        };
        if start <= row.len() {
            row.truncate(start);
            form.append(&part.values, row);
        }
    }

    /// `[1, prompt, V]`; `[1, 0, V]` after the first call.
    pub(crate) fn take_context(&mut self, name: &Name, form: LogitsForm) -> Tensor {
        let data = std::mem::take(&mut self.context);
        self.is_context_returned = true;
        let shape = Shape::from_slice(&[1, (data.len() / form.row_bytes()) as i64, form.vocab_size as i64]);
        Tensor { name: name.clone(), datatype: form.datatype, shape, data: data.into() }
    }

    /// Moves the rows of output tokens `first..first + count` to `out`, and drops those before them. Pads with zeros to `width` rows.
    pub(crate) fn take_generation(
        &mut self,
        form: LogitsForm,
        first: usize,
        count: usize,
        width: usize,
        out: &mut Vec<u8>,
    ) {
        let start = out.len();
        self.generation = self.generation.split_off(&(first as u32));
        for token in first..first + count {
            let end = out.len() + form.row_bytes();
            out.extend(self.generation.remove(&(token as u32)).unwrap_or_default());
            out.resize(end, 0);
        }
        out.resize(start + width * form.row_bytes(), 0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn piece(position: LogitsPosition, first_token: u32, values: &[f32]) -> generation::Logits {
        generation::Logits { index: 0, position, first_token, values: values.to_vec() }
    }

    #[test]
    fn all_requests_share_the_room_for_logits() {
        let mut limits = Limits::default();
        limits.set(Limit::LogitsBytes, 100);
        let budget = Arc::<LogitsBudget>::default();
        let charge = |bytes| budget.charge(&limits, bytes);
        assert!(charge(0).unwrap().is_none());
        let too_much = charge(101).unwrap_err();
        assert_eq!(too_much.kind, serving::ErrorKind::InvalidArgument);
        let first = charge(60).unwrap();
        let refused = charge(41).unwrap_err();
        assert_eq!(refused.kind, serving::ErrorKind::Unavailable);
        assert_eq!(
            refused.message,
            "request has 41 bytes of logits and others have 60, at most 100 are allowed together (--max-logits-bytes); \
             try again later"
        );
        let second = charge(40).unwrap();
        drop((first, second));
        assert!(charge(100).unwrap().is_some());
    }

    #[test]
    fn pieces_become_rows_and_the_last_values_count() {
        use LogitsPosition::{Output, Prompt};
        let form = LogitsForm { datatype: DataType::Fp32, vocab_size: 3 };
        let mut logits = Logits::default();
        let pieces = [
            piece(Prompt(0), 0, &[1.0, 2.0]),
            piece(Prompt(0), 2, &[3.0]),
            piece(Prompt(0), 0, &[4.0, 5.0]), // Preempted: from the start again.
            piece(Prompt(0), 2, &[6.0]),
            piece(Prompt(1), 0, &[7.0, 8.0, 9.0]),
            piece(Output(0), 0, &[1.0, 1.0, 1.0]),
            piece(Output(1), 0, &[2.0, 2.0, 2.0]), // After a wrong draft.
            piece(Output(1), 0, &[3.0, 3.0, 3.0]),
        ];
        pieces.iter().for_each(|piece| logits.keep(form, piece));
        let context = logits.take_context(&"context_logits".into(), form);
        assert_eq!(context.shape[..], [1, 2, 3]);
        assert_eq!(context.to_f32().unwrap(), [4.0, 5.0, 6.0, 7.0, 8.0, 9.0]);
        assert_eq!(logits.take_context(&"context_logits".into(), form).shape[..], [1, 0, 3]);
        logits.keep(form, &piece(Prompt(0), 0, &[4.0, 5.0, 6.0])); // Preempted after the first response.
        assert_eq!(logits.take_context(&"context_logits".into(), form).shape[..], [1, 0, 3]);
        let mut out = Vec::new();
        logits.take_generation(form, 1, 1, 2, &mut out);
        let tensor = Tensor {
            name: Name::default(),
            datatype: DataType::Fp32,
            shape: Shape::from_slice(&[2, 3]),
            data: out.into(),
        };
        assert_eq!(tensor.to_f32().unwrap(), [3.0, 3.0, 3.0, 0.0, 0.0, 0.0]);
        assert!(logits.generation.is_empty());
    }

    #[test]
    fn halves_are_rounded_to_nearest() {
        for (datatype, expected) in [(DataType::Fp16, 0x3c01u16), (DataType::Bf16, 0x3f80)] {
            let form = LogitsForm { datatype, vocab_size: 1 };
            let mut logits = Logits::default();
            logits.keep(form, &piece(LogitsPosition::Prompt(0), 0, &[1.001]));
            let tensor = logits.take_context(&"context_logits".into(), form);
            assert_eq!((tensor.datatype, &tensor.data[..]), (datatype, &expected.to_le_bytes()[..]));
        }
    }
}
