//! After SIGTERM requests in flight finish, and no process and no shared memory is left.

mod support;

use nix::sys::signal::Signal;
use support::{Options, TestWorld, signal};

#[test]
fn sigterm_finishes_the_stream_in_flight_and_leaves_no_process_and_no_shared_memory() {
    for world_size in [1, 2] {
        let mut world = TestWorld::of(world_size);
        let undisturbed = world.generate("Once upon a time", 120);
        let mut stream = world.stream("Once upon a time", 120);
        let first = stream.next().expect("a first piece");
        signal(world.rank0(), Signal::SIGTERM);
        assert_eq!(first + &stream.collect::<String>(), undisturbed, "{world_size} ranks");
        assert!(world.wait_for_end().success(), "{}", world.log_text());
        assert_eq!(world.shared_memory(), Vec::<String>::new());
    }
}

#[test]
fn the_server_is_not_ready_while_requests_drain() {
    let mut world = TestWorld::of(1);
    assert_eq!(world.get("/v2/health/ready").0, 200);
    let body = serde_json::json!({"text_input": "Once", "max_tokens": 1900, "stream": true, "end_id": -1});
    let mut stream = world.stream_request(&body);
    stream.next().expect("a first piece");
    signal(world.rank0(), Signal::SIGTERM);
    world.await_log("Signal (15) received.");
    assert_ne!(world.get("/v2/health/ready").0, 200);
    assert_ne!(world.post("/v2/models/ensemble/generate", &body).0, 200, "no new request is accepted");
    signal(world.rank0(), Signal::SIGTERM);
    world.wait_for_end();
    assert_eq!(world.shared_memory(), Vec::<String>::new());
}

#[test]
fn a_request_longer_than_the_exit_timeout_is_aborted_and_the_exit_code_is_1() {
    let args = vec!["--exit-timeout-secs=0".to_owned()];
    let mut world = TestWorld::start(Options { args, ..Options::default() });
    let body = serde_json::json!({"text_input": "Once", "max_tokens": 1900, "stream": true, "end_id": -1});
    let mut stream = world.stream_request(&body);
    stream.next().expect("a first piece");
    signal(world.rank0(), Signal::SIGTERM);
    assert_eq!(world.wait_for_end().code(), Some(1), "{}", world.log_text());
    assert_eq!(world.shared_memory(), Vec::<String>::new());
}
