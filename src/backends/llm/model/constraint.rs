//! The constraints of requests: prepared when the model starts, and compiled for each request.

use std::sync::Arc;

use engine::{Refused, RequestConstraint};
use generation::{ConstraintError, Constraints, GenerateRequest};
use serving::InferError;
use tokio::runtime::{Handle, RuntimeFlavor};

use super::Llm;
use crate::llm::refusal::error_of;

/// The niceness of the thread that prepares constraints.
const PREPARING_NICENESS: i32 = 10;

/// Prepares constraints beside the start of the model. If the system gives no thread, the first constrained request does it.
pub(super) fn prepare(constraints: &Arc<Constraints>) {
    let constraints = Arc::clone(constraints);
    let prepare = move || {
        let _ = rustix::process::nice(PREPARING_NICENESS); // Its failure costs other threads a little time.
        constraints.prepare();
    };
    let _ = std::thread::Builder::new().name("vocabulary".to_owned()).spawn(prepare);
}

impl Llm {
    /// Compiles the constraint of a request, if it has one. Other threads serve requests during this time.
    pub(super) fn constraint(&self, request: &GenerateRequest) -> Result<Option<RequestConstraint>, InferError> {
        if request.guide.is_free() {
            return Ok(None);
        }
        if request.sequence.beams.is_some() {
            return Err(error_of(&Refused::ConstrainedBeams));
        }
        let constraints = self.constraints.as_ref().ok_or_else(|| {
            InferError::invalid(format!(
                "model `{}` has no tokenizer, so its texts cannot be constrained",
                self.config.name
            ))
        })?;
        let compile = || constraints.compile(&request.guide, &request.sequence.sampling.end_ids);
        let can_block = Handle::try_current().is_ok_and(|it| it.runtime_flavor() == RuntimeFlavor::MultiThread);
        let compiled = if can_block { tokio::task::block_in_place(compile) } else { compile() };
        compiled.map(Some).map_err(|error| match error {
            ConstraintError::Busy { .. } => InferError::unavailable(error.to_string()),
            error => InferError::invalid(error.to_string()),
        })
    }
}
