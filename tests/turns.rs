//! Models that take turns on the devices (`--share-devices`): one is awake at a time, and all answer as if they were alone.

mod support;

use std::fs;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;

use nix::sys::signal::Signal;
use serde_json::json;
use support::{Options, TestWorld, copied_repository, eventually, post_to, signal};

const MODELS: [&str; 2] = ["tensorrt_llm", "second"];

/// A repository with the shipped language model twice.
fn repository() -> tempfile::TempDir {
    let repository = copied_repository();
    let [first, second] = MODELS.map(|name| repository.path().join(name));
    fs::create_dir_all(second.join("1")).unwrap();
    for file in fs::read_dir(first.join("1")).unwrap().flatten() {
        fs::copy(file.path(), second.join("1").join(file.file_name())).unwrap();
    }
    let config = fs::read_to_string(first.join("config.pbtxt")).unwrap();
    fs::write(second.join("config.pbtxt"), config.replace("name: \"tensorrt_llm\"", "name: \"second\"")).unwrap();
    repository
}

fn world(repository: &tempfile::TempDir, world_size: u32, args: &[&str]) -> TestWorld {
    let args = args.iter().map(|arg| (*arg).to_owned()).collect();
    TestWorld::start(Options { world_size, repository: repository.path().to_owned(), args, ..Options::default() })
}

/// The tokens of a greedy answer.
fn generate(url: &str, prompt: u32, num_tokens: u32) -> Vec<u64> {
    let ids: Vec<u32> = (0..12).map(|at| 5 + (prompt * 31 + at * 7) % 900).collect();
    let body = json!({"input_ids": ids, "input_lengths": ids.len(), "request_output_len": num_tokens, "end_id": -1,
                      "exclude_input_in_output": true});
    let (status, text) = post_to(url, &body);
    assert_eq!(status, 200, "{text}");
    let answer: serde_json::Value = serde_json::from_str(&text).unwrap();
    answer["output_ids"].as_array().unwrap().iter().map(|id| id.as_u64().unwrap()).collect()
}

fn url_of(world: &TestWorld, model: &str) -> String {
    world.url(&format!("/v2/models/{model}/generate"))
}

#[test]
fn models_that_take_turns_answer_as_if_alone_and_never_two_are_awake() {
    const PROMPTS: u32 = 6;
    let repository = repository();
    let mut alone = world(&repository, 1, &[]);
    let expected: Vec<_> = (0..PROMPTS).map(|prompt| generate(&url_of(&alone, MODELS[0]), prompt, 24)).collect();
    assert!(alone.stop().success());
    for world_size in [1, 2] {
        let mut world = world(&repository, world_size, &["--share-devices=1"]);
        assert_eq!(world.get("/v2/health/ready").0, 200);
        let has_ended = AtomicBool::new(false);
        let most_awake = thread::scope(|scope| {
            let clients: Vec<_> = (0..4)
                .map(|client| {
                    let urls = MODELS.map(|model| url_of(&world, model));
                    let expected = &expected;
                    scope.spawn(move || {
                        for prompt in 0..PROMPTS {
                            let url = &urls[((client + prompt) % 2) as usize];
                            assert_eq!(generate(url, prompt, 24), expected[prompt as usize], "{url}, {prompt}");
                        }
                    })
                })
                .collect();
            let watch = scope.spawn(|| {
                let mut most_awake = 0.0_f64;
                while !has_ended.load(Ordering::Relaxed) {
                    most_awake = most_awake.max(MODELS.len() as f64 - world.metric("trireme_llm_sleeping"));
                }
                most_awake
            });
            let results: Vec<_> = clients.into_iter().map(thread::ScopedJoinHandle::join).collect();
            has_ended.store(true, Ordering::Relaxed);
            results.into_iter().for_each(|result| result.expect("its answers are right"));
            watch.join().expect("metrics are there")
        });
        assert_eq!(most_awake, 1.0);
        assert_eq!(world.metric("trireme_llm_worker_restarts_total"), 0.0);
        assert!(world.stop().success());
    }
}

#[test]
fn a_model_that_is_never_idle_gives_way_when_its_turn_ends() {
    let repository = repository();
    let mut world = world(&repository, 1, &["--share-devices=1"]);
    let expected = generate(&url_of(&world, MODELS[1]), 1, 16);
    let has_ended = AtomicBool::new(false);
    thread::scope(|scope| {
        // Two clients in turn, so that one of them always runs.
        for client in 0..2 {
            let url = url_of(&world, MODELS[0]);
            let has_ended = &has_ended;
            scope.spawn(move || {
                while !has_ended.load(Ordering::Relaxed) {
                    generate(&url, client, 64);
                }
            });
        }
        for _ in 0..3 {
            assert_eq!(generate(&url_of(&world, MODELS[1]), 1, 16), expected);
        }
        has_ended.store(true, Ordering::Relaxed);
    });
    assert!(world.stop().success());
}

#[test]
fn a_worker_killed_while_its_model_waits_for_its_turn_is_started_for_it() {
    let repository = repository();
    let mut world = world(&repository, 1, &["--share-devices"]);
    let [first, second] = MODELS.map(|model| url_of(&world, model));
    let expected = [generate(&first, 3, 16), generate(&second, 4, 16)];
    // The first one sleeps now. Either worker may be its own.
    let workers = world.workers();
    assert_eq!(workers.len(), 2);
    workers.into_iter().for_each(|worker| signal(worker, Signal::SIGKILL));
    eventually("the awake model starts again", || world.workers().len() == 1);
    assert_eq!([generate(&first, 3, 16), generate(&second, 4, 16)], expected);
    assert_eq!(world.workers().len(), 2);
    assert!(world.stop().success());
}

#[test]
fn models_are_unloaded_and_loaded_and_do_not_sleep_by_request() {
    let repository = repository();
    let args = ["--share-devices", "--model-control-mode=explicit", "--load-model=*"];
    let mut world = world(&repository, 1, &args);
    let urls = MODELS.map(|model| url_of(&world, model));
    let expected = urls.clone().map(|url| generate(&url, 2, 16));
    let (status, text) = world.post("/sleep", &json!({}));
    assert!(status == 400 && text.contains("by request"), "{status} {text}");
    for model in MODELS {
        assert_eq!(world.post(&format!("/v2/repository/models/{model}/unload"), &json!({})).0, 200);
        eventually("its worker ends", || world.workers().len() == 1);
        assert_eq!(world.post(&format!("/v2/repository/models/{model}/load"), &json!({})).0, 200);
        assert_eq!(urls.clone().map(|url| generate(&url, 2, 16)), expected);
    }
    assert!(world.stop().success());
}
