//! `launch doctor` on this machine as it is, and with a broken checkpoint, a port in use or no `mpirun`.

use std::fs;
use std::net::TcpListener;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use serde_json::Value;

fn doctor(dir: &Path, args: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_launch"));
    command.arg("doctor").args(args).env("XDG_RUNTIME_DIR", dir).current_dir(dir);
    // Without Slurm, so that the check of MPI uses `mpirun`.
    command.env_remove("SLURM_JOB_ID");
    command
}

/// A repository of one model with a tiny checkpoint.
fn repository(dir: &Path) -> PathBuf {
    let version = dir.join("models/llama/1");
    fs::create_dir_all(&version).unwrap();
    let head = r#"{"w":{"dtype":"U8","shape":[4],"data_offsets":[0,4]}}"#;
    let mut bytes = (head.len() as u64).to_le_bytes().to_vec();
    bytes.extend(head.as_bytes());
    bytes.extend([1, 2, 3, 4]);
    fs::write(version.join("model.safetensors"), bytes).unwrap();
    version.join("model.safetensors")
}

/// A server program that answers as the real one does for a model that fits.
fn server_program(dir: &Path) -> String {
    let path = dir.join("server");
    let plan = r#"{"device":"cpu","why":"CPU: as requested","nvrtc":null,"failures":[],
        "models":[{"name":"llama","summary":"1 worker(s)","missing_bytes":0,"advice":""}]}"#;
    let script = format!(
        "#!/bin/sh\ncase $1 in lint) echo '{{\"findings\":[]}}';; plan) echo '{plan}';; *) echo trireme 0;; esac\n"
    );
    fs::write(&path, script).unwrap();
    fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).unwrap();
    format!("--trireme={}", path.display())
}

fn free_ports() -> [String; 3] {
    let listeners = [(); 3].map(|()| TcpListener::bind("127.0.0.1:0").unwrap());
    let ports = listeners.map(|listener| listener.local_addr().unwrap().port());
    let [http, grpc, metrics] = ports;
    [format!("--http_port={http}"), format!("--grpc_port={grpc}"), format!("--metrics_port={metrics}")]
}

fn finding<'a>(report: &'a Value, check: &str) -> &'a Value {
    let findings = report.as_array().unwrap();
    findings.iter().find(|finding| finding["check"] == check).unwrap_or_else(|| panic!("no `{check}` in {report}"))
}

fn json(output: &Output) -> Value {
    serde_json::from_slice(&output.stdout).unwrap_or_else(|error| panic!("{error}: {output:?}"))
}

#[test]
fn a_working_machine_passes_and_each_fault_is_named_with_advice() {
    let dir = tempfile::tempdir().unwrap();
    let weights = repository(dir.path());
    let ports = free_ports();
    let program = server_program(dir.path());
    let args = ["--json", "--model_repo=models", "--device=cpu", &program, &ports[0], &ports[1], &ports[2]];
    let output = doctor(dir.path(), &args).output().unwrap();
    let report = json(&output);
    assert_eq!(output.status.code(), Some(0), "{report}");
    assert_eq!(finding(&report, "checkpoint")["level"], "ok");
    assert_eq!(finding(&report, "shared memory")["level"], "ok");
    assert_eq!(finding(&report, "memory of models")["found"], "`llama`: 1 worker(s)");

    fs::write(&weights, "no weights").unwrap();
    let http = ports[0].strip_prefix("--http_port=").unwrap();
    let _taken = TcpListener::bind(format!("0.0.0.0:{http}")).unwrap();
    let output = doctor(dir.path(), &args).output().unwrap();
    let report = json(&output);
    assert_eq!(output.status.code(), Some(1), "{report}");
    let checkpoint = finding(&report, "checkpoint");
    assert!(checkpoint["found"].as_str().unwrap().contains("model.safetensors"), "{checkpoint}");
    let port = finding(&report, "ports");
    assert!(port["found"].as_str().unwrap().contains(&format!("in use by process {}", std::process::id())), "{port}");
    assert!(port["advice"].as_str().unwrap().contains("--http_port"), "{port}");
}

#[test]
fn what_a_start_would_refuse_is_a_failure_with_the_words_of_the_start() {
    let dir = tempfile::tempdir().unwrap();
    let program = server_program(dir.path());
    fs::create_dir(dir.path().join("empty")).unwrap();
    for (flags, check) in [
        (&["--model_repo=none"][..], "model repository"),
        (&["--model_repo=empty"], "model repository"),
        (&["--model_repo=empty", "--no_mpi", "--world_size=2"], "flags"),
        (&["--model_repo=empty", "--http_port=9001", "--grpc_port=9001"], "flags"),
    ] {
        let line = [flags, &["--json", "--device=cpu", &program][..]].concat();
        let output = doctor(dir.path(), &line).output().unwrap();
        let found = finding(&json(&output), check).clone();
        assert_eq!((output.status.code(), &found["level"]), (Some(1), &Value::from("fail")), "{flags:?}: {found}");
        let mut start = Command::new(env!("CARGO_BIN_EXE_launch"));
        start.args(flags).args(["--device=cpu", &program]).env("XDG_RUNTIME_DIR", dir.path()).current_dir(dir.path());
        let error = String::from_utf8(start.output().unwrap().stderr).unwrap();
        for part in ["found", "advice"] {
            assert!(error.contains(found[part].as_str().unwrap()), "{flags:?}: {found} is not in {error}");
        }
    }
}

#[test]
fn without_mpirun_two_ranks_cannot_start_and_one_can() {
    let dir = tempfile::tempdir().unwrap();
    repository(dir.path());
    let ports = free_ports();
    let level = |world_size: &str| {
        let args = [world_size, "--json", "--model_repo=models", "--device=cpu", &ports[0], &ports[1], &ports[2]];
        let output = doctor(dir.path(), &args).env("PATH", "/nowhere").output().unwrap();
        finding(&json(&output), "MPI")["level"].as_str().unwrap().to_owned()
    };
    assert_eq!(level("--world_size=2"), "fail");
    assert_eq!(level("--world_size=1"), "ok");
}

#[test]
fn without_a_repository_the_machine_alone_is_checked() {
    let dir = tempfile::tempdir().unwrap();
    let (program, ports) = (server_program(dir.path()), free_ports());
    let args = ["--json", "--device=cpu", &program, &ports[0], &ports[1], &ports[2]];
    let output = doctor(dir.path(), &args).output().unwrap();
    let report = json(&output);
    assert_eq!(output.status.code(), Some(0), "{report}");
    let repository = finding(&report, "model repository");
    assert_eq!(repository["level"], "warn");
    assert!(repository["advice"].as_str().unwrap().contains("trireme doctor MODEL"), "{repository}");
    assert_eq!(finding(&report, "device")["level"], "ok");
    assert_eq!(finding(&report, "GPU kernels")["level"], "ok");
    let left: Vec<_> =
        fs::read_dir(dir.path().join("trireme")).unwrap().flatten().map(|entry| entry.file_name()).collect();
    assert!(left.iter().all(|name| !name.to_string_lossy().starts_with("doctor")), "{left:?}");
}
