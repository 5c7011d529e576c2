//! What systemd is told, when it started this launcher with `Type=notify`.

use std::time::{Duration, Instant};

use sd_notify::NotifyState;

/// The service manager; nobody when there is none.
pub(crate) struct Systemd {
    /// How often it wants to hear that all is well, with room to spare.
    watchdog: Option<Duration>,
    last: Option<Instant>,
}

impl Systemd {
    pub(crate) fn new() -> Self {
        Self { watchdog: sd_notify::watchdog_enabled().map(|interval| interval / 3), last: None }
    }

    /// The world serves.
    pub(crate) fn ready(&mut self, words: &str) {
        say(&[NotifyState::Ready, NotifyState::Status(words)]);
    }

    /// What the world does now, in words.
    pub(crate) fn status(&self, words: &str) {
        say(&[NotifyState::Status(words)]);
    }

    /// The launcher does its work; said no more often than needed.
    pub(crate) fn alive(&mut self) {
        let Some(interval) = self.watchdog else { return };
        if self.last.is_none_or(|last| last.elapsed() >= interval) {
            self.last = Some(Instant::now());
            say(&[NotifyState::Watchdog]);
        }
    }

    pub(crate) fn stopping(&self) {
        say(&[NotifyState::Stopping]);
    }
}

fn say(states: &[NotifyState]) {
    // Nobody to tell, or nobody who listens, is no reason to stop serving.
    let _ = sd_notify::notify(states);
}
