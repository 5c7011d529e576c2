//! One model process: starts it, exchanges messages with it, and ends it.

use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::process::CommandExt as _;
use std::process::{Child, Stdio};
use std::sync::{Arc, Mutex, OnceLock};
use std::thread;
use std::time::Duration;

use bytes::BytesMut;
use ipc::{ProcessWatch, essential_thread, lock};
use rustix::process::Signal;
use tokio::net::UnixStream;
use tokio::sync::{Notify, watch};

use super::mpi::{self, Launch, RankErrors};
use super::spawner::{Program, Spawner, forward_lines, kill_group, wait_for};
use super::wire::{Value, WireError};

/// The largest message; tensors that would not fit travel in shared memory.
const MAX_MESSAGE_BYTES: usize = 256 << 20;

/// Interval of the checks of a launcher until its first process connects.
const LAUNCHER_CHECK_INTERVAL: Duration = Duration::from_millis(20);

/// Time for a launcher to end its processes on all ranks.
const WORLD_GRACE: Duration = Duration::from_secs(3);

/// A running model process.
#[derive(Debug)]
pub(super) struct Process {
    stream: UnixStream,
    outgoing: Mutex<Vec<u8>>,
    flush: Notify,
    /// The process, or the launcher of one on every rank.
    watch: Arc<ProcessWatch>,
    /// The process that has the socket.
    pid: u32,
    /// Errors of the processes on other ranks, if there are any.
    others: Option<RankErrors>,
    has_exited: watch::Receiver<bool>,
    /// `None` after it was reaped. Its process id may then belong to another process.
    child: Mutex<Option<Child>>,
    /// Why the server killed it.
    killed: OnceLock<String>,
}

impl Process {
    /// Starts the process, with the socket as its standard input. With a launch, starts a process on every rank, and the first of
    /// them connects.
    pub async fn start(spawner: &Spawner, program: &Program) -> io::Result<Self> {
        match &program.launch {
            None => Self::start_one(spawner, program).await,
            Some(launch) => Self::start_world(spawner, program, launch).await,
        }
    }

    async fn start_one(spawner: &Spawner, program: &Program) -> io::Result<Self> {
        let (ours, theirs) = std::os::unix::net::UnixStream::pair()?;
        ours.set_nonblocking(true)?;
        let mut command = program.command();
        mpi::leave_world(&mut command);
        command.stdin(Stdio::from(OwnedFd::from(theirs))).stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut child = spawner.spawn(command, Signal::KILL).await?;
        let title = program.title.clone();
        forward_lines(child.stderr.take(), move |line| tracing::warn!(target: "relayed", "{title}: {line}"));
        let title = program.title.clone();
        forward_lines(child.stdout.take(), move |line| tracing::info!(target: "relayed", "{title}: {line}"));
        Self::new(child, UnixStream::from_std(ours)?, None)
    }

    async fn start_world(spawner: &Spawner, program: &Program, launch: &Launch) -> io::Result<Self> {
        let (mut command, listener) = launch.prepare(&program.command(), &program.pass_environment)?;
        command.process_group(0).stdout(Stdio::piped());
        let mut child = spawner.spawn(command, Signal::TERM).await?;
        let others = RankErrors::default();
        let (errors, title) = (others.clone(), program.title.clone());
        forward_lines(child.stderr.take(), move |line| {
            if !errors.keep(line) {
                tracing::warn!(target: "relayed", "{title}: {line}");
            }
        });
        let title = program.title.clone();
        forward_lines(child.stdout.take(), move |line| tracing::info!(target: "relayed", "{title}: {line}"));
        let watch = ProcessWatch::new(child.id()).map_err(io::Error::other)?;
        let connected = async {
            loop {
                tokio::select! {
                    accepted = listener.accept() => return accepted.map(|(stream, _)| stream),
                    () = tokio::time::sleep(LAUNCHER_CHECK_INTERVAL) => if !watch.is_alive() {
                        return Err(io::Error::other("the launcher of its processes on all ranks ended"));
                    }
                }
            }
        };
        let late = || io::Error::other("its processes on all ranks did not start in time; see `stub-timeout-seconds`");
        let connected = tokio::time::timeout(program.start_timeout, connected).await;
        match connected.unwrap_or_else(|_| Err(late())) {
            Ok(stream) => Self::new(child, stream, Some(others)),
            Err(error) => {
                end_world(&watch, Duration::ZERO);
                let status = wait_for(child);
                let reason = others.first().unwrap_or_default();
                Err(io::Error::other(format!("{error} ({status}) {reason}").trim_end().to_owned()))
            }
        }
    }

