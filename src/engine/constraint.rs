//! Constraints: which tokens a sequence may continue with, decided between its steps.
//!
//! The mask of a step depends on the token of the step before it. A plan is sent before that token is known, so masks
//! travel alone: when the outputs of all earlier steps are settled, [`Engine::masks`] computes those of the oldest step
//! in flight, while the workers run its forward pass. Only choosing the tokens waits for them.

use std::fmt;

use serde::{Deserialize, Serialize};
use smallvec::SmallVec;

use crate::engine::{Engine, Sample};
use crate::{FinishReason, TokenId};

/// The state of one constrained sequence. It belongs to its sequence alone.
pub trait Constraint: Send + fmt::Debug {
    /// Writes the set of tokens that may come next to `words`, which is cleared first: bit `id % 32` of word `id / 32`.
    ///
    /// # Errors
    /// Why no token can be chosen. The sequence ends with [`FinishReason::Constraint`].
    fn mask(&mut self, words: &mut Vec<u32>) -> Result<(), String>;

    /// Adds a token of the output, or the end id that completes it.
    ///
    /// # Errors
    /// Why the token may not come here. The sequence ends with [`FinishReason::Constraint`].
    fn accept(&mut self, token: TokenId) -> Result<(), String>;

    /// How many of `tokens`, from the first, could come next in a row. Adds them to the state; [`Constraint::rollback`]
    /// removes them.
    fn accept_valid(&mut self, tokens: &[TokenId]) -> usize;

    /// Removes the last `count` tokens.
    ///
    /// # Errors
    /// Why they cannot be removed. The sequence ends with [`FinishReason::Constraint`].
    fn rollback(&mut self, count: usize) -> Result<(), String>;

    /// Whether the output is complete: no further token may come.
    fn is_complete(&self) -> bool;

    /// An independent copy of the state.
    fn copy(&self) -> Box<dyn Constraint>;
}

/// The constraint of a request. A clone has a state of its own.
#[derive(Debug)]
pub struct RequestConstraint(pub Box<dyn Constraint>);

impl Clone for RequestConstraint {
    fn clone(&self) -> Self {
        Self(self.0.copy())
    }
}

impl PartialEq for RequestConstraint {
    /// States cannot be compared, so no two are equal.
    fn eq(&self, _: &Self) -> bool {
        false
    }
}

/// The tokens that one sample of a step may choose.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct SampleMask {
    /// The number of the plan.
    pub step: u64,
    /// Index among the samples of the plan, in plan order.
    pub sample: u32,
    /// Bit `id % 32` of word `id / 32` says that token `id` may be chosen. Missing words allow no token.
    #[serde(with = "crate::plan::words")]
    pub words: Vec<u32>,
}

impl Engine {
    /// Computes the masks of the oldest plan in flight and passes each to `send`, once: one for each of its samples
    /// whose row is constrained, in plan order. Masks of later plans come when that plan is settled.
    ///
    /// # Errors
    /// The first error of `send`.
    pub fn masks<E>(&mut self, mut send: impl FnMut(SampleMask) -> Result<(), E>) -> Result<(), E> {
        let Some(oldest) = self.in_flight.front_mut().filter(|oldest| oldest.needs_masks) else { return Ok(()) };
        oldest.needs_masks = false;
        let step = oldest.step;
        let constrained = |(index, sample): (usize, &Sample)| sample.is_constrained.then_some((index, *sample));
        let samples: Vec<(usize, Sample)> = oldest.samples.iter().enumerate().filter_map(constrained).collect();
        let mut first = 0;
        while let Some(&(index, sample)) = samples.get(first) {
            // A row that verifies drafts has several samples in a row.
            let group = samples[first..].iter().take_while(|(_, other)| other.sequence == sample.sequence).count();
            for (offset, words) in self.masks_of(sample, group).into_iter().enumerate() {
                send(SampleMask { step, sample: (index + offset) as u32, words })?;
            }
            first += group;
        }
        Ok(())
    }

    /// The masks of the `count` samples of one row. A sequence that has ended needs none; its row gets empty ones, and
    /// what it samples is discarded.
    fn masks_of(&mut self, sample: Sample, count: usize) -> Vec<Vec<u32>> {
        let mut masks = vec![Vec::new(); count];
        let Some(sequence) = self.sequences.get_mut(sample.slot, sample.sequence) else { return masks };
        let constraint = sequence.constraint.as_mut().expect("a constrained sample has a constraint");
        let drafts = sequence.drafting.as_ref().map_or(&[][..], |drafting| &drafting.drafts);
        if let Err(reason) = masks_after(&mut *constraint.0, drafts, &mut masks) {
            self.fail_constraint(sample, reason);
        }
        masks
    }

    /// Ends a sequence whose constraint cannot go on.
    pub(crate) fn fail_constraint(&mut self, sample: Sample, reason: String) {
        let sequence = &mut self.sequences[sample.slot];
        let tokens: SmallVec<_> = sequence.take_held();
        let mut event = sequence.event(tokens, Some(FinishReason::Constraint));
        event.error = Some(reason.into());
        self.end(sample.slot);
        self.events.push(event);
    }
}

/// The masks after each of `0..masks.len()` tokens of `drafts`. The state is as before.
fn masks_after(constraint: &mut dyn Constraint, drafts: &[TokenId], masks: &mut [Vec<u32>]) -> Result<(), String> {
    let (mut accepted, mut result) = (0, Ok(()));
    for (index, words) in masks.iter_mut().enumerate() {
        result = constraint.mask(words);
        let Some(draft) = drafts.get(index).filter(|_| result.is_ok()) else { break };
        if constraint.accept_valid(std::slice::from_ref(draft)) == 0 {
            break; // Drafts are validated before they are planned. Later samples would be discarded anyway.
        }
        accepted += 1;
    }
    match accepted {
        0 => result,
        accepted => result.and(constraint.rollback(accepted)),
    }
}
