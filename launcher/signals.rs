//! Waits for signals to the launcher, and for the ends of its worlds and reports of its relay, with one `poll`.

use std::os::fd::{AsFd, BorrowedFd};
use std::time::Duration;

use anyhow::{Context, Result};
use nix::errno::Errno;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::signal::{SigSet, Signal};
use nix::sys::signalfd::{SfdFlags, SignalFd};

/// SIGINT, SIGTERM, SIGHUP and the signals of `launch restart`: blocked, and read one by one from a signal descriptor.
pub(crate) struct Signals(SignalFd);

/// What ended a wait.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Event {
    Signal(Signal),
    /// The file at this index of the list is readable.
    Readable(usize),
    TimedOut,
}

/// Asks a launcher to end its world and start it again.
pub(crate) const RESTART: Signal = Signal::SIGUSR1;
/// Asks a launcher to start a second world, which takes over from the first.
pub(crate) const RESTART_ROLLING: Signal = Signal::SIGUSR2;
/// Asks a launcher to end its world and start it again while connections wait.
pub(crate) const RESTART_AFTER: Signal = Signal::SIGURG;

impl Signals {
    /// Catches the signals from now on. Programs started through `ipc::bind_to_parent` are not affected.
    pub(crate) fn catch() -> Result<Self> {
        let mask = SigSet::from_iter([
            Signal::SIGINT,
            Signal::SIGTERM,
            Signal::SIGHUP,
            RESTART,
            RESTART_ROLLING,
            RESTART_AFTER,
        ]);
        mask.thread_block().context("cannot block signals")?;
        let fd = SignalFd::with_flags(&mask, SfdFlags::SFD_CLOEXEC | SfdFlags::SFD_NONBLOCK);
        Ok(Self(fd.context("cannot wait for signals")?))
    }

    /// Waits for a signal, until one of `files` is readable, or for `timeout`. Without a timeout it waits indefinitely.
    pub(crate) fn wait(&self, files: &[BorrowedFd], timeout: Option<Duration>) -> Result<Event> {
        let fds = std::iter::once(self.0.as_fd()).chain(files.iter().copied());
        let mut fds: Vec<PollFd> = fds.map(|fd| PollFd::new(fd, PollFlags::POLLIN)).collect();
        // Rounded up; otherwise the last millisecond of a wait would be a busy loop.
        let timeout = timeout.map_or(PollTimeout::NONE, |timeout| {
            PollTimeout::try_from(timeout.as_millis() + 1).unwrap_or(PollTimeout::MAX)
        });
        match poll(&mut fds, timeout) {
            Ok(0) | Err(Errno::EINTR) => return Ok(Event::TimedOut),
            Ok(_) => {}
            Err(errno) => return Err(errno).context("cannot wait for the world"),
        }
        if let Some(info) = self.0.read_signal().context("cannot read a signal")? {
            let signal = Signal::try_from(info.ssi_signo as i32).context("unknown signal")?;
            return Ok(Event::Signal(signal));
        }
        let is_ready = |fd: &PollFd| fd.any().unwrap_or(false);
        let ready = fds[1..].iter().position(is_ready);
        Ok(ready.map_or(Event::TimedOut, Event::Readable))
    }
}
