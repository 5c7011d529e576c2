//! Warnings and errors that repeat: the first of a stretch of time are written, the others counted, and one line says how many.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, Weak, mpsc};
use std::thread;
use std::time::{Duration, Instant};

use ipc::lock;
use tracing::callsite::Identifier;
use tracing::{Level, Metadata};

/// A stretch of time.
const WINDOW: Duration = Duration::from_secs(30);
/// Lines of one place of the code in a stretch.
const MAX_LINES: u32 = 50;
/// Target of lines that come from other processes, where many different ones come from one place of the code.
const RELAYED_TARGET: &str = "relayed";
const MAX_RELAYED_LINES: u32 = 2000;
/// Target of the lines that say how many were left out.
const LEFT_OUT_TARGET: &str = "left_out";

/// What was written of each place of the code that warns.
#[derive(Debug)]
pub(super) struct Limiter {
    places: Mutex<HashMap<Identifier, Place>>,
    /// Wakes the thread that says what was left out; there is none in a test.
    has_left_out: Option<mpsc::SyncSender<()>>,
}

#[derive(Debug)]
struct Place {
    metadata: &'static Metadata<'static>,
    began: Instant,
    num_written: u32,
    num_left_out: u64,
}

/// Lines that were left out.
#[derive(Debug, PartialEq, Eq)]
struct LeftOut {
    level: Level,
    place: String,
    num_lines: u64,
    time: Duration,
}

impl Limiter {
    /// A limiter, and the thread that says what it left out.
    pub(super) fn start() -> std::io::Result<Arc<Self>> {
        let (has_left_out, news) = mpsc::sync_channel(1);
        let limiter = Arc::new(Self { places: Mutex::default(), has_left_out: Some(has_left_out) });
        let reported = Arc::downgrade(&limiter);
        thread::Builder::new().name("log-limit".into()).spawn(move || report(&reported, &news))?;
        Ok(limiter)
    }

    /// Whether a line is written.
    pub(super) fn admits(&self, metadata: &'static Metadata<'static>) -> bool {
        // Levels are ordered by how much they say.
        *metadata.level() > Level::WARN || metadata.target() == LEFT_OUT_TARGET || self.counts(metadata, Instant::now())
    }

    fn counts(&self, metadata: &'static Metadata<'static>, now: Instant) -> bool {
        let max = if metadata.target() == RELAYED_TARGET { MAX_RELAYED_LINES } else { MAX_LINES };
        let mut places = lock(&self.places);
        let new = || Place { metadata, began: now, num_written: 0, num_left_out: 0 };
        let place = places.entry(metadata.callsite()).or_insert_with(new);
        if place.num_left_out == 0 && now.duration_since(place.began) >= WINDOW {
            *place = new();
        }
        if place.num_written < max {
            place.num_written += 1;
            return true;
        }
        place.num_left_out += 1;
        if place.num_left_out == 1
            && let Some(has_left_out) = &self.has_left_out
        {
            // When there is no room, it is awake.
            let _ = has_left_out.try_send(());
        }
        false
    }

    /// What was left out in stretches that have ended; they begin anew. And how long until the next one ends.
    fn take_left_out(&self, now: Instant) -> (Vec<LeftOut>, Option<Duration>) {
        let (mut taken, mut next) = (Vec::new(), None);
        for place in lock(&self.places).values_mut().filter(|place| place.num_left_out > 0) {
            let time = now.duration_since(place.began);
            if time < WINDOW {
                next = Some(next.map_or(WINDOW - time, |next: Duration| next.min(WINDOW - time)));
                continue;
            }
            let metadata = place.metadata;
            let file = metadata.file().and_then(|path| path.rsplit('/').next()).unwrap_or("?");
            let name = format!("{file}:{}", metadata.line().unwrap_or(0));
            taken.push(LeftOut { level: *metadata.level(), place: name, num_lines: place.num_left_out, time });
            *place = Place { metadata, began: now, num_written: 0, num_left_out: 0 };
        }
        (taken, next)
    }
}

/// Says what was left out, until the limiter is gone.
fn report(limiter: &Weak<Limiter>, news: &mpsc::Receiver<()>) {
    while news.recv().is_ok() {
        while let Some(limiter) = limiter.upgrade() {
            let (left_out, next) = limiter.take_left_out(Instant::now());
            drop(limiter);
            left_out.iter().for_each(LeftOut::say);
            let Some(next) = next else { break };
            thread::sleep(next);
        }
    }
}

impl LeftOut {
    fn say(&self) {
        let Self { place, num_lines, time, .. } = self;
        // A line's level is fixed where it is written.
        if self.level == Level::ERROR {
            tracing::error!(target: LEFT_OUT_TARGET, "{num_lines} further lines of {place} were left out in {time:.0?}");
        } else {
            tracing::warn!(target: LEFT_OUT_TARGET, "{num_lines} further lines of {place} were left out in {time:.0?}");
        }
    }
}

#[cfg(test)]
impl Limiter {
    /// A limiter whose thread a test plays.
    pub(super) fn silent() -> Arc<Self> {
        Arc::new(Self { places: Mutex::default(), has_left_out: None })
    }

    /// Says now what was left out, as if the stretch had ended.
    pub(super) fn say_all(&self) {
        self.take_left_out(Instant::now() + WINDOW).0.iter().for_each(LeftOut::say);
    }
}

#[cfg(test)]
mod tests {
    use tracing::Callsite as _;

    use super::*;

    #[test]
    fn what_repeats_is_counted_and_said_once() {
        let warning = tracing::callsite!(name: "w", kind: tracing::metadata::Kind::EVENT, target: "x", level: Level::WARN, fields:);
        let other = tracing::callsite!(name: "o", kind: tracing::metadata::Kind::EVENT, target: "x", level: Level::ERROR, fields:);
        let (warning, other) = (warning.metadata(), other.metadata());
        let limiter = Limiter::silent();
        let start = Instant::now();
        let num_written = (0..1000).filter(|_| limiter.counts(warning, start)).count();
        assert_eq!(num_written, MAX_LINES as usize);
        assert!(limiter.counts(other, start), "another place of the code has a limit of its own");

        let (left_out, next) = limiter.take_left_out(start + WINDOW / 2);
        assert_eq!((left_out, next), (Vec::new(), Some(WINDOW / 2)));
        let (left_out, next) = limiter.take_left_out(start + WINDOW);
        assert_eq!((left_out.len(), left_out[0].num_lines, left_out[0].level, next), (1, 950, Level::WARN, None));
        assert!(left_out[0].place.starts_with("limit.rs:"), "{left_out:?}");
        assert!(limiter.counts(warning, start + WINDOW), "a new stretch begins");
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
