//! `--record` and `trireme replay`: a recording is answered alike by the same build and settings, and otherwise by others.

use std::fs;
use std::net::TcpListener;
use std::path::Path;
use std::process::{Command, Output, Stdio};

use serde_json::{Value, json};

const PROMPT: &str = "Once upon a time there was Wilhelmina";

fn trireme(dir: &Path, words: &[&str]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_trireme"));
    command.args(words).stdin(Stdio::null()).env("XDG_RUNTIME_DIR", dir).current_dir(env!("CARGO_MANIFEST_DIR"));
    command.output().unwrap()
}

fn text(output: &Output) -> String {
    [&output.stdout[..], &output.stderr].map(|bytes| String::from_utf8_lossy(bytes).into_owned()).concat()
}

fn free_ports() -> [u16; 3] {
    let listeners = [(); 3].map(|()| TcpListener::bind("127.0.0.1:0").unwrap());
    listeners.map(|listener| listener.local_addr().unwrap().port())
}

/// Serves a few requests with `--record`, and returns the recording's only file.
fn record(dir: &Path, flags: &[&str]) -> String {
    let [http, grpc, metrics] = free_ports();
    let ports = [format!("--http_port={http}"), format!("--grpc_port={grpc}"), format!("--metrics_port={metrics}")];
    let recording = format!("--record={}", dir.join("recording").display());
    let start = ["launch", "--detach", "--device=cpu", &recording, &ports[0], &ports[1], &ports[2]];
    let started = trireme(dir, &[&start[..], flags].concat());
    assert!(started.status.success(), "{}", text(&started));
    let send = |path: &str, body: Value| {
        let reply = ureq::post(format!("http://127.0.0.1:{http}{path}")).send(body.to_string()).unwrap();
        reply.into_body().read_to_string().unwrap()
    };
    let request = json!({"model": "ensemble", "prompt": PROMPT, "max_tokens": 24, "temperature": 0});
    send("/v1/completions", request.clone());
    let mut streamed = request;
    streamed["stream"] = true.into();
    assert!(send("/v1/completions", streamed).contains("[DONE]"));
    send("/v2/models/ensemble/generate", json!({"text_input": PROMPT, "max_tokens": 24}));
    let stopped = trireme(dir, &["launch", "stop", &ports[0]]);
    assert!(stopped.status.success(), "{}", text(&stopped));
    let files: Vec<_> = fs::read_dir(dir.join("recording")).unwrap().flatten().map(|entry| entry.path()).collect();
    assert_eq!(files.len(), 1, "{files:?}");
    fs::read_to_string(&files[0]).unwrap()
}

#[test]
fn the_same_world_answers_a_recording_alike_and_other_weights_do_not() {
    let dir = tempfile::tempdir().unwrap();
    let recorded = record(dir.path(), &[]);
    assert!(recorded.contains(PROMPT));
    let lines: Vec<Value> = recorded.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    let steps: Vec<&Value> = lines.iter().map(|line| &line["step"]).filter(|step| !step.is_null()).collect();
    let num_tokens: u64 =
        steps.iter().flat_map(|step| step["rows"].as_array().unwrap()).map(|row| row[2].as_u64().unwrap()).sum();
    // Three prompts, of which the prefix cache may give a part, and 23 tokens each that are fed back.
    assert!(num_tokens >= 3 * 24, "{num_tokens} tokens in {} steps", steps.len());
    assert_eq!(lines.last().unwrap()["end"]["reason"], "stopped");

    let recording = dir.path().join("recording").display().to_string();
    let json = dir.path().join("comparison.json").display().to_string();
    let alike = trireme(dir.path(), &["replay", &recording, "--json", &json, "--", "--device=cpu"]);
    assert!(alike.status.success(), "{}", text(&alike));
    let comparison: Value = serde_json::from_str(&fs::read_to_string(&json).unwrap()).unwrap();
    assert_eq!((&comparison["sent"], &comparison["alike"]), (&3.into(), &3.into()));
    assert!(comparison["whole_ms"]["replayed"]["p50"].as_f64().unwrap() > 0.0);

    let flags = ["replay", &recording, "--speed=100", "--", "--device=cpu", "--weight_only_precision=int4"];
    let other = trireme(dir.path(), &flags);
    assert_eq!(other.status.code(), Some(1), "{}", text(&other));
    assert!(
        text(&other).contains("3 otherwise") && text(&other).contains("request 0 /v1/completions"),
        "{}",
        text(&other)
    );
    assert!(text(&trireme(dir.path(), &["launch", "status"])).contains("no world runs"), "a replay ends its world");
}

#[test]
fn a_redacted_recording_has_no_text_and_replays_its_load() {
    let dir = tempfile::tempdir().unwrap();
    let recorded = record(dir.path(), &["--record-contents=redacted"]);
    assert!(!recorded.contains("Wilhelmina") && recorded.contains("xxxxxxxxxx"), "{recorded}");
    let recording = dir.path().join("recording").display().to_string();
    let replayed = trireme(dir.path(), &["replay", &recording, "--", "--device=cpu"]);
    assert!(replayed.status.success(), "{}", text(&replayed));
    assert!(
        text(&replayed).contains("3 requests sent: 0 answered alike, 0 otherwise, 3 not compared"),
        "{}",
        text(&replayed)
    );
}
