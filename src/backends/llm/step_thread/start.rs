//! The start of a replica: its workers load their weights, agree on the number of KV blocks, and run the first steps.

use std::sync::Arc;
use std::time::{Duration, Instant};

use engine::{Engine, EngineConfig, divide_host_memory, state_interval};
use supervision::{FromWorker, ToWorker};

use super::super::host_share::TakenShare;
use super::super::inbox::Message;
use super::super::metrics::Start;
use super::super::worker_group::{WorkerGroup, WorkerLoss};
use super::{End, Running, StepThread};

/// Timeout for loading weights.
const LOAD_TIMEOUT: Duration = Duration::from_secs(1800);

impl Running {
    /// Starts the workers, and waits until each has loaded its weights and allocated its KV blocks.
    pub(super) fn start(&mut self) -> Result<WorkerGroup, End> {
        let StepThread { config, replica, agents, prefix, inbox, shared, .. } = &self.thread;
        let (listener, shared) = (inbox.clone(), Arc::clone(shared));
        let next_step = self.engine.as_ref().map_or(0, Engine::next_step);
        let started = Instant::now();
        shared.responsiveness.begin_start();
        let host_memory = self.host_memory.as_ref();
        let mut group = WorkerGroup::start(config, *replica, agents, prefix, next_step, host_memory, move |event| {
            if !shared.responsiveness.note(&event) {
                listener.send(Message::Agent(event));
            }
        });
        group.check_ranks()?;
        let deadline = started + LOAD_TIMEOUT;
        let is_first = self.engine.is_none();
        let workers = self.receive_from_all(&mut group, deadline, |message| match message {
            FromWorker::Loaded {
                fits,
                fits_again,
                weights_bytes,
                workspace_bytes,
                block_bytes,
                state_bytes,
                has_host_room,
                has_host_copies,
                phases,
            } => Some(LoadedWorker {
                fits: if is_first { fits } else { fits_again },
                fixed_bytes: weights_bytes + workspace_bytes,
                block_bytes,
                state_bytes,
                has_host_room,
                has_host_copies,
                phases,
            }),
            _ => None,
        })?;
        let loaded = Instant::now();
        self.keep_host_copies(&workers);
        let [num_blocks, num_states] = least(workers.iter().map(|worker| worker.fits));
        let host_bytes = self.host_bytes(&workers, [num_blocks, num_states]);
        let host = |worker: &LoadedWorker| divide_host_memory(host_bytes, [worker.block_bytes, worker.state_bytes]);
        let [num_host_blocks, num_host_states] = least(workers.iter().map(host));
        if host_bytes > 0 && num_host_blocks == 0 {
            let name = &self.thread.config.name;
            tracing::warn!(model = %name, "no KV block fits into `kv_cache_host_memory_bytes` {host_bytes}; raise it");
        }
        let disk_bytes = self.thread.config.kv_disk.bytes;
        let disk = |worker: &LoadedWorker| divide_host_memory(disk_bytes, [worker.block_bytes, worker.state_bytes]);
        let num_disk = if num_host_blocks > 0 { least(workers.iter().map(disk)) } else { [0; 2] };
        if disk_bytes > 0 && num_disk[0] == 0 {
            let name = &self.thread.config.name;
            tracing::warn!(model = %name, "no KV block fits into `kv_cache_disk_bytes` {disk_bytes}, or none into host memory; raise it");
        }
        let fitting = Fitting { num_blocks, num_states, num_host_blocks, num_host_states, num_disk };
        let first = workers.first().expect("a group has a worker");
        let Fitting { num_blocks, num_states, num_host_blocks, num_host_states, .. } =
            self.create_engine(fitting, state_interval(first.block_bytes, first.state_bytes))?;
        group.broadcast(&ToWorker::Configure { num_blocks, num_states, num_host_blocks, num_host_states })?;
        let found = self.receive_from_all(&mut group, deadline, |message| match message {
            FromWorker::Ready { slot_bytes } => Some(slot_bytes),
            _ => None,
        })?;
        let reported = workers.iter().map(|worker| [worker.block_bytes, worker.state_bytes]);
        let slot_bytes: Vec<[[u64; 2]; 2]> = reported.zip(found).map(|(reported, found)| [reported, found]).collect();
        self.open_disk(&mut group, &slot_bytes)?;
        let allocated = Instant::now();
        self.measure_steps(&mut group, started.elapsed())?;
        let mut phases = slowest_phases(&workers);
        phases.push(("load".to_owned(), loaded - started));
        phases.push(("kv_blocks".to_owned(), allocated - loaded));
        phases.push(("steps".to_owned(), allocated.elapsed()));
        phases.push(("total".to_owned(), started.elapsed()));
        for (index, worker) in workers.iter().enumerate() {
            group.set_memory(index, worker.fixed_bytes + worker.cache_bytes([num_blocks, num_states]));
        }
        let of_all = |bytes: fn(&LoadedWorker) -> u64| workers.iter().map(bytes).sum::<u64>();
        let slot_bytes = [of_all(|worker| worker.block_bytes), of_all(|worker| worker.state_bytes)];
        let workers = group.workers().to_vec();
        self.thread.shared.metrics.update_start(|start| *start = Start { workers, phases, slot_bytes });
        Ok(group)
    }

