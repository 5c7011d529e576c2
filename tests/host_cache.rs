//! The host tier of the prefix cache: conversations that do not fit on the device together come back from host memory, with the tokens
//! of a cold start.
//!
//! The models are those of `tests/goldens`, with a context of 256 positions. A block has 16 positions.

mod support;

use nix::sys::signal::Signal;
use serde_json::{Value, json};
use support::{
    Options, TestWorld, copied_repository, eventually, golden_repository, output_ids, set_parameters, signal,
};

/// A conversation of 200 tokens fits once.
const SMALL_POOL: (&str, &str) = ("max_tokens_in_paged_kv_cache", "272");
/// Room for several conversations of these models.
const HOST_MEMORY: (&str, &str) = ("kv_cache_host_memory_bytes", "16777216");

fn world(golden: &str, world_size: u32, parameters: &[(&str, &str)]) -> (TestWorld, tempfile::TempDir) {
    let repository = golden_repository(golden, parameters);
    let options = Options { world_size, repository: repository.path().to_owned(), ..Options::default() };
    (TestWorld::start(options), repository)
}

/// The tokens after a text.
fn tokens_after(world: &TestWorld, text: &[u64]) -> Vec<u64> {
    let request = json!({"input_ids": text, "input_lengths": text.len(), "request_output_len": 20, "end_id": -1});
    output_ids(world, "tensorrt_llm", &request)
}

/// Two conversations by turns, three turns each. Returns the outputs of all turns, and of each turn the prompt tokens that the cache
/// had, and those of them that were on the host.
fn conversations(world: &mut TestWorld) -> (Vec<Vec<u64>>, Vec<[f64; 2]>) {
    conversations_with(world, |_, _| {})
}

/// The same with a call before each turn of a conversation, with its number.
fn conversations_with(
    world: &mut TestWorld,
    mut before_turn: impl FnMut(&mut TestWorld, usize),
) -> (Vec<Vec<u64>>, Vec<[f64; 2]>) {
    let prompt = |n: u64, len: u64| (0..len).map(move |i| 3 + (i * 31 + n * 17) % 190);
    let mut texts: Vec<Vec<u64>> = (0..2).map(|n| prompt(n, 130).collect()).collect();
    let (mut outputs, mut cached) = (Vec::new(), Vec::new());
    for turn in 0..3 {
        for text in &mut texts {
            before_turn(world, outputs.len());
            let counters = ["trireme_llm_cached_prompt_tokens_total", "trireme_llm_prefix_cache_host_tokens_total"];
            let before = counters.map(|name| world.metric(name));
            let output = tokens_after(world, text);
            let after = counters.map(|name| world.metric(name));
            cached.push([after[0] - before[0], after[1] - before[1]]);
            text.extend(&output);
            text.extend(prompt(10 + turn, 12));
            outputs.push(output);
        }
    }
    (outputs, cached)
}

#[test]
fn the_third_turn_of_a_conversation_comes_from_the_host_with_the_tokens_of_a_cold_start() {
    // Of the third turn, 130 + 2 * 20 + 12 tokens were known, the last of an answer without its position.
    let known = (130 + 32 + 20 - 1) / 16 * 16;
    let stages = [("pp", "2"), ("tp", "1")];
    let layouts = [(1, &[][..]), (2, &[]), (2, &stages)];
    for (golden, (world_size, parameters)) in
        ["llama3_gqa", "qwen3_5"].into_iter().flat_map(|g| layouts.map(|l| (g, l)))
    {
        let cold = [parameters, &[("enable_kv_cache_reuse", "false")]].concat();
        let cold = conversations(&mut world(golden, world_size, &cold).0).0;
        let parameters = [parameters, &[SMALL_POOL, HOST_MEMORY]].concat();
        let (mut world, _repository) = world(golden, world_size, &parameters);
        let (outputs, cached) = conversations(&mut world);
        assert_eq!(outputs, cold, "{golden}, {parameters:?}");
        let [all, of_host] = cached[4];
        assert_eq!(all, f64::from(known), "{golden}, {parameters:?}: {cached:?}");
        assert!(of_host > 0.0 && of_host <= all, "{golden}, {parameters:?}: {cached:?}");
        let (used, limit) =
            (world.metric("trireme_llm_host_cache_used_bytes"), world.metric("trireme_llm_host_cache_limit_bytes"));
        assert!(used > 0.0 && used <= limit && limit <= f64::from(world_size) * 16_777_216.0, "{used} of {limit}");
        eventually("blocks are free", || world.metric("trireme_llm_kv_blocks_used") == 0.0);

        // A reset empties both tiers.
        let (status, text) = world.post("/reset_prefix_cache", &json!({}));
        assert_eq!((status, text.as_str()), (200, ""));
        eventually("the host is empty", || world.metric("trireme_llm_host_cache_used_bytes") == 0.0);
        let (again, cached) = conversations(&mut world);
        assert_eq!((again, cached[0]), (outputs, [0.0, 0.0]), "{golden}, {parameters:?}");
        assert!(world.stop().success());
    }
}