    fn new(child: Child, stream: UnixStream, others: Option<RankErrors>) -> io::Result<Self> {
        let watch = Arc::new(ProcessWatch::new(child.id()).map_err(io::Error::other)?);
        let (exited, has_exited) = watch::channel(false);
        let watched = watch.clone();
        let wait = move || {
            watched.wait(Duration::MAX);
            let _ = exited.send(true);
        };
        essential_thread("python-watch", wait)?;
        let connected = stream.peer_cred().ok().and_then(|peer| peer.pid()).and_then(|pid| u32::try_from(pid).ok());
        Ok(Self {
            pid: connected.filter(|_| others.is_some()).unwrap_or(child.id()),
            stream,
            outgoing: Mutex::default(),
            flush: Notify::new(),
            watch,
            others,
            has_exited,
            child: Mutex::new(Some(child)),
            killed: OnceLock::new(),
        })
    }

    /// Ends the processes on other ranks after the model has finalized on the first: they would wait for it in MPI forever.
    pub fn finalized(&self) {
        if self.others.is_some() {
            let _ = self.watch.signal(Signal::TERM.as_raw());
        }
    }

    /// Sends messages without waiting. What the socket does not accept now is sent later.
    pub fn send(&self, messages: &[u8]) {
        let mut outgoing = lock(&self.outgoing);
        let sent = if outgoing.is_empty() { self.stream.try_write(messages).unwrap_or(0) } else { 0 };
        if sent < messages.len() {
            outgoing.extend_from_slice(&messages[sent..]);
            self.flush.notify_one();
        }
    }

    /// Sends what [`Process::send`] could not. Ends only when the socket fails.
    pub async fn keep_sending(&self) {
        loop {
            self.flush.notified().await;
            while !lock(&self.outgoing).is_empty() {
                if self.stream.writable().await.is_err() {
                    return;
                }
                let mut outgoing = lock(&self.outgoing);
                match self.stream.try_write(&outgoing) {
                    Ok(sent) => drop(outgoing.drain(..sent)),
                    Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                    Err(_) => return,
                }
            }
        }
    }

    /// Passes each message to `handle` until the process closes its socket.
    ///
    /// # Errors
    /// When the process violates the protocol.
    pub async fn read(&self, mut handle: impl FnMut(Vec<Value>) -> Result<(), WireError>) -> Result<(), String> {
        let mut buffer = BytesMut::with_capacity(1 << 16);
        loop {
            buffer.reserve(1 << 16);
            self.stream.readable().await.map_err(|error| error.to_string())?;
            match self.stream.try_read_buf(&mut buffer) {
                Ok(0) => return Ok(()),
                Ok(_) => {}
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => continue,
                Err(error) if error.kind() == io::ErrorKind::ConnectionReset => return Ok(()),
                Err(error) => return Err(error.to_string()),
            }
            while let Some((length, _)) = buffer.split_first_chunk::<4>() {
                let length = u32::from_le_bytes(*length) as usize;
                if length > MAX_MESSAGE_BYTES {
                    return Err(format!("it sent a message of {length} bytes; at most {MAX_MESSAGE_BYTES} are taken"));
                }
                if buffer.len() < 4 + length {
                    buffer.reserve(4 + length - buffer.len());
                    break;
                }
                let message = buffer.split_to(4 + length).freeze().slice(4..);
                Value::read(&message)
                    .and_then(Value::tuple)
                    .and_then(&mut handle)
                    .map_err(|error| error.to_string())?;
            }
        }
    }

    /// Resolves when the process has ended.
    pub async fn exited(&self) {
        // An error means that the watching thread has ended, which it does only after the process.
        let _ = self.has_exited.clone().wait_for(|&has_exited| has_exited).await;
    }

    /// Like [`Process::exited`]. Returns how it ended.
    pub async fn ended(&self) -> String {
        self.exited().await;
        let status = self.reap();
        let reason = self.others.as_ref().and_then(RankErrors::first);
        self.killed.get().cloned().or(reason).unwrap_or(status)
    }

    /// Kills the process and all processes that it started.
    pub fn kill(&self, why: &str) {
        let child = lock(&self.child);
        if child.is_some() {
            let _ = self.killed.set(why.to_owned());
            if self.others.is_some() {
                let watch = self.watch.clone();
                thread::spawn(move || end_world(&watch, WORLD_GRACE));
                return;
            }
            let _ = self.watch.signal(Signal::KILL.as_raw());
            kill_group(self.watch.pid());
        }
    }

