//! The step thread of a replica on rank 0. It owns the engine, and sends plans to workers and events to requests.
//!
//! ```text
//! starting ──workers ready──► stepping ──a worker is lost──► starting   (running sequences are prefilled again)
//!     └── too many losses in a row ──► failed ──after a delay──► starting   (requests are refused meanwhile)
//! ```
//!
//! A replica that has lost a rank, in a world that goes on without it, gives its sequences to the others (`give_up`). One that is to sleep
//! begins no further sequence. When the others have ended, its memory is freed, until it is woken (`sleep`).
//!
//! A panic of the thread counts as a loss, too. The engine may then be inconsistent: its sequences end with an error, and an empty
//! engine replaces it.

mod disk;
mod give_up;
mod measure;
mod messages;
mod recovery;
mod sleep;
mod start;
mod watchdog;
mod weights;

use std::collections::BTreeMap;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::Ordering;
use std::sync::{Arc, mpsc};
use std::time::{Duration, Instant};

use engine::{Engine, SequenceId, StepOutput, StepPlan, TokenEvent};
use ipc::Prefix;
use serving::Timestamp;
use supervision::{Agents, FromWorker, HostMemoryLease};
use tokio::sync::oneshot;

use super::config::LlmConfig;
use super::dispatcher::Dispatcher;
use super::inbox::{Inbox, Message};
use super::masks::{self, MaskJobs};
use super::metrics::{Phase, StepKinds};
use super::replica_state::ReplicaState;
use super::request_event::RequestEvent;
use super::responsiveness::IDLE_WAIT;
use super::router::Router;
use super::step_log::StepLog;
use super::worker_group::{LossKind, WorkerGroup, WorkerLoss};
use disk::Disk;
use sleep::Sleep;
use weights::Replacement;

/// Number of losses without a settled step between them after which requests are refused.
const MAX_LOSSES: u32 = 5;

/// Maximum time between checks of the watchdog.
const POLL_INTERVAL: Duration = Duration::from_millis(100);

/// Message of a panic: the engine is created before the first step.
const ENGINE_EXISTS: &str = "the engine exists when workers are ready";

/// The parts of a step thread.
pub(crate) struct StepThread {
    pub(crate) config: LlmConfig,
    /// Index of the replica.
    pub(crate) replica: u32,
    /// The router, which is notified when this replica becomes ready.
    pub(crate) router: Arc<Router>,
    pub(crate) agents: Arc<Agents>,
    pub(crate) prefix: Prefix,
    pub(crate) inbox: Inbox,
    pub(crate) messages: mpsc::Receiver<Message>,
    pub(crate) dispatcher: Dispatcher,
    pub(crate) shared: Arc<ReplicaState>,
    /// Where steps are recorded.
    pub(crate) log: Option<StepLog>,
}

/// The state of a running step thread.
struct Running {
    thread: StepThread,
    /// `None` until the workers have reported how many KV blocks fit.
    engine: Option<Engine>,
    /// Requests with a timeout, by its expiry. Some may have had their first step since.
    timeouts: BTreeMap<(Instant, SequenceId), Waiting>,
    events: Vec<TokenEvent>,
    /// Number of losses since the last settled step.
    losses: u32,
    /// Duration of the longest recent step, for the watchdog.
    longest_step: Duration,
    /// Time when the last step was settled, or was sent to idle workers.
    last_progress: Instant,
    /// When the output before the step that is settled next arrived, or when that step was sent to idle workers.
    step_began: Instant,
    step_kinds: StepKinds,
    mask_jobs: MaskJobs,
    /// Average duration of recent steps that had all their masks.
    usual_step: Duration,
    /// Whether the oldest step in flight was sent without a mask.
    is_mask_late: bool,
    sleep: Sleep,
    /// Set from a request for other weights until the first start with them has ended.
    replacement: Option<Replacement>,
    /// Host memory of the workers, which their restarts leave; `None` if they have none.
    host_memory: Option<HostMemoryLease>,
    taken_share: Option<super::host_share::TakenShare>, // Set if the memory is of the shares of their ranks.
    disk: Disk,
}

