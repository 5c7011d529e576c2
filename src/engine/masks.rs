//! The masks of constrained samples: which tokens each of them may choose.
//!
//! The mask of a step depends on the token of the step before it. A plan is sent before that token is known, so masks
//! travel alone: when the outputs of all earlier steps are settled, [`Engine::mask_jobs`] are those of the oldest step in
//! flight, which are computed while the workers run its forward pass. Only choosing the tokens waits for them.

use smallvec::SmallVec;

use crate::constraint::{Constraint, RequestConstraint, SampleMask};
use crate::engine::Engine;
use crate::slot::Sample;
use crate::{FinishReason, TokenId};

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
