use std::fs;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::process::{Command, ExitStatus};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, poll};
use rustix::process::{
    Pid, PidfdFlags, Signal, getppid, pidfd_open, pidfd_send_signal, set_parent_process_death_signal,
};
use rustix::time::Timespec;

use crate::error::IpcError;
use crate::inherit::{Closing, OomScore};

/// Identifies one process for all time. A pid alone may be assigned to a later process.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct ProcessId {
    /// The pid, in this PID namespace.
    pub pid: u32,
    /// When it started, in clock ticks since boot.
    pub start_time: u64,
}

impl ProcessId {
    /// This process.
    pub fn current() -> Self {
        let pid = std::process::id();
        // `/proc` may be missing in a bare chroot; 0 then means "unknown" on both sides of a comparison.
        Self { pid, start_time: Self::of(pid).map_or(0, |id| id.start_time) }
    }

    /// The process that has `pid` now; `None` if there is none, or only a zombie.
    pub fn of(pid: u32) -> Option<Self> {
        let stat = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
        // The name is in parentheses and may contain any character, so fields are counted after the last parenthesis.
        let mut fields = stat.get(stat.rfind(')')? + 1..)?.split_ascii_whitespace();
        let state = fields.next()?;
        let start_time = fields.nth(18)?.parse().ok()?; // field 22 of proc(5)
        (!matches!(state, "Z" | "X")).then_some(Self { pid, start_time })
    }

    /// Whether this process still runs.
    pub fn is_alive(self) -> bool {
        Self::of(self.pid) == Some(self)
    }
}

/// Detects the end of one process, child or not, without polling.
#[derive(Debug)]
pub struct ProcessWatch {
    pid: u32,
    pidfd: OwnedFd,
}

impl ProcessWatch {
    /// Watches `pid`. Errs when there is no such process. A zombie child can be watched.
    pub fn new(pid: u32) -> Result<Self, IpcError> {
        let watch = |source| IpcError::Watch { pid, source };
        let raw = i32::try_from(pid).ok().and_then(Pid::from_raw);
        let target = raw.ok_or_else(|| watch(io::ErrorKind::InvalidInput.into()))?;
        let pidfd = pidfd_open(target, PidfdFlags::empty()).map_err(|errno| watch(errno.into()))?;
        Ok(Self { pid, pidfd })
    }

    /// The watched pid.
    pub fn pid(&self) -> u32 {
        self.pid
    }

    /// Waits until the process has ended; false when it still runs after `timeout`.
    pub fn wait(&self, timeout: Duration) -> bool {
        let deadline = Instant::now().checked_add(timeout);
        loop {
            let left = deadline.map(|at| at.saturating_duration_since(Instant::now()));
            let left = left.map(|left| Timespec { tv_sec: left.as_secs() as i64, tv_nsec: left.subsec_nanos().into() });
            match poll(&mut [PollFd::new(&self.pidfd, PollFlags::IN)], left.as_ref()) {
                Ok(ready) => return ready > 0,
                Err(rustix::io::Errno::INTR) => {}
                Err(errno) => panic!("poll on a pidfd cannot fail, but did: {errno}"),
            }
        }
    }

    /// Whether the process still runs.
    pub fn is_alive(&self) -> bool {
        !self.wait(Duration::ZERO)
    }

    /// Sends `signal` (a number of signal(7)) to this process, never to a later process with its pid.
    pub fn signal(&self, signal: i32) -> io::Result<()> {
        let signal = Signal::from_named_raw(signal).ok_or(io::ErrorKind::InvalidInput)?;
        Ok(pidfd_send_signal(&self.pidfd, signal)?)
    }
}

impl AsFd for ProcessWatch {
    /// Readable once the process has ended; for an event loop.
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.pidfd.as_fd()
    }
}

/// How a child ended, for a log line: `exit code 3`, `signal 9 (SIGKILL)`.
pub fn describe_exit(status: ExitStatus) -> String {
    match (status.code(), status.signal()) {
        (Some(code), _) => format!("exit code {code}"),
        (None, Some(signal)) => match signal_name(signal) {
            Some(name) => format!("signal {signal} ({name})"),
            None => format!("signal {signal}"),
        },
        (None, None) => status.to_string(),
    }
}

