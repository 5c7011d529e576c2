//! One request in flight: turns its sequences' events into responses, and its client's leaving into cancels.

use std::collections::HashMap;
use std::sync::{Arc, Mutex};

use engine::{BlockUsage, FinishReason, RowId, SampledToken, SequenceId, TokenEvent};
use serving::{ErrorKind, InferError, InferResponse, ResponseSender};
use tokio::sync::{mpsc, watch};

use super::inbox::{Inbox, Message, RequestEvent};
use super::outputs::{News, Responses};
use super::text_stop::TextStop;
use super::timing::Timing;

/// Running sequences by the client's request id.
pub(crate) type ById = Arc<Mutex<HashMap<String, Vec<SequenceId>>>>;

/// What the task of a request is made of.
pub(crate) struct RequestTask {
    pub(crate) client_id: String,
    pub(crate) inbox: Inbox,
    pub(crate) by_id: ById,
    pub(crate) in_flight: Arc<watch::Sender<usize>>,
    pub(crate) responses: Responses,
    pub(crate) timing: Timing,
    /// One for each sequence, where there are stop words.
    pub(crate) text_stops: Vec<TextStop>,
    /// Known once accepted.
    pub(crate) sequences: Vec<SequenceId>,
    /// Which sequences have told their last.
    pub(crate) ended: Vec<bool>,
    pub(crate) client_left: bool,
}

impl RequestTask {
    pub(crate) async fn run(mut self, mut events: mpsc::UnboundedReceiver<RequestEvent>, sender: ResponseSender) {
        loop {
            let event = tokio::select! {
                biased;
                event = events.recv() => event,
                () = sender.cancelled(), if !self.client_left => {
                    self.leave();
                    continue;
                }
            };
            let response = match event {
                Some(RequestEvent::Accepted(sequences)) => {
                    self.accepted(sequences);
                    continue;
                }
                Some(RequestEvent::Logits(piece)) => {
                    if let Some(index) = self.sequences.iter().position(|&known| known == piece.sequence) {
                        self.responses.keep_logits(index, &piece);
                    }
                    continue;
                }
                Some(RequestEvent::Joined { sequence, at, start }) => {
                    sender.mark_scheduled();
                    if let Some(index) = self.index_of(sequence) {
                        self.timing.joined(index, at, start);
                    }
                    sender.report(self.timing.generation());
                    continue;
                }
                Some(RequestEvent::Tokens(event)) => {
                    self.time(&event);
                    sender.report(self.timing.generation());
                    self.hear(event).map(Ok)
                }
                Some(RequestEvent::Failed(error)) => {
                    self.ended.iter().filter(|ended| !**ended).for_each(|_| self.timing.ended(None));
                    sender.report(self.timing.generation());
                    Some(Err(error))
                }
                None => {
                    let words = "the model was unloaded while the request ran";
                    Some(Err(InferError::new(ErrorKind::Unavailable, words)))
                }
            };
            let ends = matches!(response, Some(Err(_))) || self.ended.iter().all(|&ended| ended);
            if let Some(response) = response
                && !self.client_left
                && !sender.send(response).await
                && !ends
            {
                self.leave();
            }
            if ends {
                return;
            }
        }
    }

    fn index_of(&self, sequence: SequenceId) -> Option<usize> {
        self.sequences.iter().position(|&known| known == sequence)
    }

    /// Counts news of a sequence, unless its end was told before.
    fn time(&mut self, event: &TokenEvent) {
        if let Some(index) = self.index_of(event.sequence).filter(|&index| !self.ended[index]) {
            self.timing.heard(index, event);
            if event.finished.is_some() {
                self.timing.ended(event.finished);
            }
        }
    }

    /// The response that news of a sequence complete.
    fn hear(&mut self, event: TokenEvent) -> Option<InferResponse> {
        if !event.beams.is_empty() || self.ended.len() > self.sequences.len() {
            return self.hear_beams(event);
        }
        let TokenEvent { sequence, tokens, finished, blocks, drafts, .. } = event;
        let index = self.sequences.iter().position(|&known| known == sequence)?;
        if self.ended[index] {
            // Sampled before the engine heard of a stop word in the text.
            return None;
        }
        let mut ends = finished.is_some();
        let tokens = match self.text_stops.get_mut(index) {
            None => tokens.into_vec(),
            Some(text_stop) => {
                let mut told = Vec::new();
                if text_stop.push(tokens, ends, &mut told) && !ends {
                    ends = true;
                    self.timing.ended(Some(FinishReason::StopWord));
                    self.inbox.send(Message::Finish(sequence));
                }
                told
            }
        };
        self.ended[index] = ends;
        self.responses.push(News { index, tokens, ends, blocks, drafts, cum_log_prob: None })
    }

    /// All beams at once, when their search has ended; empty ones when it was cancelled.
    fn hear_beams(&mut self, event: TokenEvent) -> Option<InferResponse> {
        event.finished?;
        let mut beams = event.beams.into_iter();
        let mut response = None;
        for index in 0..self.ended.len() {
            let beam = beams.next();
            let cum_log_prob = beam.as_ref().map(|beam| beam.cum_log_prob);
            let sampled =
                |(token, logprob)| SampledToken { row: RowId(0), token, logprob: Some(logprob), top: Vec::new() };
            let tokens = beam.into_iter().flat_map(|beam| beam.tokens).map(sampled).collect();
            // Blocks are the search's, so they count once.
            let blocks = if index == 0 { event.blocks } else { BlockUsage::default() };
            self.ended[index] = true;
            let news = News { index, tokens, ends: true, blocks, drafts: event.drafts, cum_log_prob };
            response = self.responses.push(news);
        }
        response
    }

    fn accepted(&mut self, sequences: Vec<SequenceId>) {
        self.sequences = sequences;
        if self.client_left {
            self.leave();
        } else if !self.client_id.is_empty() {
            self.by_id.lock().unwrap().insert(self.client_id.clone(), self.sequences.clone());
        }
    }

    fn leave(&mut self) {
        self.client_left = true;
        for (&sequence, _) in self.sequences.iter().zip(&self.ended).filter(|(_, ended)| !**ended) {
            self.inbox.send(Message::Cancel(sequence));
        }
    }
}

impl Drop for RequestTask {
    fn drop(&mut self) {
        let mut by_id = self.by_id.lock().unwrap();
        if !self.sequences.is_empty() && by_id.get(&self.client_id) == Some(&self.sequences) {
            by_id.remove(&self.client_id);
        }
        drop(by_id);
        self.in_flight.send_modify(|count| *count -= 1);
    }
}
