//! Sleep and wake (`--enable-sleep-mode`): tokens stay the same, requests wait, and workers that die meanwhile do no harm.

mod support;

use std::fs;
use std::thread;

use nix::sys::signal::Signal;
use serde_json::json;
use support::{Options, TestWorld, copied_repository, eventually, post_to, set_parameters, signal};

const PROMPT: &str = "Once upon a time";

fn world(world_size: u32) -> TestWorld {
    TestWorld::start(Options { world_size, args: vec!["--enable-sleep-mode".to_owned()], ..Options::default() })
}

/// `POST path` without parameters in its body, which succeeds.
fn ask(world: &TestWorld, path: &str) {
    assert_eq!(world.post(path, &json!({})), (200, String::new()), "{path}\n{}", world.log_text());
}

fn is_sleeping(world: &TestWorld) -> bool {
    match world.get("/is_sleeping").1.as_str() {
        r#"{"is_sleeping":true}"# => true,
        r#"{"is_sleeping":false}"# => false,
        other => panic!("{other}"),
    }
}

/// The error of a `POST` with this status: its message and the parameter that it names.
fn error(world: &TestWorld, path: &str, status: u16) -> (String, Option<String>) {
    let (found, text) = world.post(path, &json!({}));
    assert_eq!(found, status, "{path}: {text}");
    let error = &serde_json::from_str::<serde_json::Value>(&text).unwrap()["error"];
    (error["message"].as_str().unwrap().to_owned(), error["param"].as_str().map(str::to_owned))
}

/// Bytes of address space of a process.
fn address_space(pid: u32) -> u64 {
    let pages = fs::read_to_string(format!("/proc/{pid}/statm")).unwrap();
    pages.split(' ').next().unwrap().parse::<u64>().unwrap() * 4096
}

#[test]
fn tokens_after_a_wake_are_those_before_the_sleep_at_both_levels_for_world_sizes_1_and_2() {
    for world_size in [1, 2] {
        let mut world = world(world_size);
        let before = world.generate(PROMPT, 48);
        assert!(!is_sleeping(&world));
        for level in [1, 2, 1] {
            let used = address_space(world.workers()[0]);
            ask(&world, &format!("/sleep?level={level}"));
            assert!(is_sleeping(&world));
            assert_eq!(world.metric("trireme_llm_sleeping"), 1.0);
            assert_eq!(world.metric("trireme_llm_kv_blocks_cached"), 0.0, "the prefix cache is empty");
            assert_eq!(world.get("/health").0, 200, "the model can be woken");
            assert_eq!(world.get("/v2/health/ready").0, 200);
            assert!(world.get("/v1/models").1.contains("\"ensemble\""));
            match level {
                1 => assert!(address_space(world.workers()[0]) + (64 << 20) < used, "KV blocks are freed"),
                _ => assert_eq!(world.workers(), Vec::<u32>::new()),
            }
            ask(&world, "/wake_up");
            assert!(!is_sleeping(&world));
            assert_eq!(world.generate(PROMPT, 48), before);
        }
        assert_eq!(world.metric("trireme_llm_sleeping"), 0.0);
        assert_eq!(world.metric("trireme_llm_worker_restarts_total"), 0.0);
        assert!(world.stop().success());
    }
}

#[test]
fn requests_sent_while_asleep_are_answered_after_the_wake() {
    let mut world = world(1);
    let before = world.generate(PROMPT, 16);
    let body = json!({"text_input": PROMPT, "max_tokens": 16});
    for level in [1, 2] {
        ask(&world, &format!("/sleep?level={level}&model=ensemble"));
        let url = world.url("/v2/models/ensemble/generate");
        let waiting: Vec<_> = (0..3)
            .map(|_| {
                let (url, body) = (url.clone(), body.clone());
                thread::spawn(move || post_to(&url, &body))
            })
            .collect();
        eventually("three requests wait", || world.metric("trireme_llm_requests_waiting") == 3.0);
        assert!(is_sleeping(&world));
        ask(&world, "/wake_up?model=tensorrt_llm");
        for answer in waiting {
            let (status, text) = answer.join().unwrap();
            let answer: serde_json::Value = serde_json::from_str(&text).unwrap();
            assert_eq!((status, answer["text_output"].as_str()), (200, Some(before.as_str())), "{text}");
        }
    }
    assert!(world.stop().success());
}

#[test]
fn a_worker_killed_while_asleep_is_started_by_the_wake() {
    let mut world = world(2);
    let before = world.generate(PROMPT, 48);
    ask(&world, "/sleep");
    signal(world.workers()[1], Signal::SIGKILL);
    eventually("its group has ended", || world.workers().is_empty());
    assert!(is_sleeping(&world));
    ask(&world, "/sleep?level=2");
    ask(&world, "/wake_up");
    assert_eq!(world.workers().len(), 2);
    assert_eq!(world.generate(PROMPT, 48), before);
    assert!(world.stop().success());
}

