//! Asks another host whether it can take ranks, without waiting for the answer.

use std::io::Read;
use std::os::fd::AsFd;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use nix::fcntl::{FcntlArg, OFlag, fcntl};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

use crate::command::quoted;
use crate::hosts::{self, REACHED};

/// Time in which a host must answer.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(10);
/// Time in which a question that is given up ends by itself.
const END_TIMEOUT: Duration = Duration::from_millis(500);

/// What every host of a world must have, as a shell script that fails with the reason.
pub(crate) fn script(folder: &Path, program: Option<&Path>, repository: &Path) -> String {
    let path = |path: &Path| quoted(&path.to_string_lossy());
    let repository_is_there = |repository: &Path| {
        let missing = quoted(&format!("there is no model repository at {}", repository.display()));
        format!("test -d {} || {{ echo {missing} >&2; exit 1; }}; ", path(repository))
    };
    let program_is_there = |program: &Path| {
        let missing = quoted(&format!("there is no program at {}", program.display()));
        format!("test -x {} || {{ echo {missing} >&2; exit 1; }}; ", path(program))
    };
    // Programs in images cannot be seen from outside.
    let files = program.map(|program| program_is_there(program) + &repository_is_there(repository)).unwrap_or_default();
    // `mpirun` and ranks do not start where the disk of temporary files or the shared memory is full.
    format!(
        "echo {REACHED}; cd {} || exit 1; {files}for folder in \"${{TMPDIR:-/tmp}}\" /dev/shm; do \
         file=$(mktemp \"$folder/trireme.XXXXXX\") || exit 1; head -c 1048576 /dev/zero >\"$file\"; written=$?; \
         rm -f \"$file\"; test $written = 0 || exit 1; done",
        path(folder)
    )
}

/// A question to a host.
pub(crate) struct Probe {
    child: Child,
    started: Instant,
}

impl Probe {
    /// Starts `script` on `host`, by the way that `mpirun` starts ranks there.
    ///
    /// # Errors
    /// When the program that reaches other hosts cannot be started.
    pub(crate) fn start(host: &str, script: &str) -> Result<Self> {
        let words = words(host, script);
        let mut command = Command::new(&words[0]);
        command.args(&words[1..]).stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let child = ipc::bind_to_parent(&mut command, Signal::SIGTERM as i32)
            .spawn()
            .with_context(|| format!("cannot start `{}`", words[0]))?;
        Ok(Self { child, started: Instant::now() })
    }

    pub(crate) fn pid(&self) -> u32 {
        self.child.id()
    }

    /// The answer: whether the host can take ranks, or why not. None as long as there is none.
    pub(crate) fn answer(&mut self) -> Option<Result<(), String>> {
        let status = match self.child.try_wait() {
            Ok(Some(status)) => status,
            Ok(None) if self.started.elapsed() < ANSWER_TIMEOUT => return None,
            Ok(None) => return Some(Err(format!("no answer within {ANSWER_TIMEOUT:?}"))),
            Err(error) => return Some(Err(error.to_string())),
        };
        if status.success() {
            return Some(Ok(()));
        }
        let (mut output, mut errors) = (String::new(), String::new());
        // What cannot be read is only missing in the message.
        let _ = self.child.stdout.take().map(|mut stdout| read_some(&mut stdout, &mut output));
        let _ = self.child.stderr.take().map(|mut stderr| read_some(&mut stderr, &mut errors));
        let why = errors.lines().rfind(|line| !line.trim().is_empty()).unwrap_or("no error message").trim();
        Some(Err(match output.starts_with(REACHED) {
            true => format!("it answers, but cannot take ranks: {why}"),
            false => why.to_owned(),
        }))
    }
}

/// Reads what is there, 64 KiB at most: the capacity of a pipe. Does not wait: a child that the process left may hold the other end.
fn read_some(pipe: &mut (impl Read + AsFd), text: &mut String) -> Result<()> {
    fcntl(pipe.as_fd(), FcntlArg::F_SETFL(OFlag::O_NONBLOCK))?;
    let mut bytes = Vec::new();
    // At the end of what is there, an error says that more could follow.
    let _ = pipe.take(64 << 10).read_to_end(&mut bytes);
    text.push_str(&String::from_utf8_lossy(&bytes));
    Ok(())
}

impl Drop for Probe {
    fn drop(&mut self) {
        let deadline = Instant::now() + END_TIMEOUT;
        while !matches!(self.child.try_wait(), Ok(Some(_)) | Err(_)) {
            // It does not matter if it is gone already.
            let _ = kill(Pid::from_raw(self.child.id() as i32), Signal::SIGTERM);
            if Instant::now() >= deadline {
                let _ = self.child.kill();
                let _ = self.child.wait();
                break;
            }
            thread::sleep(Duration::from_millis(5));
        }
    }
}

/// The command that runs `script` on `host`. The remote shell joins the words, and the user's shell there reads them.
fn words(host: &str, script: &str) -> Vec<String> {
    let words = [host.to_owned(), "sh".to_owned(), "-c".to_owned(), quoted(script)];
    hosts::remote_shell().into_iter().chain(words).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn answer_of(script: &str) -> Result<(), String> {
        // `env NAME=VALUE sh -c SCRIPT` stands for a remote shell.
        let mut command = Command::new("sh");
        command.args(["-c", script]).stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut probe = Probe { child: command.spawn().unwrap(), started: Instant::now() };
        loop {
            if let Some(answer) = probe.answer() {
                return answer;
            }
            thread::sleep(Duration::from_millis(5));
        }
    }

    #[test]
    fn a_host_that_cannot_take_ranks_says_why() {
        let (here, sh) = (std::env::temp_dir(), Path::new("/bin/sh"));
        assert_eq!(answer_of(&script(&here, Some(sh), &here)), Ok(()));
        let missing = script(&here, Some(sh), Path::new("/no such"));
        let expected = "it answers, but cannot take ranks: there is no model repository at /no such";
        assert_eq!(answer_of(&missing), Err(expected.to_owned()));
        assert_eq!(answer_of(&script(&here, None, Path::new("/no such"))), Ok(()), "it may be in an image");
        assert!(
            answer_of(&script(&here, Some(Path::new("/no/p")), &here)).unwrap_err().contains("no program at /no/p")
        );
        let full = script(&here, Some(sh), &here).replace("/dev/shm", "/dev/null");
        assert!(answer_of(&full).unwrap_err().contains("mktemp"), "no room for temporary files");
        let unreachable = "echo 'ssh: connect to host b port 22: No route to host' >&2; exit 255";
        assert_eq!(answer_of(unreachable), Err("ssh: connect to host b port 22: No route to host".to_owned()));
    }

    #[test]
    fn a_question_that_is_given_up_ends() {
        let mut command = Command::new("sh");
        command.args(["-c", "sleep 60"]).stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut probe = Probe { child: command.spawn().unwrap(), started: Instant::now() - ANSWER_TIMEOUT };
        let pid = probe.pid();
        assert!(probe.answer().unwrap().unwrap_err().contains("no answer"));
        drop(probe);
        assert!(!Path::new(&format!("/proc/{pid}")).exists());
    }
}
