//! Rank 0: the engine, and the start, watch, sleep and loss of its workers, as the step thread of `backends::llm` behaves.

use std::collections::HashMap;

use engine::{
    Engine, EngineConfig, FinishReason, Policy, Refused, SampledToken, SequenceId, StepCosts, StepOutput, TokenEvent,
    plan,
};
use supervision::{FromAgent, FromWorker, ToWorker, WorkerId};

use crate::request::Expected;
use crate::tokens::{Guesser, Random};
use crate::wire::{Direction, Timeline};
use crate::worker_process::{Reaction, Sizes, WorkerProcess};

/// Time without progress of a step after which workers are lost.
const STEP_TIMEOUT: u64 = 500;

/// Time in which workers must have started, moved their weights or woken.
const START_TIMEOUT: u64 = 2_000;

/// More events than a schedule without a deadlock or livelock has.
const MAX_EVENTS: usize = 200_000;

/// One of `n` steps kills a worker, as long as faults are left.
const DEATH_RATE: u32 = 30;

/// Longest time for which a process is stopped, if it goes on at all; longer than each of the timeouts.
const MAX_HANG: u32 = 3_000;

/// The process of rank 0. That of worker `i` has the number `i + 1`.
const RANK_0: usize = 0;

/// What has happened in schedules.
#[derive(Debug, Default)]
pub struct Totals {
    pub finished: u64,
    pub faults: u64,
    /// Faults that stopped a process.
    pub hangs: u64,
    pub restarts: u64,
    pub preempted: u64,
    pub sleeps: u64,
    /// Losses of workers while the model slept.
    pub lost_asleep: u64,
}

impl Totals {
    pub fn add(&mut self, other: &Self) {
        self.finished += other.finished;
        self.faults += other.faults;
        self.hangs += other.hangs;
        self.restarts += other.restarts;
        self.preempted += other.preempted;
        self.sleeps += other.sleeps;
        self.lost_asleep += other.lost_asleep;
    }
}

#[derive(Clone)]
enum Event {
    Submit(usize),
    Cancel(usize),
    Sleep {
        drops_weights: bool,
    },
    Wake,
    /// The workers of a start are spawned.
    Spawn(u64),
    /// A message arrives at a worker, or comes from it.
    ToWorker(WorkerId, Vec<u8>),
    FromWorker(WorkerId, Vec<u8>),
    Agent(FromAgent),
    Kill(WorkerId),
    /// The process of this number hangs: what happens in it waits until it goes on. A worker may hang for ever.
    Stop(usize),
    Resume {
        process: usize,
        instance: u64,
    },
    /// All workers of a start have computed a step.
    StepDone {
        instance: u64,
        output: StepOutput,
    },
    /// The workers of a start must have made progress since the progress of this number.
    Deadline {
        instance: u64,
        progress: u64,
    },
}

impl Event {
    /// The process in which it happens; `None` for what is done to a process from outside.
    fn process(&self) -> Option<usize> {
        match self {
            Event::ToWorker(id, _) => Some(id.tp_rank as usize + 1),
            // The first worker reports tokens.
            Event::StepDone { .. } => Some(1),
            Event::Kill(_) | Event::Stop(_) | Event::Resume { .. } => None,
            _ => Some(RANK_0),
        }
    }
}

/// What rank 0 waits for.
#[derive(Debug, Clone, PartialEq, Eq)]
enum Phase {
    /// The weights of each worker.
    Loading(Vec<bool>),
    /// The KV cache of each worker, after a start or a sleep.
    Allocating(Vec<bool>),
    Serving,
    /// The memory of each worker is to be free.
    GoingToSleep(Vec<bool>),
    Asleep,
    AsleepAlone,
    /// The next start.
    Down,
}

pub struct World {
    random: Random,
    timeline: Timeline<Event>,
    engine: Engine,
    sizes: Sizes,
    workers: Vec<WorkerProcess>,
    /// Of each process that is stopped, what happens in it once it goes on.
    held: Vec<Option<Vec<Event>>>,
    instance: u64,
    phase: Phase,
    /// Counts everything that workers have achieved.
    progress: u64,
    /// Workers of the present start that have computed a step, with its tokens.
    computed: HashMap<u64, (usize, Vec<SampledToken>)>,
    /// Time until which the devices compute: they do one step after the other.
    busy_until: u64,
    /// Whether the weights are dropped, if the model is to sleep.
    sleep: Option<bool>,
    requests: Vec<Expected>,
    by_sequence: HashMap<SequenceId, usize>,
    events: Vec<TokenEvent>,
    totals: Totals,
}