    /// Bytes of host memory that each worker uses: the size that was set, or what it takes of the share of its rank for a cache of
    /// so many blocks and states.
    fn host_bytes(&mut self, workers: &[LoadedWorker], [num_blocks, num_states]: [usize; 2]) -> u64 {
        let config = &self.thread.config;
        let most = config.worker.kv_host_memory_bytes;
        let Some(share) = config.host_share.as_ref().filter(|_| most > 0) else { return most };
        if let Some(taken) = &self.taken_share {
            return taken.bytes();
        }
        let cache = |worker: &LoadedWorker| worker.cache_bytes([num_blocks, num_states]);
        let cache_bytes = workers.iter().map(cache).max().unwrap_or(0);
        let have_room = workers.iter().all(|worker| worker.has_host_room);
        let taken = have_room.then(|| share.take(config.ranks(self.thread.replica), cache_bytes));
        let bytes = taken.as_ref().map_or(0, TakenShare::bytes);
        let why = match bytes {
            0 if !have_room => "none: a worker has too little room for its buffers, or its host for the share",
            0 => "none: other models have the share of a rank",
            _ => "a part of each rank's share of what its host had free, twice the device's cache at most",
        };
        let name = &config.name;
        tracing::info!(model = %name, bytes_of_worker = bytes, "host memory for evicted KV blocks without `--kv-cache-host-memory`: {why}");
        self.taken_share = taken;
        if bytes == 0 {
            // Workers that start again have no buffers for it.
            self.thread.config.worker.kv_host_memory_bytes = 0;
            self.host_memory = None;
        }
        bytes
    }

    /// Forgets what the host has, unless all workers that start again have the host memory of those before them.
    fn keep_host_copies(&mut self, workers: &[LoadedWorker]) {
        let Some(engine) = self.engine.as_mut().filter(|engine| engine.config().num_host_blocks > 0) else { return };
        if !workers.iter().all(|worker| worker.has_host_copies) {
            engine.forget_host();
        }
        let (name, num_blocks) = (&self.thread.config.name, engine.stats().num_host_blocks_used);
        tracing::info!(model = %name, num_blocks, "KV blocks in host memory are kept");
    }

