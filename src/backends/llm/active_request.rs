//! The state of one request in flight: converts the events of its sequences, and cancels them.

use std::collections::VecDeque;
use std::sync::Arc;

use engine::{BlockUsage, FinishReason, MovedSequence, RowId, SampledToken, SequenceId, TokenEvent};
use generation::{Delta, GenerateEvent, Logits, LogitsPosition, SequenceText, Tokens};
use serving::{ErrorKind, InferError, Name, Timestamp};
use smallvec::{SmallVec, smallvec};
use supervision::LogitsPlace;
use tokio::sync::watch;

use super::adapters::AdapterUse;
use super::event_queue;
use super::inbox::Message;
use super::logits::LogitsCharge;
use super::request_event::{OneToken, RequestEvent};
use super::router::Admission;
use super::submission::{StopHandle, StopHandles, Submission, UNLOADED, WaitOutcome};
use super::text_stop::TextStop;
use super::timing::Timing;

/// The texts of a request's sequences, by sequence.
pub(crate) type SequenceTexts = SmallVec<[SequenceText; 1]>;

/// The id of a sequence that has ended, once the others have others.
const ENDED: SequenceId = SequenceId(u64::MAX);

/// Adds new tokens of a sequence to its text. Sets the text, the tokens that are released with it, and the stop text that ends it.
fn decode(sequence: &mut SequenceText, tokens: Tokens, ends: bool, delta: &mut Delta) {
    let started = Timestamp::now();
    delta.stop = sequence.push(tokens, ends, &mut delta.text, &mut delta.tokens);
    let ended = Timestamp::now();
    delta.decoded = Some((ended, ended.ns_since(started)));
}

/// A request in flight.
pub(crate) struct ActiveRequest {
    pub(crate) client_id: Name,
    pub(crate) submission: Submission,
    pub(crate) stop_handles: StopHandles,
    pub(crate) stop: Arc<StopHandle>,
    /// Counts requests in flight.
    pub(crate) in_flight: Arc<watch::Sender<usize>>,
    /// Freed when the request has ended.
    pub(crate) _logits: Option<LogitsCharge>,
    /// Ends with the request.
    pub(crate) _adapter: Option<AdapterUse>,
    pub(crate) timing: Timing,
    /// One for each sequence, where there are stop words.
    pub(crate) text_stops: Vec<TextStop>,
    /// One for each sequence, or beam, where the events have text.
    pub(crate) texts: SequenceTexts,
    /// Empty until a replica has accepted the request. A beam search has one sequence for all of its beams.
    pub(crate) sequences: SmallVec<[SequenceId; 1]>,
    /// Whether each sequence, or beam, has ended.
    pub(crate) ended: SmallVec<[bool; 8]>,
    /// Sequences whose replica is lost, with their indices.
    pub(crate) moved: Vec<(usize, MovedSequence)>,
    /// Whether the sequences are to be cancelled once their ids are known.
    pub(crate) is_cancelled: bool,
    /// Converted events, which are returned before the next event of the queue.
    pub(crate) ready: VecDeque<GenerateEvent>,
}

impl ActiveRequest {
    /// Waits for a replica.
    pub(crate) async fn wait(
        mut self,
        mut events: event_queue::Receiver,
    ) -> (Self, event_queue::Receiver, WaitOutcome) {
        let waited = self.submission.wait(&mut events).await;
        (self, events, waited)
    }

    /// Counts the request in the metrics of its replica from now on.
    pub(crate) fn assigned(&mut self) {
        if let Admission::Assigned(reservation) = &self.submission.admission {
            self.timing.assigned_to(&reservation.replica().shared);
        }
    }

    /// Counts the end of a request that has no replica. Returns the sequences that ended.
    pub(crate) fn end_unassigned(&mut self, reason: Option<FinishReason>) -> Vec<usize> {
        let open: Vec<usize> = (0..self.ended.len()).filter(|&index| !self.ended[index]).collect();
        for &index in &open {
            self.ended[index] = true;
            self.timing.ended(reason);
        }
        open
    }

    /// Whether the replica of all sequences that have not ended is lost.
    pub(crate) fn has_moved(&self) -> bool {
        let num_open = self.ended.iter().take(self.sequences.len()).filter(|ended| !**ended).count();
        !self.moved.is_empty() && self.moved.len() == num_open
    }

