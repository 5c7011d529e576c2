//! The masks of constrained samples: which tokens each of them may choose.
//!
//! The mask of a step depends on the token of the step before it. A plan is sent before that token is known, so masks
//! travel alone: when the outputs of all earlier steps are settled, [`Engine::mask_jobs`] are those of the oldest step in
//! flight, which are computed while the workers run its forward pass. Only choosing the tokens waits for them.
//!
//! A job may take long. [`Engine::take_masks`] does not wait for it: the row sits out the step. The tokens that it samples
//! in the steps in flight are discarded, so the sequence is as before the step; its KV blocks are, too, because the same
//! positions are computed again. A recurrent state has no positions: such a sequence leaves its row, and starts again from a snapshot.
//! Its next masks are computed before it is planned.

use smallvec::SmallVec;

use crate::constraint::{Constraint, RequestConstraint, SampleMask};
use crate::engine::{Engine, Masks};
use crate::sequence::{Sequence, SequenceState};
use crate::slot::{Sample, Slot};
use crate::{FinishReason, SequenceId, TokenId};

/// The computation of the masks of one sequence. Jobs are independent of each other, so they may run on several threads.
#[derive(Debug)]
pub struct MaskJob {
    sequence: SequenceId,
    /// The plan that is next when the job starts.
    next_step: u64,
    constraint: RequestConstraint,
    /// Tokens of the output that the constraint does not have yet.
    unaccepted: Vec<TokenId>,
    drafts: Vec<TokenId>,
    /// One for each sample of the row.
    masks: Vec<Vec<u32>>,
    /// A copy of the first mask, to check the token with.
    sent: Vec<u32>,
    /// Whether an earlier mask of the sequence was late.
    is_slow: bool,
    /// Whether the output is complete, so that there is no mask.
    result: Result<bool, String>,
}

impl MaskJob {
    fn start(sequence: &mut Sequence, next_step: u64) -> Option<Self> {
        let guided = sequence.guided.as_mut().filter(|guided| guided.masks.is_none())?;
        let constraint = guided.constraint.take()?;
        let drafts = sequence.drafting.as_ref().map_or_else(Vec::new, |drafting| drafting.drafts.clone());
        Some(Self {
            sequence: sequence.id,
            next_step,
            constraint,
            unaccepted: std::mem::take(&mut guided.unaccepted),
            masks: vec![Vec::new(); 1 + drafts.len()],
            drafts,
            sent: Vec::new(),
            is_slow: guided.caution > 0,
            result: Ok(false),
        })
    }

    /// Whether an earlier mask of the sequence was late, so that this one may take long, too.
    pub fn is_slow(&self) -> bool {
        self.is_slow
    }

    /// Computes the masks.
    pub fn run(&mut self) {
        self.result = self.compute();
    }

    /// Gives up: the sequence ends with this reason.
    pub fn fail(&mut self, reason: String) {
        self.result = Err(reason);
    }

    fn compute(&mut self) -> Result<bool, String> {
        let constraint = &mut *self.constraint.0;
        for &token in &self.unaccepted {
            constraint.accept(token)?;
        }
        if !self.unaccepted.is_empty() && constraint.is_complete() {
            return Ok(true);
        }
        masks_after(constraint, &self.drafts, &mut self.masks)?;
        self.sent.clone_from(&self.masks[0]);
        Ok(false)
    }
}

impl Engine {
    /// Jobs that can start now: those of the oldest plan in flight, and those of sequences that are planned only with their
    /// masks. Run each and pass it to [`Engine::finish_mask`] when it is done. Jobs of later plans come when that plan is settled.
    pub fn mask_jobs(&mut self) -> Vec<MaskJob> {
        let (sequences, next_step) = (&mut self.sequences, self.next_step);
        let mut start = |slot: Slot, id: SequenceId| MaskJob::start(sequences.get_mut(slot, id)?, next_step);
        let mut jobs: Vec<_> = self.masks_due.drain(..).filter_map(|(slot, id)| start(slot, id)).collect();
        if let Some(oldest) = self.in_flight.front_mut().filter(|oldest| oldest.masks == Masks::Due) {
            oldest.masks = Masks::Open;
            jobs.extend(oldest.samples.iter().filter(|s| s.needs_mask()).filter_map(|s| start(s.slot, s.sequence)));
        }
        jobs
    }

