//! What the process of a worker does, as the kernel reports it: whether it is stopped, and whether it uses a processor. A worker that
//! computes a long step uses one all the time; one that waits in a collective operation, or on a lock, does not.

use std::sync::{Arc, mpsc};
use std::time::{Duration, Instant};

use ipc::{ProcessWatch, essential_thread};

use crate::messages::{Activity, FromAgent, WorkerId};

/// How often a process is looked at.
const INTERVAL: Duration = Duration::from_secs(1);

/// Time without use of a processor after which a worker counts as [`Activity::Waits`].
const WAITING_AFTER: Duration = Duration::from_secs(4);

/// Reports changes of a worker's activity until it ends. Kills it when it is stopped (SIGSTOP, a debugger) for `max_stopped`: it then
/// neither loads nor ends.
pub(crate) fn watch_activity(
    worker: WorkerId,
    watch: Arc<ProcessWatch>,
    events: mpsc::Sender<FromAgent>,
    max_stopped: Duration,
) {
    let check = move || {
        let now = Instant::now();
        let mut seen = Seen { processor_ticks: 0, last_use: now, stopped_since: None };
        let mut last = Activity::Runs;
        while !watch.wait(INTERVAL) {
            let stat = std::fs::read_to_string(format!("/proc/{}/stat", watch.pid())).unwrap_or_default();
            let Some(stat) = Stat::parse(&stat) else { continue };
            let activity = seen.update(&stat, Instant::now());
            if activity != last {
                last = activity;
                let _ = events.send(FromAgent::Activity { worker, activity });
            }
            if seen.stopped_since.is_some_and(|since| since.elapsed() >= max_stopped) {
                tracing::warn!(
                    pid = watch.pid(),
                    "kills a worker that was stopped and did not go on for {max_stopped:?}"
                );
                let _ = watch.signal(libc::SIGKILL);
            }
        }
    };
    if let Err(error) = essential_thread("worker-activity", check) {
        tracing::warn!("a worker that is stopped or waits will not be noticed, for no thread can be started: {error}");
    }
}

/// What was seen of a process so far.
struct Seen {
    processor_ticks: u64,
    last_use: Instant,
    stopped_since: Option<Instant>,
}

impl Seen {
    fn update(&mut self, stat: &Stat, now: Instant) -> Activity {
        if stat.processor_ticks != self.processor_ticks {
            (self.processor_ticks, self.last_use) = (stat.processor_ticks, now);
        }
        self.stopped_since = stat.is_stopped.then(|| self.stopped_since.unwrap_or(now));
        match stat.is_stopped {
            true => Activity::Stopped,
            false if now - self.last_use >= WAITING_AFTER => Activity::Waits,
            false => Activity::Runs,
        }
    }
}

/// Parts of `/proc/<pid>/stat`.
#[derive(Debug, PartialEq, Eq)]
struct Stat {
    is_stopped: bool,
    /// Processor time of all threads, in the kernel's ticks (usually 10 ms).
    processor_ticks: u64,
}

impl Stat {
    /// Reads the fields `state`, `utime` and `stime` (proc(5)); the name before them may hold spaces and parentheses.
    fn parse(stat: &str) -> Option<Self> {
        let (_, rest) = stat.rsplit_once(") ")?;
        let mut fields = rest.split_ascii_whitespace();
        let state = fields.next()?;
        let mut times = fields.skip(10).map(str::parse::<u64>);
        let processor_ticks = times.next()?.ok()? + times.next()?.ok()?;
        Some(Self { is_stopped: matches!(state, "T" | "t"), processor_ticks })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_state_and_times_of_a_process_are_read_behind_any_name() {
        let line =
            |state: &str| format!("71 (a) b (c) {state} 1 71 71 0 -1 4194560 10 0 0 0 250 17 0 0 20 0 5 0 99 1 2");
        assert_eq!(Stat::parse(&line("S")), Some(Stat { is_stopped: false, processor_ticks: 267 }));
        assert_eq!(Stat::parse(&line("T")), Some(Stat { is_stopped: true, processor_ticks: 267 }));
        assert_eq!(Stat::parse(""), None);
        let own = std::fs::read_to_string("/proc/self/stat").unwrap();
        assert!(!Stat::parse(&own).unwrap().is_stopped, "{own}");
    }

    #[test]
    fn a_worker_waits_once_it_has_used_no_processor_for_some_seconds() {
        let start = Instant::now();
        let mut seen = Seen { processor_ticks: 0, last_use: start, stopped_since: None };
        let mut at = |seconds: u64, processor_ticks: u64, is_stopped: bool| {
            seen.update(&Stat { is_stopped, processor_ticks }, start + Duration::from_secs(seconds))
        };
        // A step of half a minute.
        assert!((1..30).all(|second| at(second, 100 * second, false) == Activity::Runs));
        assert_eq!([30, 32, 33, 34].map(|second| at(second, 2900, false)), {
            use Activity::{Runs, Waits};
            [Runs, Runs, Waits, Waits]
        });
        assert_eq!(at(35, 2900, true), Activity::Stopped);
        assert_eq!(at(36, 2901, false), Activity::Runs);
    }
}
