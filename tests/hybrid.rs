//! Models whose layers have recurrent states (Gated DeltaNet) between those with attention: their tokens do not depend on chunks,
//! preemption, snapshots, workers or restarts.
//!
//! The models are those of `tests/goldens`. A block has 16 positions; a state takes as much memory as one to three of them, so
//! snapshots are taken every one to three blocks of a prompt.

mod support;

use std::fs;
use std::thread;

use nix::sys::signal::Signal;
use serde_json::{Value, json};
use support::{Options, TestWorld, eventually, golden_dir, golden_repository, post_to, signal};

/// Positions of the longest sequence: the context of the models is full.
const MAX_LEN: usize = 256;
/// Two of the longest sequences do not fit at once.
const SMALL_POOL: [(&str, &str); 2] = [("max_tokens_in_paged_kv_cache", "480"), ("max_num_tokens", "64")];

fn world(golden: &str, world_size: u32, parameters: &[(&str, &str)]) -> (TestWorld, tempfile::TempDir) {
    let repository = golden_repository(golden, parameters);
    let options = Options { world_size, repository: repository.path().to_owned(), ..Options::default() };
    (TestWorld::start(options), repository)
}

fn goldens(golden: &str) -> Vec<Value> {
    let golden: Value = serde_json::from_slice(&fs::read(golden_dir(golden).join("golden.json")).unwrap()).unwrap();
    golden["sequences"].as_array().unwrap().clone()
}

fn request(prompt: &[u64], len: usize) -> Value {
    json!({"input_ids": prompt, "input_lengths": prompt.len(), "request_output_len": len, "end_id": -1})
}

/// A request with more fields.
fn with(mut request: Value, fields: Value) -> Value {
    request.as_object_mut().unwrap().extend(fields.as_object().unwrap().clone());
    request
}

/// Tokens of a text, of which the first of a repeated phrase are found again by prompt look-up.
fn repeated(len: u64) -> Vec<u64> {
    (0..len).map(|i| 3 + (i % 11 * 17) % 190).collect()
}

/// Prompts that begin with the same 100 tokens; each is continued to the end of the context.
fn long_requests(count: u64) -> Vec<Value> {
    let prompt = |n: u64| -> Vec<u64> {
        let own = (0..10 + n).map(|i| 3 + (i * 31 + n * 17) % 190);
        (0..100).map(|i| 3 + (i * 7) % 190).chain(own).collect()
    };
    (0..count).map(prompt).map(|prompt| request(&prompt, MAX_LEN - prompt.len())).collect()
}

fn output_ids(url: &str, request: &Value) -> Value {
    let (status, text) = post_to(url, request);
    assert_eq!(status, 200, "{text}");
    serde_json::from_str::<Value>(&text).unwrap()["output_ids"].clone()
}

fn together(url: &str, requests: &[Value]) -> Vec<Value> {
    thread::scope(|scope| {
        let tasks: Vec<_> = requests.iter().map(|request| scope.spawn(|| output_ids(url, request))).collect();
        tasks.into_iter().map(|task| task.join().unwrap()).collect()
    })
}

/// The outputs of requests one after the other, in one worker without a prefix cache.
fn expected(golden: &str, requests: &[Value]) -> Vec<Value> {
    let (world, _repository) = world(golden, 1, &[("enable_kv_cache_reuse", "false")]);
    let url = world.url("/v2/models/tensorrt_llm/generate");
    requests.iter().map(|request| output_ids(&url, request)).collect()
}