fn config(random: &mut Random) -> EngineConfig {
    let max_rows = 1 + random.below(4) as usize;
    let below = |random: &mut Random, end| random.below(end) as usize;
    EngineConfig {
        max_rows,
        max_step_tokens: max_rows + below(random, 14),
        max_sequence_len: 40,
        block_size: 1 + below(random, 4),
        num_blocks: 14 + below(random, 30),
        max_in_flight: 1 + below(random, 3),
        max_joined_tokens: 24,
        min_prompt_tokens: 1 + below(random, 3),
        policy: if random.one_in(2) { Policy::MaxUtilization } else { Policy::GuaranteedNoEvict },
        prefix_cache: !random.one_in(4),
        max_drafts: below(random, 3),
        ..EngineConfig::default()
    }
}

impl World {
    pub fn new(seed: u64) -> Self {
        let mut random = Random(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ 0x5ee0);
        let config = config(&mut random);
        let EngineConfig { max_rows, num_blocks, block_size, .. } = config;
        let mut engine = Engine::new(config).expect("the limits are valid");
        engine.set_drafter(Box::new(Guesser(Random(seed))));
        let mut timeline = Timeline::new(random.below(6));
        let requests: Vec<_> = (0..2 + random.below(4)).map(|_| Expected::random(&mut random)).collect();
        for index in 0..requests.len() {
            let arrival = u64::from(random.below(200));
            timeline.after(arrival, Event::Submit(index));
            if random.one_in(6) {
                timeline.after(arrival + u64::from(random.below(80)), Event::Cancel(index));
            }
        }
        if random.one_in(3) {
            let (at, drops_weights) = (u64::from(random.below(200)), random.one_in(2));
            timeline.after(at, Event::Sleep { drops_weights });
            timeline.after(at + u64::from(random.below(1_000)), Event::Wake);
        }
        let num_workers = 1 + random.below(3) as usize;
        for _ in 0..random.below(3) {
            let (at, process) = (u64::from(random.below(300)), random.below(num_workers as u32 + 1));
            timeline.after(at, Event::Stop(process as usize));
        }
        let sizes = Sizes { max_rows, num_blocks, block_size };
        let workers = (0..num_workers).map(|_| WorkerProcess::new(sizes, 0)).collect();
        let mut world = Self {
            random,
            timeline,
            engine,
            sizes,
            held: vec![None; num_workers + 1],
            workers,
            instance: 0,
            phase: Phase::Down,
            progress: 0,
            computed: HashMap::new(),
            busy_until: 0,
            sleep: None,
            requests,
            by_sequence: HashMap::new(),
            events: Vec::new(),
            totals: Totals::default(),
        };
        world.start(0);
        world
    }

    /// Plays the schedule to its end, and checks what is left.
    pub fn run(mut self) -> Totals {
        for _ in 0..MAX_EVENTS {
            let Some(event) = self.timeline.next() else { break };
            self.play(event);
        }
        assert!(self.timeline.next().is_none(), "no end after {MAX_EVENTS} events in {:?}", self.phase);
        assert!(self.engine.is_idle(), "a sequence is lost in {:?}: {:?}", self.phase, self.engine.ledger());
        assert!(self.engine.ledger().is_zero(), "{:?}", self.engine.ledger());
        for (index, request) in self.requests.iter().enumerate() {
            let Expected { tokens, received, is_cancelled, has_ended, .. } = request;
            assert!(*has_ended, "request {index} has no end");
            assert!(received == tokens || *is_cancelled && tokens.starts_with(received), "tokens of request {index}");
        }
        self.totals.preempted = self.engine.stats().total_preempted;
        self.totals.faults += self.timeline.num_faults;
        self.totals
    }

    fn play(&mut self, event: Event) {
        let process = event.process();
        if let Some(held) = process.and_then(|process| self.held[process].as_mut()) {
            return held.push(event);
        }
        self.handle(event);
        // Nothing that happens elsewhere changes the engine.
        if process == Some(RANK_0) {
            self.pump();
            self.take_events();
            self.engine.audit().unwrap_or_else(|wrong| panic!("at {}: {wrong}", self.timeline.now));
        }
    }

