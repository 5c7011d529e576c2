//! Notifications to systemd, when it started this launcher with `Type=notify`.

use std::time::{Duration, Instant};

use sd_notify::NotifyState;

/// The connection to the service manager. Without one, every notification is a no-op.
pub(crate) struct Systemd {
    /// Interval between watchdog notifications: a third of the time that systemd allows.
    watchdog: Option<Duration>,
    last_watchdog: Option<Instant>,
}

impl Systemd {
    pub(crate) fn new() -> Self {
        Self { watchdog: sd_notify::watchdog_enabled().map(|interval| interval / 3), last_watchdog: None }
    }

    /// Reports that the world serves.
    pub(crate) fn ready(&mut self, message: &str) {
        notify(&[NotifyState::Ready, NotifyState::Status(message)]);
    }

    /// Reports a status line.
    pub(crate) fn status(&self, message: &str) {
        notify(&[NotifyState::Status(message)]);
    }

    /// Sends a watchdog notification if one is due.
    pub(crate) fn notify_watchdog(&mut self) {
        let Some(interval) = self.watchdog else { return };
        if self.last_watchdog.is_none_or(|last| last.elapsed() >= interval) {
            self.last_watchdog = Some(Instant::now());
            notify(&[NotifyState::Watchdog]);
        }
    }

    pub(crate) fn stopping(&self) {
        notify(&[NotifyState::Stopping]);
    }
}

fn notify(states: &[NotifyState]) {
    // A missing or failing service manager must not end the world.
    let _ = sd_notify::notify(states);
}