    /// Creates the engine at the first start. Returns the number of KV blocks and recurrent states, which stays the same over restarts
    /// because sequences were admitted by it.
    pub(super) fn create_engine(&mut self, fitting: Fitting, state_interval: usize) -> Result<Fitting, WorkerLoss> {
        let name = &self.thread.config.name;
        let Fitting { num_blocks: blocks, num_states: states, num_host_blocks, num_host_states, num_disk } = fitting;
        if let Some(engine) = &self.engine {
            let &EngineConfig { num_blocks, num_states, num_host_blocks, num_host_states, .. } = engine.config();
            let check = |fits: usize, before: usize, what: &str| {
                let message = format!("{fits} {what} fit after the restart of `{name}`, {before} before");
                if fits >= before { Ok(()) } else { Err(WorkerLoss::new(message)) }
            };
            check(blocks, num_blocks, "KV blocks")?;
            check(states, num_states, "recurrent states")?;
            return Ok(Fitting { num_blocks, num_states, num_host_blocks, num_host_states, num_disk });
        }
        let limits = self.thread.config.engine.clone();
        let config = EngineConfig {
            num_blocks: blocks,
            num_states: states,
            state_interval,
            num_host_blocks,
            num_host_states,
            num_disk_blocks: num_disk[0],
            num_disk_states: num_disk[1],
            ..limits
        };
        if num_host_blocks > 0 {
            tracing::info!(model = %name, num_host_blocks, num_host_states, "evicted KV blocks go to host memory");
        }
        match states {
            0 => {
                tracing::info!(model = %name, num_blocks = blocks, block_size = config.block_size, "workers hold their weights")
            }
            _ => tracing::info!(
                model = %name,
                num_blocks = blocks,
                block_size = config.block_size,
                num_states = states,
                state_interval,
                "workers hold their weights"
            ),
        }
        let engine =
            Engine::new(config).map_err(|error| WorkerLoss::new(format!("{blocks} KV blocks fit: {error}")))?;
        self.engine = Some(engine);
        Ok(fitting)
    }

    /// Receives one message from every worker that `pick` accepts.
    pub(super) fn receive_from_all<T>(
        &mut self,
        group: &mut WorkerGroup,
        deadline: Instant,
        mut pick: impl FnMut(FromWorker) -> Option<T>,
    ) -> Result<Vec<T>, End> {
        let mut answers: Vec<Option<T>> = (0..group.num_workers()).map(|_| None).collect();
        while answers.iter().any(Option::is_none) {
            self.handle_messages(group, Duration::from_millis(1))?;
            for (index, answer) in answers.iter_mut().enumerate().filter(|(_, answer)| answer.is_none()) {
                match group.receive(index, Duration::ZERO)? {
                    Some(FromWorker::Exchange { bytes }) => group.exchange(index, bytes)?,
                    Some(message) => *answer = pick(message),
                    None => {}
                }
            }
            if Instant::now() > deadline {
                return Err(WorkerLoss::new(format!("workers were not loaded within {LOAD_TIMEOUT:?}")).into());
            }
        }
        Ok(answers.into_iter().flatten().collect())
    }
}

/// Numbers of KV blocks and of slots for recurrent states.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Fitting {
    pub(super) num_blocks: usize,
    pub(super) num_states: usize,
    /// In host memory.
    pub(super) num_host_blocks: usize,
    /// In host memory.
    pub(super) num_host_states: usize,
    /// Both on disk.
    pub(super) num_disk: [usize; 2],
}

/// What all workers have room for.
fn least(of_workers: impl Iterator<Item = [usize; 2]>) -> [usize; 2] {
    of_workers.reduce(|[a, b], [c, d]| [a.min(c), b.min(d)]).unwrap_or_default()
}

/// The report of a worker that has loaded its weights.
struct LoadedWorker {
    /// Numbers of KV blocks and of slots for recurrent states that fit.
    fits: [usize; 2],
    /// Weights and workspace.
    fixed_bytes: u64,
    block_bytes: u64,
    state_bytes: u64,
    /// Whether it can use host memory.
    has_host_room: bool,
    /// Whether its host memory is that of the worker before it.
    has_host_copies: bool,
    phases: Vec<(String, Duration)>,
}

impl LoadedWorker {
    /// Bytes of its cache on the device.
    fn cache_bytes(&self, [num_blocks, num_states]: [usize; 2]) -> u64 {
        self.block_bytes * num_blocks as u64 + self.state_bytes * num_states as u64
    }
}

/// The longest duration of each phase among the workers.
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