    /// Takes back a job of [`Engine::mask_jobs`], which has run. Its sequence ends if it is complete or cannot go on.
    pub fn finish_mask(&mut self, job: MaskJob) {
        let Some(slot) = self.sequences.find(job.sequence) else { return };
        let Some(guided) = &mut self.sequences[slot].guided else { return };
        guided.constraint = Some(job.constraint);
        if self.next_step <= job.next_step + 1 {
            guided.caution = guided.caution.saturating_sub(1);
        }
        match job.result {
            Ok(false) => (guided.masks, guided.sent) = (Some(job.masks), job.sent),
            Ok(true) => self.end_guided(slot, FinishReason::Complete, None),
            Err(reason) => self.end_guided(slot, FinishReason::Constraint, Some(reason)),
        }
    }

    /// Whether the masks of the oldest plan in flight are not sent yet; [`Engine::take_masks`] returns them.
    pub fn owes_masks(&self) -> bool {
        self.in_flight.front().is_some_and(|oldest| oldest.masks == Masks::Open)
    }

    /// Whether a mask of the oldest plan in flight is still being computed.
    pub fn lacks_masks(&self) -> bool {
        self.owes_masks()
            && self.in_flight[0].samples.iter().any(|sample| {
                let sequence = self.sequences.find(sample.sequence).map(|slot| &self.sequences[slot]);
                let guided = sequence.and_then(|sequence| sequence.guided.as_ref());
                sample.needs_mask() && guided.is_some_and(|guided| guided.masks.is_none())
            })
    }

    /// The masks of the oldest plan in flight, one for each constrained sample, in plan order. Rows whose masks are still
    /// being computed sit out this step: they get an empty mask, and the tokens that they sample are discarded.
    pub fn take_masks(&mut self) -> Vec<SampleMask> {
        if !self.owes_masks() {
            return Vec::new();
        }
        self.in_flight[0].masks = Masks::Sent;
        let (step, mut masks) = (self.in_flight[0].step, Vec::new());
        let mut rest: Option<(SequenceId, std::vec::IntoIter<Vec<u32>>)> = None;
        for index in 0..self.in_flight[0].samples.len() {
            let sample = self.in_flight[0].samples[index];
            if !sample.is_constrained {
                continue;
            }
            // A row that verifies drafts has several samples in a row.
            if rest.as_ref().is_none_or(|(sequence, _)| *sequence != sample.sequence) {
                rest = Some((sample.sequence, self.take_masks_of(sample).into_iter()));
            }
            let words = rest.as_mut().and_then(|(_, rest)| rest.next()).unwrap_or_default();
            masks.push(SampleMask { step, sample: index as u32, words });
        }
        masks
    }

    /// The masks of the samples of one row, from the first of them on; none if they are discarded.
    fn take_masks_of(&mut self, sample: Sample) -> Vec<Vec<u32>> {
        let sequence = self.sequences.get_mut(sample.slot, sample.sequence).filter(|_| !sample.is_void);
        let Some(guided) = sequence.and_then(|sequence| sequence.guided.as_mut()) else { return Vec::new() };
        guided.masks.take().unwrap_or_else(|| {
            self.sit_out(sample);
            Vec::new()
        })
    }

    /// Discards what a sequence samples in the steps in flight. It continues from its settled tokens.
    fn sit_out(&mut self, late: Sample) {
        self.totals.late_masks += 1;
        for sample in self.in_flight.iter_mut().flat_map(|step| &mut step.samples) {
            sample.is_void |= sample.sequence == late.sequence;
        }
        let sequence = &mut self.sequences[late.slot];
        // Drafts are checked when a plan is made, which must not wait for a slow constraint.
        (sequence.drafting, sequence.max_drafts) = (None, 0);
        let is_running = matches!(sequence.state, SequenceState::Running(_));
        let leaves_row = is_running && self.config.num_states > 0;
        if is_running {
            sequence.num_computed = sequence.tokens.len() - 1;
            sequence.join_len = sequence.join_len.min(sequence.num_computed);
        }
        if let Some(guided) = &mut sequence.guided {
            guided.be_cautious();
            guided.needs_revision = is_running && !leaves_row;
        }
        if leaves_row {
            self.requeue(late.slot);
        }
    }

    /// Ends a constrained sequence between its steps.
    pub(crate) fn end_guided(&mut self, slot: Slot, reason: FinishReason, error: Option<String>) {
        let sequence = &mut self.sequences[slot];
        let tokens: SmallVec<_> = sequence.take_held();
        let mut event = sequence.event(tokens, Some(reason));
        event.error = error.map(Into::into);
        self.end(slot);
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
