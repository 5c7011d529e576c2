//! What every model of rank 0 needs: async runtimes that make progress, and ranks that reply; and health checks by its launcher, which ask for
//! this progress and whether requests are accepted. They use a socket in the launcher's directory, so that neither load of clients nor access rules of the ports affect them.

use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use ipc::Health;
use serving::Server;
use tokio::runtime::Handle;

use crate::heartbeat::Heartbeat;
use crate::losses::Losses;

/// How often a runtime records progress. The launcher waits for seconds, and each record wakes an idle process.
const INTERVAL: Duration = Duration::from_millis(500);

/// Time without progress of a runtime after which this rank counts as hung.
const MAX_SILENCE: Duration = Duration::from_secs(6);

/// The progress of the runtimes of this rank 0, and the replies of the other ranks.
pub(crate) struct Vitals {
    started: Instant,
    /// For each runtime, the time of its last progress in milliseconds since `started`.
    progress: Vec<AtomicU64>,
    heartbeat: Arc<Heartbeat>,
    losses: Arc<Losses>,
}

/// The health of this rank 0.
pub(crate) struct Control {
    vitals: Arc<Vitals>,
    /// Set once the ports are open.
    server: OnceLock<Arc<Server>>,
}

impl Control {
    /// Records the progress of `runtimes`.
    pub(crate) fn new(runtimes: &[&Handle], heartbeat: Arc<Heartbeat>, losses: Arc<Losses>) -> Arc<Self> {
        let progress = runtimes.iter().map(|_| AtomicU64::new(0)).collect();
        let vitals = Arc::new(Vitals { started: Instant::now(), progress, heartbeat, losses });
        for (index, runtime) in runtimes.iter().enumerate() {
            let vitals = Arc::clone(&vitals);
            runtime.spawn(async move {
                loop {
                    vitals.progress[index].store(vitals.now(), Ordering::Relaxed);
                    tokio::time::sleep(INTERVAL).await;
                }
            });
        }
        Arc::new(Self { vitals, server: OnceLock::new() })
    }

    /// What every model needs.
    pub(crate) fn vitals(&self) -> &Arc<Vitals> {
        &self.vitals
    }

    /// Answers health checks at `path`. An error is only logged: the launcher can also use HTTP.
    pub(crate) fn answer(self: &Arc<Self>, path: &Path) {
        let control = Arc::clone(self);
        if let Err(error) = ipc::answer_health(path, move || control.health()) {
            tracing::warn!("the launcher cannot ask this process how it is at {}: {error}", path.display());
        }
    }

    /// Notes that the ports are open. From now on readiness is that of `server`.
    pub(crate) fn serves(&self, server: &Arc<Server>) {
        // Called once.
        let _ = self.server.set(Arc::clone(server));
        self.vitals.losses.serves();
    }

    fn health(&self) -> Health {
        let server = self.server.get();
        let is_ready = server.is_some_and(|server| server.is_ready());
        let num_requests = server.map(|server| server.num_in_flight());
        Health { silent: self.vitals.silence(), is_ready, num_requests, lost: self.vitals.losses.lost() }
    }
}

impl Vitals {
    /// Whether each runtime makes progress, and each rank replies that is needed.
    pub(crate) fn respond(&self) -> bool {
        self.silence() < MAX_SILENCE && self.losses.can_spare(&self.heartbeat.silent())
    }

    /// Time since the slowest runtime made progress.
    fn silence(&self) -> Duration {
        let slowest = self.progress.iter().map(|at| at.load(Ordering::Relaxed)).min().unwrap_or_default();
        Duration::from_millis(self.now().saturating_sub(slowest))
    }

    fn now(&self) -> u64 {
        self.started.elapsed().as_millis() as u64
    }
}

#[cfg(test)]
mod tests {
    use std::thread;

    use super::*;

    fn eventually(condition: impl Fn() -> bool) -> bool {
        let start = Instant::now();
        while !condition() {
            if start.elapsed() > Duration::from_secs(20) {
                return false;
            }
            thread::sleep(Duration::from_millis(10));
        }
        true
    }

    #[test]
    fn a_blocked_runtime_is_detected_until_it_makes_progress_again() {
        let runtime = || tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
        let (busy, blocked) = (runtime(), runtime());
        let world = comm::World::start(comm::Config::default()).unwrap();
        let control = Control::new(&[busy.handle(), blocked.handle()], Heartbeat::new(&world), Losses::none());
        let (go, wait) = std::sync::mpsc::channel::<()>();
        blocked.spawn(async move { wait.recv() });
        assert!(eventually(|| control.health().silent > 5 * INTERVAL), "{:?}", control.health());
        assert!(!control.health().is_ready, "no server yet");
        drop(go);
        assert!(eventually(|| control.health().silent < 5 * INTERVAL), "{:?}", control.health());
    }
}