    fn id(&self, worker: usize) -> WorkerId {
        WorkerId { instance: self.instance, tp_rank: worker as u32 }
    }

    fn waits(&self) -> Vec<bool> {
        vec![false; self.workers.len()]
    }

    /// Starts workers after a pause.
    fn start(&mut self, pause: u64) {
        self.instance += 1;
        self.phase = Phase::Down;
        self.timeline.after(pause, Event::Spawn(self.instance));
    }

    /// The workers are lost: they are killed, and others start.
    fn lose(&mut self) {
        assert!(self.timeline.num_faults > 0, "workers are lost without a fault in {:?}", self.phase);
        self.totals.restarts += 1;
        self.workers.iter_mut().for_each(|worker| worker.is_dead = true);
        self.engine.recover();
        self.start(10);
    }

    fn set_deadline(&mut self, time: u64) {
        self.progress += 1;
        let (instance, progress) = (self.instance, self.progress);
        self.timeline.after(time, Event::Deadline { instance, progress });
    }

    fn broadcast(&mut self, message: &ToWorker) {
        let mut bytes = Vec::new();
        plan::encode(message, &mut bytes);
        for worker in 0..self.workers.len() {
            let id = self.id(worker);
            let connection = (Direction::ToWorker, id.instance, id.tp_rank);
            self.timeline.send(&mut self.random, connection, bytes.clone(), |bytes| Event::ToWorker(id, bytes));
        }
    }

    fn send_to_rank0(&mut self, id: WorkerId, message: &FromWorker) {
        let mut bytes = Vec::new();
        plan::encode(message, &mut bytes);
        let connection = (Direction::FromWorker, id.instance, id.tp_rank);
        self.timeline.send(&mut self.random, connection, bytes, |bytes| Event::FromWorker(id, bytes));
    }

    /// A worker ends. Its agent reports it.
    fn end(&mut self, id: WorkerId) {
        self.workers[id.tp_rank as usize].is_dead = true;
        let ended = FromAgent::Ended { worker: id, reason: "killed".into(), by_signal: true, last_lines: Vec::new() };
        let connection = (Direction::Agent, id.instance, id.tp_rank);
        self.timeline.send(&mut self.random, connection, Vec::new(), |_| Event::Agent(ended.clone()));
    }

    fn is_present(&self, id: WorkerId) -> bool {
        id.instance == self.instance && self.phase != Phase::Down && self.phase != Phase::AsleepAlone
    }

    fn handle(&mut self, event: Event) {
        match event {
            Event::Submit(index) => match self.engine.submit(self.requests[index].request.clone()) {
                Ok(sequence) => drop(self.by_sequence.insert(sequence, index)),
                Err(Refused::NeverFits { .. }) => {
                    let request = &mut self.requests[index];
                    (request.is_cancelled, request.has_ended) = (true, true);
                }
                Err(refused) => panic!("request {index} is refused: {refused}"),
            },
            Event::Cancel(index) => {
                let sequence = self.by_sequence.iter().find(|(_, its)| **its == index).map(|(sequence, _)| *sequence);
                let is_live = sequence.is_some_and(|sequence| self.engine.cancel(sequence));
                self.requests[index].is_cancelled |= is_live;
            }
            Event::Sleep { drops_weights } => self.sleep = Some(drops_weights),
            Event::Wake => self.wake(),
            Event::Spawn(instance) if instance == self.instance => self.spawn(),
            Event::Spawn(_) => {}
            Event::ToWorker(id, bytes) => self.deliver_to_worker(id, &bytes),
            Event::FromWorker(id, bytes) if self.is_present(id) => self.deliver_to_rank0(id, &bytes),
            Event::FromWorker(..) => {}
            Event::Agent(FromAgent::Ended { worker, .. }) if self.is_present(worker) => self.lose_or_sleep(),
            Event::Agent(_) => {}
            Event::Kill(id) => {
                if self.is_present(id) && !self.workers[id.tp_rank as usize].is_dead {
                    self.end(id);
                }
            }
            Event::Stop(process) => self.stop(process),
            Event::Resume { process, instance } if process == RANK_0 || instance == self.instance => {
                self.held[process].take().into_iter().flatten().for_each(|event| self.play(event));
            }
            Event::Resume { .. } => {}
            Event::StepDone { instance, output } => self.finish_step(instance, output),
            Event::Deadline { instance, progress } => {
                let is_served = self.phase == Phase::Serving && self.engine.num_in_flight() == 0;
                let waits = !is_served && self.phase != Phase::Asleep && self.phase != Phase::AsleepAlone;
                if instance == self.instance && progress == self.progress && waits && self.phase != Phase::Down {
                    self.lose();
                }
            }
        }
    }

