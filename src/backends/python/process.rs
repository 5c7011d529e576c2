//! One model process: its start, its socket, its end.

use std::io::{self, BufRead as _, BufReader, Read};
use std::os::fd::OwnedFd;
use std::os::unix::process::CommandExt as _;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::sync::{Arc, Mutex, OnceLock, mpsc};
use std::thread;
use std::time::Duration;

use bytes::BytesMut;
use ipc::{ProcessWatch, bind_to_parent, describe_exit, essential_thread, lock, withhold_secrets};
use rustix::process::{Pid, Signal, kill_process_group};
use tokio::net::UnixStream;
use tokio::sync::{Notify, oneshot, watch};

use super::mpi::{self, LastWords, Launch};
use super::wire::{Value, WireError};

/// The largest message; tensors that would not fit travel in shared memory.
const MAX_MESSAGE_BYTES: usize = 256 << 20;

/// How often a launcher is looked at until its first process connects.
const LOOK: Duration = Duration::from_millis(20);

/// Time for a launcher to end its processes on all ranks.
const WORLD_GRACE: Duration = Duration::from_secs(3);

/// How long a process may take to end after it was killed. The kernel waits for a driver or a disk that hangs.
const KILL_PATIENCE: Duration = Duration::from_secs(2);

/// Longest line of a model that is passed on; the rest of a longer one becomes lines of its own.
const MAX_LINE_BYTES: u64 = 16 << 10;

/// Starts processes from one thread that lives as long as this: they end with the thread that started them.
#[derive(Debug)]
pub(super) struct Spawner {
    jobs: mpsc::Sender<Job>,
}

#[derive(Debug)]
struct Job {
    command: Command,
    /// What the process gets when the server ends.
    on_end: Signal,
    reply: oneshot::Sender<io::Result<Child>>,
}

impl Spawner {
    pub fn start() -> io::Result<Self> {
        let (jobs, asked) = mpsc::channel::<Job>();
        let run = move || {
            for Job { mut command, on_end, reply } in asked {
                let child = bind_to_parent(&mut command, on_end.as_raw()).spawn();
                // Nobody waits any more: what was started must not stay.
                if let Err(Ok(mut child)) = reply.send(child) {
                    let _ = child.kill();
                    wait_for(child);
                }
            }
        };
        essential_thread("python-starter", run)?;
        Ok(Self { jobs })
    }

    async fn spawn(&self, command: Command, on_end: Signal) -> io::Result<Child> {
        let (reply, child) = oneshot::channel();
        let gone = || io::Error::other("the thread that starts processes has ended");
        self.jobs.send(Job { command, on_end, reply }).map_err(|_| gone())?;
        child.await.map_err(|_| gone())?
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
    /// Variables that it gets although their names are those of secrets.
    pub pass_environment: Vec<String>,
    /// For a process on every rank.
    pub launch: Option<Launch>,
    /// How long it may take until it is there.
    pub start_timeout: Duration,
}

impl Program {
    fn command(&self) -> Command {
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
        // A repository that is polled would take new files for a change of the model.
        command.env("PYTHONDONTWRITEBYTECODE", "1").env("PYTHONUNBUFFERED", "1");
        command
    }
}

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
    /// What other ranks said, if there are processes on them.
    others: Option<LastWords>,
    has_exited: watch::Receiver<bool>,
    /// `None` once it was reaped: its number may be another process's then.
    child: Mutex<Option<Child>>,
    /// Why this side ended it.
    killed: OnceLock<String>,
}

