//! Spawns, watches and kills the worker processes of one rank.

use std::collections::HashMap;
use std::io::Write;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::sync::{Arc, Mutex, mpsc};
use std::thread;
use std::time::{Duration, Instant};

use engine::DiskCopy;
use ipc::{
    Prefix, ProcessWatch, Ring, SharedMemory, bind_to_parent, describe_exit, essential_thread, lock, sweep_all_stale,
    withhold_secrets,
};

use crate::activity::watch_activity;
use crate::disk::{DiskEvent, DiskFile, DiskLayout};
use crate::messages::{FromAgent, RelayedWorker, ToAgent, WorkerId};
use crate::node_relay::NodeRelay;
use crate::protocol::{ShmName, WorkerSpec};
use crate::stderr_log::WorkerStderr;

/// How long a worker may take to end after SIGUSR1.
const TERMINATE_GRACE: Duration = Duration::from_secs(2);

/// How long standard error of an ended worker is read: a child of the worker may keep the pipe open.
const STDERR_TIMEOUT: Duration = Duration::from_millis(200);

/// How long the start of a process may delay other messages: the program may be on a network disk that hangs.
const SPAWN_TIMEOUT: Duration = Duration::from_secs(30);

/// How long a worker may take to end after SIGKILL. A driver or a disk that hangs delays its end in the kernel.
const KILL_TIMEOUT: Duration = Duration::from_secs(10);

/// How long the threads of a worker may take to write their stacks.
const STACKS_TIMEOUT: Duration = Duration::from_secs(1);

/// Spawns, watches and kills the workers of one rank, as messages of rank 0 request.
#[derive(Debug)]
pub struct WorkerSupervisor {
    prefix: Prefix,
    program: PathBuf,
    events: mpsc::Sender<FromAgent>,
    workers: Arc<Mutex<Workers>>,
    /// By [`WorkerId::instance`].
    relays: Mutex<HashMap<u64, NodeRelay>>,
    host_memory: Arc<Mutex<HeldMemory>>,
    /// The files below host memory, by the same ids.
    disks: Mutex<HashMap<u64, DiskFile>>,
}

/// Host memory that is passed to workers, by [`PassedMemory::id`](crate::PassedMemory::id), with the last worker that got it.
type HeldMemory = HashMap<u64, (Arc<SharedMemory>, Arc<ProcessWatch>)>;

/// A worker that runs, or one that has ended and whose output ring rank 0 may still read.
#[derive(Debug)]
struct Supervised {
    watch: Arc<ProcessWatch>,
    stderr: Arc<WorkerStderr>,
    /// Dropping these removes their names from /dev/shm.
    _rings: [Ring; 2],
    has_ended: bool,
    /// Rank 0 will not read its rings again.
    is_released: bool,
}

impl WorkerSupervisor {
    /// A supervisor that starts workers as `program worker`, creates their rings under `prefix` and reports to `events`.
    pub fn new(prefix: Prefix, program: PathBuf, events: mpsc::Sender<FromAgent>) -> Self {
        Self {
            prefix,
            program,
            events,
            workers: Arc::default(),
            relays: Mutex::default(),
            host_memory: Arc::default(),
            disks: Mutex::default(),
        }
    }

    /// Executes one message of rank 0. [`ToAgent::Shutdown`] ends every worker.
    pub fn handle(&self, message: ToAgent) {
        match message {
            ToAgent::Start(worker, spec) => self.start(worker, *spec),
            ToAgent::Relay(workers) => self.relay(&workers),
            ToAgent::ToWorkers { instance, bytes } => {
                if let Some(relay) = lock(&self.relays).get(&instance) {
                    relay.send(bytes);
                }
            }
            ToAgent::Stop(worker) => self.end(worker, TERMINATE_GRACE),
            ToAgent::Kill(worker) => {
                lock(&self.relays).remove(&worker.instance);
                self.end(worker, Duration::ZERO);
                release(&mut lock(&self.workers), worker);
            }
            ToAgent::Stacks(worker) => self.report_stacks(worker),
            ToAgent::OpenDisk { id, layout } => self.open_disk(id, layout),
            ToAgent::CopyDisk { id, copies } => self.copy_disk(id, copies),
            ToAgent::FreeHostMemory { id } => {
                drop(lock(&self.disks).remove(&id));
                drop(lock(&self.host_memory).remove(&id));
            }
            // The rank itself handles it.
            ToAgent::RankLost(_) => {}
            ToAgent::Shutdown => self.end_all(),
        }
    }

