//! A process without a free descriptor still answers health checks. In a test program of its own, because it lowers the limit of the
//! whole process.

use std::fs::{self, File};
use std::io::Write;
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use ipc::Health;
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

/// Environment variable with the path of the socket, set for the child.
const SOCKET: &str = "TRIREME_TEST_SOCKET";

/// Whether the thread of this name sleeps in a system call.
fn waits(name: &str) -> bool {
    let stat = fs::read_dir("/proc/self/task")
        .unwrap()
        .filter_map(|task| fs::read_to_string(task.ok()?.path().join("stat")).ok());
    stat.into_iter().any(|stat| stat.contains(&format!("({name}) S")))
}

#[test]
fn a_process_without_a_free_descriptor_answers_health_checks() {
    let health = Health { silent: Duration::from_millis(7), is_ready: true, num_requests: None, lost: Vec::new() };
    if let Some(path) = std::env::var_os(SOCKET).map(PathBuf::from) {
        let start = Instant::now();
        while ipc::ask_health(&path).ok() != Some(health.clone()) {
            assert!(start.elapsed() < Duration::from_secs(30), "no answer");
        }
        return;
    }
    let limit = getrlimit(Resource::Nofile);
    setrlimit(Resource::Nofile, Rlimit { current: Some(128), ..limit }).unwrap();
    let path = std::env::temp_dir().join(format!("trireme-no-descriptors-{}", std::process::id()));
    ipc::answer_health(&path, move || health.clone()).unwrap();
    let mut child = Command::new("/bin/sh")
        .args(["-c", "read go; exec \"$0\""])
        .arg(std::env::current_exe().unwrap())
        .env(SOCKET, &path)
        .stdin(Stdio::piped())
        .spawn()
        .unwrap();
    // Until it waits for a connection, it could lose the descriptor that it keeps to the files below.
    let start = Instant::now();
    while !waits("control") {
        assert!(start.elapsed() < Duration::from_secs(30), "the thread does not wait");
        std::thread::yield_now();
    }
    let mut files = Vec::new();
    while let Ok(file) = File::open("/dev/null") {
        files.push(file);
    }
    // It stays open: a descriptor that became free now could be taken here while the process answers with the one that it keeps
    // for this.
    let mut stdin = child.stdin.take().unwrap();
    stdin.write_all(b"go\n").unwrap();
    assert!(child.wait().unwrap().success());
    drop(stdin);
    drop(files);
    std::fs::remove_file(path).unwrap();
}
