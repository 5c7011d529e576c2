//! Worlds for end-to-end tests: the built binary, `mpirun`, sockets and the shipped demo model.
#![allow(dead_code)] // Each test file uses a part of it.

mod goldens;
mod repositories;

use std::collections::VecDeque;
use std::fs;
use std::io::{BufRead, BufReader, Read};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::{Duration, Instant};

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use serde_json::{Value, json};

#[allow(unused_imports)] // Each test file uses a part of it.
pub use goldens::{check_golden, golden, output_ids};
#[allow(unused_imports)] // Each test file uses a part of it.
pub use repositories::{
    copied_repository, golden_dir, golden_repository, repository_with_queue, set_parameters, shipped_repository, widen,
};

/// Timeout of each wait; large enough for a busy machine.
pub const TIMEOUT: Duration = Duration::from_secs(90);

/// Time that the other processes of a world have to end after its first process.
const EXIT_TIMEOUT: Duration = Duration::from_secs(10);

/// A running world. Dropping it kills its processes.
pub struct TestWorld {
    child: Child,
    http_port: u16,
    log: Arc<Mutex<VecDeque<String>>>,
    prefix: String,
    _scratch: tempfile::TempDir,
}

/// How a world is started.
pub struct Options {
    pub world_size: u32,
    pub repository: PathBuf,
    pub args: Vec<String>,
    /// The program that starts more than one rank.
    pub mpirun: &'static str,
    /// Whether it keeps the world when a rank dies, as for `launch --elastic`.
    pub keeps_world: bool,
}

impl Default for Options {
    fn default() -> Self {
        Self { world_size: 1, repository: shipped_repository(), args: Vec::new(), mpirun: "mpirun", keeps_world: false }
    }
}

impl TestWorld {
    /// Starts a world of `world_size` ranks with the shipped repository, and waits until it is ready.
    pub fn of(world_size: u32) -> Self {
        Self::start(Options { world_size, ..Options::default() })
    }

    /// Starts a world and waits until it is ready. Panics with its log if it does not become ready.
    pub fn start(options: Options) -> Self {
        static NEXT: AtomicU32 = AtomicU32::new(0);
        let prefix = format!("t{}x{}_", std::process::id(), NEXT.fetch_add(1, Ordering::Relaxed));
        let scratch = tempfile::tempdir().expect("a scratch directory");
        let mut child = command(&options, &prefix, scratch.path()).spawn().expect("the world's command starts");
        let log = Arc::new(Mutex::new(VecDeque::new()));
        let reader = BufReader::new(child.stderr.take().expect("stderr is piped"));
        let lines = Arc::clone(&log);
        thread::spawn(move || {
            reader.lines().map_while(Result::ok).for_each(|line| lines.lock().unwrap().push_back(line))
        });
        let mut world = Self { child, http_port: 0, log, prefix, _scratch: scratch };
        let line = world.await_log("Started HTTPService at ");
        world.http_port = port_of(&line);
        world
    }

    /// Waits for a log line that contains `text`; returns the first one.
    pub fn await_log(&mut self, text: &str) -> String {
        let deadline = Instant::now() + TIMEOUT;
        loop {
            if let Some(line) = self.log.lock().unwrap().iter().find(|line| line.contains(text)) {
                return line.clone();
            }
            if let Some(status) = self.child.try_wait().expect("the child's status can be read") {
                thread::sleep(Duration::from_millis(200));
                panic!("the world ended ({status}) before `{text}`:\n{}", self.log_text());
            }
            assert!(Instant::now() < deadline, "no `{text}` in time:\n{}", self.log_text());
            thread::sleep(Duration::from_millis(10));
        }
    }

    pub fn log_text(&self) -> String {
        self.log.lock().unwrap().iter().cloned().collect::<Vec<_>>().join("\n")
    }

    pub fn url(&self, path: &str) -> String {
        format!("http://127.0.0.1:{}{path}", self.http_port)
    }

    /// `GET path`: status and body.
    pub fn get(&self, path: &str) -> (u16, String) {
        status_and_body(agent().get(self.url(path)).call())
    }

    /// `GET path` on the metrics port: status and body.
    pub fn get_metrics(&mut self, path: &str) -> (u16, String) {
        let port = port_of(&self.await_log("Started Metrics Service at "));
        status_and_body(agent().get(format!("http://127.0.0.1:{port}{path}")).call())
    }

    /// `POST path` with a JSON body.
    pub fn post(&self, path: &str, body: &Value) -> (u16, String) {
        status_and_body(agent().post(self.url(path)).send(body.to_string()))
    }

    /// `POST path` with a JSON header of `json_len` bytes followed by binary tensors.
    pub fn post_binary(&self, path: &str, json_len: usize, body: &[u8]) -> (u16, String) {
        let request = agent().post(self.url(path)).header("Inference-Header-Content-Length", json_len.to_string());
        status_and_body(request.send(body))
    }

