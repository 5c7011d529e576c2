//! The relay of `--keep-connections`: a process of this launcher that holds the ports and the connections of clients, and outlives worlds.

use std::fs;
use std::io::{self, Read, Write};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use ipc::{ProcessWatch, RelayCommand, RelayReport};
use nix::sys::signal::Signal;

use crate::command::CommandLine;

/// Time in which the relay must open its ports.
const START_TIMEOUT: Duration = Duration::from_secs(30);

/// Time that the relay has at its end to send answers that it has.
const END_TIMEOUT: Duration = Duration::from_secs(3);

/// How often the relay is asked whether it is alive.
const CHECK_INTERVAL: Duration = Duration::from_secs(1);

/// A relay that ran for less is started again after a pause.
const MIN_TIME: Duration = Duration::from_secs(1);

/// The relay of one launcher.
pub(crate) struct Relay {
    command: CommandLine,
    process: Process,
    /// Where the last world is, or why there is none. A relay that is started again gets this command, too.
    last: Option<RelayCommand>,
    /// Whether no further world follows.
    has_ended: bool,
    /// What outlives one relay, for the next.
    journals: PathBuf,
}

struct Process {
    child: Child,
    watch: ProcessWatch,
    /// Standard input; the relay ends when it is closed.
    commands: Option<ChildStdin>,
    /// The other end of standard output.
    reports: UnixStream,
    /// A part of a report.
    unread: Vec<u8>,
    listens: bool,
    is_idle: bool,
    is_wanted: bool,
    started: Instant,
    asked: Instant,
    /// How often it was asked whether it is alive since it has last answered.
    num_unanswered: u64,
}

impl Relay {
    /// Starts a relay with `command`, and waits until its ports are open. It keeps in the directory `journals` what the next relay needs.
    ///
    /// # Errors
    /// When it does not start; its own message is in the log.
    pub(crate) fn start(mut command: CommandLine, journals: PathBuf) -> Result<Self> {
        command.args.insert(1, format!("--relay-journals={}", journals.display()));
        Ok(Self { process: Process::start(&command)?, command, last: None, has_ended: false, journals })
    }

    /// Becomes readable when the relay has ended.
    pub(crate) fn watch(&self) -> &ProcessWatch {
        &self.process.watch
    }

    /// The pid of its process.
    pub(crate) fn pid(&self) -> u32 {
        self.process.child.id()
    }

    /// A world serves, whose rank 0 has its sockets in `directory`.
    pub(crate) fn serve(&mut self, directory: &Path) {
        self.send(RelayCommand::Serve(directory.to_owned()));
    }

    /// No world serves, for this reason. Requests wait for the next one.
    pub(crate) fn away(&mut self, reason: String) {
        self.send(RelayCommand::Away(reason));
    }

    /// No world serves until a request comes, which [`Self::is_wanted`] reports.
    pub(crate) fn sleep(&mut self) {
        self.process.is_wanted = false;
        self.send(RelayCommand::Sleep);
    }

    /// Whether a request has come since the world sleeps.
    pub(crate) fn is_wanted(&self) -> bool {
        self.process.is_wanted
    }

    /// Whether no request has come for the time of `--idle-exit`; true once for each report.
    pub(crate) fn take_idle(&mut self) -> bool {
        std::mem::take(&mut self.process.is_idle)
    }