    fn relay(&self, workers: &[RelayedWorker]) {
        let Some(first) = workers.first().map(|relayed| relayed.worker) else { return };
        match NodeRelay::start(workers, &self.events) {
            Ok(relay) => drop(lock(&self.relays).insert(first.instance, relay)),
            Err(error) => {
                let reason = format!("its messages cannot be carried: {error}");
                let ended = FromAgent::Ended { worker: first, reason, by_signal: false, last_lines: Vec::new() };
                let _ = self.events.send(ended);
            }
        }
    }

    fn open_disk(&self, id: u64, layout: DiskLayout) {
        let rank = layout.rank;
        match DiskFile::start(id, layout, self.events.clone()) {
            Ok(file) => drop(lock(&self.disks).insert(id, file)),
            Err(error) => {
                let reason = format!("rank {rank} cannot start a thread for its file: {error}");
                let _ = self.events.send(FromAgent::Disk { id, event: DiskEvent::Failed { reason } });
            }
        }
    }

    /// The memory is that of now: a worker that starts later may get another.
    fn copy_disk(&self, id: u64, copies: Vec<DiskCopy>) {
        let memory = lock(&self.host_memory).get(&id).map(|(memory, _)| Arc::clone(memory));
        match (lock(&self.disks).get(&id), memory) {
            (Some(file), Some(memory)) => file.copy(memory, copies),
            _ => copies.into_iter().for_each(|copy| {
                let event = DiskEvent::Copied { copy, is_done: false };
                let _ = self.events.send(FromAgent::Disk { id, event });
            }),
        }
    }

    fn report_stacks(&self, worker: WorkerId) {
        let (watch, stderr) = match lock(&self.workers).get(&worker) {
            Some(Supervised { watch, stderr, has_ended: false, .. }) => (Arc::clone(watch), Arc::clone(stderr)),
            _ => return,
        };
        let events = self.events.clone();
        let report = move || {
            let text = stderr.stacks(watch.pid(), STACKS_TIMEOUT);
            let _ = events.send(FromAgent::Stacks { worker, text });
        };
        if let Err(error) = essential_thread("stacks", report) {
            let text = format!("its stacks are not known, for no thread can be started: {error}");
            let _ = self.events.send(FromAgent::Stacks { worker, text });
        }
    }

    /// Number of workers that run now.
    pub fn num_workers(&self) -> usize {
        lock(&self.workers).values().filter(|worker| !worker.has_ended).count()
    }

    /// Ends every worker and waits for their ends, at most a bounded time: SIGKILL may not end a worker that the kernel blocks.
    pub fn end_all(&self) {
        lock(&self.relays).clear();
        let workers: Vec<_> = lock(&self.workers).keys().copied().collect();
        for worker in workers {
            self.end(worker, TERMINATE_GRACE);
            release(&mut lock(&self.workers), worker);
        }
        let deadline = Instant::now() + TERMINATE_GRACE + KILL_TIMEOUT;
        while self.num_workers() > 0 {
            if Instant::now() >= deadline {
                let workers = lock(&self.workers);
                let left = workers.values().filter(|worker| !worker.has_ended);
                let pids: Vec<_> = left.map(|worker| worker.watch.pid()).collect();
                tracing::error!(?pids, "workers do not end: the kernel waits for a driver or a disk on their behalf");
                return;
            }
            thread::sleep(Duration::from_millis(5));
        }
        lock(&self.disks).clear();
        lock(&self.host_memory).clear();
    }

