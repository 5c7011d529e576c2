//! Sleep of a replica: with its workers, which keep the weights in host memory, or without workers.

use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use serving::SleepLevel;
use supervision::{FromWorker, ToWorker};

use super::super::inbox::SleepResult;
use super::super::responsiveness::IDLE_WAIT;
use super::super::worker_group::WorkerGroup;
use super::{End, POLL_INTERVAL, Running};

/// Timeout for moving weights to the host or back.
const MOVE_TIMEOUT: Duration = Duration::from_secs(600);

/// Timeout for the end of workers. A driver that hangs delays it.
const END_TIMEOUT: Duration = Duration::from_secs(15);

/// Whether the replica is to sleep, and who waits for it.
#[derive(Default)]
pub(super) struct Sleep {
    /// `None`: the replica is to run.
    wanted: Option<SleepLevel>,
    /// Whether the workers have ended because of the sleep.
    has_no_workers: bool,
    sleepers: Vec<SleepResult>,
    wakers: Vec<SleepResult>,
}

impl Sleep {
    pub(super) fn is_wanted(&self) -> bool {
        self.wanted.is_some()
    }

    /// A request to sleep. `done` gets its result when the replica sleeps.
    pub(super) fn ask(&mut self, level: SleepLevel, done: SleepResult) {
        self.wanted = Some(self.wanted.map_or(level, |wanted| wanted.max(level)));
        self.sleepers.push(done);
    }

    /// The same while there are no workers: they start at the wake.
    pub(super) fn ask_without_workers(&mut self, level: SleepLevel, done: SleepResult) {
        self.ask(level, done);
        self.has_no_workers = true;
    }

    /// A request to wake. `done` gets its result when the replica runs.
    pub(super) fn ask_to_wake(&mut self, done: SleepResult) {
        self.wake();
        self.wakers.push(done);
    }

    /// The replica is to run, without a request to wake that waits for it.
    pub(super) fn wake(&mut self) {
        self.refuse("it was woken before it slept");
    }

    /// Ends requests to sleep that have no result yet with this error. The replica is to run.
    fn refuse(&mut self, reason: &str) {
        self.wanted = None;
        answer(&mut self.sleepers, &Err(reason.to_owned()));
    }

    /// Answers all that wait for sleep or wake: the replica is lost, and has no memory to free or to take.
    pub(super) fn give_up(&mut self) {
        self.wanted = None;
        answer(&mut self.sleepers, &Ok(()));
        answer(&mut self.wakers, &Ok(()));
    }

    /// Ends all requests with this error: the replica neither sleeps nor runs.
    pub(super) fn fail(&mut self, reason: &str) {
        self.refuse(reason);
        answer(&mut self.wakers, &Err(reason.to_owned()));
    }
}

fn answer(waiting: &mut Vec<SleepResult>, result: &Result<(), String>) {
    for done in waiting.drain(..) {
        let _ = done.send(result.clone()); // The client may have left.
    }
}

impl Running {
    /// Whether every sequence that has begun has ended, if the replica is to sleep. Otherwise answers requests to wake.
    pub(super) fn is_time_to_sleep(&mut self) -> bool {
        let is_wanted = self.sleep.is_wanted();
        let engine = self.engine();
        engine.hold_new(is_wanted);
        let is_time = is_wanted && engine.is_unbegun();
        if !is_wanted && (!self.sleep.wakers.is_empty() || self.thread.shared.is_sleeping()) {
            self.thread.shared.sleeps.store(false, Ordering::Release);
            answer(&mut self.sleep.wakers, &Ok(()));
        }
        is_time
    }

