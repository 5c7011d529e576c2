//! A model whose layers alternate between a sliding window and none: its tokens do not depend on how blocks before the
//! window are released and used again.
//!
//! The model is the Gemma 3 of `tests/goldens`: three layers, of which two read the last 20 positions. Each layer is a KV
//! group of its own, so a sequence has three block tables.

mod support;

use std::fs;
use std::thread;

use nix::sys::signal::Signal;
use serde_json::{Value, json};
use support::{Options, TestWorld, eventually, golden_dir, golden_repository, post_to, signal};

const GOLDEN: &str = "gemma3";
/// Positions of the longest sequence: the context of the model is full.
const MAX_LEN: usize = 256;
/// With 64 positions in a step, a sequence of 256 positions holds 16 blocks of 16 positions in the layer without a window
/// and at most 7 in each other layer. Without windows it would need 48.
const SMALL_POOL: [(&str, &str); 2] = [("max_tokens_in_paged_kv_cache", "160"), ("max_num_tokens", "64")];

fn world(world_size: u32, parameters: &[(&str, &str)]) -> (TestWorld, tempfile::TempDir) {
    let repository = golden_repository(GOLDEN, parameters);
    let options = Options { world_size, repository: repository.path().to_owned(), ..Options::default() };
    (TestWorld::start(options), repository)
}

fn goldens() -> Vec<Value> {
    let golden: Value = serde_json::from_slice(&fs::read(golden_dir(GOLDEN).join("golden.json")).unwrap()).unwrap();
    golden["sequences"].as_array().unwrap().clone()
}

/// Prompts that begin with the same 100 tokens; each is continued to the end of the context.
fn long_requests(count: usize) -> Vec<Value> {
    let prompt = |n: usize| -> Vec<usize> {
        let own = (0..10 + n).map(|i| 3 + (i * 31 + n * 17) % 190);
        (0..100).map(|i| 3 + (i * 7) % 190).chain(own).collect()
    };
    let request = |prompt: Vec<usize>| json!({"input_ids": prompt, "input_lengths": prompt.len(), "request_output_len": MAX_LEN - prompt.len(), "end_id": -1});
    (0..count).map(|n| request(prompt(n))).collect()
}

fn output_ids(url: &str, request: &Value) -> Value {
    let (status, text) = post_to(url, request);
    assert_eq!(status, 200, "{text}");
    serde_json::from_str::<Value>(&text).unwrap()["output_ids"].clone()
}

/// The outputs of requests one after the other, with all blocks of a sequence in memory and no prefix cache.
fn expected(requests: &[Value]) -> Vec<Value> {
    let (world, _repository) = world(1, &[("enable_kv_cache_reuse", "false")]);
    let url = world.url("/v2/models/tensorrt_llm/generate");
    requests.iter().map(|request| output_ids(&url, request)).collect()
}

#[test]
fn tokens_of_a_small_pool_are_those_of_a_large_one_for_world_sizes_1_2_and_4() {
    let requests = long_requests(12);
    let expected = expected(&requests);
    for world_size in [1, 2, 4] {
        let (mut world, _repository) = world(world_size, &SMALL_POOL);
        let url = world.url("/v2/models/tensorrt_llm/generate");
        for golden in goldens() {
            // As far as the choice is clear; after a near tie, the order of a sum decides.
            let margins = golden["margins"].as_array().unwrap();
            let num_clear = margins.iter().take_while(|margin| margin.as_f64() > Some(0.01)).count();
            let request = json!({"input_ids": golden["prompt"], "end_id": -1, "request_output_len": num_clear,
                                 "input_lengths": golden["prompt"].as_array().unwrap().len()});
            let found = output_ids(&url, &request);
            assert_eq!(found, json!(golden["tokens"].as_array().unwrap()[..num_clear]), "world size {world_size}");
        }
        // Together: they preempt each other, and use each other's prefixes and blocks.
        let found: Vec<Value> = thread::scope(|scope| {
            let tasks: Vec<_> = requests.iter().map(|request| scope.spawn(|| output_ids(&url, request))).collect();
            tasks.into_iter().map(|task| task.join().unwrap()).collect()
        });
        assert_eq!(found, expected, "world size {world_size}");
        assert!(world.metric("trireme_llm_prefix_cache_reused_blocks_total") > 0.0);
        assert_eq!(world.metric("trireme_llm_kv_blocks"), 30.0);
        eventually("blocks are free", || world.metric("trireme_llm_kv_blocks_used") == 0.0);
    }
}

