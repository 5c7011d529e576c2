//! Processes step outputs: adds tokens to their sequences, ends sequences, creates events.

use smallvec::SmallVec;

use crate::draft::InStep;
use crate::engine::Engine;
use crate::plan::{SampledToken, StepOutput};
use crate::sequence::SequenceState;
use crate::slot::Sample;
use crate::{FinishReason, RowId, TokenEvent, TokenId};

/// The output is not that of the oldest plan in flight. Workers and engine disagree, so the workers must be restarted.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[allow(missing_docs)] // Fields are named in the messages.
pub enum SettleError {
    /// No step is in flight.
    #[error("output of step {found} came but no step is in flight; restart the workers")]
    NothingInFlight { found: u64 },
    /// The output of another step.
    #[error("output of step {found} came, expected step {expected}; restart the workers")]
    WrongStep { expected: u64, found: u64 },
    /// The number of tokens differs from the number sampled.
    #[error("output of step {step} has {found} tokens, expected {expected}; restart the workers")]
    WrongCount { step: u64, expected: usize, found: usize },
    /// The token of another row.
    #[error("token {index} of step {step} is of row {}, expected row {}; restart the workers", .found.0, .expected.0)]
    WrongRow { step: u64, index: usize, expected: RowId, found: RowId },
}

impl Engine {
    /// Processes the output of the oldest plan in flight and appends the resulting events to `events`.
    ///
    /// # Errors
    /// Returns an error if it is not the output of that plan; the engine's state is unchanged then.
    pub fn settle(&mut self, output: StepOutput, events: &mut Vec<TokenEvent>) -> Result<(), SettleError> {
        self.check_output(&output)?;
        self.drain_events(events);
        events.reserve(output.tokens.len());
        let mut settled = self.in_flight.pop_front().expect("a checked output has its plan");
        for (&sample, token) in settled.samples.iter().zip(output.tokens) {
            self.settle_token(sample, token, events);
        }
        // What was guessed before was compared with the tokens of this step.
        self.keep_guesses(&settled.samples, output.guesses);
        settled.samples.clear();
        if settled.has_work {
            self.last_computed = Some(settled.step);
        }
        self.spare_samples = settled.samples;
        Ok(())
    }

    /// Keeps what the devices guessed behind the tokens. Both lists are in plan order.
    fn keep_guesses(&mut self, samples: &[Sample], guesses: Vec<(RowId, Vec<TokenId>)>) {
        let mut samples = samples.iter();
        for (row, guesses) in guesses {
            let Some(sample) = samples.find(|sample| sample.row == row) else { return };
            let sequence = self.sequences.get_mut(sample.slot, sample.sequence).filter(|_| !sample.is_void);
            if let Some(sequence) = sequence.filter(|sequence| sequence.state == SequenceState::Running(row)) {
                sequence.guesses = guesses;
            }
        }
    }

    fn check_output(&self, output: &StepOutput) -> Result<(), SettleError> {
        let Some(oldest) = self.in_flight.front() else {
            return Err(SettleError::NothingInFlight { found: output.step });
        };
        let step = oldest.step;
        if output.step != step {
            return Err(SettleError::WrongStep { expected: step, found: output.step });
        }
        let (expected, found) = (oldest.samples.len(), output.tokens.len());
        if found != expected {
            return Err(SettleError::WrongCount { step, expected, found });
        }
        let wrong = oldest.samples.iter().zip(&output.tokens).position(|(sample, token)| sample.row != token.row);
        wrong.map_or(Ok(()), |index| {
            let (expected, found) = (oldest.samples[index].row, output.tokens[index].row);
            Err(SettleError::WrongRow { step, index, expected, found })
        })
    }

    fn settle_token(&mut self, sample: Sample, token: SampledToken, events: &mut Vec<TokenEvent>) {
        let Some(sequence) = self.sequences.get_mut(sample.slot, sample.sequence) else {
            self.totals.discarded_tokens += 1; // The sequence ended while the step was in flight.
            return;
        };
        sequence.num_in_flight -= 1;
        if sample.is_void {
            self.totals.discarded_tokens += 1; // A mask of the sequence was late.
            return;
        }
        if sequence.beams.is_some() {
            return self.settle_beam(sample, token, events);
        }
        if sequence.drafting.is_some() {
            return self.settle_draft(sample, token, events);
        }
        if sequence.max_drafts > 0 && !sequence.guesses.is_empty() {
            sequence.compare_guess(token.token);
            self.draft_history.acceptance.follow(&sequence.acceptance);
        }
        self.totals.output_tokens += 1;
        if sequence.continues_after(token.token) {
            // Fast path of nearly every token: it is not held back and does not end the sequence.
            sequence.tokens.push(token.token);
            events.push(sequence.event(SmallVec::from_buf([token]), None));
            return;
        }
        let mut tokens = SmallVec::new();
        match sequence.accept(token, &mut tokens) {
            Ok(finished) => {
                if finished.is_none() && sequence.guided.as_ref().is_some_and(|guided| guided.caution > 0) {
                    self.masks_due.push((sample.slot, sample.sequence));
                }
                self.release(sample, tokens, finished, events);
            }
            Err(reason) => self.fail(sample, tokens, reason, events),
        }
    }