#[test]
fn what_the_host_has_outlives_a_worker_with_the_tokens_of_a_cold_start() {
    let known = f64::from((130 + 32 + 20 - 1) / 16 * 16);
    for (golden, world_size) in [("llama3_gqa", 1), ("llama3_gqa", 2), ("qwen3_5", 1)] {
        let cold = conversations(&mut world(golden, world_size, &[("enable_kv_cache_reuse", "false")]).0).0;
        // As many tokens as the longest sequence has.
        let parameters = [("max_tokens_in_paged_kv_cache", "256"), HOST_MEMORY];
        let (mut world, _repository) = world(golden, world_size, &parameters);
        let mut used = Vec::new();
        let (outputs, cached) = conversations_with(&mut world, |world, turn| {
            if turn != 4 {
                return;
            }
            // Both conversations have had two turns. This text leaves nothing of them on the device.
            tokens_after(world, &(0..236).map(|i| 3 + (i * 7) % 190).collect::<Vec<_>>());
            used.push(world.metric("trireme_llm_host_cache_used_bytes"));
            let lost = world.workers();
            signal(lost[world_size as usize - 1], Signal::SIGKILL);
            eventually("workers run again", || {
                world.metric("trireme_llm_worker_restarts_total") == 1.0
                    && world.metric("trireme_llm_ready") == 1.0
                    && world.workers().iter().all(|pid| !lost.contains(pid))
            });
        });
        assert_eq!(outputs, cold, "{golden}, {world_size}");
        // The newest snapshots of recurrent states had not left the device, so such a text goes on from an earlier one.
        let least = if golden == "qwen3_5" { 128.0 } else { known };
        let is_found = |&[all, of_host]: &[f64; 2]| all == of_host && (least..=known).contains(&all);
        assert!(cached[4..].iter().all(is_found), "{golden}, {world_size}: {cached:?}");
        assert!(used[0] > 0.0, "{golden}, {world_size}: {used:?}");
        assert!(world.log_text().contains("KV blocks in host memory are kept"), "{}", world.log_text());
        assert!(world.stop().success());
    }
}

#[test]
fn without_host_memory_the_third_turn_is_computed_again() {
    let (mut world, _repository) = world("llama3_gqa", 1, &[SMALL_POOL]);
    let (_, cached) = conversations(&mut world);
    assert!(cached[4][0] < 160.0 && cached.iter().all(|turn| turn[1] == 0.0), "{cached:?}");
    assert_eq!(world.metric("trireme_llm_host_cache_limit_bytes"), 0.0);
}

#[test]
fn windows_come_back_too() {
    // Just enough for the longest sequence.
    let pool = ("max_tokens_in_paged_kv_cache", "224");
    let cold = conversations(&mut world("gemma3", 1, &[("enable_kv_cache_reuse", "false")]).0).0;
    let (mut world, _repository) = world("gemma3", 1, &[pool, HOST_MEMORY]);
    let (outputs, cached) = conversations(&mut world);
    assert_eq!(outputs, cold);
    let of_host: f64 = cached.iter().map(|turn| turn[1]).sum();
    assert!(cached[4][0] > 0.0 && of_host > 0.0, "{cached:?}");
}

