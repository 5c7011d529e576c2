//! Rate limit of warnings and errors: in each time window, the first lines of a call site are written and the others are counted; one
//! line reports the count.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, Weak, mpsc};
use std::thread;
use std::time::{Duration, Instant};

use ipc::lock;
use tracing::callsite::Identifier;
use tracing::{Level, Metadata};

/// Length of a time window.
const WINDOW: Duration = Duration::from_secs(30);
/// Most lines of one call site in a window.
const MAX_LINES: u32 = 50;
/// Target of lines of other processes. Many different lines share its call sites.
const RELAYED_TARGET: &str = "relayed";
const MAX_RELAYED_LINES: u32 = 2000;
/// Target of the reports of this limiter.
const LEFT_OUT_TARGET: &str = "left_out";

/// Counts the lines of each call site.
#[derive(Debug)]
pub(super) struct Limiter {
    call_sites: Mutex<HashMap<Identifier, CallSite>>,
    /// Wakes the thread that reports; `None` in a test.
    wake_reporter: Option<mpsc::SyncSender<()>>,
}

#[derive(Debug)]
struct CallSite {
    metadata: &'static Metadata<'static>,
    began: Instant,
    num_written: u32,
    num_left_out: u64,
}

/// The number of lines of a call site that were not written.
#[derive(Debug, PartialEq, Eq)]
struct LeftOut {
    level: Level,
    /// File name and line.
    place: String,
    num_lines: u64,
    time: Duration,
}

impl Limiter {
    /// A limiter with a thread that reports the lines that were not written.
    pub(super) fn start() -> std::io::Result<Arc<Self>> {
        let (wake_reporter, woken) = mpsc::sync_channel(1);
        let limiter = Arc::new(Self { call_sites: Mutex::default(), wake_reporter: Some(wake_reporter) });
        let reported = Arc::downgrade(&limiter);
        thread::Builder::new().name("log-limit".into()).spawn(move || report(&reported, &woken))?;
        Ok(limiter)
    }

    /// Whether a line is written.
    pub(super) fn admits(&self, metadata: &'static Metadata<'static>) -> bool {
        // Levels are ordered by verbosity.
        *metadata.level() > Level::WARN || metadata.target() == LEFT_OUT_TARGET || self.counts(metadata, Instant::now())
    }

    fn counts(&self, metadata: &'static Metadata<'static>, now: Instant) -> bool {
        let max = if metadata.target() == RELAYED_TARGET { MAX_RELAYED_LINES } else { MAX_LINES };
        let mut call_sites = lock(&self.call_sites);
        let new = || CallSite { metadata, began: now, num_written: 0, num_left_out: 0 };
        let site = call_sites.entry(metadata.callsite()).or_insert_with(new);
        if site.num_left_out == 0 && now.duration_since(site.began) >= WINDOW {
            *site = new();
        }
        if site.num_written < max {
            site.num_written += 1;
            return true;
        }
        site.num_left_out += 1;
        if site.num_left_out == 1
            && let Some(wake_reporter) = &self.wake_reporter
        {
            // When the channel is full, the reporter is already running.
            let _ = wake_reporter.try_send(());
        }
        false
    }

    /// The counts of windows that have ended, which are reset, and the time until the next window ends.
    fn take_left_out(&self, now: Instant) -> (Vec<LeftOut>, Option<Duration>) {
        let (mut taken, mut next) = (Vec::new(), None);
        for site in lock(&self.call_sites).values_mut().filter(|site| site.num_left_out > 0) {
            let time = now.duration_since(site.began);
            if time < WINDOW {
                next = Some(next.map_or(WINDOW - time, |next: Duration| next.min(WINDOW - time)));
                continue;
            }
            let metadata = site.metadata;
            let file = metadata.file().and_then(|path| path.rsplit('/').next()).unwrap_or("?");
            let name = format!("{file}:{}", metadata.line().unwrap_or(0));
            taken.push(LeftOut { level: *metadata.level(), place: name, num_lines: site.num_left_out, time });
            *site = CallSite { metadata, began: now, num_written: 0, num_left_out: 0 };
        }
        (taken, next)
    }
}

/// Reports the lines that were not written, until the limiter is dropped.
fn report(limiter: &Weak<Limiter>, woken: &mpsc::Receiver<()>) {
    while woken.recv().is_ok() {
        while let Some(limiter) = limiter.upgrade() {
            let (left_out, next) = limiter.take_left_out(Instant::now());
            drop(limiter);
            left_out.iter().for_each(LeftOut::report);
            let Some(next) = next else { break };
            thread::sleep(next);
        }
    }
}

impl LeftOut {
    fn report(&self) {
        let Self { place, num_lines, time, .. } = self;
        // The level of a call site is a constant.
        if self.level == Level::ERROR {
            tracing::error!(target: LEFT_OUT_TARGET, "{num_lines} further lines of {place} were left out in {time:.0?}");
        } else {
            tracing::warn!(target: LEFT_OUT_TARGET, "{num_lines} further lines of {place} were left out in {time:.0?}");
        }
    }
}

#[cfg(test)]
impl Limiter {
    /// A limiter without a reporter.
    pub(super) fn silent() -> Arc<Self> {
        Arc::new(Self { call_sites: Mutex::default(), wake_reporter: None })
    }

    /// Reports at once, as if all windows had ended.
    pub(super) fn report_all(&self) {
        self.take_left_out(Instant::now() + WINDOW).0.iter().for_each(LeftOut::report);
    }
}

#[cfg(test)]
mod tests {
    use tracing::Callsite as _;

    use super::*;

    #[test]
    fn repeated_lines_are_counted_and_reported_once() {
        let warning = tracing::callsite!(name: "w", kind: tracing::metadata::Kind::EVENT, target: "x", level: Level::WARN, fields:);
        let other = tracing::callsite!(name: "o", kind: tracing::metadata::Kind::EVENT, target: "x", level: Level::ERROR, fields:);
        let (warning, other) = (warning.metadata(), other.metadata());
        let limiter = Limiter::silent();
        let start = Instant::now();
        let num_written = (0..1000).filter(|_| limiter.counts(warning, start)).count();
        assert_eq!(num_written, MAX_LINES as usize);
        assert!(limiter.counts(other, start), "another call site has a limit of its own");

        let (left_out, next) = limiter.take_left_out(start + WINDOW / 2);
        assert_eq!((left_out, next), (Vec::new(), Some(WINDOW / 2)));
        let (left_out, next) = limiter.take_left_out(start + WINDOW);
        assert_eq!((left_out.len(), left_out[0].num_lines, left_out[0].level, next), (1, 950, Level::WARN, None));
        assert!(left_out[0].place.starts_with("limit.rs:"), "{left_out:?}");
        assert!(limiter.counts(warning, start + WINDOW), "a new window begins");
        assert_eq!(limiter.take_left_out(start + 9 * WINDOW).0, []);
    }

    #[test]
    fn information_is_never_left_out_and_relayed_lines_rarely() {
        let info = tracing::callsite!(name: "i", kind: tracing::metadata::Kind::EVENT, target: "x", level: Level::INFO, fields:);
        let relayed = tracing::callsite!(name: "r", kind: tracing::metadata::Kind::EVENT, target: RELAYED_TARGET, level: Level::WARN, fields:);
        let limiter = Limiter::silent();
        assert!((0..5000).all(|_| limiter.admits(info.metadata())));
        assert_eq!((0..5000).filter(|_| limiter.admits(relayed.metadata())).count(), MAX_RELAYED_LINES as usize);
    }
}