    /// Stops a process, if there is one that runs.
    fn stop(&mut self, process: usize) {
        let runs = process == RANK_0 || {
            let worker = process - 1;
            self.is_present(self.id(worker)) && !self.workers[worker].is_dead
        };
        if !runs || self.held[process].is_some() {
            return;
        }
        self.held[process] = Some(Vec::new());
        self.timeline.num_faults += 1;
        self.totals.hangs += 1;
        if process == RANK_0 || !self.random.one_in(3) {
            let (time, instance) = (1 + u64::from(self.random.below(MAX_HANG)), self.instance);
            self.timeline.after(time, Event::Resume { process, instance });
        }
    }

    fn spawn(&mut self) {
        let next_step = self.engine.next_step();
        self.computed.clear();
        for index in 0..self.workers.len() {
            self.workers[index] = WorkerProcess::new(self.sizes, next_step);
            self.held[index + 1] = None;
            let id = self.id(index);
            if self.timeline.has_fault(&mut self.random, DEATH_RATE) {
                let delay = u64::from(self.random.below(60));
                self.timeline.after(delay, Event::Kill(id));
            }
        }
        self.phase = Phase::Loading(self.waits());
        self.set_deadline(START_TIMEOUT);
        for index in 0..self.workers.len() {
            let loaded = FromWorker::Loaded {
                weights_bytes: 1,
                workspace_bytes: 1,
                block_bytes: 1,
                fits: [self.sizes.num_blocks, 0],
                fits_again: [self.sizes.num_blocks, 0],
                state_bytes: 0,
                has_host_room: true,
                has_host_copies: false,
                phases: Vec::new(),
            };
            self.send_to_rank0(self.id(index), &loaded);
        }
    }

    fn deliver_to_worker(&mut self, id: WorkerId, bytes: &[u8]) {
        let is_dead = self.workers[id.tp_rank as usize].is_dead;
        if id.instance != self.instance || is_dead || matches!(self.phase, Phase::Down | Phase::AsleepAlone) {
            return;
        }
        match self.workers[id.tp_rank as usize].receive(bytes) {
            Reaction::Send(message) => self.send_to_rank0(id, &message),
            Reaction::Fail(message) => {
                self.send_to_rank0(id, &FromWorker::Failed { message });
                self.end(id);
            }
            Reaction::Computed { step, tokens } => self.join_step(step, tokens),
            Reaction::Nothing => {}
        }
    }

    /// A worker has computed a step. The step is done when all have, which must agree.
    fn join_step(&mut self, step: u64, tokens: Vec<SampledToken>) {
        let (count, first) = self.computed.entry(step).or_insert_with(|| (0, tokens.clone()));
        assert_eq!(*first, tokens, "workers disagree about step {step}");
        *count += 1;
        if *count == self.workers.len() && self.workers.iter().all(|worker| !worker.is_dead) {
            self.computed.remove(&step);
            let output = StepOutput { step, tokens, guesses: vec![] };
            let now = self.timeline.now;
            self.busy_until = self.busy_until.max(now) + u64::from(1 + self.random.below(4));
            self.timeline.after(self.busy_until - now, Event::StepDone { instance: self.instance, output });
        }
    }

    fn finish_step(&mut self, instance: u64, output: StepOutput) {
        if instance != self.instance || self.workers.iter().any(|worker| worker.is_dead) {
            return;
        }
        self.workers.iter_mut().for_each(WorkerProcess::step_ended);
        if self.timeline.has_fault(&mut self.random, DEATH_RATE) {
            let victim = self.random.below(self.workers.len() as u32);
            let delay = u64::from(self.random.below(10));
            self.timeline.after(delay, Event::Kill(self.id(victim as usize)));
        }
        self.send_to_rank0(self.id(0), &FromWorker::Output(output));
    }