/// A request with a timeout.
struct Waiting {
    sequences: Vec<SequenceId>,
    /// Whether the request is refused after the timeout. Otherwise it is moved after others.
    rejects: bool,
}

/// Why starting or stepping ended.
enum End {
    Lost(WorkerLoss),
    /// The replica is to sleep without workers.
    Asleep,
    Stopped(oneshot::Sender<()>),
}

impl From<WorkerLoss> for End {
    fn from(lost: WorkerLoss) -> Self {
        End::Lost(lost)
    }
}

impl StepThread {
    /// Runs until [`Message::Stop`]. `loaded` gets the result of the first start; when that failed, the thread ends.
    pub(crate) fn run(self, loaded: oneshot::Sender<Result<(), String>>) {
        let (ranks, host_bytes) = (self.config.ranks(self.replica), self.config.worker.kv_host_memory_bytes);
        let inbox = self.inbox.clone();
        let listener = move |event| {
            inbox.send(Message::Disk { event });
        };
        let mut running = Running {
            host_memory: (host_bytes > 0).then(|| self.agents.lease_host_memory(ranks, listener)),
            taken_share: None,
            disk: Disk::default(),
            thread: self,
            engine: None,
            timeouts: BTreeMap::new(),
            events: Vec::new(),
            losses: 0,
            longest_step: Duration::ZERO,
            last_progress: Instant::now(),
            step_began: Instant::now(),
            step_kinds: StepKinds::default(),
            mask_jobs: MaskJobs::default(),
            usual_step: Duration::ZERO,
            is_mask_late: false,
            sleep: Sleep::default(),
            replacement: None,
        };
        let mut loaded = Some(loaded);
        let _ended = Ended(Arc::clone(&running.thread.shared));
        loop {
            let end = catch_unwind(AssertUnwindSafe(|| running.start_and_serve(&mut loaded)));
            match end.unwrap_or_else(|panic| End::Lost(running.reset_after_panic(&*panic))) {
                End::Stopped(done) => {
                    let _ = done.send(());
                    return;
                }
                End::Asleep => {}
                End::Lost(lost) => {
                    let may_try_again = lost.kind == LossKind::BySignal && running.losses + 1 < MAX_LOSSES;
                    if let Some(loaded) = loaded.take_if(|_| !may_try_again) {
                        let _ = loaded.send(Err(lost.reason));
                        return;
                    }
                    if let Some(done) = running.recover(&lost) {
                        let _ = done.send(());
                        return;
                    }
                }
            }
        }
    }
}

/// Marks the replica as not ready when the thread ends.
struct Ended(Arc<ReplicaState>);

impl Drop for Ended {
    fn drop(&mut self) {
        self.0.ready.store(false, Ordering::Release);
        if std::thread::panicking() {
            let message = "the step thread of the model has ended by a panic; load the model again".to_owned();
            *ipc::lock(&self.0.failure) = Some(message);
        }
    }
}

impl Running {
    /// Starts the workers, and runs steps until one is lost or the model is stopped.
    fn start_and_serve(&mut self, loaded: &mut Option<oneshot::Sender<Result<(), String>>>) -> End {
        if let Err(end) = self.sleep_without_workers() {
            return end;
        }
        let group = match self.start() {
            Ok(group) => group,
            Err(end) => {
                self.end_replacement(Some(&end));
                return end;
            }
        };
        *ipc::lock(&self.thread.shared.failure) = None;
        // Before the model counts as loaded.
        self.thread.shared.ready.store(true, Ordering::Release);
        self.end_replacement(None);
        self.thread.router.dispatch();
        loaded.take().map(|loaded| loaded.send(Ok(())));
        self.serve(group)
    }

