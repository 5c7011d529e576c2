//! One thread per replica of a model on rank 0. It owns the engine, sends steps to the workers and tokens to requests.
//!
//! ```text
//! starting ──workers ready──► stepping ──a worker is lost──► starting   (running sequences are prefilled again)
//!     └── too many losses without a step between ──► failed ──later──► starting   (requests get an error meanwhile)
//! ```
//!
//! A panic of the thread counts as a loss, too. What the engine knew of its sequences is not trusted then: they end with an
//! error, and an engine without any takes its place.

use std::any::Any;
use std::collections::BTreeMap;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::Ordering;
use std::sync::{Arc, mpsc};
use std::time::{Duration, Instant};

use engine::{Engine, Request, SequenceId, StepPlan, TokenEvent};
use ipc::Prefix;
use serving::{InferError, Timestamp};
use supervision::{Agents, FromWorker, ToWorker};
use tokio::sync::oneshot;

use super::config::LlmConfig;
use super::dispatcher::Dispatcher;
use super::event_queue;
use super::figures::{Phase, Start, StepKinds};
use super::group::{Group, Lost, LostKind};
use super::inbox::{Inbox, Message};
use super::ledger::Report;
use super::masks::send_masks;
use super::refusal::error_of;
use super::replica_state::ReplicaState;
use super::request_event::RequestEvent;
use super::router::Router;

/// Losses in a row, without a settled step between them, after which the model is given up.
const MAX_LOSSES: u32 = 5;

/// A model that was given up is tried again after this time, doubled each time up to the longest.
const FIRST_RETRY: Duration = Duration::from_secs(5);
const LONGEST_RETRY: Duration = Duration::from_secs(60);

/// Longest wait between looks at the watchdog.
const LOOK_AROUND: Duration = Duration::from_millis(100);

/// Wait before the second start in a row, doubled before each further one.
const FIRST_BACK_OFF: Duration = Duration::from_millis(100);

/// Workers that fail after a silence of this length have hung, and it is of interest where.
const SILENCE: Duration = Duration::from_secs(1);

/// How long agents may take to report where their workers hang.
const STACKS_TIMEOUT: Duration = Duration::from_secs(2);

/// How long workers may take to load their weights.
const LOAD_TIMEOUT: Duration = Duration::from_secs(1800);

/// What the step thread is made of.
pub(crate) struct StepThread {
    pub(crate) config: LlmConfig,
    /// Which replica of the model it is.
    pub(crate) replica: u32,
    /// Notified when this replica can serve.
    pub(crate) router: Arc<Router>,
    pub(crate) agents: Arc<Agents>,
    pub(crate) prefix: Prefix,
    pub(crate) inbox: Inbox,
    pub(crate) messages: mpsc::Receiver<Message>,
    pub(crate) dispatcher: Dispatcher,
    pub(crate) shared: Arc<ReplicaState>,
}

/// The thread once it runs.
struct Running {
    thread: StepThread,
    /// `None` until the workers have said how many KV blocks fit.
    engine: Option<Engine>,
    /// Requests that may not wait for ever, by when they may no longer; some had their first step since.
    timeouts: BTreeMap<(Instant, SequenceId), Waiting>,
    events: Vec<TokenEvent>,
    /// Starts and losses since the last settled step.
    losses: u32,
    /// Longest of the recent steps, for the watchdog.
    longest_step: Duration,
    /// When a step was last settled, or sent to idle workers.
    last_progress: Instant,
    step_kinds: StepKinds,
}

/// A request that may not wait for ever.
struct Waiting {
    sequences: Vec<SequenceId>,
    /// It is refused when it has waited too long; else others are served before it.
    rejects: bool,
}

/// How stepping, or starting, came to an end.
enum End {
    Lost(Lost),
    Stopped(oneshot::Sender<()>),
}

impl From<Lost> for End {
    fn from(lost: Lost) -> Self {
        End::Lost(lost)
    }
}

