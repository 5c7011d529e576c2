//! Calls of a model that answers at once, one after another in one run of an ensemble: behind a decoupled step, one for
//! each token.
//!
//! What is alike from call to call is looked at once, and what is counted is added to the model's statistics for several
//! calls together: they are shared by all that call the model, and dear to touch from several threads.

use std::sync::Arc;
use std::time::Duration;

use smallvec::SmallVec;

use crate::histogram::Tally;
use crate::model::ServedModel;
use crate::statistics::Outcome;
use crate::watch::refusal_of;
use crate::{
    Changes, DataType, Elements, EnsembleStep, InferError, InferRequest, InferResponse, Moment, Name, Shape, Tensor,
};

/// Calls that are counted together, at most.
const MAX_UNCOUNTED: u64 = 16;

/// Calls one model. What it has not counted yet counts when it is dropped.
#[derive(Debug)]
pub(crate) struct Caller {
    model: Arc<ServedModel>,
    accepted: Accepted,
    /// Calls that are not counted yet, and what they took.
    num_uncounted: u64,
    took: Took,
    /// Of them, those that brought something.
    first_responses: Tally,
}

/// How long calls took.
#[derive(Debug, Clone, Copy, Default)]
struct Took {
    /// All of it.
    total_ns: u64,
    /// Checking the inputs, where they were not as before.
    input_ns: u64,
}

/// The inputs of the last request that passed its checks.
#[derive(Debug, Default)]
struct Accepted {
    inputs: SmallVec<[Form; 4]>,
    batch_size: u64,
}

/// An input but for its elements.
#[derive(Debug)]
struct Form {
    name: Name,
    datatype: DataType,
    shape: Shape,
    num_bytes: usize,
}

impl Caller {
    /// Calls `model`, which answers at once.
    pub fn new(model: Arc<ServedModel>) -> Self {
        Self {
            model,
            accepted: Accepted::default(),
            num_uncounted: 0,
            took: Took::default(),
            first_responses: Tally::default(),
        }
    }

    /// What the model answers. Only its outputs are sure to be there: who answered what, the caller knows.
    pub fn call(&mut self, request: &mut InferRequest) -> Result<InferResponse, InferError> {
        if !self.model.answers_plainly(request) {
            return self.model.answer(request);
        }
        let started = Moment::now();
        let mut input_ns = 0;
        if !self.accepted.is_like(request) {
            self.settle(); // As of the batch size until now.
            let batch_size = self.model.signature.check(request)?;
            self.accepted = Accepted::new(request, batch_size);
            input_ns = Moment::now().ns_since(started);
        }
        let answer = self.model.answer_unseen(request);
        let total_ns = Moment::now().ns_since(started);
        self.see(answer.as_ref().map(|response| !response.outputs.is_empty()), Took { total_ns, input_ns });
        answer
    }

    /// Asks at `started` what is new in the answer to a request that differs from the last of this `step` in `changes` alone.
    /// That is in `told` then, from when it says on; `None` where it is to be answered in full.
    pub fn call_again(
        &mut self,
        step: &EnsembleStep,
        started: Moment,
        changes: &Changes,
        told: &mut Changes,
    ) -> Option<Result<Moment, InferError>> {
        let inputs = &self.accepted.inputs;
        let is_known = |(place, elements): (usize, &Elements)| {
            inputs.get(place).is_some_and(|known| known.num_bytes == elements.len())
        };
        if !changes.iter().all(is_known) {
            return None;
        }
        let answer = self.model.answer_again_unseen(step, changes, told)?;
        let ended = Moment::now();
        let took = Took { total_ns: ended.ns_since(started), input_ns: 0 };
        self.see(answer.as_ref().map(|()| !told.is_empty()), took);
        Some(answer.map(|()| ended))
    }

    /// Counts a call: whether it has answered with anything, or why it failed, and how long it took.
    fn see(&mut self, answered: Result<bool, &InferError>, took: Took) {
        match answered {
            Ok(is_any) => {
                if is_any {
                    self.model.statistics.gather_first_response(took.total_ns, &mut self.first_responses);
                }
                self.count(took);
            }
            Err(error) => {
                let total = Duration::from_nanos(took.total_ns);
                self.model.statistics.failed(refusal_of(error), total);
            }
        }
    }

    fn count(&mut self, took: Took) {
        self.took.total_ns += took.total_ns;
        self.took.input_ns += took.input_ns;
        self.num_uncounted += 1;
        if self.num_uncounted == MAX_UNCOUNTED || self.model.statistics.has_summaries() {
            self.settle();
        }
    }

    /// Counts what has not been.
    pub fn settle(&mut self) {
        let Took { total_ns, input_ns } = std::mem::take(&mut self.took);
        let [total, input] = [total_ns, input_ns].map(Duration::from_nanos);
        self.model.statistics.first_responses(&mut self.first_responses);
        let (count, batch_size) = (std::mem::take(&mut self.num_uncounted), self.accepted.batch_size);
        if count > 0 {
            let all = Outcome { total, input, batch_size, executed: Some(batch_size), ..Outcome::default() };
            self.model.statistics.all_succeeded(&all, count);
        }
    }
}

impl Drop for Caller {
    fn drop(&mut self) {
        self.settle();
    }
}

impl Accepted {
    fn new(request: &InferRequest, batch_size: u64) -> Self {
        let form = |tensor: &Tensor| Form {
            name: tensor.name.clone(),
            datatype: tensor.datatype,
            shape: tensor.shape.clone(),
            num_bytes: tensor.data.len(),
        };
        // The elements of text have lengths of their own, which are to be looked at.
        let is_known = request.inputs.iter().all(|tensor| tensor.datatype != DataType::Bytes);
        let inputs = if is_known { request.inputs.iter().map(form).collect() } else { SmallVec::new() };
        Self { inputs, batch_size }
    }

    /// Whether `request` differs in its elements alone.
    fn is_like(&self, request: &InferRequest) -> bool {
        let is_alike = |(known, tensor): (&Form, &Tensor)| {
            known.datatype == tensor.datatype
                && known.num_bytes == tensor.data.len()
                && known.shape[..] == tensor.shape[..]
                && known.name == tensor.name
        };
        !self.inputs.is_empty()
            && self.inputs.len() == request.inputs.len()
            && self.inputs.iter().zip(&request.inputs).all(is_alike)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_request_is_checked_again_unless_it_differs_in_its_elements_alone() {
        let request = |inputs: Vec<Tensor>| InferRequest { inputs, ..InferRequest::default() };
        let ids = |name: &str, shape: &[i64], ids: &[i32]| Tensor::from_i32(name, shape, ids);
        let known = Accepted::new(&request(vec![ids("a", &[1, 2], &[1, 2]), ids("b", &[1, 1], &[3])]), 1);
        let is_like = |a: Tensor, b: Tensor| known.is_like(&request(vec![a, b]));
        assert!(is_like(ids("a", &[1, 2], &[4, 5]), ids("b", &[1, 1], &[6])));
        let b = || ids("b", &[1, 1], &[3]);
        for other in [
            ids("c", &[1, 2], &[1, 2]),
            ids("a", &[2, 1], &[1, 2]),
            ids("a", &[1, 2], &[1]),
            Tensor::from_u32("a", &[1, 2], &[1, 2]),
        ] {
            assert!(!is_like(other, b()));
        }
        assert!(!known.is_like(&request(vec![ids("a", &[1, 2], &[1, 2])])));
        let words = request(vec![Tensor::from_byte_strings("a", &[1], &["x"])]);
        assert!(!Accepted::new(&words, 1).is_like(&words), "the lengths of text are elements");
    }
}
