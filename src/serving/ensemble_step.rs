//! What a step of an ensemble keeps from one request to the next.

use std::any::Any;
use std::fmt;
use std::sync::{Arc, Mutex, PoisonError};

/// The place of a request in a run of an ensemble.
///
/// A decoupled step makes the steps behind it run once for each of its responses. Those steps share a state per run, so
/// that a detokenizer can hold back half a character until its other half comes. It ends with the run.
#[derive(Clone, Default)]
pub struct EnsembleStep {
    state: Arc<Mutex<Option<Box<dyn Any + Send>>>>,
    /// No further request of this run will reach this step.
    pub is_last: bool,
}

impl EnsembleStep {
    /// Calls `work` with this step's state of this run, made by `make` when there is none of its type yet.
    pub fn with_state<S: Send + 'static, R>(&self, make: impl FnOnce() -> S, work: impl FnOnce(&mut S) -> R) -> R {
        let mut slot = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        if !slot.as_ref().is_some_and(|state| state.is::<S>()) {
            *slot = Some(Box::new(make()));
        }
        let state = slot.as_mut().and_then(|state| state.downcast_mut());
        work(state.expect("a state of this type was just put there"))
    }
}

impl fmt::Debug for EnsembleStep {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.debug_struct("EnsembleStep").field("is_last", &self.is_last).finish_non_exhaustive()
    }
}