    /// CPU time that all processes of this world have used, in milliseconds.
    pub fn cpu_ms(&self) -> u64 {
        let mut processes = descendants(self.child.id());
        processes.push(self.child.id());
        let ticks = |pid: u32| -> Option<u64> {
            let stat = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
            let fields: Vec<&str> = stat.rsplit_once(") ")?.1.split(' ').collect();
            Some(fields[11].parse::<u64>().ok()? + fields[12].parse::<u64>().ok()?)
        };
        // Linux reports ticks of 10 ms to user space, independent of its own tick.
        processes.into_iter().filter_map(ticks).sum::<u64>() * 10
    }

    /// Greedy text from the ensemble.
    pub fn generate(&self, prompt: &str, max_tokens: u32) -> String {
        self.stream(prompt, max_tokens).collect()
    }

    /// Greedy text from the ensemble as a stream, one item per event.
    pub fn stream(&self, prompt: &str, max_tokens: u32) -> TextStream {
        self.stream_request(&json!({"text_input": prompt, "max_tokens": max_tokens, "stream": true}))
    }

    pub fn stream_request(&self, body: &Value) -> TextStream {
        self.stream_of("ensemble", body)
    }

    /// The stream of any model.
    pub fn stream_of(&self, model: &str, body: &Value) -> TextStream {
        let path = format!("/v2/models/{model}/generate_stream");
        let response = agent().post(self.url(&path)).send(body.to_string());
        let response = response.expect("the server answers");
        assert_eq!(response.status().as_u16(), 200, "{body}");
        TextStream { lines: Box::new(BufReader::new(response.into_body().into_reader()).lines()) }
    }

    /// Process ids of this world's workers, by tensor-parallel rank.
    pub fn workers(&self) -> Vec<u32> {
        let mut workers: Vec<(u32, u32)> = descendants(self.child.id())
            .into_iter()
            .filter_map(|pid| {
                let title = fs::read_to_string(format!("/proc/{pid}/cmdline")).ok()?;
                let tp_rank = title.strip_prefix("trireme: worker ")?.split(' ').next()?.parse().ok()?;
                Some((tp_rank, pid))
            })
            .collect();
        workers.sort_unstable();
        workers.into_iter().map(|(_, pid)| pid).collect()
    }

    /// Process id of rank 0.
    pub fn rank0(&self) -> u32 {
        self.rank(0)
    }

    /// Process id of a rank.
    pub fn rank(&self, rank: u32) -> u32 {
        let is_rank = |pid: &u32| {
            let title = fs::read_to_string(format!("/proc/{pid}/cmdline")).unwrap_or_default();
            title.trim_end_matches('\0') == format!("trireme: rank {rank}")
        };
        let mut processes = descendants(self.child.id());
        processes.push(self.child.id());
        processes.into_iter().find(is_rank).expect("the rank runs")
    }

    /// A metric's value, summed over its labels. Panics if there is no such metric.
    pub fn metric(&mut self, name: &str) -> f64 {
        let port = port_of(&self.await_log("Started Metrics Service at "));
        let (_, text) = status_and_body(agent().get(format!("http://127.0.0.1:{port}/metrics")).call());
        let is_sample = |line: &&str| line.strip_prefix(name).is_some_and(|rest| rest.starts_with(['{', ' ']));
        let values: Vec<f64> =
            text.lines().filter(is_sample).filter_map(|line| line.rsplit(' ').next()?.parse().ok()).collect();
        assert!(!values.is_empty(), "no metric `{name}` in:\n{text}");
        values.iter().sum()
    }

    /// Sends SIGTERM to rank 0 and waits for the end of the world. Panics if it leaves processes or shared memory.
    pub fn stop(&mut self) -> ExitStatus {
        signal(self.rank0(), Signal::SIGTERM);
        let status = self.wait_for_end();
        assert_eq!(self.shared_memory(), Vec::<String>::new(), "left in /dev/shm");
        status
    }

    pub fn wait_for_end(&mut self) -> ExitStatus {
        let deadline = Instant::now() + TIMEOUT;
        let before = descendants(self.child.id());
        let status = loop {
            if let Some(status) = self.child.try_wait().expect("the child's status can be read") {
                break status;
            }
            assert!(Instant::now() < deadline, "the world did not end:\n{}", self.log_text());
            thread::sleep(Duration::from_millis(10));
        };
        // On a busy machine killed processes take some time to end.
        let deadline = Instant::now() + EXIT_TIMEOUT;
        let left = || before.iter().filter(|pid| Path::new(&format!("/proc/{pid}")).exists()).collect::<Vec<_>>();
        while !left().is_empty() && Instant::now() < deadline {
            thread::sleep(Duration::from_millis(10));
        }
        assert_eq!(left(), Vec::<&u32>::new(), "processes left behind");
        status
    }

    /// Names of this world's files in /dev/shm.
    pub fn shared_memory(&self) -> Vec<String> {
        let names = fs::read_dir("/dev/shm").expect("/dev/shm").flatten();
        names
            .map(|entry| entry.file_name().to_string_lossy().into_owned())
            .filter(|name| name.starts_with(&self.prefix))
            .collect()
    }
}

