//! A process without a free descriptor still answers health checks. In a test program of its own, because it lowers the limit of the
//! whole process.

use std::fs::File;
use std::io::Write;
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use ipc::Health;
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

/// Environment variable with the path of the socket, set for the child.
const SOCKET: &str = "TRIREME_TEST_SOCKET";

#[test]
fn a_process_without_a_free_descriptor_answers_health_checks() {
    let health = Health { silent: Duration::from_millis(7), is_ready: true };
    if let Some(path) = std::env::var_os(SOCKET).map(PathBuf::from) {
        let start = Instant::now();
        while ipc::ask_health(&path).ok() != Some(health) {
            assert!(start.elapsed() < Duration::from_secs(30), "no answer");
        }
        return;
    }
    let limit = getrlimit(Resource::Nofile);
    setrlimit(Resource::Nofile, Rlimit { current: Some(128), ..limit }).unwrap();
    let path = std::env::temp_dir().join(format!("trireme-no-descriptors-{}", std::process::id()));
    ipc::answer_health(&path, move || health).unwrap();
    let mut child = Command::new("/bin/sh")
        .args(["-c", "read go; exec \"$0\""])
        .arg(std::env::current_exe().unwrap())
        .env(SOCKET, &path)
        .stdin(Stdio::piped())
        .spawn()
        .unwrap();
    let mut files = Vec::new();
    while let Ok(file) = File::open("/dev/null") {
        files.push(file);
    }
    child.stdin.take().unwrap().write_all(b"go\n").unwrap();
    // The pipe to the child's standard input is closed by now, which freed one descriptor.
    files.extend(File::open("/dev/null"));
    assert!(child.wait().unwrap().success());
    drop(files);
    std::fs::remove_file(path).unwrap();
}
