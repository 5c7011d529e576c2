//! Standard error of a worker: each line goes to its rank's log, and the last lines are kept for the report of its end.

use std::collections::VecDeque;
use std::io::{BufRead, BufReader, Read};
use std::sync::{Condvar, Mutex, PoisonError};
use std::time::{Duration, Instant};

use ipc::{STACK_LINE, lock, with_names};

/// Number of lines that are kept.
const NUM_KEPT: usize = 40;
/// Longest line that is logged; a longer one is split.
const MAX_LINE_BYTES: u64 = 16 << 10;

/// The last lines that one worker wrote to standard error.
#[derive(Debug, Default)]
pub(crate) struct WorkerStderr {
    lines: Mutex<Lines>,
    /// Notified for each new line, and at the end.
    changed: Condvar,
}

#[derive(Debug, Default)]
struct Lines {
    kept: VecDeque<String>,
    /// Stacks since they were last requested.
    stacks: Vec<String>,
    has_ended: bool,
}

impl WorkerStderr {
    /// Reads lines until the worker has closed its end of the pipe.
    pub(crate) fn read_from(&self, tp_rank: u32, source: impl Read) {
        let mut reader = BufReader::new(source);
        let mut bytes = Vec::new();
        while matches!(reader.by_ref().take(MAX_LINE_BYTES).read_until(b'\n', &mut bytes), Ok(1..)) {
            let line = String::from_utf8_lossy(&bytes).trim_end().to_owned();
            bytes.clear();
            self.record(tp_rank, line);
        }
        lock(&self.lines).has_ended = true;
        self.changed.notify_all();
    }

    fn record(&self, tp_rank: u32, line: String) {
        let is_stack = line.starts_with(STACK_LINE);
        let line = if is_stack { with_names(&line) } else { line };
        tracing::warn!(target: "relayed", "worker {tp_rank}: {line}");
        let mut lines = lock(&self.lines);
        if is_stack {
            lines.stacks.push(line.clone());
        }
        if lines.kept.len() == NUM_KEPT {
            lines.kept.pop_front();
        }
        lines.kept.push_back(line);
        self.changed.notify_all();
    }

    /// The last lines. Waits until the worker has closed its end, at most `timeout`.
    pub(crate) fn last(&self, timeout: Duration) -> Vec<String> {
        let lines = lock(&self.lines);
        let waited = self.changed.wait_timeout_while(lines, timeout, |lines| !lines.has_ended);
        let (lines, _) = waited.unwrap_or_else(PoisonError::into_inner);
        lines.kept.iter().cloned().collect()
    }

    /// The stacks that the threads of `process` write on request, after their states as the kernel reports them. Waits at most
    /// `timeout`.
    pub(crate) fn stacks(&self, process: u32, timeout: Duration) -> String {
        lock(&self.lines).stacks.clear();
        let states = ipc::thread_states(process);
        let num_requested = ipc::ask_for_stacks(process);
        let deadline = Instant::now() + timeout;
        let mut lines = lock(&self.lines);
        while lines.stacks.len() < num_requested && !lines.has_ended {
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                break;
            }
            lines = self.changed.wait_timeout(lines, left).unwrap_or_else(PoisonError::into_inner).0;
        }
        format!("{states}{}", lines.stacks.join("\n"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_lines_are_kept_and_long_ones_are_cut() {
        let stderr = WorkerStderr::default();
        let long = "x".repeat(20_000);
        let text: String = (0..100).map(|n| format!("line {n}\n")).chain([long]).collect();
        stderr.read_from(0, text.as_bytes());
        let kept = stderr.last(Duration::ZERO);
        assert_eq!((kept.len(), kept[0].as_str()), (NUM_KEPT, "line 62"));
        assert_eq!(kept[NUM_KEPT - 1].len() + kept[NUM_KEPT - 2].len(), 20_000);
    }
}
