//! State that a step of an ensemble keeps from one request to the next.

use std::any::Any;
use std::fmt;
use std::sync::{Arc, Mutex, PoisonError};

/// State of one step of an ensemble, while the ensemble serves one request.
///
/// Steps after a decoupled step run once for each of its responses. Each of them keeps a state between these runs, so that
/// a detokenizer can hold back an incomplete character until the rest of it arrives. The state is dropped when the
/// ensemble's request ends.
#[derive(Clone, Default)]
pub struct EnsembleStep {
    state: Arc<Mutex<Option<Box<dyn Any + Send>>>>,
    /// Whether this is the step's last request.
    pub is_last: bool,
}

impl EnsembleStep {
    /// Calls `work` with the state of this step. `make` creates the state if there is none of this type yet.
    pub fn with_state<S: Send + 'static, R>(&self, make: impl FnOnce() -> S, work: impl FnOnce(&mut S) -> R) -> R {
        let mut slot = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        if !slot.as_ref().is_some_and(|state| state.is::<S>()) {
            *slot = Some(Box::new(make()));
        }
        let state = slot.as_mut().and_then(|state| state.downcast_mut());
        work(state.expect("the state has this type"))
    }
}

impl fmt::Debug for EnsembleStep {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.debug_struct("EnsembleStep").field("is_last", &self.is_last).finish_non_exhaustive()
    }
}
