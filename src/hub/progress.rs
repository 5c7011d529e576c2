//! What a user sees of a download: a bar in a terminal, else plain lines, on standard error.

use std::io::{IsTerminal as _, Write as _};
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use indicatif::{HumanBytes, ProgressBar, ProgressDrawTarget, ProgressStyle};

/// Time between two plain lines of one download.
const LINE_EVERY: Duration = Duration::from_secs(10);

/// The progress of some files together.
pub(crate) struct Progress {
    /// Drawn in a terminal only.
    bar: ProgressBar,
    total: u64,
    done: AtomicU64,
    last_line: Mutex<Instant>,
    is_stopped: AtomicBool,
}

impl Progress {
    /// `total` is in bytes.
    pub(crate) fn new(total: u64) -> Self {
        let style = ProgressStyle::with_template(
            "{bar:30} {decimal_bytes}/{decimal_total_bytes} {decimal_bytes_per_sec} {eta} left",
        );
        let style = style.expect("the template is constant");
        let bar = ProgressBar::with_draw_target(Some(total), ProgressDrawTarget::stderr_with_hz(5)).with_style(style);
        Self {
            bar,
            total,
            done: AtomicU64::new(0),
            last_line: Mutex::new(Instant::now()),
            is_stopped: AtomicBool::new(false),
        }
    }

    /// Bytes that are on the disk now, downloaded or found.
    pub(crate) fn add(&self, bytes: u64) {
        let done = self.done.fetch_add(bytes, Ordering::Relaxed) + bytes;
        self.bar.inc(bytes);
        let Ok(mut last) = self.last_line.try_lock() else { return };
        if last.elapsed() >= LINE_EVERY && !std::io::stderr().is_terminal() {
            *last = Instant::now();
            let (done, total) = (HumanBytes(done.min(self.total)), HumanBytes(self.total));
            self.say(&format!("{done} of {total}"));
        }
    }

    /// Bytes that have to be downloaded again.
    pub(crate) fn subtract(&self, bytes: u64) {
        self.done.fetch_sub(bytes, Ordering::Relaxed);
        self.bar.dec(bytes);
    }

    /// A line above the bar.
    pub(crate) fn say(&self, line: &str) {
        // A closed standard error must not end a download.
        self.bar.suspend(|| drop(writeln!(std::io::stderr(), "{line}")));
    }

    /// Asks every download to end.
    pub(crate) fn stop(&self) {
        self.is_stopped.store(true, Ordering::Relaxed);
    }

    /// Whether a file failed, so that the others are not needed.
    pub(crate) fn is_stopped(&self) -> bool {
        self.is_stopped.load(Ordering::Relaxed)
    }

    pub(crate) fn finish(&self) {
        self.bar.finish_and_clear();
    }
}
