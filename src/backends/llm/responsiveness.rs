//! Whether the parts of a replica respond: its step thread and its workers. A replica that does not is not ready, long before the
//! watchdog replaces its workers.
//!
//! A long step is no hang: a CPU worker uses a processor while it computes. A GPU worker polls its device meanwhile, so there the bound is
//! the longest recent step and [`STEP_SLACK`].

use std::collections::BTreeMap;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use supervision::{Activity, DeviceChoice, FromAgent};

/// Time without a sign of life after which the step thread counts as hung.
const MAX_SILENCE: Duration = Duration::from_secs(6);

/// Time after which a step counts as hung if no worker computes. On GPUs it is added to the longest recent step.
const STEP_SLACK: Duration = Duration::from_secs(5);

/// How long the step thread waits for messages at most, while no step is in flight, between two signs of life.
pub(crate) const IDLE_WAIT: Duration = Duration::from_secs(2);

/// Value of [`Responsiveness::beat`] while the step thread waits for room in the rings of workers, or starts them.
const PAUSED: u64 = u64::MAX;

/// The signs of life of a replica. Its step thread and the listener of its workers write them; any thread reads them.
#[derive(Debug)]
pub(crate) struct Responsiveness {
    started: Instant,
    /// Time of the step thread's last sign of life in milliseconds since `started`, or [`PAUSED`].
    beat: AtomicU64,
    is_step_hung: AtomicBool,
    is_worker_stopped: AtomicBool,
    /// The workers that have reported their activity.
    workers: Mutex<BTreeMap<u32, Activity>>,
}

impl Default for Responsiveness {
    fn default() -> Self {
        Self {
            started: Instant::now(),
            beat: AtomicU64::new(PAUSED),
            is_step_hung: AtomicBool::new(false),
            is_worker_stopped: AtomicBool::new(false),
            workers: Mutex::default(),
        }
    }
}

impl Responsiveness {
    /// Whether the step thread and the workers respond.
    pub(crate) fn responds(&self) -> bool {
        let beat = self.beat.load(Ordering::Relaxed);
        let is_thread_silent = beat != PAUSED && self.now().saturating_sub(beat) > MAX_SILENCE.as_millis() as u64;
        !is_thread_silent
            && !self.is_step_hung.load(Ordering::Relaxed)
            && !self.is_worker_stopped.load(Ordering::Relaxed)
    }

    /// A sign of life of the step thread. Another one follows within [`MAX_SILENCE`].
    pub(crate) fn beat(&self) {
        self.beat.store(self.now(), Ordering::Relaxed);
    }

    /// Runs `send`, which may wait for workers, without signs of life of the step thread.
    pub(crate) fn while_sending<T>(&self, send: impl FnOnce() -> T) -> T {
        self.beat.store(PAUSED, Ordering::Relaxed);
        let sent = send();
        self.beat();
        sent
    }

    /// Forgets the workers of the last start. The step thread is silent until they have been asked to start.
    pub(crate) fn begin_start(&self) {
        self.beat.store(PAUSED, Ordering::Relaxed);
        ipc::lock(&self.workers).clear();
        self.is_worker_stopped.store(false, Ordering::Relaxed);
        self.is_step_hung.store(false, Ordering::Relaxed);
    }

    /// Notes the activity of a worker, if `event` is about that. Returns whether it is.
    pub(crate) fn note(&self, event: &FromAgent) -> bool {
        let FromAgent::Activity { worker, activity } = event else { return false };
        let mut workers = ipc::lock(&self.workers);
        workers.insert(worker.tp_rank, *activity);
        let is_stopped = workers.values().any(|activity| *activity == Activity::Stopped);
        self.is_worker_stopped.store(is_stopped, Ordering::Relaxed);
        true
    }

    /// Notes how long the oldest step in flight has run; zero without one.
    pub(crate) fn note_step(&self, waited: Duration, longest: Duration, num_workers: usize, device: DeviceChoice) {
        let is_hung = match device {
            DeviceChoice::Cpu { .. } => waited > STEP_SLACK && self.num_waiting() == num_workers,
            DeviceChoice::Cuda { .. } => waited > longest + STEP_SLACK,
        };
        self.is_step_hung.store(is_hung, Ordering::Relaxed);
    }

    /// Number of workers that use no processor.
    fn num_waiting(&self) -> usize {
        ipc::lock(&self.workers).values().filter(|activity| **activity != Activity::Runs).count()
    }

    fn now(&self) -> u64 {
        self.started.elapsed().as_millis() as u64
    }
}

#[cfg(test)]
mod tests {
    use supervision::WorkerId;

    use super::*;

    const CPU: DeviceChoice = DeviceChoice::Cpu { threads: 1, first_core: None };
    const GPU: DeviceChoice = DeviceChoice::Cuda { ordinal: 0 };

    fn note(of: &Responsiveness, tp_rank: u32, activity: Activity) {
        assert!(of.note(&FromAgent::Activity { worker: WorkerId { instance: 1, tp_rank }, activity }));
    }

    #[test]
    fn a_stopped_worker_does_not_respond_until_it_goes_on_or_is_replaced() {
        let replica = Responsiveness::default();
        note(&replica, 1, Activity::Stopped);
        assert!(!replica.responds());
        note(&replica, 0, Activity::Waits);
        assert!(!replica.responds(), "the other worker is still stopped");
        note(&replica, 1, Activity::Runs);
        assert!(replica.responds());
        note(&replica, 1, Activity::Stopped);
        replica.begin_start();
        assert!(replica.responds());
    }

    #[test]
    fn a_step_of_minutes_is_no_hang_while_a_worker_computes() {
        let replica = Responsiveness::default();
        let minutes = Duration::from_secs(300);
        note(&replica, 0, Activity::Waits);
        replica.note_step(minutes, Duration::ZERO, 2, CPU);
        assert!(replica.responds(), "the other worker computes");
        note(&replica, 1, Activity::Waits);
        replica.note_step(Duration::from_secs(4), Duration::ZERO, 2, CPU);
        assert!(replica.responds(), "a step that has just begun");
        replica.note_step(minutes, Duration::ZERO, 2, CPU);
        assert!(!replica.responds(), "both wait");
        replica.note_step(Duration::ZERO, Duration::ZERO, 2, CPU);
        assert!(replica.responds());

        replica.note_step(Duration::from_secs(9), Duration::from_secs(5), 2, GPU);
        assert!(replica.responds(), "not much longer than the longest step");
        replica.note_step(Duration::from_secs(11), Duration::from_secs(5), 2, GPU);
        assert!(!replica.responds());
    }

    #[test]
    fn a_silent_step_thread_does_not_respond_unless_it_waits_for_workers() {
        let past = Instant::now().checked_sub(2 * MAX_SILENCE).expect("the machine has run for longer");
        let replica = Responsiveness { started: past, beat: AtomicU64::new(0), ..Responsiveness::default() };
        assert!(!replica.responds());
        replica.while_sending(|| assert!(replica.responds()));
        assert!(replica.responds());
    }
}