    /// Runs steps until a worker is lost or the model is stopped.
    fn serve(&mut self, mut group: WorkerGroup) -> End {
        debug_assert!(group.is_linked());
        self.step_began = Instant::now();
        self.thread.inbox.set_doorbell(group.doorbell());
        let mut end = loop {
            if let Err(end) = self.run_once(&mut group) {
                break end;
            }
        };
        self.thread.shared.ready.store(false, Ordering::Release);
        self.thread.inbox.set_doorbell(None);
        match end {
            End::Stopped(_) => group.end(true),
            End::Asleep => end = self.end_workers(&mut group),
            End::Lost(WorkerLoss { kind: LossKind::Failed, .. }) if self.is_hung() => self.log_stacks(&mut group),
            End::Lost(_) => {}
        }
        end
    }

    /// One iteration: handles messages, plans and sends steps, and settles the output of the oldest step.
    fn run_once(&mut self, group: &mut WorkerGroup) -> Result<(), End> {
        self.note_responsiveness(group);
        self.handle_messages(group, Duration::ZERO)?;
        if self.is_time_to_sleep() {
            return self.sleep(group);
        }
        let was_idle = self.engine().num_in_flight() == 0;
        let sent = self.send_plans(group)?;
        self.send_disk_copies();
        let engine = self.engine.as_mut().expect(ENGINE_EXISTS);
        engine.drain_events(&mut self.events);
        self.push_events();
        if self.engine().num_in_flight() == 0 {
            let stats = self.engine().stats();
            *ipc::lock(&self.thread.shared.stats) = stats;
            self.report_adapters();
            return self.handle_messages(group, IDLE_WAIT);
        }
        if was_idle {
            self.last_progress = Instant::now();
            let has_gap = self.engine().oldest_load().is_some_and(|load| load.after_gap);
            self.step_began = if has_gap { self.step_began } else { self.last_progress };
        }
        if group.doorbell().is_none() {
            self.handle_messages(group, POLL_INTERVAL)?;
        }
        match group.next_report(POLL_INTERVAL)? {
            Some(FromWorker::Output(output)) => return Ok(self.settle(output, sent)?),
            Some(FromWorker::Logits(piece)) => {
                self.last_progress = Instant::now();
                self.thread.dispatcher.push(piece.sequence, RequestEvent::Logits(Box::new(piece)));
            }
            Some(_) => {
                return Err(WorkerLoss::new("worker 0 sent something other than a step's output".to_owned()).into());
            }
            // The doorbell rang, or the poll interval has passed.
            None => self.check_watchdog()?,
        }
        self.push_events();
        Ok(())
    }

    /// Shows other threads how long the oldest step has run.
    fn note_responsiveness(&self, group: &WorkerGroup) {
        let is_busy = self.engine.as_ref().is_some_and(|engine| engine.num_in_flight() > 0);
        let waited = if is_busy { self.last_progress.elapsed() } else { Duration::ZERO };
        let StepThread { config, shared, .. } = &self.thread;
        shared.responsiveness.note_step(waited, self.longest_step, group.num_workers(), config.worker.device);
    }

    fn engine(&mut self) -> &mut Engine {
        self.engine.as_mut().expect(ENGINE_EXISTS)
    }

    /// Plans and sends steps until enough are in flight. Returns the time of the last one.
    fn send_plans(&mut self, group: &mut WorkerGroup) -> Result<Instant, End> {
        self.start_masks();
        let StepThread { shared, dispatcher, log, .. } = &mut self.thread;
        let engine = self.engine.as_mut().expect(ENGINE_EXISTS);
        let mut now = Instant::now();
        while let Some(plan) = engine.plan() {
            let began = now;
            now = shared.metrics.phase(Phase::Plan, now);
            log.iter_mut().for_each(|log| log.planned(&plan, began, now));
            self.step_kinds.planned(&plan, &shared.metrics);
            push_scheduled(dispatcher, &plan, now.into(), shared.restarts.load(Ordering::Relaxed));
            for (_, adapter) in engine.take_filled() {
                shared.responsiveness.while_sending(|| group.send_adapter(&adapter))?;
            }
            shared.responsiveness.while_sending(|| group.step(plan))?;
            now = shared.metrics.phase(Phase::Send, now);
            log.iter_mut().for_each(|log| log.sent(now));
        }
        dispatcher.flush(); // Before the waits for masks and workers: requests are to know that they are scheduled.
        self.start_masks();
        if self.engine().owes_masks() {
            self.send_masks(group)?;
            now = self.thread.shared.metrics.phase(Phase::Mask, now);
        }
        Ok(now)
    }

