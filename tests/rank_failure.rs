//! Failures of workers and ranks: streams continue with the same tokens after a worker's death, and clients get the cause of a rank's.

mod support;

use nix::sys::signal::Signal;
use serde_json::json;
use support::{Options, TestWorld, copied_repository, eventually, set_parameters, signal};

const MAX_TOKENS: u32 = 160;

fn text_with_a_worker_killed(world: &mut TestWorld, victim: usize) -> String {
    let mut stream = world.stream("Once upon a time", MAX_TOKENS);
    let mut text: String = stream.by_ref().take(5).collect();
    signal(world.workers()[victim], Signal::SIGKILL);
    text.extend(stream);
    text
}

#[test]
fn a_killed_worker_comes_back_and_its_stream_ends_with_the_undisturbed_text() {
    let mut world = TestWorld::of(1);
    let undisturbed = world.generate("Once upon a time", MAX_TOKENS);
    assert_eq!(text_with_a_worker_killed(&mut world, 0), undisturbed);
    assert_eq!(world.metric("trireme_llm_worker_restarts_total"), 1.0);
    assert!(world.stop().success());
}

/// The KV cache is as large as half of the memory that was free at the start.
#[test]
fn a_worker_comes_back_though_others_have_taken_memory_since_the_start() {
    const TAKEN_BYTES: usize = 1 << 30;
    let repository = copied_repository();
    set_parameters(&repository, "tensorrt_llm", &[("max_tokens_in_paged_kv_cache", "")]);
    let mut world = TestWorld::start(Options { repository: repository.path().to_path_buf(), ..Options::default() });
    let undisturbed = world.generate("Once upon a time", MAX_TOKENS);
    let taken = std::hint::black_box(vec![1u8; TAKEN_BYTES]);
    assert_eq!(text_with_a_worker_killed(&mut world, 0), undisturbed);
    assert_eq!(world.metric("trireme_llm_worker_restarts_total"), 1.0);
    drop(taken);
    assert!(world.stop().success());
}

#[test]
fn streams_survive_the_death_of_any_worker_of_a_group() {
    let mut world = TestWorld::of(2);
    let undisturbed = world.generate("Once upon a time", MAX_TOKENS);
    assert_eq!(text_with_a_worker_killed(&mut world, 1), undisturbed);
    assert_eq!(text_with_a_worker_killed(&mut world, 0), undisturbed);
    assert_eq!(world.workers().len(), 2);
    assert!(world.stop().success());
}

#[test]
fn a_constrained_stream_survives_the_death_of_a_worker() {
    let guided = json!({
        "text_input": "Once upon a time", "max_tokens": 60, "stream": true,
        "guided_decoding_guide_type": "regex", "guided_decoding_guide": "([a-z]{3}, ){12}[0-9]{4}",
    });
    let mut world = TestWorld::of(2);
    let undisturbed: String = world.stream_request(&guided).collect();
    let mut stream = world.stream_request(&guided);
    let mut text = stream.next().expect("the stream has a first token");
    signal(world.workers()[1], Signal::SIGKILL);
    text.extend(&mut stream);
    assert_eq!(text, undisturbed);
    assert!(text.ends_with(|last: char| last.is_ascii_digit()), "{text}");
    assert_eq!(text.matches(", ").count(), 12, "{text}");
    assert_eq!(world.metric("trireme_llm_worker_restarts_total"), 1.0);
    assert!(world.stop().success());
}

#[test]
fn a_worker_killed_while_idle_is_replaced_before_the_next_request() {
    let mut world = TestWorld::of(1);
    let before = world.generate("The captain", 16);
    signal(world.workers()[0], Signal::SIGKILL);
    assert_eq!(world.generate("The captain", 16), before);
    assert!(world.stop().success());
}

#[test]
fn a_worker_that_hangs_is_replaced_and_the_log_shows_the_stacks_of_its_group() {
    let mut world = TestWorld::of(2);
    let undisturbed = world.generate("Once upon a time", MAX_TOKENS);
    let mut stream = world.stream("Once upon a time", MAX_TOKENS);
    let mut text: String = stream.by_ref().take(5).collect();
    signal(world.workers()[1], Signal::SIGSTOP);
    text.extend(stream);
    assert_eq!(text, undisturbed);
    let log = world.log_text();
    assert!(log.contains("worker 1 hangs at: process ") && log.contains("T (stopped)"), "{log}");
    assert!(world.stop().success());
}

