//! Replicas of a model behind one queue: `tp` is smaller than the world.

mod support;

use std::process::Command;
use std::thread;

use nix::sys::signal::Signal;
use support::{Options, TestWorld, copied_repository, eventually, set_parameters, signal};

const PROMPTS: [&str; 4] =
    ["Once upon a time", "Q: What colour is the sky?", "The captain of the ship", "One morning a"];

/// A world of one-rank replicas.
fn replicas(count: u32, parameters: &[(&str, &str)]) -> (TestWorld, tempfile::TempDir) {
    let repository = copied_repository();
    let all: Vec<_> = [("tp", "1")].into_iter().chain(parameters.iter().copied()).collect();
    set_parameters(&repository, "tensorrt_llm", &all);
    let options = Options { world_size: count, repository: repository.path().to_owned(), ..Options::default() };
    (TestWorld::start(options), repository)
}

/// The value of a metric for each replica.
fn of_replicas(world: &mut TestWorld, name: &str, count: u32) -> Vec<f64> {
    let (_, text) = world.get_metrics("/metrics");
    let of = |replica: u32| {
        let label = format!("replica=\"{replica}\"");
        let is_its = |line: &&str| line.starts_with(&format!("{name}{{")) && line.contains(&label);
        let line = text.lines().find(is_its).unwrap_or_else(|| panic!("no `{name}` of replica {replica} in:\n{text}"));
        line.rsplit(' ').next().unwrap().parse().expect("a number")
    };
    (0..count).map(of).collect()
}

#[test]
fn replicas_return_the_same_text_as_one_and_share_the_load() {
    let texts = {
        let alone = TestWorld::of(1);
        PROMPTS.map(|prompt| alone.generate(prompt, 48))
    };
    let (mut world, _repository) = replicas(2, &[]);
    assert_eq!(world.workers().len(), 2, "one worker per rank");
    let shared = &world;
    thread::scope(|scope| {
        let answers = (0..16).map(|i| (i % 4, scope.spawn(move || shared.generate(PROMPTS[i % 4], 48))));
        for (prompt, answer) in answers.collect::<Vec<_>>() {
            assert_eq!(answer.join().unwrap(), texts[prompt]);
        }
    });
    let tokens = of_replicas(&mut world, "trireme_llm_output_tokens_total", 2);
    // The balance depends on how many requests overlap: short ones end before the next one arrives.
    let all: f64 = tokens.iter().sum();
    assert!(tokens.iter().all(|&tokens| tokens >= all / 8.0), "{tokens:?}");
    let log = world.log_text();
    assert!(log.contains("placement: replica 2 of 2, stage 1 of 1: workers 1 on "), "{log}");
    assert!(world.stop().success());
}

#[test]
fn a_prompt_goes_to_the_replica_that_has_its_prefix_cached() {
    let (mut world, _repository) = replicas(2, &[]);
    // Different from the first token on, and so long that its cached blocks outweigh a request that has just ended and still counts.
    let prompt =
        |i: usize| format!("{} {}", PROMPTS[i], "the little boat went over the sea and came home again ".repeat(40));
    for i in [0, 1, 2] {
        world.generate(&prompt(i), 4);
    }
    let hits = world.metric("trireme_llm_prefix_cache_hits_total");
    // A least-recently-used policy would send each of these to the other replica.
    for i in [2, 1, 2, 0] {
        world.generate(&(prompt(i) + "and so on"), 4);
    }
    assert_eq!(world.metric("trireme_llm_prefix_cache_hits_total"), hits + 4.0);
    assert!(world.stop().success());
}

#[test]
fn streams_continue_when_a_worker_of_one_replica_dies_and_the_other_serves_meanwhile() {
    let (mut world, _repository) = replicas(2, &[]);
    let undisturbed = world.generate(PROMPTS[0], 160);
    let mut streams: Vec<_> = (0..4).map(|_| world.stream(PROMPTS[0], 160)).collect();
    let mut texts: Vec<String> = streams.iter_mut().map(|stream| stream.by_ref().take(5).collect()).collect();
    signal(world.workers()[0], Signal::SIGKILL);
    assert_eq!(world.get("/v2/health/ready").0, 200, "a step can run now");
    assert!(!world.generate(PROMPTS[1], 8).is_empty());
    for (text, stream) in texts.iter_mut().zip(streams) {
        text.extend(stream);
        assert_eq!(*text, undisturbed);
    }
    assert_eq!(of_replicas(&mut world, "trireme_llm_worker_restarts_total", 2), [1.0, 0.0]);
    let world = &mut world;
    eventually("both are ready", || of_replicas(world, "trireme_llm_ready", 2) == [1.0, 1.0]);
    assert!(world.stop().success());
}

#[test]
fn requests_that_no_replica_has_room_for_wait_in_one_queue() {
    let repository = support::repository_with_queue(2, "default_queue_policy { max_queue_size: 8 }", &[("tp", 1)]);
    let path = repository.path().to_owned();
    let mut world = TestWorld::start(Options { world_size: 2, repository: path, ..Options::default() });
    let text = world.generate(PROMPTS[0], 16);
    let long = serde_json::json!({"text_input": PROMPTS[2], "max_tokens": 1900, "stream": true, "end_id": -1});
    let mut running: Vec<_> = (0..4).map(|_| world.stream_request(&long)).collect();
    running.iter_mut().for_each(|stream| drop(stream.next_event().expect("it runs")));
    let url = world.url("/v2/models/ensemble/generate");
    let body = serde_json::json!({"text_input": PROMPTS[0], "max_tokens": 16});
    let waiting: Vec<_> = (0..8)
        .map(|_| {
            let (url, body) = (url.clone(), body.clone());
            thread::spawn(move || support::post_to(&url, &body))
        })
        .collect();
    eventually("eight wait", || world.metric("trireme_llm_requests_queued") == 8.0);
    assert_eq!(world.metric("trireme_llm_requests_waiting"), 0.0, "and none at a replica");
    let (status, answer) = world.post("/v2/models/ensemble/generate", &body);
    assert!(status == 503 && answer.contains("12 requests waiting or running"), "{status} {answer}");
    drop(running);
    for answer in waiting {
        let (status, answer) = answer.join().unwrap();
        assert!(status == 200 && answer.contains(&serde_json::to_string(&text).unwrap()), "{status} {answer}");
    }
    assert_eq!(world.metric("trireme_llm_requests_queued"), 0.0);
    assert!(world.stop().success());
}