#[test]
fn a_model_that_could_not_wake_wakes_or_sleeps_at_the_next_request() {
    let repository = copied_repository();
    let args = vec!["--enable-sleep-mode".to_owned()];
    let mut world = TestWorld::start(Options { repository: repository.path().to_owned(), args, ..Options::default() });
    let before = world.generate(PROMPT, 16);
    let weights = repository.path().join("tensorrt_llm/1/model.safetensors");
    let away = weights.with_extension("away");
    ask(&world, "/sleep?level=2");
    fs::rename(&weights, &away).unwrap();
    let (message, _) = error(&world, "/wake_up", 503);
    assert!(message.contains("were lost"), "{message}");
    // It can sleep again, and then does not try by itself.
    ask(&world, "/sleep");
    assert!(is_sleeping(&world));
    error(&world, "/wake_up", 503);
    fs::rename(&away, &weights).unwrap();
    // At once, and not after the interval between two tries.
    ask(&world, "/wake_up");
    assert!(!is_sleeping(&world));
    assert_eq!(world.generate(PROMPT, 16), before);
    assert!(world.stop().success());
}

#[test]
fn streams_that_run_end_before_the_sleep() {
    const MAX_TOKENS: u32 = 160;
    let mut world = world(2);
    let undisturbed = world.generate(PROMPT, MAX_TOKENS);
    for level in [1, 2] {
        let mut stream = world.stream(PROMPT, MAX_TOKENS);
        let mut text: String = stream.by_ref().take(5).collect();
        let url = world.url(&format!("/sleep?level={level}&mode=wait"));
        let sleep = thread::spawn(move || post_to(&url, &json!({})));
        text.extend(stream);
        assert_eq!(text, undisturbed);
        assert_eq!(sleep.join().unwrap(), (200, String::new()));
        assert!(is_sleeping(&world));
        ask(&world, "/wake_up");
    }
    assert_eq!(world.generate(PROMPT, MAX_TOKENS), undisturbed);
    assert!(world.stop().success());
}

#[test]
fn to_sleep_or_to_wake_twice_changes_nothing_and_a_second_level_goes_further() {
    let mut world = world(1);
    let before = world.generate(PROMPT, 16);
    ask(&world, "/wake_up");
    ask(&world, "/sleep");
    ask(&world, "/sleep?level=1");
    assert_eq!(world.workers().len(), 1);
    ask(&world, "/sleep?level=2");
    assert_eq!(world.workers().len(), 0);
    ask(&world, "/sleep?level=1");
    assert!(is_sleeping(&world));
    ask(&world, "/wake_up");
    ask(&world, "/wake_up");
    assert_eq!(world.generate(PROMPT, 16), before);
    assert!(world.stop().success());
}

#[test]
fn all_replicas_sleep_and_wake_together() {
    let repository = copied_repository();
    set_parameters(&repository, "tensorrt_llm", &[("tp", "1")]);
    let args = vec!["--enable-sleep-mode".to_owned()];
    let options = Options { world_size: 2, repository: repository.path().to_owned(), args, ..Options::default() };
    let mut world = TestWorld::start(options);
    let before = world.generate(PROMPT, 16);
    ask(&world, "/sleep?level=2");
    assert_eq!((world.workers().len(), world.metric("trireme_llm_sleeping")), (0, 2.0));
    ask(&world, "/wake_up");
    assert_eq!((world.workers().len(), world.metric("trireme_llm_sleeping")), (2, 0.0));
    assert_eq!(world.generate(PROMPT, 16), before);
    assert!(world.stop().success());
}

#[test]
fn bad_requests_are_refused_by_name_and_all_without_the_flag() {
    let mut awake = world(1);
    assert_eq!(error(&awake, "/sleep?level=3", 400).1.as_deref(), Some("level"));
    assert_eq!(error(&awake, "/sleep?mode=abort", 400).1.as_deref(), Some("mode"));
    assert_eq!(error(&awake, "/wake_up?tags=weights", 400).1.as_deref(), Some("tags"));
    assert!(error(&awake, "/sleep?model=nobody", 404).0.contains("nobody"));
    assert!(error(&awake, "/sleep?model=preprocessing", 400).0.contains("`preprocessing` cannot sleep"));
    assert_eq!((awake.get("/sleep").0, awake.post("/is_sleeping", &json!({})).0), (405, 405));
    assert!(!is_sleeping(&awake));
    assert!(awake.stop().success());

    let mut without = TestWorld::of(1);
    for path in ["/sleep", "/wake_up", "/sleep?model=ensemble"] {
        assert!(error(&without, path, 400).0.contains("`--enable-sleep-mode`"), "{path}");
    }
    assert_eq!(without.get("/is_sleeping").0, 400);
    assert_eq!(without.generate(PROMPT, 4), without.generate(PROMPT, 4));
    assert!(without.stop().success());
}

#[test]
fn a_world_stops_while_its_model_sleeps() {
    for level in [1, 2] {
        let mut world = world(2);
        ask(&world, &format!("/sleep?level={level}"));
        assert!(world.stop().success());
    }
}