#[test]
fn tokens_are_those_of_transformers_and_the_same_in_a_small_pool_for_world_sizes_1_2_and_4() {
    let requests = long_requests(6);
    for (golden, world_sizes) in [("qwen3_5", &[1, 2, 4][..]), ("qwen3_next", &[2]), ("qwen3_5_moe_vision", &[2])] {
        let expected = expected(golden, &requests);
        for &world_size in world_sizes {
            let (mut world, _repository) = world(golden, world_size, &SMALL_POOL);
            let url = world.url("/v2/models/tensorrt_llm/generate");
            for sequence in goldens(golden) {
                // As far as the choice is clear; after a near tie, the order of a sum decides.
                let margins = sequence["margins"].as_array().unwrap();
                let num_clear = margins.iter().take_while(|margin| margin.as_f64() > Some(0.01)).count();
                let prompt: Vec<u64> = serde_json::from_value(sequence["prompt"].clone()).unwrap();
                let found = output_ids(&url, &request(&prompt, num_clear));
                let tokens = json!(sequence["tokens"].as_array().unwrap()[..num_clear]);
                assert_eq!(found, tokens, "{golden}, world size {world_size}");
            }
            // Together: they preempt each other, and start from each other's snapshots.
            assert_eq!(together(&url, &requests), expected, "{golden}, world size {world_size}");
            assert!(world.metric("trireme_llm_prefix_cache_reused_blocks_total") > 0.0);
            eventually("blocks are free", || world.metric("trireme_llm_kv_blocks_used") == 0.0);
        }
    }
}

#[test]
fn tokens_are_the_same_in_pipeline_stages() {
    let requests = long_requests(6);
    let expected = expected("qwen3_5", &requests);
    let parameters = [&SMALL_POOL[..], &[("pp", "2"), ("tp", "1")]].concat();
    let (world, _repository) = world("qwen3_5", 2, &parameters);
    assert_eq!(together(&world.url("/v2/models/tensorrt_llm/generate"), &requests), expected);
}

#[test]
fn drafts_change_no_token() {
    let mut requests = long_requests(4);
    requests.extend([40, 77].map(|len| request(&repeated(len), 120)));
    // Drawn tokens.
    let sampled = |seed: u64| json!({"temperature": 0.7, "runtime_top_k": 3, "random_seed": seed});
    requests.extend((1..4).map(|seed| with(request(&repeated(44), 100), sampled(seed))));
    let expected = expected("qwen3_5", &requests);
    for (world_size, tp) in [(1, "1"), (2, "2")] {
        let parameters = [&SMALL_POOL[..], &[("prompt_lookup_num_tokens", "5"), ("tp", tp)]].concat();
        let (mut world, _repository) = world("qwen3_5", world_size, &parameters);
        let url = world.url("/v2/models/tensorrt_llm/generate");
        assert_eq!(together(&url, &requests), expected, "{world_size} workers");
        let drafted = world.metric("trireme_llm_drafted_tokens_total");
        let accepted = world.metric("trireme_llm_accepted_draft_tokens_total");
        assert!(accepted > 0.0 && accepted < drafted, "{accepted} of {drafted} drafts");
    }
}

#[test]
fn the_next_turn_of_a_conversation_computes_what_is_new_and_gives_the_tokens_of_a_cold_start() {
    let (mut world, _repository) = world("qwen3_5", 1, &[]);
    let url = world.url("/v2/models/tensorrt_llm/generate");
    let mut text: Vec<u64> = (0..37).map(|i| 3 + (i * 7) % 190).collect();
    for turn in 0..4 {
        let asked = request(&text, 30);
        let before = world.metric("trireme_llm_prefix_cache_reused_blocks_total");
        let found = output_ids(&url, &asked);
        let reused = world.metric("trireme_llm_prefix_cache_reused_blocks_total") - before;
        assert_eq!(json!([found]), json!(expected("qwen3_5", &[asked])), "turn {turn}");
        // The last token of an answer was not computed; the others are, up to the end of a block.
        let known = if turn == 0 { 0 } else { text.len() - 12 - 1 };
        assert_eq!(reused, (known / 16) as f64, "turn {turn}");
        text.extend(found.as_array().unwrap().iter().map(|id| id.as_u64().unwrap()));
        text.extend((0..12).map(|i| 3 + (i * 11 + turn) % 190));
    }
}

#[test]
fn a_text_survives_the_death_of_a_worker() {
    let requests = long_requests(1);
    let expected = expected("qwen3_5", &requests);
    let (world, _repository) = world("qwen3_5", 2, &SMALL_POOL);
    let mut found = Vec::new();
    for (index, event) in world.stream_of("tensorrt_llm", &requests[0]).events().enumerate() {
        if index == 60 {
            signal(world.workers()[1], Signal::SIGKILL);
        }
        found.extend(event["output_ids"].as_array().unwrap_or_else(|| panic!("{event}")).clone());
    }
    assert_eq!(Value::Array(found), expected[0]);
}