    /// Kills what the process started, and waits for a process that has ended or was killed.
    fn reap(&self) -> String {
        let mut slot = lock(&self.child);
        let Some(child) = slot.take() else { return "it has ended".to_owned() };
        if self.others.is_none() {
            kill_group(self.watch.pid());
        }
        wait_for(child)
    }

    /// Waits until the process ends by itself, and kills it after `timeout`. Returns whether it ended by itself.
    pub async fn wait_or_kill(&self, timeout: Duration) -> bool {
        if tokio::time::timeout(timeout, self.exited()).await.is_ok() {
            return true;
        }
        self.kill("it did not end in time");
        false
    }

    /// Whether the process is stopped, by SIGSTOP or a debugger.
    pub fn is_stopped(&self) -> bool {
        let stat = std::fs::read_to_string(format!("/proc/{}/stat", self.pid)).unwrap_or_default();
        stat.rfind(')').and_then(|at| stat[at + 1..].split_ascii_whitespace().next()) == Some("T")
    }
}

/// Lets a launcher end its processes and remove its files. Kills what has not ended after `grace`.
fn end_world(launcher: &ProcessWatch, grace: Duration) {
    let _ = launcher.signal(Signal::TERM.as_raw());
    if launcher.wait(grace) {
        return;
    }
    for child in mpi::children(launcher.pid()) {
        kill_group(child);
    }
    let _ = launcher.signal(Signal::KILL.as_raw());
}

impl Drop for Process {
    fn drop(&mut self) {
        self.kill("its model was unloaded");
        self.reap();
    }
}

#[cfg(test)]
mod tests {
    use std::net::UdpSocket;
    use std::os::fd::AsRawFd as _;
    use std::path::PathBuf;
    use std::process::Command;

    use rustix::io::{FdFlags, fcntl_setfd};

    use super::*;

    const SECRETS: [&str; 3] = ["TRIREME_API_KEYS", "AWS_SECRET_ACCESS_KEY", "HF_TOKEN"];

    /// Runs only in the program that the next test starts.
    #[tokio::test]
    async fn a_server_with_secrets_starts_a_model() {
        let Some(dir) = std::env::var_os("PROCESS_TEST_DIR").map(PathBuf::from) else { return };
        let stub = dir.join("stub.sh");
        std::fs::write(&stub, "exec sleep 60\n").unwrap();
        let socket = UdpSocket::bind("127.0.0.1:0").unwrap();
        fcntl_setfd(&socket, FdFlags::empty()).unwrap();
        let inherited = std::fs::read_link(format!("/proc/self/fd/{}", socket.as_raw_fd())).unwrap();

        let program = Program {
            interpreter: "sh".into(),
            stub,
            title: "m_0".to_owned(),
            module_dir: dir,
            pass_environment: vec!["HF_TOKEN".to_owned()],
            launch: None,
            start_timeout: Duration::from_secs(60),
        };
        // The process ends with the thread that started it.
        let spawner = Spawner::start().unwrap();
        let process = Process::start(&spawner, &program).await.unwrap();
        let proc = PathBuf::from(format!("/proc/{}", process.pid));
        // While the process replaces itself by another program, neither can be read.
        let (mut environment, mut open) = (String::new(), Vec::new());
        for _ in 0..500 {
            environment = std::fs::read_to_string(proc.join("environ")).unwrap();
            let listed = std::fs::read_dir(proc.join("fd")).unwrap().flatten();
            open = listed.filter_map(|entry| std::fs::read_link(entry.path()).ok()).collect();
            if !environment.is_empty() && !open.is_empty() {
                break;
            }
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
        let names: Vec<&str> = environment.split('\0').filter_map(|pair| Some(pair.split_once('=')?.0)).collect();
        assert!(names.contains(&"PYTHONPATH") && names.contains(&"PROCESS_TEST_DIR"), "{names:?}");
        for secret in SECRETS {
            assert!(std::env::var_os(secret).is_some());
            assert_eq!(names.contains(&secret), secret == "HF_TOKEN", "{names:?}");
        }
        assert!(!open.is_empty() && !open.contains(&inherited), "{open:?}");
    }

    #[test]
    fn a_model_gets_no_socket_of_the_server_and_only_named_secrets() {
        let dir = tempfile::tempdir().unwrap();
        let mut server = Command::new(std::env::current_exe().unwrap());
        server.args(["python::process::tests::a_server_with_secrets_starts_a_model", "--exact", "--nocapture"]);
        server.env("PROCESS_TEST_DIR", dir.path()).envs(SECRETS.map(|name| (name, "not to be seen")));
        let output = server.output().unwrap();
        let stdout = String::from_utf8_lossy(&output.stdout);
        assert!(output.status.success() && stdout.contains("1 passed"), "{output:?}");
    }
}
