//! One test's world: directory, ports, commands, and waiting for what happens.

use std::fs;

use std::net::TcpListener;

use std::path::PathBuf;
use std::process::{Child, Command, ExitStatus, Output, Stdio};
use std::time::{Duration, Instant};

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use tempfile::TempDir;

/// Timeout of every wait.
pub(crate) const TIMEOUT: Duration = Duration::from_secs(40);

/// The run directory, empty model repository and ports of one test.
pub(crate) struct TestSite {
    pub(crate) dir: TempDir,
    pub(crate) ports: [u16; 3],
}

impl Drop for TestSite {
    /// Kills the ranks that a failed test left.
    fn drop(&mut self) {
        for pid in [0, 1].iter().flat_map(|rank| self.starts(*rank)).filter(|pid| is_alive(*pid)) {
            let _ = kill(Pid::from_raw(pid), Signal::SIGKILL);
        }
    }
}

impl TestSite {
    pub(crate) fn new() -> Self {
        let dir = tempfile::tempdir().unwrap();
        fs::create_dir_all(dir.path().join("models/llama/1")).unwrap();
        let listeners = [(); 3].map(|()| TcpListener::bind("127.0.0.1:0").unwrap());
        let ports = listeners.map(|listener| listener.local_addr().unwrap().port());
        Self { dir, ports }
    }

    /// `launch` with these arguments, in this directory.
    pub(crate) fn launch(&self, args: &str) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_launch"));
        command
            .args(args.split_whitespace())
            .current_dir(self.dir.path())
            .env("XDG_RUNTIME_DIR", self.dir.path())
            .env("FAKE_LOG", self.dir.path().join("events"))
            .stdout(Stdio::piped())
            .stderr(Stdio::piped());
        command
    }

    /// The command that starts a world with this site's ports.
    pub(crate) fn start(&self, args: &str) -> Command {
        let [http, grpc, metrics] = self.ports;
        let fake = fake_rank();
        let fake = fake.display();
        self.launch(&format!(
            "--model_repo=models --trireme={fake} --http_port={http} --grpc_port {grpc} --metrics-port={metrics} {args}"
        ))
    }

    pub(crate) fn events(&self) -> String {
        fs::read_to_string(self.dir.path().join("events")).unwrap_or_default()
    }

    /// The pids of all starts of `rank`, oldest first.
    pub(crate) fn starts(&self, rank: u32) -> Vec<i32> {
        let head = format!("rank {rank} starts as ");
        let pids = |text: String| -> Vec<i32> {
            let starts = text.lines().filter_map(|line| line.strip_prefix(&head)?.split(':').next()?.parse().ok());
            starts.collect()
        };
        pids(self.events())
    }

    pub(crate) fn is_serving(&self) -> bool {
        std::net::TcpStream::connect(("127.0.0.1", self.ports[0])).is_ok()
    }

    /// Whether the launcher, which polls, has noticed that it serves.
    pub(crate) fn has_recorded_serving(&self) -> bool {
        let state = self.dir.path().join(format!("trireme/world-{}.json", self.ports[0]));
        fs::read_to_string(state).unwrap_or_default().contains("\"phase\": \"serving\"")
    }

    /// Asserts that no rank runs, no state file exists and nothing listens.
    pub(crate) fn assert_nothing_is_left(&self) {
        for pid in [0, 1].iter().flat_map(|rank| self.starts(*rank)) {
            assert!(!is_alive(pid), "rank process {pid} is left");
        }
        assert!(!self.is_serving());
        let run_dir = self.dir.path().join("trireme");
        let states = fs::read_dir(run_dir).unwrap().map(|entry| entry.unwrap().path());
        let states: Vec<_> = states.filter(|path| path.extension().is_some_and(|ext| ext == "json")).collect();
        assert!(states.is_empty(), "{states:?}");
    }
}

pub(crate) fn fake_rank() -> PathBuf {
    let tests = std::env::current_exe().unwrap();
    let fake = tests.parent().unwrap().parent().unwrap().join("examples/fake_rank");
    assert!(fake.is_file(), "{} is not built: run all targets, or `cargo build --examples` first", fake.display());
    fake
}

pub(crate) fn is_alive(pid: i32) -> bool {
    ipc::ProcessId::of(pid as u32).is_some()
}

pub(crate) fn signal(pid: i32, signal: Signal) {
    kill(Pid::from_raw(pid), signal).unwrap();
}

pub(crate) fn eventually(what: &str, condition: impl Fn() -> bool) {
    let start = Instant::now();
    while !condition() {
        assert!(start.elapsed() < TIMEOUT, "did not happen: {what}");
        std::thread::sleep(Duration::from_millis(20));
    }
}

/// Waits for a process that should end soon; its exit status and output.
pub(crate) fn output(child: Child) -> Output {
    let watch = ipc::ProcessWatch::new(child.id());
    let ended = watch.map_or(true, |watch| watch.wait(TIMEOUT));
    assert!(ended, "launch {} does not end", child.id());
    child.wait_with_output().unwrap()
}

pub(crate) fn text(output: &Output) -> String {
    format!("{}{}", String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr))
}

pub(crate) fn code(status: ExitStatus) -> i32 {
    status.code().expect("launch itself was not killed")
}

pub(crate) fn has_mpirun() -> bool {
    let has = Command::new("mpirun").arg("--version").output().is_ok();
    if !has {
        println!("skipped: no mpirun on this machine");
    }
    has
}
