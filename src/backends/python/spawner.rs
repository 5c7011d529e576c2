//! Starts model processes, and reads what they write.

use std::io::{self, BufRead as _, BufReader, Read};
use std::os::unix::process::CommandExt as _;
use std::path::PathBuf;
use std::process::{Child, Command};
use std::sync::mpsc;
use std::thread;
use std::time::Duration;

use ipc::{ProcessWatch, bind_to_parent, describe_exit, essential_thread, withhold_secrets};
use rustix::process::{Pid, Signal, kill_process_group};
use tokio::sync::oneshot;

use super::mpi::Launch;

/// How long a process may take to end after it was killed. A driver or a disk that hangs can delay its end.
const KILL_TIMEOUT: Duration = Duration::from_secs(2);

/// Longest line of a model in the log. Longer lines are divided.
const MAX_LINE_BYTES: u64 = 16 << 10;

/// Starts processes from one thread of its own, because a process ends when the thread that started it ends.
#[derive(Debug)]
pub(super) struct Spawner {
    jobs: mpsc::Sender<Job>,
}

#[derive(Debug)]
struct Job {
    command: Command,
    /// The signal that the process gets when the server ends.
    on_end: Signal,
    reply: oneshot::Sender<io::Result<Child>>,
}

impl Spawner {
    pub fn start() -> io::Result<Self> {
        let (jobs, queue) = mpsc::channel::<Job>();
        let run = move || {
            for Job { mut command, on_end, reply } in queue {
                let child = bind_to_parent(&mut command, on_end.as_raw()).spawn();
                // The caller has been dropped, so nothing else would end the process.
                if let Err(Ok(mut child)) = reply.send(child) {
                    let _ = child.kill();
                    wait_for(child);
                }
            }
        };
        essential_thread("python-starter", run)?;
        Ok(Self { jobs })
    }

    pub async fn spawn(&self, command: Command, on_end: Signal) -> io::Result<Child> {
        let (reply, child) = oneshot::channel();
        let ended = || io::Error::other("the thread that starts processes has ended");
        self.jobs.send(Job { command, on_end, reply }).map_err(|_| ended())?;
        child.await.map_err(|_| ended())?
    }
}

/// What to run.
#[derive(Debug, Clone)]
pub(super) struct Program {
    pub interpreter: PathBuf,
    pub stub: PathBuf,
    /// Shown by `ps`.
    pub title: String,
    /// Directory of the module, for processes that the model starts.
    pub module_dir: PathBuf,
    /// Environment variables that it gets although their names suggest secrets.
    pub pass_environment: Vec<String>,
    /// Set for a process on every rank.
    pub launch: Option<Launch>,
    /// How long it may take to start.
    pub start_timeout: Duration,
}

impl Program {
    pub fn command(&self) -> Command {
        let mut command = Command::new(&self.interpreter);
        command.arg(&self.stub).arg(&self.title).process_group(0);
        withhold_secrets(&mut command, &self.pass_environment);
        let path = std::env::var_os("PYTHONPATH").into_iter().flat_map(|path| {
            let parts: Vec<PathBuf> = std::env::split_paths(&path).collect();
            parts
        });
        if let Ok(path) = std::env::join_paths(path.chain([self.module_dir.clone()])) {
            command.env("PYTHONPATH", path);
        }
        // With polling, compiled files in the repository would look like a change of the model.
        command.env("PYTHONDONTWRITEBYTECODE", "1").env("PYTHONUNBUFFERED", "1");
        command
    }
}

/// Waits for a process that has ended or was killed, and returns how it ended. If it does not end in time, a thread of its own
/// continues to wait.
pub(super) fn wait_for(mut child: Child) -> String {
    let has_ended = ProcessWatch::new(child.id()).is_ok_and(|watch| watch.wait(KILL_TIMEOUT));
    if has_ended {
        return child.wait().map_or_else(|error| error.to_string(), describe_exit);
    }
    let pid = child.id();
    thread::spawn(move || child.wait());
    format!("process {pid} was killed and has not ended: a driver or a disk may hang")
}

/// Passes each line that a model process writes to `take`, on a thread of its own, until the process closes its end.
pub(super) fn forward_lines(source: Option<impl Read + Send + 'static>, mut take: impl FnMut(&str) + Send + 'static) {
    let Some(source) = source else { return };
    let run = move || {
        let (mut reader, mut bytes) = (BufReader::new(source), Vec::new());
        while matches!(reader.by_ref().take(MAX_LINE_BYTES).read_until(b'\n', &mut bytes), Ok(1..)) {
            take(String::from_utf8_lossy(&bytes).trim_end());
            bytes.clear();
        }
    };
    if let Err(error) = thread::Builder::new().name("python-output".to_owned()).spawn(run) {
        tracing::error!("the output of a Python model is lost, because no thread can be started: {error}");
    }
}

/// Kills a process group. Must not be called after its leader was reaped, whose id may then belong to another process.
pub(super) fn kill_group(leader: u32) {
    if let Some(group) = i32::try_from(leader).ok().and_then(Pid::from_raw) {
        let _ = kill_process_group(group, Signal::KILL);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_of_a_model_are_bounded_and_none_is_lost() {
        let (sender, lines) = mpsc::channel();
        let long = "x".repeat(40_000);
        let text = format!("one\n\ntwo\u{1b}\n{long}\nlast");
        forward_lines(Some(std::io::Cursor::new(text)), move |line| sender.send(line.to_owned()).unwrap());
        let lines: Vec<String> = lines.iter().collect();
        assert_eq!(lines[..3], ["one", "", "two\u{1b}"]);
        assert!(lines.iter().all(|line| line.len() <= MAX_LINE_BYTES as usize));
        assert_eq!(lines[3..].concat(), format!("{long}last"));
    }
}
