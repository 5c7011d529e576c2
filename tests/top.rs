//! `trireme top --once` prints the activity of a running world.

mod support;

use std::process::{Command, Output};

use support::{TestWorld, eventually};

fn top(metrics_port: &str) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_trireme"));
    command.args(["top", "--once", "--interval=0.5", "--url=127.0.0.1", "--metrics-port", metrics_port]);
    command.output().expect("the program runs")
}

/// The cells of the first line that begins with `first`.
fn row(frame: &str, first: &str) -> Vec<String> {
    let line = frame.lines().find(|line| line.starts_with(first)).unwrap_or_default();
    line.split_ascii_whitespace().map(str::to_owned).collect()
}

#[test]
fn a_frame_shows_the_model_and_its_busy_workers() {
    let mut world = TestWorld::of(2);
    let line = world.await_log("Started Metrics Service at ");
    let port = line.trim_end_matches('"').rsplit(':').next().expect("a port").to_owned();
    let mut stream = world.stream("Once upon a time", 1500);
    stream.next().expect("a first piece");
    let mut frame = String::new();
    eventually("a frame shows tokens", || {
        let output = top(&port);
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        frame = String::from_utf8_lossy(&output.stdout).into_owned();
        // Another stream keeps the model busy.
        if stream.next().is_none() {
            stream = world.stream("Once upon a time", 1500);
        }
        row(&frame, "tensorrt_llm").get(2).is_some_and(|tokens| tokens.parse::<f64>().is_ok_and(|tokens| tokens > 0.0))
    });
    let model = row(&frame, "tensorrt_llm");
    assert_eq!(model[1], "ready", "{frame}");
    assert!(model[4].parse::<f64>().unwrap() > 0.0, "steps per second:\n{frame}");
    let latencies = frame.lines().filter(|line| line.starts_with("tensorrt_llm")).nth(1).unwrap_or_default();
    let times = latencies.split_ascii_whitespace().skip(1).take(5).filter(|time| time.ends_with('s'));
    assert_eq!(times.count(), 5, "step, time to first token and between tokens:\n{frame}");
    let workers: Vec<_> = frame.lines().filter(|line| line.starts_with("worker")).collect();
    assert_eq!(workers.len(), 2, "{frame}");
    for pid in world.workers() {
        assert!(
            workers.iter().any(|line| line.split_ascii_whitespace().any(|cell| cell == pid.to_string())),
            "{frame}"
        );
    }
}

#[test]
fn an_unreachable_server_is_reported_on_standard_error_and_in_the_exit_code() {
    let output = top("1");
    assert!(!output.status.success());
    let error = String::from_utf8_lossy(&output.stderr);
    assert!(error.contains("no metrics from 127.0.0.1:1"), "{error}");
}