    /// Becomes readable when there are reports.
    pub(crate) fn reports(&self) -> BorrowedFd<'_> {
        self.process.reports.as_fd()
    }

    /// Reads the reports that are there.
    pub(crate) fn read_reports(&mut self) {
        // An error means that there are none, or that the relay has ended.
        while self.process.read_reports().is_ok_and(|count| count > 0) {}
    }

    /// Asks the relay every second whether it is alive, and kills it if it does not answer for `allowed` seconds; 0 stands for ever.
    pub(crate) fn check(&mut self, allowed: u64) {
        let process = &mut self.process;
        if allowed == 0 || process.asked.elapsed() < CHECK_INTERVAL {
            return;
        }
        if process.num_unanswered >= allowed {
            eprintln!("launch: the relay has not answered for {} s: kills it", process.num_unanswered);
            // Its end is noticed as that of any process.
            let _ = process.child.kill();
            return;
        }
        process.send(&RelayCommand::Ping);
        process.asked = Instant::now();
        process.num_unanswered += 1;
    }

    /// No further world follows: the ports are closed, and no request is sent again.
    pub(crate) fn end(&mut self) {
        if !std::mem::replace(&mut self.has_ended, true) {
            self.process.send(&RelayCommand::End);
        }
    }

    fn send(&mut self, command: RelayCommand) {
        self.process.send(&command);
        self.last = Some(command);
    }

    /// Starts another relay after this one has ended; the connections of clients have ended with it. Returns false, and starts none,
    /// when no further world follows.
    pub(crate) fn start_again(&mut self) -> Result<bool> {
        let status = self.process.child.wait().context("cannot wait for the relay")?;
        if self.has_ended {
            return Ok(false);
        }
        eprintln!(
            "launch: the relay has ended ({}), and the connections with it: starts another",
            ipc::describe_exit(status)
        );
        if self.process.started.elapsed() < MIN_TIME {
            thread::sleep(MIN_TIME);
        }
        self.process = Process::start(&self.command)?;
        self.last.iter().for_each(|command| self.process.send(command));
        Ok(true)
    }
}

impl Drop for Relay {
    fn drop(&mut self) {
        // There are none if no client wanted one.
        let _ = fs::remove_dir_all(&self.journals);
    }
}

impl Process {
    fn start(command: &CommandLine) -> Result<Self> {
        let (reports, output) = UnixStream::pair().context("cannot make a socket for the relay")?;
        let mut relay = Command::new(&command.program);
        relay.args(&command.args).stdin(Stdio::piped()).stdout(OwnedFd::from(output)).process_group(0);
        let mut child = ipc::bind_to_parent(&mut relay, Signal::SIGKILL as i32)
            .spawn()
            .with_context(|| format!("cannot start `{}`", command.program.display()))?;
        // Closes this process's copy of its standard output, so that its end is noticed.
        drop(relay);
        let (watch, commands, now) = (ProcessWatch::new(child.id())?, child.stdin.take(), Instant::now());
        let mut process = Self {
            child,
            watch,
            commands,
            reports,
            unread: Vec::new(),
            listens: false,
            is_idle: false,
            is_wanted: false,
            started: now,
            asked: now,
            num_unanswered: 0,
        };
        if !process.awaits_ports()? {
            let _ = process.child.kill();
            let status = process.child.wait().context("cannot wait for the relay")?;
            bail!(
                "the relay of --keep-connections did not open its ports ({}); see the messages above",
                ipc::describe_exit(status)
            );
        }
        process.reports.set_nonblocking(true)?;
        Ok(process)
    }

    /// Waits until its ports are open. Returns false if it ends before, or takes too long.
    fn awaits_ports(&mut self) -> Result<bool> {
        let deadline = self.started + START_TIMEOUT;
        while !self.listens {
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Ok(false);
            }
            self.reports.set_read_timeout(Some(left))?;
            if !self.read_reports().is_ok_and(|count| count > 0) {
                return Ok(false);
            }
        }
        Ok(true)
    }

    /// Reads reports. Returns the number of bytes; 0 at the end of the relay.
    fn read_reports(&mut self) -> io::Result<usize> {
        let mut bytes = [0; 256];
        let count = (&self.reports).read(&mut bytes)?;
        self.unread.extend(&bytes[..count]);
        while let Some(end) = self.unread.iter().position(|byte| *byte == b'\n') {
            let line: Vec<u8> = self.unread.drain(..=end).collect();
            match RelayReport::parse(String::from_utf8_lossy(&line[..end]).as_ref()) {
                Some(RelayReport::Listens) => self.listens = true,
                Some(RelayReport::Alive) => self.num_unanswered = 0,
                Some(RelayReport::Idle) => self.is_idle = true,
                Some(RelayReport::Wanted) => self.is_wanted = true,
                None => {}
            }
        }
        Ok(count)
    }

    fn send(&mut self, command: &RelayCommand) {
        // This fails if the relay has ended. The next one gets the command when it starts.
        let _ = self.commands.as_mut().map(|commands| writeln!(commands, "{}", command.line()));
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        drop(self.commands.take());
        if !self.watch.wait(END_TIMEOUT) {
            let _ = self.child.kill();
        }
        let _ = self.child.wait();
    }
}
