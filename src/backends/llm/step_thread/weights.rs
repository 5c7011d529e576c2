//! A start with other weights: those of another checkpoint, for a replica whose workers have ended in a sleep.

use std::sync::atomic::Ordering;

use super::super::inbox::SleepResult;
use super::super::weights::Weights;
use super::{End, Running, StepThread};

/// Other weights that the next start loads for the first time.
pub(super) struct Replacement {
    /// The weights before.
    before: Weights,
    /// Gets the result of the start.
    done: SleepResult,
}

impl Running {
    /// A request to wake with other weights. Workers that run keep theirs.
    pub(super) fn wake_with(&mut self, weights: Weights, done: SleepResult, has_workers: bool) {
        if has_workers || self.replacement.is_some() {
            let _ = done.send(Err("it was woken before its weights were replaced".to_owned()));
            return;
        }
        self.replacement = Some(Replacement { before: self.set_weights(weights), done });
        self.sleep.wake();
    }

    /// Ends a request for other weights after the first start with them. If it failed, the next one loads the weights before.
    pub(super) fn end_replacement(&mut self, failure: Option<&End>) {
        let Some(Replacement { before, done }) = self.replacement.take() else { return };
        let result = match failure {
            None => {
                self.thread.shared.sleeps.store(false, Ordering::Release);
                Ok(())
            }
            Some(End::Lost(lost)) => {
                self.set_weights(before);
                Err(lost.reason.clone())
            }
            Some(End::Asleep | End::Stopped(_)) => Err("the model stopped".to_owned()),
        };
        let _ = done.send(result); // The client may have left.
    }

    /// Sets the checkpoint that workers read from the next start on. Returns the one before.
    fn set_weights(&mut self, weights: Weights) -> Weights {
        let StepThread { config, .. } = &mut self.thread;
        Weights {
            checkpoint: std::mem::replace(&mut config.checkpoint, weights.checkpoint),
            fingerprint: std::mem::replace(&mut config.checkpoint_fingerprint, weights.fingerprint),
        }
    }
}