/// A conversation: a system prompt of 38 tokens that many share, and a message of its own. The model's end token is behind each.
fn conversation(n: u64) -> Value {
    let system = (0..37).map(|i| 3 + (i * 7) % 190).chain([2]);
    let message = (0..24 + n).map(|i| 3 + (i * 31 + n * 17) % 190).chain([2, 5]);
    request(&system.chain(message).collect::<Vec<u64>>(), 12)
}

#[test]
fn a_system_prompt_is_found_by_the_second_conversation_with_the_tokens_of_a_cold_start() {
    let requests: Vec<Value> = (0..5).map(conversation).collect();
    let expected = expected("olmo_hybrid", &requests);
    // In the second world there are three slots for states, and blocks for three conversations.
    for (world_size, parameters) in [(1, &[][..]), (2, &[("max_tokens_in_paged_kv_cache", "240")])] {
        let (mut world, _repository) = world("olmo_hybrid", world_size, parameters);
        // The system prompt is shorter than regular snapshots are apart.
        world.await_log("state_interval=4");
        let url = world.url("/v2/models/tensorrt_llm/generate");
        let check = |world: &mut TestWorld, n: usize, num_reused: f64| {
            let before = world.metric("trireme_llm_prefix_cache_reused_blocks_total");
            assert_eq!(output_ids(&url, &requests[n]), expected[n], "conversation {n}, {world_size} workers");
            let reused = world.metric("trireme_llm_prefix_cache_reused_blocks_total") - before;
            assert_eq!(reused, num_reused, "conversation {n}, {world_size} workers");
        };
        check(&mut world, 0, 0.0);
        (1..5).for_each(|n| check(&mut world, n, 2.0));
        // The states are lost with a worker, and the next conversation leaves them again. It may have begun before the loss is noticed.
        signal(world.workers()[0], Signal::SIGKILL);
        assert_eq!(output_ids(&url, &requests[0]), expected[0]);
        check(&mut world, 1, 2.0);
        assert_eq!(together(&url, &requests), expected, "{world_size} workers");
    }
}

#[test]
fn several_outputs_of_one_prompt_share_it_and_beams_are_refused_with_the_reason() {
    let mut requests = long_requests(1);
    requests[0]["num_return_sequences"] = json!(3);
    requests[0]["request_output_len"] = json!(40);
    requests[0]["temperature"] = json!(1.0);
    requests[0]["runtime_top_k"] = json!(20);
    requests[0]["random_seed"] = json!(7);
    let expected = expected("qwen3_5", &requests);
    let (mut world, _repository) = world("qwen3_5", 1, &[]);
    let url = world.url("/v2/models/tensorrt_llm/generate");
    assert_eq!(output_ids(&url, &requests[0]), expected[0]);
    // The prompt of 110 tokens has 6 full blocks.
    assert_eq!(world.metric("trireme_llm_prefix_cache_reused_blocks_total"), 2.0 * 6.0);
    let mut beams = long_requests(1).remove(0);
    beams["beam_width"] = json!(2);
    let (status, text) = post_to(&url, &beams);
    assert!(status == 400 && text.contains("recurrent layers, which do not support beam search"), "{status} {text}");
}

#[test]
fn a_plan_counts_the_states() {
    let repository = golden_repository("qwen3_5", &SMALL_POOL);
    let mut command = std::process::Command::new(env!("CARGO_BIN_EXE_trireme"));
    command.args(["plan", "--device=cpu", "--world-size=1"]).arg("--model-repository").arg(repository.path());
    let text = String::from_utf8(command.output().unwrap().stdout).unwrap();
    assert!(text.contains("30 KV blocks of 16 positions: 480 positions\n"), "{text}");
    assert!(text.contains(" recurrent states of 0.0 MiB, for running sequences and snapshots\n"), "{text}");
}