    /// Queues these sequences for another replica. `events` is the queue of the request.
    pub(crate) fn move_on(&mut self, events: &event_queue::Receiver) {
        let Admission::Assigned(reservation) = &self.submission.admission else { return };
        self.moved.sort_by_key(|(index, _)| *index);
        let sequences: Vec<MovedSequence> = self.moved.drain(..).map(|(_, moved)| moved).collect();
        let Some(first) = sequences.first() else { return };
        let num_rows = sequences.iter().map(MovedSequence::num_rows).sum();
        let timeout = self.submission.timeout.filter(|_| sequences.iter().all(MovedSequence::is_new));
        let ticket = reservation.move_on(first.tokens(), num_rows, first.priority());
        let submit = Some(Message::Adopt { sequences, timeout, events: events.sender() });
        self.submission = Submission { admission: Admission::Queued(ticket), submit, timeout };
    }

    /// Fast path: the delta of one token of a running sequence. `None` where the token needs a search for stop words or a beam.
    pub(crate) fn one_token(&mut self, token: &OneToken, is_drained: bool) -> Option<Delta> {
        let has_stop_texts = self.texts.first().is_some_and(SequenceText::has_stop_texts);
        if has_stop_texts || !self.text_stops.is_empty() || self.ended.len() > self.sequences.len() {
            return None;
        }
        let index = self.index_of(token.sequence).filter(|&index| !self.ended[index])?;
        let &OneToken { row, token, logprob, blocks, drafts, at, .. } = token;
        self.timing.tokens(index, 1, blocks, at);
        let tokens = smallvec![SampledToken { row, token, logprob, top: Vec::new() }];
        let mut delta = Delta { blocks, drafts, is_drained, ..Delta::new(index, at) };
        match self.texts.get_mut(index) {
            Some(text) => decode(text, tokens, false, &mut delta),
            None => delta.tokens = tokens,
        }
        Some(delta)
    }

    /// Handles the next event of the queue, and appends the resulting events to `ready`.
    ///
    /// # Errors
    /// When the request failed.
    pub(crate) fn take(&mut self, event: Option<RequestEvent>, is_drained: bool) -> Result<(), InferError> {
        self.take_event(event, is_drained)?;
        if self.is_cancelled && self.has_moved() {
            self.cancel();
        }
        Ok(())
    }

    fn take_event(&mut self, event: Option<RequestEvent>, is_drained: bool) -> Result<(), InferError> {
        match event {
            Some(RequestEvent::Token(token)) => {
                let (event, at) = token.open();
                self.take_tokens(event, at, is_drained);
            }
            Some(RequestEvent::Tokens(mut event, at)) => {
                let error = event.error.take();
                self.take_tokens(*event, at, is_drained);
                // The error takes the place of the end. There is none if a stop text was found first.
                if let Some(reason) = error
                    && let Some(GenerateEvent::Delta(delta)) = self.ready.back_mut()
                    && delta.finished == Some(FinishReason::Constraint)
                {
                    delta.finished = None;
                    return Err(InferError::new(ErrorKind::InvalidArgument, reason.into_string()));
                }
            }
            Some(RequestEvent::Accepted(sequences)) => {
                let mut new = sequences.into_iter();
                if self.sequences.is_empty() {
                    self.sequences = new.collect();
                } else {
                    let ids = self.sequences.iter_mut().zip(&self.ended);
                    ids.for_each(|(id, &ended)| *id = if ended { ENDED } else { new.next().unwrap_or(ENDED) });
                }
                if self.is_cancelled {
                    self.cancel();
                }
            }
            Some(RequestEvent::Logits(piece)) => {
                let Some(index) = self.index_of(piece.sequence) else { return Ok(()) };
                let position = match piece.place {
                    LogitsPlace::Context(position) => LogitsPosition::Prompt(position),
                    LogitsPlace::Generation(token) => LogitsPosition::Output(token),
                };
                let (first_token, values) = (piece.first_token, piece.values);
                self.ready.push_back(GenerateEvent::Logits(Logits { index, position, first_token, values }));
            }
            Some(RequestEvent::Joined { sequence, at, start }) => {
                if let Some(index) = self.index_of(sequence) {
                    self.timing.joined(index, at, start);
                    self.ready.push_back(GenerateEvent::Scheduled { index, at });
                }
            }
            Some(RequestEvent::Moved(sequence, moved)) => {
                if let Some(index) = self.index_of(sequence).filter(|&index| !self.ended[index]) {
                    self.moved.push((index, moved));
                }
            }
            Some(RequestEvent::Stop) => self.cancel(),
            Some(RequestEvent::Failed(error)) => {
                self.ended.iter().filter(|ended| !**ended).for_each(|_| self.timing.ended(None));
                return Err(error);
            }
            None => return Err(InferError::new(ErrorKind::Unavailable, UNLOADED)),
        }
        Ok(())
    }