    fn deliver_to_rank0(&mut self, id: WorkerId, bytes: &[u8]) {
        let message = match plan::decode::<FromWorker>(bytes) {
            Ok(FromWorker::Failed { .. }) | Err(_) => return self.lose_or_sleep(),
            Ok(message) => message,
        };
        let worker = id.tp_rank as usize;
        match (&mut self.phase, message) {
            (Phase::Loading(done), FromWorker::Loaded { .. }) => done[worker] = true,
            (Phase::Allocating(done), FromWorker::Ready { .. }) => done[worker] = true,
            (Phase::GoingToSleep(done), FromWorker::Slept { .. }) => done[worker] = true,
            (Phase::Serving, FromWorker::Output(output)) => {
                if self.engine.settle(output, &mut self.events).is_err() {
                    return self.lose();
                }
                if self.random.one_in(8) {
                    // Drafts become worth their time, or no longer are.
                    let gap = if self.random.one_in(2) { 1.0 } else { 0.0 };
                    self.engine.set_costs(StepCosts { step: 0.01, gap, ..StepCosts::default() });
                }
                self.set_deadline(STEP_TIMEOUT);
            }
            // Only the worker that reports tokens is read while steps run.
            (Phase::Serving, _) if worker == 0 => return self.lose(),
            // Others wait for their message, and drop what comes before it.
            _ => {}
        }
        self.advance();
    }

    /// Goes on when all workers have answered.
    fn advance(&mut self) {
        match &self.phase {
            Phase::Loading(done) if done.iter().all(|&done| done) => {
                self.phase = Phase::Allocating(self.waits());
                self.broadcast(&ToWorker::Configure {
                    num_blocks: self.sizes.num_blocks,
                    num_states: 0,
                    num_host_blocks: 0,
                    num_host_states: 0,
                });
            }
            Phase::Allocating(done) if done.iter().all(|&done| done) => self.phase = Phase::Serving,
            Phase::GoingToSleep(done) if done.iter().all(|&done| done) => {
                self.totals.sleeps += 1;
                self.phase = Phase::Asleep;
                if self.timeline.has_fault(&mut self.random, 4) {
                    let (victim, delay) = (self.random.below(self.workers.len() as u32), self.random.below(500));
                    self.timeline.after(u64::from(delay), Event::Kill(self.id(victim as usize)));
                }
                if self.sleep.is_none() {
                    self.wake();
                }
            }
            _ => {}
        }
    }

    /// A worker is lost: a model that sleeps goes on to do so.
    fn lose_or_sleep(&mut self) {
        match self.phase {
            Phase::Asleep => {
                self.totals.lost_asleep += 1;
                self.workers.iter_mut().for_each(|worker| worker.is_dead = true);
                self.phase = Phase::AsleepAlone;
            }
            _ => self.lose(),
        }
    }

    fn wake(&mut self) {
        self.sleep = None;
        match self.phase {
            Phase::Asleep => {
                self.phase = Phase::Allocating(self.waits());
                self.set_deadline(START_TIMEOUT);
                self.broadcast(&ToWorker::Wake { next_step: self.engine.next_step() });
            }
            Phase::AsleepAlone => self.start(1),
            _ => {}
        }
    }

    /// Plans and sends steps, or begins to sleep.
    fn pump(&mut self) {
        if self.phase != Phase::Serving {
            return;
        }
        self.engine.hold_new(self.sleep.is_some());
        if let Some(drops_weights) = self.sleep.filter(|_| self.engine.is_unbegun()) {
            self.engine.recover();
            if drops_weights {
                self.totals.sleeps += 1;
                self.workers.iter_mut().for_each(|worker| worker.is_dead = true);
                self.phase = Phase::AsleepAlone;
                return;
            }
            self.phase = Phase::GoingToSleep(self.waits());
            self.set_deadline(START_TIMEOUT);
            return self.broadcast(&ToWorker::Sleep);
        }
        let was_idle = self.engine.num_in_flight() == 0;
        while let Some(plan) = self.engine.plan() {
            self.broadcast(&ToWorker::Step(plan));
        }
        if was_idle && self.engine.num_in_flight() > 0 {
            self.set_deadline(STEP_TIMEOUT);
        }
    }

    fn take_events(&mut self) {
        self.engine.drain_events(&mut self.events);
        for event in std::mem::take(&mut self.events) {
            let request = &mut self.requests[self.by_sequence[&event.sequence]];
            assert!(!request.has_ended, "nothing follows the end of a sequence");
            request.received.extend(event.tokens.iter().map(|token| token.token));
            request.has_ended = event.finished.is_some();
            self.totals.finished += u64::from(event.finished == Some(FinishReason::Length));
        }
    }
}
