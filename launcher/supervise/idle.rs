//! `--idle-exit`: ends a world that has no requests, and starts it again for the next one. The relay holds the ports meanwhile.

use anyhow::Result;

use super::Supervisor;
use super::running::{LIVENESS_POLL, Running};
use crate::relay::Relay;
use crate::signals::{Event, RESTART, RESTART_AFTER, RESTART_ROLLING};
use crate::state::Phase;

impl Supervisor {
    /// Asks the world to end if the relay reports that no request has come for the time of `--idle-exit`.
    pub(super) fn end_if_idle(&mut self, running: &mut Running) {
        let is_idle = self.relay.as_mut().is_some_and(Relay::take_idle);
        if is_idle && running.serving_since.is_some() && running.next.is_none() {
            let seconds = self.flags.idle_exit.unwrap_or_default();
            running.sleeps = true;
            self.advance_shutdown(running, &format!("no request has come for {seconds} s"));
        }
    }

    /// Waits until a request comes, or a restart is requested. Returns false if the end of the launcher is requested.
    pub(super) fn sleep(&mut self) -> Result<bool> {
        let message = "the world sleeps; the next request starts it";
        eprintln!("launch: {message}");
        self.systemd.status(message);
        self.state.phase = Phase::Asleep;
        self.write_state();
        while self.relay.as_ref().is_some_and(|relay| !relay.is_wanted()) {
            self.systemd.notify_watchdog();
            match self.wait_and_keep_relay(&[], Some(LIVENESS_POLL))? {
                Event::Signal(RESTART | RESTART_ROLLING | RESTART_AFTER) => break,
                Event::Signal(signal) => {
                    eprintln!("launch: {signal}: ends");
                    return Ok(false);
                }
                Event::Readable(_) | Event::TimedOut => {}
            }
        }
        eprintln!("launch: starts the world");
        self.relay.iter_mut().for_each(|relay| relay.away("the server was asleep and starts".to_owned()));
        Ok(true)
    }
}