#[test]
fn clients_get_an_error_at_once_when_a_rank_dies() {
    let world = TestWorld::of(2);
    let body = serde_json::json!({"text_input": "Once", "max_tokens": 1900, "stream": true, "end_id": -1});
    let mut stream = world.stream_request(&body);
    stream.next_event().expect("a first piece");
    signal(world.rank(1), Signal::SIGKILL);
    let error = std::iter::from_fn(|| stream.next_event()).find_map(|event| event["error"].as_str().map(str::to_owned));
    let error = error.expect("the stream ends with an error");
    assert!(error.contains("rank 1 (process ") && error.contains("has ended"), "{error}");
}

#[test]
fn clients_get_the_name_of_a_stopped_rank_and_the_world_ends() {
    let args = vec!["--heartbeat-timeout=3".to_owned()];
    let mut world = TestWorld::start(Options { world_size: 2, args, ..Options::default() });
    let body = serde_json::json!({"text_input": "Once", "max_tokens": 1900, "stream": true, "end_id": -1});
    let mut stream = world.stream_request(&body);
    stream.next_event().expect("a first piece");
    // The worker is stopped too; otherwise the stream might end first.
    signal(world.workers()[1], Signal::SIGSTOP);
    signal(world.rank(1), Signal::SIGSTOP);
    let error = std::iter::from_fn(|| stream.next_event()).find_map(|event| event["error"].as_str().map(str::to_owned));
    let error = error.expect("the stream ends with an error");
    assert!(error.contains("rank 1 on node ") && error.contains("has not answered for"), "{error}");
    assert!(!world.wait_for_end().success());
}

#[test]
fn openai_clients_find_a_model_while_its_workers_restart_and_their_requests_wait() {
    let mut world = TestWorld::of(2);
    let list = |world: &TestWorld| {
        let (status, text) = world.get("/v1/models");
        assert_eq!(status, 200, "{text}");
        serde_json::from_str::<serde_json::Value>(&text).unwrap()
    };
    let body = json!({"model": "ensemble", "prompt": "Once upon a time", "max_tokens": 8, "temperature": 0});
    let (before, (_, undisturbed)) = (list(&world), world.post("/v1/completions", &body));
    assert_eq!(before["data"][0]["id"], "ensemble");
    signal(world.workers()[1], Signal::SIGKILL);
    let mut was_away = false;
    eventually("the model serves again", || {
        let is_ready = world.get("/v2/models/ensemble/ready").0 == 200;
        assert_eq!(list(&world), before);
        assert_eq!(world.get("/v1/models/ensemble").0, 200);
        if !is_ready && !was_away {
            was_away = true;
            let (status, text) = world.post("/v1/completions", &body);
            assert_eq!(status, 200, "{text}");
            let choices = |text: &str| serde_json::from_str::<serde_json::Value>(text).unwrap()["choices"].clone();
            assert_eq!(choices(&text), choices(&undisturbed));
        }
        was_away && is_ready
    });
    assert_eq!(world.metric("trireme_llm_worker_restarts_total"), 1.0);
    assert!(world.stop().success());
}

#[test]
fn a_model_recovers_when_its_missing_checkpoint_is_back() {
    let repository = copied_repository();
    let mut world = TestWorld::start(Options { repository: repository.path().to_owned(), ..Options::default() });
    let undisturbed = world.generate("Once upon a time", 8);
    let (version, away) = (repository.path().join("tensorrt_llm/1"), repository.path().join("tensorrt_llm/away"));
    std::fs::rename(&version, &away).unwrap();
    signal(world.workers()[0], Signal::SIGKILL);
    let body = serde_json::json!({"text_input": "Once upon a time", "max_tokens": 8});
    let (status, text) = world.post("/v2/models/ensemble/generate", &body);
    assert!(status == 503 && text.contains("were lost"), "{status} {text}");

    std::fs::rename(&away, &version).unwrap();
    eventually("the model serves again", || world.post("/v2/models/ensemble/generate", &body).0 == 200);
    assert_eq!(world.generate("Once upon a time", 8), undisturbed);
    assert!(world.stop().success());
}
