//! The watchdog: detects steps that take too long, and logs the stacks of hung workers.

use std::time::{Duration, Instant};

use super::super::inbox::Message;
use super::super::worker_group::{WorkerGroup, WorkerLoss};
use super::{MAX_LOSSES, Running};

/// The stacks of workers are logged if they fail after this time without progress.
const HANG_THRESHOLD: Duration = Duration::from_secs(1);

/// Timeout for the stacks of workers.
const STACKS_TIMEOUT: Duration = Duration::from_secs(2);

impl Running {
    /// Whether the workers made no progress for a long time before they were lost.
    pub(super) fn is_hung(&self) -> bool {
        let is_busy = self.engine.as_ref().is_some_and(|engine| engine.num_in_flight() > 0);
        is_busy && self.last_progress.elapsed() > HANG_THRESHOLD
    }

    /// Logs the stacks of every worker that still runs. Other messages are put back into the inbox.
    pub(super) fn log_stacks(&mut self, group: &mut WorkerGroup) {
        group.request_stacks();
        let deadline = Instant::now() + STACKS_TIMEOUT;
        let mut others = Vec::new();
        while group.stacks().iter().any(Option::is_none) && Instant::now() < deadline {
            match self.thread.messages.recv_timeout(Duration::from_millis(20)) {
                // The end of a worker is already known.
                Ok(Message::Agent(event)) => drop(group.handle_event(event)),
                Ok(other) => others.push(other),
                Err(_) => {}
            }
        }
        for message in others {
            self.thread.inbox.send(message);
        }
        for (index, stacks) in group.stacks().iter().enumerate() {
            let text = stacks.as_deref().unwrap_or("does not run any more, or its rank does not answer");
            tracing::warn!(model = %self.thread.config.name, "worker {} hangs at: {text}", group.rank_of(index));
        }
    }

    pub(super) fn check_watchdog(&self) -> Result<(), WorkerLoss> {
        // The timeout doubles with each loss, so that a slow machine completes the step at last.
        let timeout = self.thread.config.worker.step_timeout * (1 << self.losses.min(MAX_LOSSES));
        let (waited, allowed) = (self.last_progress.elapsed(), timeout + self.longest_step);
        match waited > allowed {
            true => Err(WorkerLoss::new(format!("a step was not done after {waited:.1?}, {allowed:.1?} are allowed"))),
            false => Ok(()),
        }
    }
}