#[test]
fn the_plan_lists_replicas_and_stages() {
    let plan = |world_size: u32, parameters: &[(&str, &str)]| {
        let repository = copied_repository();
        set_parameters(&repository, "tensorrt_llm", parameters);
        let mut command = Command::new(env!("CARGO_BIN_EXE_trireme"));
        command.args(["plan", "--device=cpu", &format!("--world-size={world_size}")]);
        let output = command.arg("--model-repository").arg(repository.path()).output().expect("the program runs");
        (output.status.success(), String::from_utf8_lossy(&output.stdout).into_owned())
    };
    let num_lines = |text: &str| text.lines().filter(|line| line.split_whitespace().nth(1) == Some("CPU")).count();
    let (fits, text) = plan(4, &[("tp", "1"), ("pp", "2")]);
    assert!(fits && text.contains("2 replicas of 2 worker(s) in 2 stages, each with:"), "{text}");
    assert_eq!(num_lines(&text), 4, "{text}");
    let (fits, text) = plan(4, &[("tp", "2"), ("replicas", "1")]);
    assert!(fits && text.contains(": 2 worker(s)\n") && num_lines(&text) == 2, "{text}");
    let (fits, text) = plan(3, &[("tp", "2"), ("replicas", "2")]);
    assert!(!fits && text.contains("`tp` 2 x `pp` 1 x `replicas` 2 workers need as many ranks"), "{text}");
    assert!(text.contains("and world_size is 3; start with `--world_size=4`"), "{text}");
}

/// A world of two ranks that `mpirun` keeps when one dies, as for `launch --elastic`.
fn kept_world(parameters: &[(&str, &str)]) -> (TestWorld, tempfile::TempDir) {
    let repository = copied_repository();
    set_parameters(&repository, "tensorrt_llm", parameters);
    let args = ["--model-control-mode=explicit", "--load-model=*"].map(str::to_owned).to_vec();
    let path = repository.path().to_owned();
    let options = Options { world_size: 2, repository: path, args, keeps_world: true, ..Options::default() };
    (TestWorld::start(options), repository)
}

/// Waits until a process has ended. `mpirun` would wait for the rank that was killed.
fn await_end(pid: u32) {
    let state = || std::fs::read_to_string(format!("/proc/{pid}/stat")).ok();
    let has_ended = || state().is_none_or(|stat| stat.rsplit_once(") ").is_none_or(|(_, rest)| rest.starts_with('Z')));
    eventually("it has ended", has_ended);
}

#[test]
fn streams_of_a_replica_that_loses_its_rank_go_on_at_the_other_one_with_the_undisturbed_text() {
    let (mut world, _repository) = kept_world(&[("tp", "1")]);
    let undisturbed = world.generate(PROMPTS[0], 160);
    let mut streams: Vec<_> = (0..6).map(|_| world.stream(PROMPTS[0], 160)).collect();
    let mut texts: Vec<String> = streams.iter_mut().map(|stream| stream.by_ref().take(5).collect()).collect();
    signal(world.rank(1), Signal::SIGKILL);
    for (text, stream) in texts.iter_mut().zip(streams) {
        text.extend(stream);
        assert_eq!(*text, undisturbed);
    }
    assert_eq!(world.get("/v2/health/ready").0, 200, "the other replica serves");
    assert_eq!(of_replicas(&mut world, "trireme_llm_replica_lost", 2), [0.0, 1.0]);
    assert_eq!(of_replicas(&mut world, "trireme_llm_ready", 2), [1.0, 0.0]);
    let load = serde_json::json!({"parameters": {"config": "{\"max_batch_size\": 2}"}});
    let (status, answer) = world.post("/v2/repository/models/tensorrt_llm/load", &load);
    assert!(status == 400 && answer.contains("the world is not whole (rank 1 (process "), "{status} {answer}");
    assert_eq!(world.generate(PROMPTS[0], 160), undisturbed, "the refusal leaves the model as it is");
    let rank_0 = world.rank0();
    signal(rank_0, Signal::SIGTERM);
    await_end(rank_0);
    assert!(!world.log_text().contains("ends the world"), "{}", world.log_text());
}

#[test]
fn a_world_ends_with_a_rank_that_shares_each_layer_also_if_mpirun_keeps_it() {
    let (world, _repository) = kept_world(&[]);
    let body = serde_json::json!({"text_input": "Once", "max_tokens": 1900, "stream": true, "end_id": -1});
    let mut stream = world.stream_request(&body);
    stream.next_event().expect("a first piece");
    let rank_0 = world.rank0();
    signal(world.rank(1), Signal::SIGKILL);
    let error = std::iter::from_fn(|| stream.next_event()).find_map(|event| event["error"].as_str().map(str::to_owned));
    let error = error.expect("the stream ends with an error");
    assert!(error.contains("rank 1 (process ") && error.contains("has ended"), "{error}");
    await_end(rank_0);
}
