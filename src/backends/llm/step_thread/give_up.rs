//! The end of a replica that has lost a rank: its sequences go on at the others.

use std::sync::atomic::Ordering;

use engine::Engine;
use tokio::sync::oneshot;

use super::super::inbox::Message;
use super::super::ledger::Report;
use super::super::request_event::RequestEvent;
use super::Running;

impl Running {
    /// Gives the sequences to other replicas, with those that were sent before the loss was known, until [`Message::Stop`]. Returns its
    /// reply channel.
    pub(super) fn give_up(&mut self, reason: String) -> oneshot::Sender<()> {
        let (name, replica) = (self.thread.config.name.clone(), self.thread.replica);
        let num_open = self.thread.dispatcher.num_open();
        tracing::error!(model = %name, replica, num_open, "the replica is lost: {reason}; its sequences go on at the others");
        let shared = &self.thread.shared;
        *ipc::lock(&shared.failure) = Some(reason);
        shared.is_lost.store(true, Ordering::Release);
        shared.sleeps.store(false, Ordering::Release);
        shared.metrics.update_start(|start| start.workers.clear());
        self.sleep.give_up();
        self.host_memory = None;
        self.timeouts.clear();
        self.thread.router.dispatch(); // Requests that wait for this replica alone would wait for ever.
        loop {
            self.give_sequences();
            // Without senders, no request can arrive.
            let Ok(message) = self.thread.messages.recv() else { return oneshot::channel().0 };
            match message {
                Message::Submit { sequences, timeout, events } => {
                    self.accept(sequences, Engine::submit, timeout, events);
                }
                Message::Adopt { sequences, timeout, events } => {
                    self.accept(sequences, Engine::adopt, timeout, events);
                }
                Message::Cancel(sequence) => drop(self.engine.as_mut().map(|engine| engine.cancel(sequence))),
                Message::Finish(sequence) => drop(self.engine.as_mut().map(|engine| engine.finish(sequence))),
                Message::Masks(jobs) => self.finish_masks(jobs),
                Message::Abort(error) => self.abort(&error),
                Message::Ledger(reply) => {
                    let _ = reply.send(Report::new(self.engine.as_ref(), self.thread.dispatcher.num_open()));
                }
                Message::ResetPrefixCache(reply) => drop(reply.send(())),
                // It has no memory of a device to free or to take.
                Message::Sleep { done, .. } | Message::Wake { done } | Message::WakeWith { done, .. } => {
                    drop(done.send(Ok(())));
                }
                Message::Agent(_) | Message::Disk { .. } => {}
                Message::Stop { done } => return done,
            }
        }
    }

    /// Sends each sequence to its request, which takes it to another replica.
    fn give_sequences(&mut self) {
        self.timeouts.clear(); // The requests keep them.
        self.show_queue();
        let Some(engine) = &mut self.engine else { return };
        for (sequence, moved) in engine.take_sequences() {
            self.thread.dispatcher.push_last(sequence, RequestEvent::Moved(sequence, moved));
        }
        self.thread.dispatcher.flush();
    }
}
