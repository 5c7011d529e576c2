//! Constraints: which tokens a sequence may continue with, decided between its steps.
//!
//! The mask of a step depends on the token of the step before it. A plan is sent before that token is known, so masks
//! travel alone: when the outputs of all earlier steps are settled, [`Engine::mask_jobs`] are those of the oldest step in
//! flight, which are computed while the workers run its forward pass. Only choosing the tokens waits for them.

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

/// The computation of the masks of one row of a step. Jobs are independent of each other, so they may run on several
/// threads.
#[derive(Debug)]
pub struct MaskJob {
    step: u64,
    /// Index of its first sample in the plan.
    first: usize,
    sample: Sample,
    /// `None` if the sequence has ended: what its row samples is discarded.
    constraint: Option<RequestConstraint>,
    drafts: Vec<TokenId>,
    /// One for each sample of the row.
    masks: Vec<Vec<u32>>,
    result: Result<(), String>,
}

impl MaskJob {
    /// Computes the masks.
    pub fn run(&mut self) {
        if let Some(RequestConstraint(constraint)) = &mut self.constraint {
            self.result = masks_after(&mut **constraint, &self.drafts, &mut self.masks);
        }
    }
}

impl Engine {
    /// The masks that the workers need for the oldest plan in flight, if they were not computed yet: a job for each row that
    /// is constrained, in plan order. Run them and pass all of them to [`Engine::finish_masks`] before any other call. Masks
    /// of later plans come when that plan is settled.
    pub fn mask_jobs(&mut self) -> Vec<MaskJob> {
        let Some(oldest) = self.in_flight.front_mut().filter(|oldest| oldest.needs_masks) else { return Vec::new() };
        oldest.needs_masks = false;
        let step = oldest.step;
        let mut jobs: Vec<MaskJob> = Vec::new();
        for (first, &sample) in oldest.samples.iter().enumerate().filter(|(_, sample)| sample.is_constrained) {
            // A row that verifies drafts has several samples in a row.
            if let Some(job) = jobs.last_mut().filter(|job| job.sample.sequence == sample.sequence) {
                job.masks.push(Vec::new());
                continue;
            }
            let sequence = self.sequences.get_mut(sample.slot, sample.sequence);
            let (constraint, drafts) = match sequence {
                None => (None, Vec::new()),
                Some(sequence) => {
                    let drafts = sequence.drafting.as_ref().map(|drafting| drafting.drafts.clone());
                    (sequence.constraint.take(), drafts.unwrap_or_default())
                }
            };
            jobs.push(MaskJob { step, first, sample, constraint, drafts, masks: vec![Vec::new()], result: Ok(()) });
        }
        jobs
    }

    /// Takes back the jobs of [`Engine::mask_jobs`], which have run. Returns one mask for each constrained sample, in plan
    /// order. Sequences whose constraint cannot go on end.
    pub fn finish_masks(&mut self, jobs: Vec<MaskJob>) -> Vec<SampleMask> {
        let mut masks = Vec::with_capacity(jobs.len());
        for job in jobs {
            if let Some(constraint) = job.constraint {
                self.sequences[job.sample.slot].constraint = Some(constraint);
            }
            if let Err(reason) = job.result {
                self.fail_constraint(job.sample, reason);
            }
            let mask = |(offset, words)| SampleMask { step: job.step, sample: (job.first + offset) as u32, words };
            masks.extend(job.masks.into_iter().enumerate().map(mask));
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