fn signal_name(signal: i32) -> Option<&'static str> {
    Some(match signal {
        libc::SIGHUP => "SIGHUP",
        libc::SIGINT => "SIGINT",
        libc::SIGQUIT => "SIGQUIT",
        libc::SIGILL => "SIGILL",
        libc::SIGTRAP => "SIGTRAP",
        libc::SIGABRT => "SIGABRT",
        libc::SIGBUS => "SIGBUS, perhaps /dev/shm or a mapped file ran out of space",
        libc::SIGFPE => "SIGFPE",
        libc::SIGKILL => "SIGKILL, perhaps the kernel ran out of memory",
        libc::SIGSEGV => "SIGSEGV",
        libc::SIGPIPE => "SIGPIPE",
        libc::SIGTERM => "SIGTERM",
        _ => return None,
    })
}

/// Makes the kernel send `signal` to this process when the thread that started it ends. Errs if `parent` has already ended.
///
/// Call it at the start of a child. The kernel watches the parent's *thread*: start children from a thread that outlives them.
pub fn die_with_parent(parent: u32, signal: i32) -> io::Result<()> {
    let signal = Signal::from_named_raw(signal).ok_or(io::ErrorKind::InvalidInput)?;
    set_parent_process_death_signal(Some(signal))?;
    // The parent may have ended before the line above; then no signal is sent.
    if getppid().map(|pid| pid.as_raw_nonzero().get() as u32) != Some(parent) {
        return Err(io::Error::other(format!("the parent process {parent} has ended")));
    }
    Ok(())
}

/// As [`die_with_parent`], for a child that runs any program: set between fork and exec of `command`.
///
/// The child starts with no signal blocked, whatever this thread blocks, so that `signal` arrives. It inherits no descriptor above
/// standard error, and when memory runs out, the kernel kills it before this process.
pub fn bind_to_parent(command: &mut Command, signal: i32) -> &mut Command {
    let (parent, closing, oom_score) = (std::process::id(), Closing::new(), OomScore::new());
    // SAFETY: between fork and exec only async-signal-safe calls are allowed: the closure makes only system calls
    // (close_range or fcntl; open, write, close; rt_sigprocmask, prctl, getppid), and its errors are plain codes that
    // allocate nothing.
    unsafe {
        command.pre_exec(move || {
            closing.run();
            oom_score.run();
            unblock_signals()?;
            let signal = Signal::from_named_raw(signal).ok_or(io::ErrorKind::InvalidInput)?;
            set_parent_process_death_signal(Some(signal))?;
            if getppid().map(|pid| pid.as_raw_nonzero().get() as u32) != Some(parent) {
                return Err(io::ErrorKind::NotFound.into());
            }
            Ok(())
        })
    }
}

fn unblock_signals() -> io::Result<()> {
    let mut none = std::mem::MaybeUninit::uninit();
    // SAFETY: `sigemptyset` sets the mask before `sigprocmask` reads it; the old mask is not returned.
    let result = unsafe {
        libc::sigemptyset(none.as_mut_ptr());
        libc::sigprocmask(libc::SIG_SETMASK, none.as_ptr(), std::ptr::null_mut())
    };
    if result == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_watch_returns_at_once_when_the_process_is_killed() {
        let mut child = Command::new("sleep").arg("60").spawn().unwrap();
        let watch = ProcessWatch::new(child.id()).unwrap();
        let id = ProcessId::of(child.id()).unwrap();
        assert!(watch.is_alive() && id.is_alive());
        assert!(!watch.wait(Duration::from_millis(20)));

        child.kill().unwrap();
        assert!(watch.wait(Duration::from_secs(5)));
        assert!(!id.is_alive(), "a zombie counts as ended");
        assert_eq!(describe_exit(child.wait().unwrap()), "signal 9 (SIGKILL, perhaps the kernel ran out of memory)");
        assert!(ProcessWatch::new(child.id()).is_err());
    }

    #[test]
    fn a_process_with_the_same_pid_but_another_start_is_another_process() {
        let current = ProcessId::current();
        assert!(current.is_alive());
        assert!(!ProcessId { start_time: current.start_time + 1, ..current }.is_alive());
    }

    #[test]
    fn a_bound_child_dies_with_the_thread_that_started_it() {
        let child = std::thread::spawn(|| {
            let child = bind_to_parent(Command::new("sleep").arg("60"), libc::SIGKILL).spawn().unwrap();
            assert!(ProcessWatch::new(child.id()).unwrap().is_alive());
            child
        });
        let mut child = child.join().unwrap();
        assert_eq!(child.wait().unwrap().signal(), Some(libc::SIGKILL));
    }
}