    /// Creates the event of tokens that may be released, and ends the sequence if there is a reason.
    fn release(
        &mut self,
        sample: Sample,
        tokens: SmallVec<[SampledToken; 1]>,
        finished: Option<FinishReason>,
        events: &mut Vec<TokenEvent>,
    ) {
        if !tokens.is_empty() || finished.is_some() {
            events.push(self.sequences[sample.slot].event(tokens, finished));
        }
        if finished.is_some() {
            self.end(sample.slot);
        }
    }

    /// Releases tokens and ends their sequence, because its constraint does not allow the token after them.
    fn fail(
        &mut self,
        sample: Sample,
        tokens: SmallVec<[SampledToken; 1]>,
        reason: String,
        events: &mut Vec<TokenEvent>,
    ) {
        self.release(sample, tokens, None, events);
        self.end_guided(sample.slot, FinishReason::Constraint, Some(reason));
        self.drain_events(events);
    }

    /// Adds the candidates of one beam. After the last beam of the step, advances the search.
    fn settle_beam(&mut self, sample: Sample, token: SampledToken, events: &mut Vec<TokenEvent>) {
        let sequence = &mut self.sequences[sample.slot];
        let Some(beams) = sequence.beams.as_mut().filter(|_| sequence.state != SequenceState::Queued) else {
            self.totals.discarded_tokens += 1; // The search was preempted and starts over.
            return;
        };
        beams.push(token);
        self.totals.output_tokens += 1;
        if !beams.is_settled() {
            return;
        }
        if let Some((outputs, reason)) = beams.advance() {
            events.push(TokenEvent { beams: outputs, ..sequence.event(SmallVec::new(), Some(reason)) });
            self.end(sample.slot);
        }
    }

    /// Adds one verified token. After the last one of the step, accepts the tokens up to and including the one at the
    /// first wrong guess.
    fn settle_draft(&mut self, sample: Sample, token: SampledToken, events: &mut Vec<TokenEvent>) {
        let forced = self.config.forced_acceptance;
        let sequence = &mut self.sequences[sample.slot];
        let drafting = sequence.drafting.as_mut().expect("a guess that is settled is in flight");
        drafting.verified.push(token);
        if drafting.verified.len() <= drafting.drafts.len() {
            return;
        }
        let InStep { drafts, verified } = *sequence.drafting.take().expect("as above");
        let (mut tokens, mut finished, mut num_accepted) = (SmallVec::new(), None, 0);
        let num_known = sequence.tokens.len();
        let num_forced = forced.map(|forced| sequence.acceptance.forced(forced, drafts.len()));
        for (index, mut sampled) in verified.into_iter().enumerate() {
            let draft =
                drafts.get(index).filter(|draft| num_forced.map_or(**draft == sampled.token, |num| index < num));
            if let Some(&draft) = draft {
                sampled.token = draft; // Another one only where a benchmark forces it.
            }
            match sequence.accept(sampled, &mut tokens) {
                Ok(reason) => finished = reason,
                Err(reason) => return self.fail(sample, tokens, reason, events),
            }
            self.totals.output_tokens += 1;
            if finished.is_some() || draft.is_none() {
                break;
            }
            num_accepted += 1;
        }
        sequence.draft_usage.num_accepted += num_accepted;
        self.totals.accepted_tokens += u64::from(num_accepted);
        sequence.acceptance.learn(num_accepted as usize, drafts.len());
        self.draft_history.acceptance.follow(&sequence.acceptance);
        if let SequenceState::Running(_) = sequence.state {
            // A recurrent state that has seen wrong tokens goes back to the known ones.
            let recurrent = &mut sequence.recurrent;
            recurrent.must_restore = recurrent.before_drafts.is_some() && (num_accepted as usize) < drafts.len();
            sequence.num_computed = if recurrent.must_restore { num_known } else { sequence.tokens.len() - 1 };
        }
        self.release(sample, tokens, finished, events);
    }
}