    /// Sleeps until a request to wake. No step is in flight.
    ///
    /// # Errors
    /// [`End::Asleep`] if the replica is to sleep without workers.
    pub(super) fn sleep(&mut self, group: &mut WorkerGroup) -> Result<(), End> {
        let (started, name) = (Instant::now(), self.thread.config.name.clone());
        self.forget_cache();
        if self.sleep.wanted == Some(SleepLevel::Drop) {
            self.thread.shared.sleeps.store(true, Ordering::Release); // Before the replica counts as not ready.
            return Err(End::Asleep);
        }
        group.broadcast(&ToWorker::Sleep)?;
        let refusals = self.receive_from_all(group, started + MOVE_TIMEOUT, |message| match message {
            FromWorker::Slept { refused } => Some(refused),
            _ => None,
        })?;
        if let Some(reason) = refusals.into_iter().flatten().next() {
            tracing::warn!(model = %name, "does not sleep: {reason}");
            self.sleep.refuse(&reason);
            return self.wake_workers(group);
        }
        self.thread.shared.sleeps.store(true, Ordering::Release);
        tracing::info!(model = %name, "sleeps, with its weights in host memory, after {:.1?}", started.elapsed());
        match self.wait_for_wake(Some(&mut *group)) {
            Ok(()) => self.wake_workers(group),
            Err(End::Lost(lost)) if !lost.kind.is_final() => {
                tracing::warn!(model = %name, reason = %lost.reason, "workers lost while they sleep; they start at the wake");
                Err(End::Asleep)
            }
            Err(end) => Err(end),
        }
    }

    /// Ends the workers of a replica that is to sleep without them, and waits until their memory is free.
    pub(super) fn end_workers(&mut self, group: &mut WorkerGroup) -> End {
        let (started, name) = (Instant::now(), self.thread.config.name.clone());
        group.end(true);
        while !group.workers().is_empty() && started.elapsed() < END_TIMEOUT {
            match self.handle_messages(group, POLL_INTERVAL) {
                Err(End::Lost(lost)) if !lost.kind.is_final() => {}
                Err(end) => return end,
                Ok(()) => {}
            }
        }
        match group.workers().len() {
            0 => tracing::info!(model = %name, "sleeps without workers, which ended after {:.1?}", started.elapsed()),
            left => tracing::warn!(model = %name, "sleeps, but {left} workers have not ended after {END_TIMEOUT:?}"),
        }
        self.thread.shared.metrics.update_start(|start| start.workers.clear());
        self.sleep.has_no_workers = true;
        End::Asleep
    }

    /// Sleeps until a request to wake, if the workers have ended because of a sleep.
    pub(super) fn sleep_without_workers(&mut self) -> Result<(), End> {
        if !std::mem::take(&mut self.sleep.has_no_workers) {
            return Ok(());
        }
        self.forget_cache(); // The workers may have been lost in a sleep or at its end.
        self.wait_for_wake(None)
    }

    /// Handles messages until a request to wake.
    ///
    /// # Errors
    /// [`End::Asleep`] if there are workers and the weights are to be dropped.
    fn wait_for_wake(&mut self, mut group: Option<&mut WorkerGroup>) -> Result<(), End> {
        loop {
            match self.sleep.wanted {
                None => return Ok(()),
                Some(SleepLevel::Drop) if group.is_some() => return Err(End::Asleep),
                Some(_) => answer(&mut self.sleep.sleepers, &Ok(())),
            }
            let next_expiry = self.timeouts.first_key_value().map(|((at, _), _)| *at);
            let timeout = next_expiry.map_or(IDLE_WAIT, |at| at.saturating_duration_since(Instant::now()));
            self.handle_messages_with(group.as_deref_mut(), timeout.min(IDLE_WAIT))?;
            self.show_queue();
        }
    }

    /// Delivers the ends of sequences that wait, and shows how many wait.
    pub(super) fn show_queue(&mut self) {
        let Some(engine) = &mut self.engine else { return };
        engine.drain_events(&mut self.events);
        *ipc::lock(&self.thread.shared.stats) = engine.stats();
        self.push_events();
    }

    /// Takes the memory of the workers' devices again.
    fn wake_workers(&mut self, group: &mut WorkerGroup) -> Result<(), End> {
        let started = Instant::now();
        let next_step = self.engine().next_step();
        group.broadcast(&ToWorker::Wake { next_step })?;
        self.receive_from_all(group, started + MOVE_TIMEOUT, |message| {
            matches!(message, FromWorker::Ready { .. }).then_some(())
        })?;
        self.step_began = Instant::now();
        tracing::info!(model = %self.thread.config.name, "is awake after {:.1?}", started.elapsed());
        Ok(())
    }

    /// Forgets what KV blocks hold.
    fn forget_cache(&mut self) {
        let done = self.mask_jobs.close();
        self.finish_masks(done);
        self.step_kinds.clear();
        if let Some(engine) = &mut self.engine {
            engine.recover();
            // The weights may be others after the sleep.
            engine.forget_copies();
        }
        self.show_queue();
    }
}