impl Process {
    /// Starts the process, whose standard input is the socket; or a process on every rank, the first of which connects.
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
        pass_on(child.stderr.take(), move |line| tracing::warn!(target: "relayed", "{title}: {line}"));
        let title = program.title.clone();
        pass_on(child.stdout.take(), move |line| tracing::info!(target: "relayed", "{title}: {line}"));
        Self::new(child, UnixStream::from_std(ours)?, None)
    }

    async fn start_world(spawner: &Spawner, program: &Program, launch: &Launch) -> io::Result<Self> {
        let (mut command, listener) = launch.prepare(&program.command(), &program.pass_environment)?;
        command.process_group(0).stdout(Stdio::piped());
        let mut child = spawner.spawn(command, Signal::TERM).await?;
        let others = LastWords::default();
        let (words, title) = (others.clone(), program.title.clone());
        pass_on(child.stderr.take(), move |line| {
            if !words.keep(line) {
                tracing::warn!(target: "relayed", "{title}: {line}");
            }
        });
        let title = program.title.clone();
        pass_on(child.stdout.take(), move |line| tracing::info!(target: "relayed", "{title}: {line}"));
        let watch = ProcessWatch::new(child.id()).map_err(io::Error::other)?;
        let connected = async {
            loop {
                tokio::select! {
                    accepted = listener.accept() => return accepted.map(|(stream, _)| stream),
                    () = tokio::time::sleep(LOOK) => if !watch.is_alive() {
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
                let said = others.get().unwrap_or_default();
                Err(io::Error::other(format!("{error} ({status}) {said}").trim_end().to_owned()))
            }
        }
    }

    fn new(child: Child, stream: UnixStream, others: Option<LastWords>) -> io::Result<Self> {
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

    /// The model has finalized on the first rank: the others, which wait for it in MPI for ever, end too.
    pub fn finalized(&self) {
        if self.others.is_some() {
            let _ = self.watch.signal(Signal::TERM.as_raw());
        }
    }

    /// Sends messages, at once if the socket takes them, else as soon as it does.
    pub fn send(&self, messages: &[u8]) {
        let mut outgoing = lock(&self.outgoing);
        let sent = if outgoing.is_empty() { self.stream.try_write(messages).unwrap_or(0) } else { 0 };
        if sent < messages.len() {
            outgoing.extend_from_slice(&messages[sent..]);
            self.flush.notify_one();
        }
    }

    /// Sends what [`Process::send`] could not; never ends.
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

    /// Hands each message to `handle` until the process closes its socket. Errs when it does not keep to the protocol.
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
        // An error would mean that the watch has ended, which it does only after this.
        let _ = self.has_exited.clone().wait_for(|&has_exited| has_exited).await;
    }

    /// As [`Process::exited`], with how.
    pub async fn ended(&self) -> String {
        self.exited().await;
        let status = self.reap();
        let said = self.others.as_ref().and_then(LastWords::get);
        self.killed.get().cloned().or(said).unwrap_or(status)
    }

    /// Ends the process and all that it started, at once.
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

    /// Waits for the end of a process that has ended or was killed; what it started goes with it.
    fn reap(&self) -> String {
        let mut slot = lock(&self.child);
        let Some(child) = slot.take() else { return "it has ended".to_owned() };
        if self.others.is_none() {
            kill_group(self.watch.pid());
        }
        wait_for(child)
    }

    /// Whether it ends by itself within `patience`; it is killed otherwise.
    pub async fn wait_or_kill(&self, patience: Duration) -> bool {
        if tokio::time::timeout(patience, self.exited()).await.is_ok() {
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

/// Waits for a process that has ended or was killed, and says how it ended. One that does not end all the same is waited for by
/// a thread of its own.
fn wait_for(mut child: Child) -> String {
    let has_ended = ProcessWatch::new(child.id()).is_ok_and(|watch| watch.wait(KILL_PATIENCE));
    if has_ended {
        return child.wait().map_or_else(|error| error.to_string(), describe_exit);
    }
    let pid = child.id();
    thread::spawn(move || child.wait());
    format!("process {pid} was killed and has not ended: the kernel waits for a driver or a disk on its behalf")
}

/// Hands each line that a model process writes to `take`, from a thread of its own until the process has closed its end. What a
/// model writes must not look like a line of this process's log.
fn pass_on(source: Option<impl Read + Send + 'static>, mut take: impl FnMut(&str) + Send + 'static) {
    let Some(source) = source else { return };
    let run = move || {
        let (mut reader, mut bytes) = (BufReader::new(source), Vec::new());
        while matches!(reader.by_ref().take(MAX_LINE_BYTES).read_until(b'\n', &mut bytes), Ok(1..)) {
            take(String::from_utf8_lossy(&bytes).trim_end());
            bytes.clear();
        }
    };
    if let Err(error) = thread::Builder::new().name("python-output".to_owned()).spawn(run) {
        tracing::error!("what a Python model writes is lost: no thread can be started for it: {error}");
    }
}

/// Has a launcher end its processes and remove what it has made; what does not end within `grace` is killed.
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

/// Only while the process is not reaped: its number may be another process's then.
fn kill_group(leader: u32) {
    if let Some(group) = i32::try_from(leader).ok().and_then(Pid::from_raw) {
        let _ = kill_process_group(group, Signal::KILL);
    }
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

    use rustix::io::{FdFlags, fcntl_setfd};

    use super::*;

    const SECRETS: [&str; 3] = ["TRIREME_API_KEYS", "AWS_SECRET_ACCESS_KEY", "HF_TOKEN"];

    /// Plays its part where the test below has started it again.
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
        let said = String::from_utf8_lossy(&output.stdout);
        assert!(output.status.success() && said.contains("1 passed"), "{output:?}");
    }

    #[test]
    fn other_hosts_get_the_variables_that_are_passed() {
        let launch =
            Launch { hosts: vec!["a".to_owned(), "b".to_owned()], scratch: "/nowhere".into(), load: Vec::new() };
        let passed = ["CARGO_PKG_NAME".to_owned(), "NO_SUCH_VARIABLE".to_owned()];
        let command = launch.mpirun(&Command::new("python3"), &passed);
        let args: Vec<_> = command.get_args().map(|arg| arg.to_string_lossy()).collect();
        assert_eq!(args.iter().filter(|arg| *arg == "CARGO_PKG_NAME").count(), 2, "{args:?}");
        assert!(!args.iter().any(|arg| arg == "NO_SUCH_VARIABLE"), "{args:?}");
    }

    #[test]
    fn lines_of_a_model_are_bounded_and_none_is_lost() {
        let (sender, lines) = mpsc::channel();
        let long = "x".repeat(40_000);
        let text = format!("one\n\ntwo\u{1b}\n{long}\nlast");
        pass_on(Some(std::io::Cursor::new(text)), move |line| sender.send(line.to_owned()).unwrap());
        let lines: Vec<String> = lines.iter().collect();
        assert_eq!(lines[..3], ["one", "", "two\u{1b}"]);
        assert!(lines.iter().all(|line| line.len() <= MAX_LINE_BYTES as usize));
        assert_eq!(lines[3..].concat(), format!("{long}last"));
    }
}
