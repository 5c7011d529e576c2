//! Messages to the step thread: requests, cancellations and events of agents.

use std::time::{Duration, Instant};

use engine::{Engine, MaskJob, Refused, SequenceId};
use serving::InferError;

use super::super::event_queue;
use super::super::inbox::Message;
use super::super::ledger::Report;
use super::super::refusal::error_of;
use super::super::request_event::RequestEvent;
use super::super::worker_group::WorkerGroup;
use super::{End, Running, Waiting};

impl Running {
    /// Handles all messages in the inbox. Waits up to `timeout` for the first one.
    pub(super) fn handle_messages(&mut self, group: &mut WorkerGroup, timeout: Duration) -> Result<(), End> {
        self.handle_messages_with(Some(group), timeout)
    }

    /// The same. Without workers, events of agents are dropped.
    pub(super) fn handle_messages_with(
        &mut self,
        mut group: Option<&mut WorkerGroup>,
        timeout: Duration,
    ) -> Result<(), End> {
        self.thread.shared.responsiveness.beat();
        let mut next = self.thread.messages.recv_timeout(timeout).ok();
        while let Some(message) = next {
            match message {
                Message::Agent(event) => {
                    if let Some(group) = &mut group {
                        group.handle_event(event)?;
                        self.thread.shared.metrics.update_start(|start| start.workers = group.workers().to_vec());
                    }
                }
                Message::Disk { event } => self.note_disk(event),
                Message::Submit { sequences, timeout, events } => {
                    self.accept(sequences, Engine::submit, timeout, events)
                }
                Message::Adopt { sequences, timeout, events } => self.accept(sequences, Engine::adopt, timeout, events),
                Message::Cancel(sequence) => {
                    self.engine.as_mut().map(|engine| engine.cancel(sequence));
                }
                Message::Finish(sequence) => {
                    self.engine.as_mut().map(|engine| engine.finish(sequence));
                }
                Message::Masks(jobs) => self.finish_masks(jobs),
                Message::ResetPrefixCache(reply) => {
                    self.engine.as_mut().map(Engine::reset_prefix_cache);
                    let _ = reply.send(());
                }
                Message::Ledger(reply) => {
                    let _ = reply.send(Report::new(self.engine.as_ref(), self.thread.dispatcher.num_open()));
                }
                Message::Sleep { level, done } => self.sleep.ask(level, done),
                Message::Wake { done } => self.sleep.ask_to_wake(done),
                Message::WakeWith { weights, done } => self.wake_with(weights, done, group.is_some()),
                Message::Abort(error) => self.abort(&error),
                Message::Stop { done } => return Err(End::Stopped(done)),
            }
            next = self.thread.messages.try_recv().ok();
        }
        self.expire();
        self.thread.dispatcher.flush();
        Ok(())
    }

    /// Ends all sequences with this error.
    pub(super) fn abort(&mut self, error: &InferError) {
        self.thread.dispatcher.push_last_to_all(|| RequestEvent::Failed(error.clone()));
        self.engine.as_mut().map(Engine::cancel_all);
    }

    /// Passes mask jobs that have run to the engine.
    pub(super) fn finish_masks(&mut self, jobs: Vec<MaskJob>) {
        if let Some(engine) = &mut self.engine {
            jobs.into_iter().for_each(|job| engine.finish_mask(job));
        }
    }

    /// Refuses requests whose timeout has expired, or moves them after others.
    pub(super) fn expire(&mut self) {
        let Some(engine) = &mut self.engine else { return };
        while let Some(late) = self.timeouts.first_entry().filter(|first| first.key().0 <= Instant::now()) {
            let Waiting { sequences, rejects } = late.remove();
            if !sequences.iter().all(|&sequence| engine.is_new(sequence)) {
                continue;
            }
            for &sequence in &sequences {
                if !rejects {
                    engine.delay(sequence);
                    continue;
                }
                engine.cancel(sequence);
                let expired = RequestEvent::Failed(InferError::unavailable("Request timeout expired"));
                self.thread.dispatcher.push_last(sequence, expired);
            }
        }
    }

    /// Adds the sequences of a request to the engine, all or none.
    pub(super) fn accept<T>(
        &mut self,
        added: Vec<T>,
        add: impl Fn(&mut Engine, T) -> Result<SequenceId, Refused>,
        timeout: Option<(Instant, bool)>,
        events: event_queue::Sender,
    ) {
        let Some(engine) = &mut self.engine else {
            events.send(RequestEvent::Failed(InferError::unavailable("the model's workers still load")));
            return;
        };
        let mut sequences = Vec::with_capacity(added.len());
        for sequence in added {
            match add(engine, sequence) {
                Ok(sequence) => sequences.push(sequence),
                Err(refused) => {
                    for sequence in sequences {
                        engine.cancel(sequence);
                    }
                    events.send(RequestEvent::Failed(error_of(&refused)));
                    return;
                }
            }
        }
        if let (Some((at, rejects)), Some(&first)) = (timeout, sequences.first()) {
            self.timeouts.insert((at, first), Waiting { sequences: sequences.clone(), rejects });
        }
        self.thread.dispatcher.accept(sequences, events);
    }
}