impl Drop for TestWorld {
    fn drop(&mut self) {
        for pid in descendants(self.child.id()) {
            let _ = kill(Pid::from_raw(pid as i32), Signal::SIGKILL);
        }
        let _ = self.child.kill();
        let _ = self.child.wait();
        for name in self.shared_memory() {
            let _ = fs::remove_file(Path::new("/dev/shm").join(name));
        }
    }
}

/// The texts of a server-sent event stream. Panics if an event is an error.
pub struct TextStream {
    lines: Box<dyn Iterator<Item = std::io::Result<String>> + Send>,
}

impl TextStream {
    /// The next event, error or not; `None` at the end.
    pub fn next_event(&mut self) -> Option<Value> {
        loop {
            let line = self.lines.next()?.expect("the stream is complete");
            if let Some(data) = line.strip_prefix("data: ") {
                return Some(serde_json::from_str(data).expect("an event is JSON"));
            }
        }
    }

    /// All events, of a model that does not return text.
    pub fn events(mut self) -> impl Iterator<Item = Value> {
        std::iter::from_fn(move || self.next_event())
    }
}

impl Iterator for TextStream {
    type Item = String;

    fn next(&mut self) -> Option<String> {
        let event = self.next_event()?;
        Some(event["text_output"].as_str().unwrap_or_else(|| panic!("no text in {event}")).to_owned())
    }
}

/// `POST url` with a JSON body, for threads without access to the [`TestWorld`].
pub fn post_to(url: &str, body: &Value) -> (u16, String) {
    status_and_body(agent().post(url).send(body.to_string()))
}

pub fn signal(pid: u32, signal: Signal) {
    kill(Pid::from_raw(pid as i32), signal).expect("the process can be signalled");
}

/// Waits until `condition` holds.
pub fn eventually(what: &str, mut condition: impl FnMut() -> bool) {
    let deadline = Instant::now() + TIMEOUT;
    while !condition() {
        assert!(Instant::now() < deadline, "timed out after waiting for: {what}");
        thread::sleep(Duration::from_millis(10));
    }
}

fn command(options: &Options, prefix: &str, scratch: &Path) -> Command {
    let trireme = env!("CARGO_BIN_EXE_trireme");
    let mut command = match options.world_size {
        1 => Command::new(trireme),
        _ => {
            let mut mpirun = Command::new(options.mpirun);
            if options.mpirun == "mpirun" {
                mpirun.args(["--allow-run-as-root", "--oversubscribe"]).env("OMPI_MCA_mpi_yield_when_idle", "1");
            }
            if options.keeps_world {
                mpirun.arg("--enable-recovery").env("TRIREME_KEEP_WORLD", "true");
            }
            mpirun
        }
    };
    for rank in 0..options.world_size {
        if options.world_size > 1 {
            command.args(if rank == 0 { &["-n", "1"][..] } else { &[":", "-n", "1"] }).arg(trireme);
        }
        command.arg("rank").arg("--model-repository").arg(&options.repository);
        command.args(["--http-port=0", "--grpc-port=0", "--metrics-port=0", "--device=cpu"]);
        command.arg(format!("--backend-config=python,shm-region-prefix-name={prefix}{rank}_"));
        command.args(&options.args);
    }
    command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::piped());
    command.env("TMPDIR", scratch).env("HOME", scratch);
    command
}

fn agent() -> ureq::Agent {
    ureq::Agent::config_builder().http_status_as_error(false).timeout_global(Some(TIMEOUT)).build().into()
}

fn status_and_body(response: Result<ureq::http::Response<ureq::Body>, ureq::Error>) -> (u16, String) {
    let mut response = response.expect("the server answers");
    let mut text = String::new();
    response.body_mut().as_reader().read_to_string(&mut text).expect("a whole body");
    (response.status().as_u16(), text)
}

fn port_of(line: &str) -> u16 {
    let digits = line.trim_end_matches('"').rsplit(':').next().and_then(|port| port.parse().ok());
    digits.unwrap_or_else(|| panic!("no port in `{line}`"))
}

/// All descendants of `pid`.
fn descendants(pid: u32) -> Vec<u32> {
    let parent_of = |pid: u32| -> Option<u32> {
        let stat = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
        stat.rsplit_once(") ")?.1.split(' ').nth(1)?.parse().ok()
    };
    let processes = fs::read_dir("/proc").expect("/proc").flatten();
    let pids: Vec<u32> = processes.filter_map(|entry| entry.file_name().to_str()?.parse().ok()).collect();
    let parents: Vec<(u32, u32)> = pids.iter().filter_map(|&pid| Some((pid, parent_of(pid)?))).collect();
    let mut found = vec![pid];
    let mut next = 0;
    while next < found.len() {
        let parent = found[next];
        found.extend(parents.iter().filter(|(_, of)| *of == parent).map(|(pid, _)| *pid));
        next += 1;
    }
    found.split_off(1)
}