    /// Runs one thread for each worker: the kernel kills a child when the thread that spawned it ends, so that thread waits for
    /// the child.
    fn start(&self, worker: WorkerId, spec: WorkerSpec) {
        let (prefix, program) = (self.prefix.clone(), self.program.clone());
        let (events, workers) = (self.events.clone(), Arc::clone(&self.workers));
        let (host_memory, passed) = (Arc::clone(&self.host_memory), spec.host_memory);
        let (spawned, wait_spawned) = mpsc::channel::<()>();
        // Longer than the step watchdog, which reports stacks but is active only while steps run.
        let max_stopped = spec.settings.step_timeout.mul_f32(1.5);
        let run = move || {
            let memory = memory_of(&host_memory, &spec);
            let started =
                memory.and_then(|memory| Ok((spawn(&prefix, &program, worker, spec, memory.as_deref())?, memory)));
            let ended = match started {
                Ok((Started { mut child, watch, announcement, rings, stderr }, memory)) => {
                    let entry = Supervised {
                        watch,
                        stderr: Arc::clone(&stderr),
                        _rings: rings,
                        has_ended: false,
                        is_released: false,
                    };
                    let watch = Arc::clone(&entry.watch);
                    if let Some((memory, passed)) = memory.zip(passed) {
                        lock(&host_memory).insert(passed.id, (memory, Arc::clone(&watch)));
                    }
                    lock(&workers).insert(worker, entry);
                    drop(spawned);
                    let _ = events.send(announcement);
                    watch_activity(worker, watch, events.clone(), max_stopped);
                    let status = child.wait();
                    // A killed worker leaves its shared memory behind, also that of its group on this node.
                    let _ = sweep_all_stale();
                    // After the sweep: the rank ends when it has no running worker.
                    note_end(&mut lock(&workers), worker);
                    let by_signal = status.as_ref().is_ok_and(|status| status.code().is_none());
                    let reason = status.map_or_else(|error| format!("cannot wait for it: {error}"), describe_exit);
                    FromAgent::Ended { worker, reason, by_signal, last_lines: stderr.last(STDERR_TIMEOUT) }
                }
                Err(reason) => FromAgent::Ended { worker, reason, by_signal: false, last_lines: Vec::new() },
            };
            let _ = events.send(ended);
        };
        if let Err(error) = essential_thread(format!("worker-{}", worker.tp_rank), run) {
            let reason = format!("cannot start a thread for it: {error}");
            let ended = FromAgent::Ended { worker, reason, by_signal: true, last_lines: Vec::new() };
            let _ = self.events.send(ended);
        }
        // A later message must find this worker: the sender is dropped once the worker is in the map, or has failed.
        if wait_spawned.recv_timeout(SPAWN_TIMEOUT) == Err(mpsc::RecvTimeoutError::Timeout) {
            tracing::error!(?worker, "its process has not started after {SPAWN_TIMEOUT:?}; does a disk hang?");
        }
    }

    fn end(&self, worker: WorkerId, grace: Duration) {
        let watch = match lock(&self.workers).get(&worker) {
            Some(Supervised { watch, has_ended: false, .. }) => Arc::clone(watch),
            _ => return,
        };
        if !grace.is_zero() {
            // Not SIGTERM, which workers block: see `worker::main`.
            let _ = watch.signal(libc::SIGUSR1);
            let ending = Arc::clone(&watch);
            let kill_late = move || {
                if !ending.wait(grace) {
                    let _ = ending.signal(libc::SIGKILL);
                }
            };
            if essential_thread("end-worker", kill_late).is_ok() {
                return;
            }
        }
        let _ = watch.signal(libc::SIGKILL);
    }
}

/// The host memory to pass to a worker. It is that of the worker before it, if that has ended: memory that two processes write would
/// be of no use.
fn memory_of(held: &Mutex<HeldMemory>, spec: &WorkerSpec) -> Result<Option<Arc<SharedMemory>>, String> {
    let Some(passed) = spec.host_memory else { return Ok(None) };
    let bytes = spec.settings.kv_host_memory_bytes;
    let before = lock(held).remove(&passed.id);
    if let Some((memory, user)) = before.filter(|(memory, _)| memory.len() as u64 == bytes) {
        if user.wait(KILL_TIMEOUT) {
            return Ok(Some(memory));
        }
        tracing::warn!(pid = user.pid(), "a lost worker does not end, so the next one gets other host memory");
    }
    let len = usize::try_from(bytes).map_err(|_| format!("{bytes} bytes of host memory cannot be addressed"))?;
    let memory = SharedMemory::new("trireme-kv-cache", len).map_err(|error| match error {
        ipc::IpcError::Os { source, .. } => format!("{bytes} bytes of host memory: {source}"),
        error => error.to_string(),
    })?;
    Ok(Some(Arc::new(memory)))
}

