//! Attention over latent vectors (DeepSeek V2 and V3) in worlds with pipeline stages, alone and divided further among workers: the
//! tokens are those of transformers, also of requests that share a pool of KV blocks in which two of the longest do not fit.

mod support;

use std::fs;
use std::thread;

use serde_json::{Value, json};
use support::{Options, TestWorld, eventually, golden_dir, golden_repository, post_to};

const SMALL_POOL: [(&str, &str); 2] = [("max_tokens_in_paged_kv_cache", "480"), ("max_num_tokens", "64")];

fn world(golden: &str, world_size: u32, parameters: &[(&str, &str)]) -> (TestWorld, tempfile::TempDir) {
    let repository = golden_repository(golden, &[&SMALL_POOL[..], parameters].concat());
    let options = Options { world_size, repository: repository.path().to_owned(), ..Options::default() };
    (TestWorld::start(options), repository)
}

fn output_ids(url: &str, request: &Value) -> Vec<Value> {
    let (status, text) = post_to(url, request);
    assert_eq!(status, 200, "{text}");
    serde_json::from_str::<Value>(&text).unwrap()["output_ids"].as_array().unwrap().clone()
}

/// A request for the first tokens of a golden sequence, up to the first that roundings could change, and these tokens.
fn clear_request(sequence: &Value) -> (Value, Vec<Value>) {
    let margins = sequence["margins"].as_array().unwrap();
    let count = margins.iter().take_while(|margin| margin.as_f64() > Some(0.01)).count().max(1);
    let len = sequence["prompt"].as_array().unwrap().len();
    let request =
        json!({"input_ids": sequence["prompt"], "input_lengths": len, "request_output_len": count, "end_id": -1});
    (request, sequence["tokens"].as_array().unwrap()[..count].to_vec())
}

/// Requests that fill most of the context of 256 positions.
fn long_requests(count: u64) -> Vec<Value> {
    let prompt = |n: u64| (0..110 + n).map(|i| 3 + (i * 31 + n * 17) % 190).collect::<Vec<u64>>();
    let request = |prompt: Vec<u64>| json!({"input_ids": prompt, "input_lengths": prompt.len(), "request_output_len": 120, "end_id": -1});
    (0..count).map(prompt).map(request).collect()
}

fn together(url: &str, requests: &[Value]) -> Vec<Vec<Value>> {
    thread::scope(|scope| {
        let tasks: Vec<_> = requests.iter().map(|request| scope.spawn(|| output_ids(url, request))).collect();
        tasks.into_iter().map(|task| task.join().unwrap()).collect()
    })
}

#[test]
fn pipeline_stages_give_the_tokens_of_transformers_alone_and_in_a_small_pool() {
    let requests = long_requests(5);
    for (golden, world_size, tp) in [("deepseek_v2", 2, "1"), ("deepseek_v3", 4, "2")] {
        let expected = {
            let (world, _repository) = world(golden, world_size / 2, &[]);
            let url = world.url("/v2/models/tensorrt_llm/generate");
            requests.iter().map(|request| output_ids(&url, request)).collect::<Vec<_>>()
        };
        let (mut world, _repository) = world(golden, world_size, &[("pp", "2"), ("tp", tp)]);
        let url = world.url("/v2/models/tensorrt_llm/generate");
        let text = fs::read(golden_dir(golden).join("golden.json")).unwrap();
        for sequence in serde_json::from_slice::<Value>(&text).unwrap()["sequences"].as_array().unwrap() {
            let (request, tokens) = clear_request(sequence);
            assert_eq!(output_ids(&url, &request), tokens, "{golden}");
        }
        assert_eq!(together(&url, &requests), expected, "{golden}");
        eventually("blocks are free", || world.metric("trireme_llm_kv_blocks_used") == 0.0);
    }
}
