//! The relay of `--keep-connections`: a process of this launcher that holds the ports and the connections of clients, and outlives worlds.

use std::fs;
use std::io::{BufRead, BufReader, Write};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::mpsc;
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use ipc::{ProcessWatch, RelayCommand};
use nix::sys::signal::Signal;

use crate::command::CommandLine;

/// Time in which the relay must open its ports.
const START_TIMEOUT: Duration = Duration::from_secs(30);

/// Time that the relay has at its end to send answers that it has.
const END_TIMEOUT: Duration = Duration::from_secs(3);

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
    started: Instant,
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
        let mut relay = Command::new(&command.program);
        relay.args(&command.args).stdin(Stdio::piped()).stdout(Stdio::piped()).process_group(0);
        let mut child = ipc::bind_to_parent(&mut relay, Signal::SIGKILL as i32)
            .spawn()
            .with_context(|| format!("cannot start `{}`", command.program.display()))?;
        let watch = ProcessWatch::new(child.id())?;
        let commands = child.stdin.take();
        let output = BufReader::new(child.stdout.take().context("standard output is piped")?);
        let (listens, is_listening) = mpsc::channel();
        thread::spawn(move || {
            let mut lines = output.lines().map_while(Result::ok);
            let _ = listens.send(lines.any(|line| line == ipc::RELAY_LISTENS));
            // Reads on: a full pipe would block the relay.
            lines.for_each(drop);
        });
        if !is_listening.recv_timeout(START_TIMEOUT).unwrap_or(false) {
            let _ = child.kill();
            let status = child.wait().context("cannot wait for the relay")?;
            bail!(
                "the relay of --keep-connections did not open its ports ({}); see the messages above",
                ipc::describe_exit(status)
            );
        }
        Ok(Self { child, watch, commands, started: Instant::now() })
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
