//! Keeps the relay of `--keep-connections` running.

use std::os::fd::AsFd;
use std::time::Duration;

use anyhow::Result;
use ipc::ProcessWatch;

use super::Supervisor;
use crate::plan;
use crate::relay::Relay;
use crate::signals::Event;

impl Supervisor {
    /// Starts the relay of `--keep-connections`, which is there before the first world.
    pub(super) fn start_relay(&mut self) -> Result<()> {
        if let Some(command) = plan::plan(&self.flags, &self.site)?.relay {
            let journals = self.run_dir.journals(self.state.launcher_pid);
            self.relay = Some(Relay::start(command, journals)?);
        }
        Ok(())
    }

    /// Starts another relay after one has ended, unless none is needed any more.
    fn replace_relay(&mut self) -> Result<()> {
        let is_needed = self.relay.as_mut().map_or(Ok(false), Relay::start_again)?;
        self.relay = self.relay.take().filter(|_| is_needed);
        Ok(())
    }

    /// Waits for a signal, the end of one of `worlds`, or `timeout`. Keeps the relay running meanwhile.
    pub(super) fn wait_and_keep_relay(&mut self, worlds: &[&ProcessWatch], timeout: Option<Duration>) -> Result<Event> {
        self.relay.iter_mut().for_each(|relay| relay.check(self.flags.liveness_timeout));
        let relay = self.relay.as_ref().map(|relay| [relay.watch().as_fd(), relay.reports()]);
        let files: Vec<_> = worlds.iter().map(|world| world.as_fd()).chain(relay.into_iter().flatten()).collect();
        match self.signals.wait(&files, timeout)? {
            Event::Readable(at) if at < worlds.len() => Ok(Event::Readable(at)),
            Event::Readable(at) if at == worlds.len() => self.replace_relay().map(|()| Event::TimedOut),
            Event::Readable(_) => {
                self.relay.iter_mut().for_each(Relay::read_reports);
                Ok(Event::TimedOut)
            }
            event => Ok(event),
        }
    }
}
