//! A rank's care for its workers: starts them, notices their end at once, ends them when told to.

use std::collections::HashMap;
use std::io::Write;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::sync::{Arc, Mutex, mpsc};
use std::thread;
use std::time::Duration;

use ipc::{Prefix, ProcessWatch, Ring, bind_to_parent, describe_exit, sweep_stale};
use serde::{Deserialize, Serialize};

use crate::protocol::{ShmName, WorkerSpec};

/// How long a worker may take to end after SIGUSR1.
const TERMINATE_GRACE: Duration = Duration::from_secs(2);

/// One worker of one start of a model: a restart is a new `instance`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct WorkerId {
    /// Counts every start of every model on rank 0.
    pub instance: u64,
    /// Place in the tensor-parallel group.
    pub tp_rank: u32,
}

/// Rank 0 to the agent of a rank.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub enum ToAgent {
    /// Start a worker; the agent fills in the names of its rings.
    Start(WorkerId, Box<WorkerSpec>),
    /// End a worker: SIGUSR1, then SIGKILL.
    Stop(WorkerId),
    /// End a worker at once; it hangs or its group is lost.
    Kill(WorkerId),
    /// End the rank.
    Shutdown,
}

/// The agent of a rank to rank 0.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum FromAgent {
    /// The worker runs and its rings exist.
    Started {
        /// Which.
        worker: WorkerId,
        /// Its process.
        pid: u32,
        /// Where plans go.
        plan_ring: ShmName,
        /// Where its messages come from.
        output_ring: ShmName,
    },
    /// The worker ended, or could not be started.
    Ended {
        /// Which.
        worker: WorkerId,
        /// Exit code, signal, or what failed.
        reason: String,
    },
}

/// Starts and watches the workers of one rank.
#[derive(Debug)]
pub struct Agent {
    prefix: Prefix,
    program: PathBuf,
    events: mpsc::Sender<FromAgent>,
    workers: Arc<Mutex<HashMap<WorkerId, Arc<ProcessWatch>>>>,
}

impl Agent {
    /// An agent that starts workers as `program worker` and makes their rings under `prefix`.
    pub fn new(prefix: Prefix, program: PathBuf, events: mpsc::Sender<FromAgent>) -> Self {
        Self { prefix, program, events, workers: Arc::default() }
    }

    /// Carries out one message of rank 0. [`ToAgent::Shutdown`] ends every worker.
    pub fn handle(&self, message: ToAgent) {
        match message {
            ToAgent::Start(worker, spec) => self.start(worker, *spec),
            ToAgent::Stop(worker) => self.end(worker, TERMINATE_GRACE),
            ToAgent::Kill(worker) => self.end(worker, Duration::ZERO),
            ToAgent::Shutdown => self.end_all(),
        }
    }

    /// Workers that run now.
    pub fn num_workers(&self) -> usize {
        self.workers.lock().unwrap().len()
    }

    /// Ends every worker and waits until they are gone.
    pub fn end_all(&self) {
        let workers: Vec<_> = self.workers.lock().unwrap().keys().copied().collect();
        for worker in workers {
            self.end(worker, TERMINATE_GRACE);
        }
        while self.num_workers() > 0 {
            thread::sleep(Duration::from_millis(5));
        }
    }

    /// A thread per worker: the kernel ends a child with the thread that started it, so that thread stays to wait for it.
    fn start(&self, worker: WorkerId, spec: WorkerSpec) {
        let (prefix, program) = (self.prefix.clone(), self.program.clone());
        let (events, workers) = (self.events.clone(), Arc::clone(&self.workers));
        let (spawned, wait_spawned) = mpsc::channel::<()>();
        let run = move || {
            let reason = match spawn(&prefix, &program, worker, spec) {
                Ok(Started { mut child, watch, announcement, rings }) => {
                    workers.lock().unwrap().insert(worker, watch);
                    drop(spawned);
                    let _ = events.send(announcement);
                    let status = child.wait();
                    drop(rings);
                    // A worker that was killed could not remove what it had made.
                    let _ = sweep_stale(&prefix);
                    // Last, for the rank ends when it has no worker left.
                    workers.lock().unwrap().remove(&worker);
                    status.map_or_else(|error| format!("cannot wait for it: {error}"), describe_exit)
                }
                Err(reason) => reason,
            };
            let _ = events.send(FromAgent::Ended { worker, reason });
        };
        thread::Builder::new().name(format!("worker-{}", worker.tp_rank)).spawn(run).expect("a thread can be started");
        // A message that ends the worker must find it: the sender is dropped once it is known, or failed.
        let _ = wait_spawned.recv();
    }

    fn end(&self, worker: WorkerId, grace: Duration) {
        let Some(watch) = self.workers.lock().unwrap().get(&worker).cloned() else {
            return;
        };
        thread::spawn(move || {
            if !grace.is_zero() {
                // Not SIGTERM, which workers leave to rank 0.
                let _ = watch.signal(libc::SIGUSR1);
            }
            if grace.is_zero() || !watch.wait(grace) {
                let _ = watch.signal(libc::SIGKILL);
            }
        });
    }
}

struct Started {
    child: Child,
    watch: Arc<ProcessWatch>,
    announcement: FromAgent,
    /// The rings' names leave /dev/shm when these are dropped, after the worker's end.
    rings: [Ring; 2],
}

fn spawn(prefix: &Prefix, program: &PathBuf, worker: WorkerId, mut spec: WorkerSpec) -> Result<Started, String> {
    let make_ring = |kind: &str| {
        let name = format!("{}_{}_{}_{kind}", std::process::id(), worker.instance, worker.tp_rank);
        let ring = Ring::create(prefix, &name, spec.ring_bytes).map_err(|error| error.to_string())?;
        Ok::<_, String>((ring, ShmName { prefix: prefix.to_string(), name }))
    };
    let (plan, plan_ring) = make_ring("plan")?;
    let (output, output_ring) = make_ring("output")?;
    (spec.plan_ring, spec.output_ring) = (plan_ring.clone(), output_ring.clone());

    let mut command = Command::new(program);
    // Multicast memory of a lost worker can block a whole host's links.
    command.arg("worker").env("NCCL_NVLS_ENABLE", "0").stdin(Stdio::piped());
    bind_to_parent(&mut command, libc::SIGKILL);
    let mut child = command.spawn().map_err(|error| format!("cannot start `{}`: {error}", program.display()))?;
    let json = serde_json::to_vec(&spec).expect("a spec holds nothing that cannot be serialized");
    // A child that dies before reading its spec is reported by its exit status, not by this write.
    let _ = child.stdin.take().expect("stdin is piped").write_all(&json);
    let pid = child.id();
    let watch = match ProcessWatch::new(pid) {
        Ok(watch) => Arc::new(watch),
        Err(error) => {
            let _ = child.kill();
            let _ = child.wait();
            return Err(error.to_string());
        }
    };
    let announcement = FromAgent::Started { worker, pid, plan_ring, output_ring };
    Ok(Started { child, watch, announcement, rings: [plan, output] })
}