type Workers = HashMap<WorkerId, Supervised>;

/// Notes that rank 0 will not read the worker's rings again, and removes the worker if it has ended.
fn release(workers: &mut Workers, worker: WorkerId) {
    if let Some(entry) = workers.get_mut(&worker) {
        entry.is_released = true;
        if entry.has_ended {
            workers.remove(&worker);
        }
    }
}

/// Notes that the worker has ended. Its rings stay until rank 0 has read its last message.
fn note_end(workers: &mut Workers, worker: WorkerId) {
    if let Some(entry) = workers.get_mut(&worker) {
        entry.has_ended = true;
        if entry.is_released {
            workers.remove(&worker);
        }
    }
}

struct Started {
    child: Child,
    stderr: Arc<WorkerStderr>,
    watch: Arc<ProcessWatch>,
    announcement: FromAgent,
    rings: [Ring; 2],
}

fn spawn(
    prefix: &Prefix,
    program: &PathBuf,
    worker: WorkerId,
    mut spec: WorkerSpec,
    host_memory: Option<&SharedMemory>,
) -> Result<Started, String> {
    let make_ring = |kind: &str| {
        let name = format!("{}_{}_{}_{kind}", std::process::id(), worker.instance, worker.tp_rank);
        let ring = Ring::create(prefix, &name, spec.ring_bytes).map_err(|error| error.to_string())?;
        Ok::<_, String>((ring, ShmName { prefix: prefix.to_string(), name }))
    };
    let (plan, plan_ring) = make_ring("plan")?;
    let (output, output_ring) = make_ring("output")?;
    (spec.plan_ring, spec.output_ring) = (plan_ring.clone(), output_ring.clone());

    let mut command = Command::new(program);
    // NVLink multicast memory of a lost worker can block the links of the whole host.
    command.arg("worker").env("NCCL_NVLS_ENABLE", "0").stdin(Stdio::piped()).stderr(Stdio::piped());
    bind_to_parent(withhold_secrets(&mut command, &[]), libc::SIGKILL);
    if let Some((passed, memory)) = spec.host_memory.as_mut().zip(host_memory) {
        passed.descriptor = memory.pass_to(&mut command);
    }
    let mut child = command.spawn().map_err(|error| format!("cannot start `{}`: {error}", program.display()))?;
    let json = serde_json::to_vec(&spec).expect("a spec holds nothing that cannot be serialized");
    let mut stdin = child.stdin.take().expect("stdin is piped");
    // If the child dies before it has read its spec, its exit status is reported, not this write. A stopped child does not read,
    // so a thread of its own writes.
    let feed = move || drop(stdin.write_all(&json));
    if let Err(error) = essential_thread(format!("feed-{}", worker.tp_rank), feed) {
        let _ = child.kill();
        let _ = child.wait();
        return Err(format!("cannot start a thread that sends its spec: {error}"));
    }
    let pid = child.id();
    let watch = match ProcessWatch::new(pid) {
        Ok(watch) => Arc::new(watch),
        Err(error) => {
            let _ = child.kill();
            let _ = child.wait();
            return Err(error.to_string());
        }
    };
    let stderr = Arc::new(WorkerStderr::default());
    let (log, mut pipe) = (Arc::clone(&stderr), child.stderr.take().expect("stderr is piped"));
    // A panic loses one line; it must not close the standard error of the worker.
    let read = move || while catch_unwind(AssertUnwindSafe(|| log.read_from(worker.tp_rank, &mut pipe))).is_err() {};
    if let Err(error) = essential_thread(format!("stderr-{}", worker.tp_rank), read) {
        let _ = child.kill();
        let _ = child.wait();
        return Err(format!("cannot start a thread that reads its standard error: {error}"));
    }
    let node = nix::unistd::gethostname().unwrap_or_default().to_string_lossy().into_owned();
    let announcement = FromAgent::Started { worker, pid, rank_pid: std::process::id(), node, plan_ring, output_ring };
    Ok(Started { child, stderr, watch, announcement, rings: [plan, output] })
}

#[cfg(test)]
mod tests;
