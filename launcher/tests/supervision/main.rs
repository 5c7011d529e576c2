//! End-to-end tests of the launcher: the real binary and a real `mpirun`, with a fake rank that serves no model.

use std::fs;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpListener;
use std::os::unix::fs::PermissionsExt;
use std::path::PathBuf;
use std::process::{Child, Command, ExitStatus, Output, Stdio};
use std::time::{Duration, Instant};

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use tempfile::TempDir;

/// Timeout of every wait.
const TIMEOUT: Duration = Duration::from_secs(40);

/// The run directory, empty model repository and ports of one test.
struct TestSite {
    dir: TempDir,
    ports: [u16; 3],
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
    fn new() -> Self {
        let dir = tempfile::tempdir().unwrap();
        fs::create_dir(dir.path().join("models")).unwrap();
        let listeners = [(); 3].map(|()| TcpListener::bind("127.0.0.1:0").unwrap());
        let ports = listeners.map(|listener| listener.local_addr().unwrap().port());
        Self { dir, ports }
    }

    /// `launch` with these arguments, in this directory.
    fn launch(&self, args: &str) -> Command {
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
    fn start(&self, args: &str) -> Command {
        let [http, grpc, metrics] = self.ports;
        let fake = fake_rank();
        let fake = fake.display();
        self.launch(&format!(
            "--model_repo=models --trireme={fake} --http_port={http} --grpc_port {grpc} --metrics-port={metrics} {args}"
        ))
    }

    fn events(&self) -> String {
        fs::read_to_string(self.dir.path().join("events")).unwrap_or_default()
    }

    /// The pids of all starts of `rank`, oldest first.
    fn starts(&self, rank: u32) -> Vec<i32> {
        let head = format!("rank {rank} starts as ");
        let pids = |text: String| -> Vec<i32> {
            let starts = text.lines().filter_map(|line| line.strip_prefix(&head)?.split(':').next()?.parse().ok());
            starts.collect()
        };
        pids(self.events())
    }

    fn is_serving(&self) -> bool {
        std::net::TcpStream::connect(("127.0.0.1", self.ports[0])).is_ok()
    }

    /// Whether the launcher, which polls, has noticed that it serves.
    fn has_recorded_serving(&self) -> bool {
        let state = self.dir.path().join(format!("trireme/world-{}.json", self.ports[0]));
        fs::read_to_string(state).unwrap_or_default().contains("\"phase\": \"serving\"")
    }

    /// Asserts that no rank runs, no state file exists and nothing listens.
    fn assert_nothing_is_left(&self) {
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

fn fake_rank() -> PathBuf {
    let tests = std::env::current_exe().unwrap();
    let fake = tests.parent().unwrap().parent().unwrap().join("examples/fake_rank");
    assert!(fake.is_file(), "{} is not built: run all targets, or `cargo build --examples` first", fake.display());
    fake
}

fn is_alive(pid: i32) -> bool {
    ipc::ProcessId::of(pid as u32).is_some()
}

fn signal(pid: i32, signal: Signal) {
    kill(Pid::from_raw(pid), signal).unwrap();
}

fn eventually(what: &str, condition: impl Fn() -> bool) {
    let start = Instant::now();
    while !condition() {
        assert!(start.elapsed() < TIMEOUT, "did not happen: {what}");
        std::thread::sleep(Duration::from_millis(20));
    }
}

/// Waits for a process that should end soon; its exit status and output.
fn output(child: Child) -> Output {
    let watch = ipc::ProcessWatch::new(child.id());
    let ended = watch.map_or(true, |watch| watch.wait(TIMEOUT));
    assert!(ended, "launch {} does not end", child.id());
    child.wait_with_output().unwrap()
}

fn text(output: &Output) -> String {
    format!("{}{}", String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr))
}

fn code(status: ExitStatus) -> i32 {
    status.code().expect("launch itself was not killed")
}

fn has_mpirun() -> bool {
    let has = Command::new("mpirun").arg("--version").output().is_ok();
    if !has {
        println!("skipped: no mpirun on this machine");
    }
    has
}

#[test]
fn a_dry_run_prints_the_command_and_starts_nothing() {
    let site = TestSite::new();
    let output = site.start("--dry_run --world_size=2 --oversubscribe -- --id=me").output().unwrap();
    let (fake, [http, grpc, metrics]) = (fake_rank(), site.ports);
    let rank = |rank, rest| {
        format!(
            "-n 1 {} rank --model-repository=models --grpc-port={grpc} --http-port={http} --metrics-port={metrics} \
             --device=auto --backend-config=python,shm-region-prefix-name=prefix{rank}_ {rest}--id=me",
            fake.display()
        )
    };
    let expected = format!(
        "mpirun --allow-run-as-root --bind-to none --oversubscribe --mca mpi_yield_when_idle 1 {} : {}\n",
        rank(0, ""),
        rank(1, "--model-control-mode=explicit --load-model=tensorrt_llm ")
    );
    assert_eq!((text(&output), code(output.status)), (expected, 0));
    assert_eq!(site.events(), "");
}

#[test]
fn sigterm_reaches_a_lone_rank_at_once_and_the_launcher_exits_with_its_status() {
    let site = TestSite::new();
    let launch = site.start("").spawn().unwrap();
    eventually("serving", || site.is_serving());
    signal(launch.id() as i32, Signal::SIGTERM);
    let output = output(launch);
    assert_eq!(code(output.status), 0, "{}", text(&output));
    assert_eq!(site.events().matches("gets SIGTERM").count(), 1, "{}", site.events());
    site.assert_nothing_is_left();
}

#[test]
fn sigint_ends_a_world_under_mpirun_gracefully() {
    if !has_mpirun() {
        return;
    }
    let site = TestSite::new();
    let launch = site.start("--world_size=2 --oversubscribe --wait_ready=30").spawn().unwrap();
    eventually("serving", || site.is_serving());
    signal(launch.id() as i32, Signal::SIGINT);
    let output = output(launch);
    assert_eq!(code(output.status), 0, "{}", text(&output));
    let events = site.events();
    assert!(events.contains("rank 0 gets SIGTERM") && !events.contains("rank 1 gets"), "{events}");
    site.assert_nothing_is_left();
}

#[test]
fn a_world_that_loses_a_rank_is_started_again() {
    if has_mpirun() {
        loses_a_rank("");
    }
}

#[test]
fn a_world_of_mpich_that_loses_a_rank_is_started_again() {
    match Command::new("mpirun.mpich").arg("--version").output() {
        Ok(_) => loses_a_rank("--mpirun=mpirun.mpich"),
        Err(_) => println!("skipped: no mpirun.mpich on this machine"),
    }
}

fn loses_a_rank(flags: &str) {
    let site = TestSite::new();
    let launch = site.start(&format!("--world_size=2 --oversubscribe {flags}")).spawn().unwrap();
    eventually("serving, as recorded by the launcher", || site.has_recorded_serving());
    signal(site.starts(1)[0], Signal::SIGKILL);
    eventually("a second start", || site.starts(0).len() == 2 && site.starts(1).len() == 2);
    eventually("serving again", || site.is_serving());
    assert!(!is_alive(site.starts(0)[0]), "rank 0 of the first world lives on");

    signal(launch.id() as i32, Signal::SIGTERM);
    let output = output(launch);
    assert_eq!(code(output.status), 0, "{}", text(&output));
    site.assert_nothing_is_left();
}

#[test]
fn a_world_that_loses_a_rank_while_it_loads_is_started_again() {
    if has_mpirun() {
        loses_a_rank_while_it_loads("");
    }
    if Command::new("mpirun.mpich").arg("--version").output().is_ok() {
        loses_a_rank_while_it_loads("--mpirun=mpirun.mpich");
    }
}

/// A rank that a signal killed, for example for lack of memory, may succeed the next time; one that exited with an error would not.
fn loses_a_rank_while_it_loads(flags: &str) {
    let site = TestSite::new();
    let flags = format!("--world_size=2 --oversubscribe {flags}");
    let launch = site.start(&flags).env("FAKE_SLOW_MS", "1500").spawn().unwrap();
    eventually("a start of both", || site.starts(0).len() == 1 && site.starts(1).len() == 1);
    signal(site.starts(1)[0], Signal::SIGKILL);
    eventually("a second start", || site.starts(0).len() == 2 && site.starts(1).len() == 2);
    eventually("serving", || site.is_serving());
    signal(launch.id() as i32, Signal::SIGTERM);
    let output = output(launch);
    assert_eq!(code(output.status), 0, "{}", text(&output));
    assert!(text(&output).contains("the world died by itself"), "{}", text(&output));
    site.assert_nothing_is_left();
}

#[test]
fn a_world_that_dies_is_not_started_again_with_exit_on_failure() {
    let site = TestSite::new();
    let launch = site.start("--exit_on_failure").spawn().unwrap();
    eventually("serving, as recorded by the launcher", || site.has_recorded_serving());
    signal(site.starts(0)[0], Signal::SIGKILL);
    let output = output(launch);
    assert_eq!(code(output.status), 128 + 9, "{}", text(&output));
    assert_eq!(site.starts(0).len(), 1);
    site.assert_nothing_is_left();
}

#[test]
fn a_world_that_never_served_is_not_started_again() {
    let site = TestSite::new();
    let output = site.start("").env("FAKE_FAIL", "load").output().unwrap();
    assert_eq!(code(output.status), 1, "{}", text(&output));
    assert!(text(&output).contains("model `llama` has no weights"), "{}", text(&output));
    assert_eq!(site.starts(0).len(), 1);
    site.assert_nothing_is_left();
}

#[test]
fn a_detached_world_can_be_listed_and_stopped_and_its_ports_are_taken() {
    let site = TestSite::new();
    let run_dir = site.dir.path().join("trireme");
    fs::create_dir(&run_dir).unwrap();
    fs::set_permissions(&run_dir, fs::Permissions::from_mode(0o755)).unwrap();
    let started = site.start("--detach").output().unwrap();
    assert_eq!(code(started.status), 0, "{}", text(&started));
    assert!(site.is_serving());
    assert!(text(&started).contains("other users could use"), "{}", text(&started));
    assert_eq!(fs::metadata(&run_dir).unwrap().permissions().mode() & 0o777, 0o700);

    let status = text(&site.launch("status").output().unwrap());
    let port = site.ports[0];
    assert!(status.contains(&format!("http {port} ")) && status.contains(": ready, 1 rank(s)"), "{status}");

    let alone = site.launch(&format!("status --http_port={port}")).output().unwrap();
    assert!(text(&alone).contains(&format!("http {port} ")), "{}", text(&alone));
    let nobody = site.launch("status --http_port=1").output().unwrap();
    assert!(code(nobody.status) == 1 && text(&nobody).contains("serves HTTP on port 1;"), "{}", text(&nobody));

    let second = site.start("").output().unwrap();
    assert_eq!(code(second.status), 1);
    let refusal = text(&second);
    assert!(refusal.contains(&format!("a world already serves on port {port}")), "{refusal}");
    // A second world may run on other ports, with its own prefix of shared memory.
    let other = text(&site.launch("--dry_run --http_port=1 --grpc_port=2 --metrics_port=3").output().unwrap());
    assert!(other.contains("shm-region-prefix-name=prefix1_0_"), "{other}");

    let stopped = site.launch(&format!("stop --http_port={port}")).output().unwrap();
    assert_eq!(code(stopped.status), 0, "{}", text(&stopped));
    site.assert_nothing_is_left();
    assert_eq!(code(site.launch("stop").output().unwrap().status), 1);
    assert_eq!(code(site.launch("stop --all").output().unwrap().status), 0);
}

#[test]
fn a_detached_world_that_cannot_start_says_why() {
    let site = TestSite::new();
    let output = site.start("--detach").env("FAKE_FAIL", "load").output().unwrap();
    assert_ne!(code(output.status), 0);
    assert!(text(&output).contains("model `llama` has no weights"), "{}", text(&output));
    site.assert_nothing_is_left();
}

#[test]
fn a_world_that_is_not_ready_in_time_is_ended() {
    for mode in ["", "--detach"] {
        let site = TestSite::new();
        let output = site.start(&format!("--wait-ready=1 {mode}")).env("FAKE_SLOW_MS", "60000").output().unwrap();
        assert_eq!(code(output.status), 1, "{}", text(&output));
        assert!(text(&output).contains("does not serve"), "{}", text(&output));
        site.assert_nothing_is_left();
    }
}

#[test]
fn a_second_signal_ends_a_world_at_once_and_a_third_kills_it() {
    let site = TestSite::new();
    let launch = site.start("").env("FAKE_STUBBORN", "1").spawn().unwrap();
    eventually("serving", || site.is_serving());
    let num_signals = || site.events().matches("gets SIGTERM").count();
    signal(launch.id() as i32, Signal::SIGTERM);
    eventually("the first SIGTERM", || num_signals() == 1);
    signal(launch.id() as i32, Signal::SIGINT);
    eventually("the second SIGTERM", || num_signals() == 2);
    signal(launch.id() as i32, Signal::SIGTERM);
    let output = output(launch);
    assert_eq!(code(output.status), 128 + 9, "{}", text(&output));
    site.assert_nothing_is_left();
}

#[test]
fn a_world_ends_with_a_launcher_that_is_killed() {
    for args in ["", "--world_size=2 --oversubscribe"] {
        if !args.is_empty() && !has_mpirun() {
            return;
        }
        let site = TestSite::new();
        let mut launch = site.start(args).spawn().unwrap();
        eventually("serving", || site.is_serving());
        launch.kill().unwrap();
        launch.wait().unwrap();
        eventually("all ranks gone", || [0, 1].iter().all(|rank| !site.starts(*rank).iter().any(|pid| is_alive(*pid))));
        let listed = text(&site.launch("status").output().unwrap());
        assert_eq!(listed, "no world runs\n");
        site.assert_nothing_is_left();
    }
}

#[test]
fn a_restart_keeps_the_launcher_and_its_flags() {
    let site = TestSite::new();
    let port = site.ports[0];
    let launch = site.start("-- --id=me").spawn().unwrap();
    eventually("serving, as recorded by the launcher", || site.has_recorded_serving());
    let restarted = site.launch("restart").output().unwrap();
    assert_eq!(code(restarted.status), 0, "{}", text(&restarted));
    let starts = site.starts(0);
    assert!(starts.len() == 2 && !is_alive(starts[0]) && is_alive(starts[1]), "{starts:?}");
    assert_eq!(site.events().matches("--id=me").count(), 2, "{}", site.events());

    let status = site.launch("status --json").output().unwrap();
    let status: serde_json::Value = serde_json::from_slice(&status.stdout).unwrap();
    assert_eq!((&status[0]["state"], &status[0]["num_restarts"]), (&"ready".into(), &1.into()), "{status}");
    assert_eq!(status[0]["processes"][0]["pid"], launch.id(), "{status}");

    let logs = text(&site.launch(&format!("logs --http_port={port}")).output().unwrap());
    assert!(logs.contains("launch: SIGUSR1") || logs.contains("a restart is asked for"), "{logs}");
    signal(launch.id() as i32, Signal::SIGTERM);
    let output = output(launch);
    assert_eq!(code(output.status), 0, "{}", text(&output));
    assert!(text(&output).contains("the world has ended (exit code 0)"), "the terminal shows the log");
    site.assert_nothing_is_left();
}

#[test]
fn a_followed_log_ends_with_its_world() {
    let site = TestSite::new();
    assert_eq!(code(site.start("--detach").output().unwrap().status), 0);
    let mut follower = site.launch("logs --follow").spawn().unwrap();
    let mut lines = BufReader::new(follower.stdout.take().unwrap()).lines().map(Result::unwrap);
    assert!(lines.any(|line| line.contains("launch: serving after")), "earlier lines are shown");
    assert_eq!(code(site.launch("stop").output().unwrap().status), 0);
    assert!(lines.any(|line| line.contains("the world has ended")), "new lines are shown");
    assert_eq!(code(output(follower).status), 0);
}

#[test]
fn a_world_that_dies_of_a_signal_while_it_loads_is_started_again_and_leaves_a_report() {
    let site = TestSite::new();
    let launch = site.start("").env("FAKE_SLOW_MS", "1500").spawn().unwrap();
    eventually("started", || site.starts(0).len() == 1);
    signal(site.starts(0)[0], Signal::SIGABRT);
    eventually("serving", || site.is_serving());
    let reports = fs::read_dir(site.dir.path().join("trireme/crashes")).unwrap();
    let reports: Vec<_> = reports.map(|entry| fs::read_to_string(entry.unwrap().path()).unwrap()).collect();
    assert!(reports.len() == 1 && reports[0].contains("ended: signal 6 (SIGABRT)"), "{reports:?}");
    signal(launch.id() as i32, Signal::SIGTERM);
    assert_eq!(code(output(launch).status), 0);
    site.assert_nothing_is_left();
}

#[test]
fn leftovers_of_a_killed_launcher_are_ended_by_the_next() {
    let site = TestSite::new();
    // It ignores SIGTERM, so it outlives the launcher that is killed.
    let mut launch = site.start("").env("FAKE_STUBBORN", "1").spawn().unwrap();
    eventually("serving", || site.is_serving());
    let stubborn = site.starts(0)[0];
    launch.kill().unwrap();
    launch.wait().unwrap();
    assert!(is_alive(stubborn));
    let next = site.start("").spawn().unwrap();
    eventually("the next world", || site.starts(0).len() == 2 && site.is_serving());
    assert!(!is_alive(stubborn));
    signal(next.id() as i32, Signal::SIGTERM);
    assert_eq!(code(output(next).status), 0);
    site.assert_nothing_is_left();
}

#[test]
fn a_rank_that_does_not_answer_is_killed_and_started_again() {
    let site = TestSite::new();
    let launch = site.start("--liveness-timeout=2").spawn().unwrap();
    let log = || text(&site.launch("logs").output().unwrap());
    eventually("serving", || log().contains("launch: serving after"));
    signal(site.starts(0)[0], Signal::SIGSTOP);
    eventually("a second start", || site.starts(0).len() == 2 && site.is_serving());
    assert!(log().contains("rank 0 has not answered for") && log().contains("T (stopped)"), "{}", log());
    signal(launch.id() as i32, Signal::SIGTERM);
    assert_eq!(code(output(launch).status), 0);
    site.assert_nothing_is_left();
}

#[test]
fn worlds_whose_ports_do_not_report_health_are_supervised_too() {
    for flags in ["--http-restricted-api=health:key=secret", "--allow-http=false"] {
        let site = TestSite::new();
        let port = site.ports[0];
        let started = site.start(&format!("--detach --wait-ready=30 -- {flags}")).output().unwrap();
        assert_eq!(code(started.status), 0, "{flags}: {}", text(&started));
        let status = text(&site.launch("status").output().unwrap());
        assert!(status.contains(&format!("http {port} ")) && status.contains(": ready, 1 rank(s)"), "{status}");
        let restarted = site.launch("restart").output().unwrap();
        assert_eq!(code(restarted.status), 0, "{flags}: {}", text(&restarted));
        assert_eq!(site.starts(0).len(), 2);
        let stopped = site.launch("stop").output().unwrap();
        assert_eq!(code(stopped.status), 0, "{flags}: {}", text(&stopped));
        site.assert_nothing_is_left();
    }
}

#[test]
fn clients_that_take_every_connection_do_not_end_a_world() {
    let site = TestSite::new();
    let mut start = site.start("--liveness-timeout=1");
    let launch = start.env("FAKE_SILENT", "1").spawn().unwrap();
    eventually("serving, as recorded by the launcher", || site.has_recorded_serving());
    let connect = || std::net::TcpStream::connect(("127.0.0.1", site.ports[0])).unwrap();
    let silent: Vec<_> = std::iter::repeat_with(connect).take(300).collect();
    // Longer than the launcher waits for an answer.
    std::thread::sleep(Duration::from_secs(4));
    assert_eq!(site.starts(0).len(), 1, "{}", site.events());
    drop(silent);
    signal(launch.id() as i32, Signal::SIGTERM);
    assert_eq!(code(output(launch).status), 0);
    site.assert_nothing_is_left();
}

#[test]
fn clients_get_the_cause_of_a_worlds_end_and_no_line_of_the_log() {
    let site = TestSite::new();
    let mut start = site.start("");
    start.env("FAKE_LINE", "E ends the world: your licence expired").env("FAKE_OFFER", "1").env("FAKE_SLOW_MS", "3000");
    let launch = start.spawn().unwrap();
    eventually("serving, as recorded by the launcher", || site.has_recorded_serving());
    let files = || fs::read_dir(site.dir.path().join("trireme")).unwrap().map(|entry| entry.unwrap().path());
    let causes = || files().filter(|path| path.extension().is_some_and(|ext| ext == "cause")).count();
    assert_eq!(causes(), 1);
    signal(site.starts(0)[0], Signal::SIGKILL);
    let get = || -> std::io::Result<String> {
        let mut stream = std::net::TcpStream::connect(("127.0.0.1", site.ports[0]))?;
        stream.set_read_timeout(Some(Duration::from_secs(1)))?;
        stream.write_all(b"GET / HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n")?;
        let mut answer = String::new();
        stream.read_to_string(&mut answer)?;
        Ok(answer)
    };
    let answers = std::cell::RefCell::new(Vec::new());
    eventually("the reason", || {
        answers.borrow_mut().extend(get());
        answers.borrow().iter().any(|answer| answer.contains("the server died (signal 9 (SIGKILL"))
    });
    assert!(!answers.borrow().iter().any(|answer| answer.contains("licence")), "{answers:?}");
    signal(launch.id() as i32, Signal::SIGTERM);
    let output = output(launch);
    assert!(text(&output).contains("your licence expired"), "the line was logged");
    assert_eq!(causes(), 0);
}

#[test]
fn systemd_is_notified_of_readiness_and_of_the_end() {
    let site = TestSite::new();
    let path = site.dir.path().join("notify");
    let socket = std::os::unix::net::UnixDatagram::bind(&path).unwrap();
    socket.set_read_timeout(Some(TIMEOUT)).unwrap();
    let receive = || {
        let mut bytes = [0; 1024];
        let len = socket.recv(&mut bytes).unwrap();
        String::from_utf8_lossy(&bytes[..len]).into_owned()
    };
    let until = |word: &str| while !receive().contains(word) {};
    let mut start = site.start("");
    let launch = start.env("NOTIFY_SOCKET", &path).env("WATCHDOG_USEC", "3000000").spawn().unwrap();
    until("READY=1");
    until("WATCHDOG=1");
    signal(launch.id() as i32, Signal::SIGTERM);
    until("STOPPING=1");
    assert_eq!(code(output(launch).status), 0);
}

/// Processes, except those in `except`, whose `/proc` file `name` contains `word`.
fn processes_that_show(word: &str, name: &str, except: &[u32]) -> Vec<u32> {
    let pids = fs::read_dir("/proc").unwrap().flatten().filter_map(|entry| entry.file_name().to_str()?.parse().ok());
    let shows = |pid: &u32| {
        let bytes = fs::read(format!("/proc/{pid}/{name}")).unwrap_or_default();
        bytes.windows(word.len()).any(|part| part == word.as_bytes())
    };
    pids.filter(|pid| !except.contains(pid)).filter(shows).collect()
}

#[test]
fn keys_reach_rank_0_and_appear_in_no_command_line_and_no_other_environment() {
    for args in ["", "--world_size=2 --oversubscribe"] {
        if !args.is_empty() && !has_mpirun() {
            return;
        }
        let site = TestSite::new();
        let keys = ["literal", "variable", "api"].map(|name| format!("k3y-{}-of-{name}", site.ports[0]));
        let [literal, variable, api] = &keys;
        let rules = format!("--http-restricted-api=health:a={literal} --grpc_restricted_protocol infer:b=env:MY_KEY");
        let launch = site
            .start(&format!("{args} -- --id=me {rules}"))
            .env("MY_KEY", variable)
            .env("TRIREME_API_KEYS", api)
            .spawn()
            .unwrap();
        eventually("serving, as recorded by the launcher", || site.has_recorded_serving());
        for key in &keys {
            assert_eq!(processes_that_show(key, "cmdline", &[]), Vec::<u32>::new(), "{key}");
            assert_eq!(processes_that_show(key, "environ", &[launch.id()]), Vec::<u32>::new(), "{key}");
        }
        let events = site.events();
        let rank_0 = events.lines().find(|line| line.starts_with("rank 0 starts")).unwrap();
        for (flag, key) in [
            ("--http-restricted-api=health:a=@", literal),
            ("--grpc-restricted-protocol=infer:b=@", variable),
            ("--api-key-file=", api),
        ] {
            let file = rank_0.split(' ').find_map(|word| word.strip_prefix(flag)).unwrap_or_else(|| panic!("{events}"));
            assert_eq!(fs::read_to_string(file).unwrap(), format!("{key}\n"));
            assert_eq!(fs::metadata(file).unwrap().permissions().mode() & 0o777, 0o600);
        }
        let rank_1 = events.lines().find(|line| line.starts_with("rank 1 starts"));
        assert!(rank_1.is_none_or(|line| line.contains("--id=me") && !line.contains("=@")), "{events}");

        signal(launch.id() as i32, Signal::SIGTERM);
        let output = output(launch);
        assert_eq!(code(output.status), 0, "{}", text(&output));
        assert!(text(&output).contains("a key is on this command line"), "{}", text(&output));
        assert!(keys.iter().all(|key| !text(&output).contains(key)), "{}", text(&output));
        site.assert_nothing_is_left();
        let files = fs::read_dir(site.dir.path().join("trireme")).unwrap().flatten();
        assert!(files.into_iter().all(|file| !file.file_name().to_string_lossy().starts_with("keys-")));
    }
}

#[test]
fn a_dry_run_shows_where_keys_would_be_and_no_key() {
    let site = TestSite::new();
    let mut command = site.launch("--model_repo=models --dry_run -- --http-restricted-api=health:a=s3cret");
    let output = command.env("TRIREME_API_KEYS", "t0ps3cret").output().unwrap();
    let text = text(&output);
    assert!(text.contains("--http-restricted-api=health:a=@") && text.contains("--api-key-file="), "{text}");
    assert!(!text.contains("s3cret"), "{text}");
}

#[test]
fn session_files_of_open_mpi_are_in_a_directory_that_is_removed_with_the_world() {
    if !has_mpirun() {
        return;
    }
    let site = TestSite::new();
    let launch = site.start("--world_size=2 --oversubscribe").spawn().unwrap();
    let found = || -> Vec<PathBuf> {
        let paths = fs::read_dir("/dev/shm").unwrap().flatten().map(|entry| entry.path());
        paths.filter(|path| path.display().to_string().contains(&format!(".{}.", launch.id()))).collect()
    };
    eventually("serving, as recorded by the launcher", || site.has_recorded_serving());
    let dirs = found();
    assert!(dirs.len() == 1 && dirs[0].display().to_string().starts_with("/dev/shm/trireme-mpi."), "{dirs:?}");
    assert_eq!(fs::metadata(&dirs[0]).unwrap().permissions().mode() & 0o777, 0o700);
    assert!(fs::read_dir(&dirs[0]).unwrap().count() > 0, "mpirun has its session there");
    let environment = fs::read_to_string(format!("/proc/{}/environ", site.starts(1)[0])).unwrap();
    let has = |setting: &str| environment.split('\0').any(|entry| entry == setting);
    assert!(has("OMPI_MCA_pml=ob1") && has("OMPI_MCA_btl=self,vader"), "ranks would listen on networks");

    signal(launch.id() as i32, Signal::SIGTERM);
    eventually("all gone", || found().is_empty());
    assert_eq!(code(output(launch).status), 0);
}

#[test]
fn a_port_in_use_by_another_program_is_refused_with_its_pid() {
    let site = TestSite::new();
    let _listener = TcpListener::bind(("127.0.0.1", site.ports[1])).unwrap();
    let output = site.start("").output().unwrap();
    let expected = format!("port {} is in use by process {}", site.ports[1], std::process::id());
    assert!(text(&output).contains(&expected), "{}", text(&output));
    assert_eq!((code(output.status), site.events()), (1, String::new()));
}

#[test]
fn a_missing_repository_or_server_program_is_named() {
    let site = TestSite::new();
    let no_repository = site.launch("--model_repo=nowhere").output().unwrap();
    assert!(text(&no_repository).contains("there is no model repository at nowhere"), "{}", text(&no_repository));
    let no_server = site.launch("--model_repo=models --trireme=nowhere").output().unwrap();
    assert!(text(&no_server).contains("there is no server program at nowhere"), "{}", text(&no_server));
}