impl StepThread {
    /// Runs until [`Message::Stop`]. `loaded` gets the result of the first start; when that failed, the thread ends.
    pub(crate) fn run(self, loaded: oneshot::Sender<Result<(), String>>) {
        let mut running = Running {
            thread: self,
            engine: None,
            timeouts: BTreeMap::new(),
            events: Vec::new(),
            losses: 0,
            longest_step: Duration::ZERO,
            last_progress: Instant::now(),
            step_kinds: StepKinds::default(),
        };
        let mut loaded = Some(loaded);
        let _ended = Ended(Arc::clone(&running.thread.shared));
        loop {
            let end = catch_unwind(AssertUnwindSafe(|| running.start_and_serve(&mut loaded)));
            match end.unwrap_or_else(|panic| End::Lost(running.start_anew(&*panic))) {
                End::Stopped(done) => {
                    let _ = done.send(());
                    return;
                }
                End::Lost(lost) => {
                    let may_try_again = lost.kind == LostKind::BySignal && running.losses + 1 < MAX_LOSSES;
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

/// Nothing steps any more when this is dropped.
struct Ended(Arc<ReplicaState>);

impl Drop for Ended {
    fn drop(&mut self) {
        self.0.ready.store(false, Ordering::Release);
        if std::thread::panicking() {
            let words = "the step thread of the model has ended by a panic; load the model again".to_owned();
            *ipc::lock(&self.0.failure) = Some(words);
        }
    }
}

/// What a panic said.
fn words_of(panic: &(dyn Any + Send)) -> &str {
    let owned = panic.downcast_ref::<String>().map(String::as_str);
    owned.or(panic.downcast_ref::<&str>().copied()).unwrap_or("it said nothing")
}

impl Running {
    /// Starts the workers, and steps until one is lost or the model is stopped.
    fn start_and_serve(&mut self, loaded: &mut Option<oneshot::Sender<Result<(), String>>>) -> End {
        let group = match self.start() {
            Ok(group) => group,
            Err(end) => return end,
        };
        *ipc::lock(&self.thread.shared.failure) = None;
        // Before the model counts as loaded.
        self.thread.shared.ready.store(true, Ordering::Release);
        self.thread.router.dispatch();
        loaded.take().map(|loaded| loaded.send(Ok(())));
        self.serve(group)
    }

    /// After a panic, which left the engine in any state: its sequences end with an error, and one without any takes its
    /// place. The workers are gone with their group.
    fn start_anew(&mut self, panic: &(dyn Any + Send)) -> Lost {
        let StepThread { config, shared, inbox, dispatcher, .. } = &mut self.thread;
        shared.ready.store(false, Ordering::Release);
        inbox.set_doorbell(None);
        let words = format!("the step thread of model `{}` panicked: {}", config.name, words_of(panic));
        tracing::error!(model = %config.name, "{words}; its requests end with an error, and its workers start again");
        self.engine = self.engine.take().map(|engine| engine.successor());
        self.timeouts.clear();
        self.events.clear();
        let error = InferError::internal(format!("{words}; the model starts again, so send the request again"));
        dispatcher.push_last_to_all(|| RequestEvent::Failed(error.clone()));
        dispatcher.flush();
        Lost::new(words)
    }

    /// Starts the workers and waits until each holds its weights and KV blocks. Requests queue meanwhile.
    fn start(&mut self) -> Result<Group, End> {
        let StepThread { config, replica, agents, prefix, inbox, .. } = &self.thread;
        let listener = inbox.clone();
        let next_step = self.engine.as_ref().map_or(0, Engine::next_step);
        let started = Instant::now();
        let mut group = Group::start(config, *replica, agents, prefix, next_step, move |event| {
            listener.send(Message::Agent(event));
        });
        let deadline = started + LOAD_TIMEOUT;
        let workers = self.await_all(&mut group, deadline, |message| match message {
            FromWorker::Loaded { max_blocks, weights_bytes, workspace_bytes, block_bytes, phases } => {
                Some(LoadedWorker { max_blocks, fixed_bytes: weights_bytes + workspace_bytes, block_bytes, phases })
            }
            _ => None,
        })?;
        let loaded = Instant::now();
        let fitting = workers.iter().map(|worker| worker.max_blocks).min().expect("a group has a worker");
        let num_blocks = self.make_engine(fitting)?;
        group.broadcast(&ToWorker::Configure { num_blocks })?;
        self.await_all(&mut group, deadline, |message| matches!(message, FromWorker::Ready).then_some(()))?;
        let mut phases = slowest_phases(&workers);
        phases.push(("load".to_owned(), loaded - started));
        phases.push(("kv_blocks".to_owned(), loaded.elapsed()));
        phases.push(("total".to_owned(), started.elapsed()));
        for (index, worker) in workers.iter().enumerate() {
            group.note_memory(index, worker.fixed_bytes + worker.block_bytes * num_blocks as u64);
        }
        let workers = group.workers().to_vec();
        self.thread.shared.figures.update_start(|start| *start = Start { workers, phases });
        Ok(group)
    }

    /// The engine keeps its number of blocks over a restart: sequences were admitted by it.
    fn make_engine(&mut self, fitting: usize) -> Result<usize, Lost> {
        let name = &self.thread.config.name;
        if let Some(engine) = &self.engine {
            let num_blocks = engine.config().num_blocks;
            return match fitting >= num_blocks {
                true => Ok(num_blocks),
                false => Err(Lost::new(format!(
                    "{fitting} KV blocks fit after the restart of `{name}`, {num_blocks} before"
                ))),
            };
        }
        let config = engine::EngineConfig { num_blocks: fitting, ..self.thread.config.engine.clone() };
        tracing::info!(model = %name, num_blocks = fitting, block_size = config.block_size, "workers hold their weights");
        let engine = Engine::new(config).map_err(|error| Lost::new(format!("{fitting} KV blocks fit: {error}")))?;
        self.engine = Some(engine);
        Ok(fitting)
    }

    /// One answer from every worker, through `pick`.
    fn await_all<T>(
        &mut self,
        group: &mut Group,
        deadline: Instant,
        mut pick: impl FnMut(FromWorker) -> Option<T>,
    ) -> Result<Vec<T>, End> {
        let mut answers: Vec<Option<T>> = (0..group.num_workers()).map(|_| None).collect();
        while answers.iter().any(Option::is_none) {
            self.take_messages(group, Duration::from_millis(1))?;
            for (index, answer) in answers.iter_mut().enumerate().filter(|(_, answer)| answer.is_none()) {
                match group.receive(index, Duration::ZERO)? {
                    Some(FromWorker::Exchange { bytes }) => group.exchange(index, bytes)?,
                    Some(message) => *answer = pick(message),
                    None => {}
                }
            }
            if Instant::now() > deadline {
                return Err(Lost::new(format!("workers were not loaded within {LOAD_TIMEOUT:?}")).into());
            }
        }
        Ok(answers.into_iter().flatten().collect())
    }

    /// Steps until a worker is lost or the model is stopped.
    fn serve(&mut self, mut group: Group) -> End {
        debug_assert!(group.is_linked());
        self.thread.inbox.set_doorbell(group.doorbell());
        let end = loop {
            if let Err(end) = self.turn(&mut group) {
                break end;
            }
        };
        self.thread.shared.ready.store(false, Ordering::Release);
        self.thread.inbox.set_doorbell(None);
        match end {
            End::Stopped(_) => group.end(true),
            End::Lost(Lost { kind: LostKind::Failed, .. }) if self.is_hung() => self.log_stacks(&mut group),
            End::Lost(_) => {}
        }
        end
    }

    /// Whether the workers were silent for long before they were lost.
    fn is_hung(&self) -> bool {
        let is_busy = self.engine.as_ref().is_some_and(|engine| engine.num_in_flight() > 0);
        is_busy && self.last_progress.elapsed() > SILENCE
    }

    /// Writes to the log where every worker that still runs hangs. Requests that come meanwhile wait in the inbox.
    fn log_stacks(&mut self, group: &mut Group) {
        group.ask_for_stacks();
        let deadline = Instant::now() + STACKS_TIMEOUT;
        let mut others = Vec::new();
        while group.stacks().iter().any(Option::is_none) && Instant::now() < deadline {
            match self.thread.messages.recv_timeout(Duration::from_millis(20)) {
                // One that has ended has no stack; that it has is known.
                Ok(Message::Agent(event)) => drop(group.take_event(event)),
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

    /// One turn: take messages, plan and send what may be in flight, settle what came back.
    fn turn(&mut self, group: &mut Group) -> Result<(), End> {
        self.take_messages(group, Duration::ZERO)?;
        let engine = self.engine.as_mut().expect("workers are ready, so the engine stands");
        let was_idle = engine.num_in_flight() == 0;
        let shared = Arc::clone(&self.thread.shared);
        let figures = &shared.figures;
        let mut now = Instant::now();
        // The workers wait for masks, so these are sent before the next plan.
        send_masks(engine, group)?;
        while let Some(plan) = engine.plan() {
            now = figures.phase(Phase::Plan, now);
            self.step_kinds.planned(&plan, figures);
            push_joined(&mut self.thread.dispatcher, &plan, now.into(), shared.restarts.load(Ordering::Relaxed));
            group.step(plan)?;
            now = figures.phase(Phase::Send, now);
        }
        send_masks(engine, group)?;
        self.thread.dispatcher.flush(); // Before the wait for workers: who has joined is to know now.
        engine.drain_events(&mut self.events);
        if engine.num_in_flight() == 0 {
            *ipc::lock(&self.thread.shared.stats) = engine.stats();
            self.push_events();
            return self.take_messages(group, Duration::MAX);
        }
        if was_idle {
            self.last_progress = Instant::now();
        }
        if group.doorbell().is_none() {
            self.take_messages(group, LOOK_AROUND)?;
        }
        let engine = self.engine.as_mut().expect("as above");
        match group.next_report(LOOK_AROUND)? {
            Some(FromWorker::Output(output)) => {
                now = figures.phase(Phase::Wait, now);
                self.step_kinds.settled(self.last_progress.elapsed(), figures);
                let settled = engine.settle(output, &mut self.events);
                settled.map_err(|error| Lost::new(format!("worker 0 answered out of turn: {error}")))?;
                self.losses = 0;
                // Slowly forgets: the first step after a start may be far longer than any other.
                self.longest_step = self.last_progress.elapsed().max(self.longest_step.mul_f32(0.99));
                *ipc::lock(&self.thread.shared.stats) = engine.stats();
                self.last_progress = figures.phase(Phase::Settle, now);
                self.push_events();
                figures.phase(Phase::Tell, self.last_progress);
                return Ok(());
            }
            Some(FromWorker::Logits(piece)) => {
                self.last_progress = Instant::now();
                self.thread.dispatcher.push(piece.sequence, RequestEvent::Logits(Box::new(piece)));
            }
            Some(_) => return Err(Lost::new("worker 0 sent something other than a step's output".to_owned()).into()),
            // Rung by a message, or time to look around.
            None => self.check_watchdog()?,
        }
        self.push_events();
        Ok(())
    }

    fn check_watchdog(&self) -> Result<(), Lost> {
        // A machine that is only slow gets longer each time, lest the same step be lost again and again.
        let patience = self.thread.config.step_timeout * (1 << self.losses.min(MAX_LOSSES));
        let (waited, allowed) = (self.last_progress.elapsed(), patience + self.longest_step);
        match waited > allowed {
            true => Err(Lost::new(format!("a step was not done after {waited:.1?}, {allowed:.1?} are allowed"))),
            false => Ok(()),
        }
    }

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

    /// Everything in the inbox now, waiting up to `timeout` for the first ([`Duration::MAX`]: for as long as it takes).
    fn take_messages(&mut self, group: &mut Group, timeout: Duration) -> Result<(), End> {
        let messages = &self.thread.messages;
        let mut next = match timeout {
            Duration::MAX => messages.recv().ok(),
            timeout => messages.recv_timeout(timeout).ok(),
        };
        while let Some(message) = next {
            match message {
                Message::Agent(event) => {
                    group.take_event(event)?;
                    self.thread.shared.figures.update_start(|start| start.workers = group.workers().to_vec());
                }
                Message::Submit { sequences, timeout, events } => self.submit(sequences, timeout, events),
                Message::Cancel(sequence) => {
                    self.engine.as_mut().map(|engine| engine.cancel(sequence));
                }
                Message::Finish(sequence) => {
                    self.engine.as_mut().map(|engine| engine.finish(sequence));
                }
                Message::Ledger(reply) => {
                    let _ = reply.send(Report::new(self.engine.as_ref(), self.thread.dispatcher.num_open()));
                }
                Message::Stop { done } => return Err(End::Stopped(done)),
            }
            next = self.thread.messages.try_recv().ok();
        }
        self.expire();
        self.thread.dispatcher.flush();
        Ok(())
    }

    /// Refuses requests that have waited for as long as they may, or has others served before them.
    fn expire(&mut self) {
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

    fn submit(&mut self, requests: Vec<Request>, timeout: Option<(Instant, bool)>, events: event_queue::Sender) {
        let Some(engine) = &mut self.engine else {
            events.send(RequestEvent::Failed(InferError::unavailable("the model's workers still load")));
            return;
        };
        let mut sequences = Vec::with_capacity(requests.len());
        for request in requests {
            match engine.submit(request) {
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

    /// After a loss: sequences wait to be prefilled again; or, after too many losses in a row, all requests end
    /// and the thread waits to be stopped.
    fn recover(&mut self, lost: &Lost) -> Option<oneshot::Sender<()>> {
        self.losses += 1;
        let (name, reason) = (&self.thread.config.name, &lost.reason);
        self.step_kinds.clear();
        if let Some(engine) = &mut self.engine {
            engine.recover();
        }
        if lost.kind == LostKind::RankLost {
            tracing::error!(model = %name, "{reason}");
            return self.give_up(reason.clone());
        }
        if self.losses < MAX_LOSSES {
            tracing::warn!(model = %name, reason = %reason, losses = self.losses, "workers lost; starting them again");
            self.thread.shared.restarts.fetch_add(1, Ordering::Relaxed);
            std::thread::sleep(FIRST_BACK_OFF * (1 << self.losses.saturating_sub(1)) - FIRST_BACK_OFF);
            return None;
        }
        let words =
            format!("workers of model `{name}` were lost {} times without a step between: {reason}", self.losses);
        tracing::error!(model = %name, "{words}; requests are refused until a further start succeeds");
        self.give_up(words)
    }

    /// Ends all requests with this error, and refuses others with it until [`Message::Stop`].
    fn give_up(&mut self, words: String) -> Option<oneshot::Sender<()>> {
        *ipc::lock(&self.thread.shared.failure) = Some(words.clone());
        let error = InferError::unavailable(words);
        self.thread.dispatcher.push_last_to_all(|| RequestEvent::Failed(error.clone()));
        self.thread.dispatcher.flush();
        self.refuse_for_a_while(&error)
    }

    /// Waits for [`Message::Stop`] or the time to try again. Requests get the error meanwhile.
    fn refuse_for_a_while(&mut self, error: &InferError) -> Option<oneshot::Sender<()>> {
        let doublings = self.losses.saturating_sub(MAX_LOSSES).min(8);
        let end = Instant::now() + (FIRST_RETRY * (1 << doublings)).min(LONGEST_RETRY);
        loop {
            match self.thread.messages.recv_timeout(end.saturating_duration_since(Instant::now())) {
                Ok(Message::Submit { events, .. }) => events.send(RequestEvent::Failed(error.clone())),
                Ok(Message::Stop { done }) => return Some(done),
                Ok(Message::Cancel(_) | Message::Finish(_) | Message::Agent(_) | Message::Ledger(_)) => {}
                Err(mpsc::RecvTimeoutError::Timeout) => return None,
                // All senders are gone: no request can come any more.
                Err(mpsc::RecvTimeoutError::Disconnected) => return Some(oneshot::channel().0),
            }
        }
    }
}

/// What a worker reports once its weights are loaded.
struct LoadedWorker {
    max_blocks: usize,
    /// Weights and workspace.
    fixed_bytes: u64,
    block_bytes: u64,
    phases: Vec<(String, Duration)>,
}

/// What took how long in the slowest worker, phase by phase.
fn slowest_phases(workers: &[LoadedWorker]) -> Vec<(String, Duration)> {
    let mut slowest: Vec<(String, Duration)> = Vec::new();
    for (name, time) in workers.iter().flat_map(|worker| &worker.phases) {
        match slowest.iter_mut().find(|(known, _)| known == name) {
            Some((_, longest)) => *longest = (*longest).max(*time),
            None => slowest.push((name.clone(), *time)),
        }
    }
    slowest
}

/// Reports to requests that a plan has room for them.
fn push_joined(dispatcher: &mut Dispatcher, plan: &StepPlan, at: Timestamp, start: u64) {
    for joined in &plan.joined {
        dispatcher.push(joined.sequence, RequestEvent::Joined { sequence: joined.sequence, at, start });
    }
}

#[cfg(test)]
mod tests;