#[test]
fn usage_counts_what_the_host_had_and_resets_are_for_a_model_or_for_all() {
    let repository = copied_repository();
    set_parameters(
        &repository,
        "tensorrt_llm",
        &[("max_tokens_in_paged_kv_cache", "288"), ("max_sequence_len", "256")],
    );
    let args = vec!["--kv-cache-host-memory=64MiB".to_owned()];
    let options = Options { repository: repository.path().to_owned(), args, ..Options::default() };
    let world = TestWorld::start(options);
    let ask = |n: usize| {
        let text = format!("{n} {}", "the little boat went over the sea and came home again ".repeat(10));
        let body = json!({"model": "ensemble", "prompt": text, "max_tokens": 8, "temperature": 0});
        let (status, reply) = world.post("/v1/completions", &body);
        assert_eq!(status, 200, "{reply}");
        let reply: Value = serde_json::from_str(&reply).unwrap();
        let cached = reply["usage"]["prompt_tokens_details"]["cached_tokens"].as_u64().unwrap_or(0);
        (reply["choices"][0]["text"].as_str().unwrap().to_owned(), cached)
    };
    let first = ask(1);
    assert_eq!(first.1, 0);
    (2..4).for_each(|n| drop(ask(n)));
    let again = ask(1);
    assert!(again.0 == first.0 && again.1 > 80, "{first:?}, {again:?}");
    for (query, then) in [("", 0), ("?model=ensemble", 0), ("?model=tensorrt_llm", 0)] {
        let (status, text) = world.post(&format!("/reset_prefix_cache{query}"), &json!({}));
        assert_eq!(status, 200, "{text}");
        assert_eq!(ask(1), (first.0.clone(), then), "after a reset of {query:?}");
    }
    let (status, text) = world.post("/reset_prefix_cache?model=preprocessing", &json!({}));
    assert!(status == 400 && text.contains("model `preprocessing` has no prefix cache"), "{status} {text}");
    assert_eq!(world.post("/reset_prefix_cache?model=other", &json!({})).0, 404);
    assert_eq!(world.get("/reset_prefix_cache").0, 405);
}

#[test]
fn requests_share_cached_prefixes_with_those_of_the_same_salt_alone() {
    let repository = copied_repository();
    let mut world = TestWorld::start(Options { repository: repository.path().to_owned(), ..Options::default() });
    let text = "the little boat went over the sea and came home again ".repeat(6);
    let ids: Vec<u64> = (0..100).map(|i| 3 + (i * 7) % 190).collect();
    let asked = [
        ("/v1/completions", json!({"model": "ensemble", "prompt": text, "max_tokens": 4})),
        (
            "/v1/chat/completions",
            json!({"model": "ensemble", "messages": [{"role": "user", "content": text}], "max_tokens": 4}),
        ),
        ("/v1/responses", json!({"model": "ensemble", "input": text, "max_output_tokens": 16})),
        ("/v2/models/ensemble/generate", json!({"text_input": text, "max_tokens": 4})),
        (
            "/v2/models/tensorrt_llm/generate",
            json!({"input_ids": ids, "input_lengths": ids.len(), "request_output_len": 4}),
        ),
    ];
    for (path, body) in asked {
        let mut reused = |salt: Value| {
            let mut body = body.clone();
            if !salt.is_null() {
                body["cache_salt"] = salt;
            }
            let before = world.metric("trireme_llm_prefix_cache_reused_blocks_total");
            let (status, reply) = world.post(path, &body);
            assert_eq!(status, 200, "{path}: {reply}");
            world.metric("trireme_llm_prefix_cache_reused_blocks_total") - before
        };
        let found = [json!("a"), json!("b"), Value::Null, json!("a"), json!("b"), Value::Null].map(&mut reused);
        assert!(found[..3] == [0.0; 3] && found[3] > 1.0 && found[4..] == [found[3]; 2], "{path}: {found:?}");
        assert_eq!(world.post("/reset_prefix_cache", &json!({})).0, 200);
        for wrong in [json!(""), json!(5), json!("x".repeat(1025))] {
            let mut body = body.clone();
            body["cache_salt"] = wrong;
            let (status, reply) = world.post(path, &body);
            assert!(status == 400 && reply.contains("`cache_salt` must"), "{path}: {status} {reply}");
        }
    }
    // As a parameter of `infer`, and the same salt in all protocols.
    let tensor = |name: &str, shape: [usize; 2], data: Value| json!({"name": name, "shape": shape, "datatype": "INT32", "data": data});
    let body = json!({
        "inputs": [tensor("input_ids", [1, 100], json!(ids)), tensor("input_lengths", [1, 1], json!([100])),
                   tensor("request_output_len", [1, 1], json!([4]))],
        "parameters": {"cache_salt": "a"},
    });
    let salted = json!({"input_ids": ids, "input_lengths": 100, "request_output_len": 4, "cache_salt": "a"});
    assert_eq!(world.post("/v2/models/tensorrt_llm/generate", &salted).0, 200);
    let before = world.metric("trireme_llm_prefix_cache_reused_blocks_total");
    let (status, reply) = world.post("/v2/models/tensorrt_llm/infer", &body);
    assert_eq!(status, 200, "{reply}");
    assert_eq!(world.metric("trireme_llm_prefix_cache_reused_blocks_total") - before, 6.0);
}