    /// Starts the mask jobs that can start.
    fn start_masks(&mut self) {
        let jobs = self.engine().mask_jobs();
        self.mask_jobs.start(jobs, &self.thread.inbox);
    }

    /// Sends the masks of the oldest step in flight when all are computed, or when the time is over.
    fn send_masks(&mut self, group: &mut WorkerGroup) -> Result<(), End> {
        let deadline = Instant::now() + masks::longest_wait(self.usual_step);
        while self.engine().lacks_masks() {
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                break;
            }
            self.handle_messages(group, left)?;
        }
        let done = self.mask_jobs.close();
        self.finish_masks(done);
        self.is_mask_late |= self.engine().lacks_masks();
        let masks = self.engine().take_masks();
        Ok(self.thread.shared.responsiveness.while_sending(|| masks::send(masks, group))?)
    }

    /// Settles the oldest step, and delivers its events. `sent` is the time when the last plan was sent.
    fn settle(&mut self, output: StepOutput, sent: Instant) -> Result<(), WorkerLoss> {
        let shared = Arc::clone(&self.thread.shared);
        let (now, step) = (shared.metrics.phase(Phase::Wait, sent), output.step);
        let engine = self.engine.as_mut().expect(ENGINE_EXISTS);
        let time = now - self.step_began;
        let predicted = engine.measure(time.as_secs_f64());
        self.step_kinds.settled(time, predicted, &shared.metrics);
        let settled = engine.settle(output, &mut self.events);
        settled.map_err(|error| WorkerLoss::new(format!("worker 0 sent an unexpected output: {error}")))?;
        self.losses = 0;
        // Decays slowly, because the first step after a start may be much longer than others.
        let is_usual = !std::mem::take(&mut self.is_mask_late);
        if is_usual {
            self.usual_step = self.usual_step.mul_f32(0.9) + self.last_progress.elapsed().mul_f32(0.1);
        }
        self.longest_step = self.last_progress.elapsed().max(self.longest_step.mul_f32(0.99));
        *ipc::lock(&shared.stats) = engine.stats();
        self.report_adapters();
        self.last_progress = shared.metrics.phase(Phase::Settle, now);
        self.step_began = now;
        self.push_events();
        let delivered = shared.metrics.phase(Phase::Deliver, self.last_progress);
        self.thread.log.iter_mut().for_each(|log| log.ended(step, [now, self.last_progress, delivered]));
        Ok(())
    }

    /// Shows the adapters of running sequences to other threads.
    fn report_adapters(&mut self) {
        if self.thread.config.adapters.num_slots > 0 {
            let running = self.engine().running_adapters().collect();
            *ipc::lock(&self.thread.shared.adapters) = running;
        }
    }

    /// Passes the engine's events to the dispatcher.
    fn push_events(&mut self) {
        let now = Timestamp::now();
        for event in self.events.drain(..) {
            let (sequence, ends) = (event.sequence, event.finished.is_some());
            let event = RequestEvent::of(event, now);
            match ends {
                true => self.thread.dispatcher.push_last(sequence, event),
                false => self.thread.dispatcher.push(sequence, event),
            }
        }
        self.thread.dispatcher.flush();
    }
}

/// Reports to requests that their sequences are scheduled.
fn push_scheduled(dispatcher: &mut Dispatcher, plan: &StepPlan, at: Timestamp, start: u64) {
    for joined in &plan.joined {
        dispatcher.push(joined.sequence, RequestEvent::Joined { sequence: joined.sequence, at, start });
    }
}

#[cfg(test)]
mod tests;
