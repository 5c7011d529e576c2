//! Health checks of rank 0 by its launcher: whether the async runtimes make progress, and whether requests are accepted. They use a
//! socket in the launcher's directory, so that neither load of clients nor access rules of the ports affect them.

use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use ipc::Health;
use serving::Server;
use tokio::runtime::Handle;

/// How often a runtime records progress. The launcher waits for seconds, and each record wakes an idle process.
const INTERVAL: Duration = Duration::from_millis(500);

/// The health of this rank 0.
pub(crate) struct Control {
    started: Instant,
    /// For each runtime, the time of its last progress in milliseconds since `started`.
    progress: Vec<AtomicU64>,
    /// Set once the ports are open.
    server: OnceLock<Arc<Server>>,
}

impl Control {
    /// Records the progress of `runtimes`.
    pub(crate) fn new(runtimes: &[&Handle]) -> Arc<Self> {
        let progress = runtimes.iter().map(|_| AtomicU64::new(0)).collect();
        let control = Arc::new(Self { started: Instant::now(), progress, server: OnceLock::new() });
        for (index, runtime) in runtimes.iter().enumerate() {
            let control = Arc::clone(&control);
            runtime.spawn(async move {
                loop {
                    control.progress[index].store(control.now(), Ordering::Relaxed);
                    tokio::time::sleep(INTERVAL).await;
                }
            });
        }
        control
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
    }

    fn health(&self) -> Health {
        let slowest = self.progress.iter().map(|at| at.load(Ordering::Relaxed)).min().unwrap_or_default();
        let is_ready = self.server.get().is_some_and(|server| server.is_ready());
        Health { silent: Duration::from_millis(self.now().saturating_sub(slowest)), is_ready }
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
        let control = Control::new(&[busy.handle(), blocked.handle()]);
        let (go, wait) = std::sync::mpsc::channel::<()>();
        blocked.spawn(async move { wait.recv() });
        assert!(eventually(|| control.health().silent > 5 * INTERVAL), "{:?}", control.health());
        assert!(!control.health().is_ready, "no server yet");
        drop(go);
        assert!(eventually(|| control.health().silent < 5 * INTERVAL), "{:?}", control.health());
    }
}