/// Two pipeline stages, of which each has layers of some groups only; and steps that verify drafts.
#[test]
fn tokens_are_the_same_in_pipeline_stages_and_with_drafts() {
    let requests = long_requests(6);
    let expected = expected(&requests);
    for (world_size, parameters) in
        [(2, [("pp", "2"), ("tp", "1")]), (1, [("prompt_lookup_num_tokens", "5"), ("tp", "1")])]
    {
        let (mut world, _repository) = world(world_size, &[&SMALL_POOL[..], &parameters].concat());
        let url = world.url("/v2/models/tensorrt_llm/generate");
        let found: Vec<Value> = thread::scope(|scope| {
            let tasks: Vec<_> = requests.iter().map(|request| scope.spawn(|| output_ids(&url, request))).collect();
            tasks.into_iter().map(|task| task.join().unwrap()).collect()
        });
        assert_eq!(found, expected, "{parameters:?}");
        let drafted = world.metric("trireme_llm_drafted_tokens_total");
        assert_eq!(drafted > 0.0, world_size == 1, "{drafted} drafts");
    }
}

#[test]
fn a_long_text_holds_only_the_blocks_that_it_can_see() {
    let (mut world, _repository) = world(1, &SMALL_POOL);
    let url = world.url("/v2/models/tensorrt_llm/generate");
    // One after the other. A text takes some milliseconds, so many are watched.
    let requests = long_requests(12).into_iter().cycle().take(60);
    let texts = thread::spawn(move || requests.for_each(|request| drop(output_ids(&url, &request))));
    let mut most = 0.0f64;
    while !texts.is_finished() {
        most = most.max(world.metric("trireme_llm_kv_blocks_used"));
    }
    texts.join().unwrap();
    // 16 blocks, and at most 3 in each layer with a window of 20 positions.
    assert!((13.0..=22.0).contains(&most), "{most} blocks");
}

#[test]
fn a_text_longer_than_its_window_survives_the_death_of_a_worker() {
    let requests = long_requests(1);
    let expected = expected(&requests);
    let (world, _repository) = world(2, &SMALL_POOL);
    let mut found = Vec::new();
    for (index, event) in world.stream_of("tensorrt_llm", &requests[0]).events().enumerate() {
        if index == 60 {
            signal(world.workers()[1], Signal::SIGKILL);
        }
        found.extend(event["output_ids"].as_array().unwrap_or_else(|| panic!("{event}")).clone());
    }
    assert_eq!(Value::Array(found), expected[0]);
}

#[test]
fn beams_of_a_small_pool_are_those_of_a_large_one() {
    let mut requests = long_requests(2);
    for request in &mut requests {
        request["beam_width"] = json!(3);
        request["request_output_len"] = json!(90);
    }
    let (pool, expected) = ([("max_tokens_in_paged_kv_cache", "480"), ("max_num_tokens", "64")], expected(&requests));
    let (world, _repository) = world(2, &pool);
    let url = world.url("/v2/models/tensorrt_llm/generate");
    for _ in 0..2 {
        let found: Vec<Value> = requests.iter().map(|request| output_ids(&url, request)).collect();
        assert_eq!(found, expected);
    }
}

#[test]
fn a_plan_counts_blocks_over_the_kv_groups() {
    let repository = golden_repository(GOLDEN, &SMALL_POOL);
    let mut command = std::process::Command::new(env!("CARGO_BIN_EXE_trireme"));
    command.args(["plan", "--device=cpu", "--world-size=1"]).arg("--model-repository").arg(repository.path());
    let text = String::from_utf8(command.output().unwrap().stdout).unwrap();
    let expected = "30 KV blocks of 16 positions, 3 groups of layers: 1 keeps all positions, 2 keep the last 20\n  \
                    at once, of at most 64 sequences: 1 of 256 positions\n";
    assert!(text.contains(expected), "{text}");
}