    pub(crate) fn has_ended(&self) -> bool {
        self.ended.iter().all(|&ended| ended)
    }

    fn index_of(&self, sequence: SequenceId) -> Option<usize> {
        self.sequences.iter().position(|&known| known == sequence)
    }

    /// Handles new tokens of a sequence, or its end.
    fn take_tokens(&mut self, event: TokenEvent, at: Timestamp, is_drained: bool) {
        let Some(index) = self.index_of(event.sequence) else { return };
        if self.ended[index] {
            return; // The step was in flight when a stop word was found in the text.
        }
        let beam_tokens: usize = event.beams.iter().map(|beam| beam.tokens.len()).sum();
        self.timing.tokens(index, (event.tokens.len() + beam_tokens) as u64, event.blocks, at);
        if event.finished.is_some() {
            self.timing.ended(event.finished);
        }
        if !event.beams.is_empty() || self.ended.len() > self.sequences.len() {
            self.take_beams(event, at);
            return;
        }
        let TokenEvent { sequence, tokens, finished, blocks, drafts, .. } = event;
        let mut delta = Delta { finished, blocks, drafts, is_drained, ..Delta::new(index, at) };
        let is_stopped = match (self.texts.get_mut(index), self.text_stops.get_mut(index)) {
            (Some(text), _) => {
                decode(text, tokens, finished.is_some(), &mut delta);
                delta.stop.is_some()
            }
            (None, Some(text_stop)) => text_stop.push(tokens, finished.is_some(), &mut delta.tokens),
            (None, None) => {
                delta.tokens = tokens;
                false
            }
        };
        if is_stopped {
            if finished.is_none() {
                self.timing.ended(Some(FinishReason::StopWord));
                self.submission.send(Message::Finish(sequence));
            }
            delta.finished = Some(FinishReason::StopWord);
        }
        self.ended[index] = delta.finished.is_some();
        self.ready.push_back(GenerateEvent::Delta(delta));
    }

    /// Handles the beams when their search has ended. Beams of a cancelled search are empty.
    fn take_beams(&mut self, event: TokenEvent, at: Timestamp) {
        if event.finished.is_none() {
            return;
        }
        let mut beams = event.beams.into_iter();
        for index in 0..self.ended.len() {
            let beam = beams.next();
            let cum_log_prob = beam.as_ref().map(|beam| beam.cum_log_prob);
            let sampled =
                |(token, logprob)| SampledToken { row: RowId(0), token, logprob: Some(logprob), top: Vec::new() };
            let tokens: Tokens = beam.into_iter().flat_map(|beam| beam.tokens).map(sampled).collect();
            // The beams share their blocks, which count once.
            let blocks = if index == 0 { event.blocks } else { BlockUsage::default() };
            let (finished, drafts) = (event.finished, event.drafts);
            let mut delta = Delta { finished, blocks, drafts, cum_log_prob, ..Delta::new(index, at) };
            match self.texts.get_mut(index) {
                Some(text) => decode(text, tokens, true, &mut delta),
                None => delta.tokens = tokens,
            }
            self.ended[index] = true;
            self.ready.push_back(GenerateEvent::Delta(delta));
        }
    }

    /// Cancels the sequences that have not ended. Sequences whose ids are not known yet are cancelled when they are.
    pub(crate) fn cancel(&mut self) {
        self.is_cancelled = true;
        if self.has_moved() {
            self.moved.clear();
            let ended = self.end_unassigned(Some(FinishReason::Cancelled));
            self.ready.extend(ended.into_iter().map(cancelled));
        }
        for (&sequence, _) in self.sequences.iter().zip(&self.ended).filter(|(_, ended)| !**ended) {
            self.submission.send(Message::Cancel(sequence));
        }
    }
}

/// The last event of a sequence that ends without a replica.
pub(crate) fn cancelled(index: usize) -> GenerateEvent {
    let finished = Some(FinishReason::Cancelled);
    GenerateEvent::Delta(Delta { finished, ..Delta::new(index, Timestamp::now()) })
}

impl Drop for ActiveRequest {
    fn drop(&mut self) {
        if let Admission::Queued(_) = self.submission.admission
            && !self.has_ended()
        {
            self.end_unassigned(Some(FinishReason::Cancelled)); // The client disconnected while the request was queued.
        }
        let mut stop_handles = ipc::lock(&self.stop_handles);
        if stop_handles.get(&self.client_id).is_some_and(|stop| Arc::ptr_eq(stop, &self.stop)) {
            stop_handles.remove(&self.client_id);
        }
        drop(stop_handles);
        self.in_flight.send_modify(|count| *count -= 1);
    }
}
