//! Bad input gets one clear error and does not affect the next request.

mod support;

use std::fs::{self, OpenOptions};
use std::path::Path;

use serde_json::{Value, json};
use support::{Options, TestWorld, copied_repository};

fn assert_refused(world: &TestWorld, path: &str, body: &Value, message: &str) {
    let (status, text) = world.post(path, body);
    assert!((400..500).contains(&status), "{body}: {status} {text}");
    let error = serde_json::from_str::<Value>(&text).expect("an error is JSON")["error"].to_string();
    assert!(error.contains(message), "{body}: expected `{message}` in {error}");
    assert!(!world.generate("The captain", 4).is_empty(), "the next request is served after {body}");
}

#[test]
fn wrong_requests_are_refused_with_their_reason() {
    let world = TestWorld::of(1);
    let generate = "/v2/models/ensemble/generate";
    let request = |prompt: &str, max_tokens: i64| json!({"text_input": prompt, "max_tokens": max_tokens});
    assert_refused(&world, "/v2/models/nothing/generate", &request("Once", 4), "nothing");
    assert_refused(&world, generate, &request("", 4), "empty");
    assert_refused(&world, generate, &request("Once", -3), "-3");
    assert_refused(&world, generate, &request("Once", 0), "request_output_len");
    assert_refused(&world, generate, &request(&"word ".repeat(3000), 4), "at most");
    assert_refused(&world, generate, &request(&"ab ".repeat(1 << 20), 4), "--max-prompt-bytes");
    let words = |count: usize| (0..count).map(|index| format!("w{index}")).collect::<Vec<_>>();
    for list in ["stop_words", "bad_words"] {
        let body = json!({"text_input": "Once", "max_tokens": 4, list: words(40_000)});
        assert_refused(&world, generate, &body, "--max-request-words");
    }
    assert_refused(&world, generate, &json!({"text_input": "Once"}), "max_tokens");
    assert_refused(
        &world,
        generate,
        &json!({"text_input": "Once", "max_tokens": 4, "temperature": -1.0}),
        "temperature",
    );
    assert_refused(&world, generate, &json!({"text_input": "Once", "max_tokens": 4, "beam_width": 0}), "beam_width");
}

#[test]
fn text_that_is_not_utf8_is_refused() {
    let world = TestWorld::of(1);
    // A BYTES element of two bytes that are no valid UTF-8.
    let header = json!({"inputs": [
        {"name": "QUERY", "shape": [1, 1], "datatype": "BYTES", "parameters": {"binary_data_size": 6}},
        {"name": "REQUEST_OUTPUT_LEN", "shape": [1, 1], "datatype": "INT32", "data": [4]}
    ]})
    .to_string();
    let mut body = header.clone().into_bytes();
    body.extend_from_slice(&[2, 0, 0, 0, 0xff, 0xfe]);
    let (status, text) = world.post_binary("/v2/models/preprocessing/infer", header.len(), &body);
    assert!((400..500).contains(&status) && text.contains("UTF-8"), "{status} {text}");
    assert!(!world.generate("The captain", 4).is_empty());
}

/// Serves a repository whose LLM is broken by `damage`. The LLM must be unavailable with `message`, and other models must serve.
fn assert_unavailable(damage: impl FnOnce(&Path), message: &str) {
    let repository = copied_repository();
    damage(&repository.path().join("tensorrt_llm/1"));
    let args = vec!["--exit-on-error=false".to_owned(), "--strict-readiness=false".to_owned()];
    let world = TestWorld::start(Options { repository: repository.path().to_owned(), args, ..Options::default() });
    let (_, index) = world.post("/v2/repository/index", &json!({}));
    let index: Vec<Value> = serde_json::from_str(&index).expect("the index is JSON");
    let entry = index.iter().find(|entry| entry["name"] == "tensorrt_llm").expect("the model is listed");
    assert_eq!(entry["state"], "UNAVAILABLE");
    let reason = entry["reason"].as_str().expect("a reason");
    assert!(reason.contains(message), "expected `{message}` in `{reason}`");
    assert_eq!(world.get("/v2/models/preprocessing/ready").0, 200, "other models serve");
}

#[test]
fn missing_weights_are_named() {
    assert_unavailable(|checkpoint| fs::remove_file(checkpoint.join("model.safetensors")).unwrap(), "safetensors");
}

#[test]
fn a_truncated_safetensors_file_is_named() {
    let truncate = |checkpoint: &Path| {
        let file = OpenOptions::new().write(true).open(checkpoint.join("model.safetensors")).unwrap();
        file.set_len(file.metadata().unwrap().len() / 2).unwrap();
    };
    assert_unavailable(truncate, "model.safetensors");
}

#[test]
fn a_wrong_shape_is_named() {
    let widen = |checkpoint: &Path| {
        let path = checkpoint.join("config.json");
        let mut config: Value = serde_json::from_str(&fs::read_to_string(&path).unwrap()).unwrap();
        config["intermediate_size"] = json!(config["intermediate_size"].as_u64().unwrap() + 64);
        fs::write(path, config.to_string()).unwrap();
    };
    assert_unavailable(widen, "mlp");
}

#[test]
fn a_wrong_dtype_is_named() {
    let retype = |checkpoint: &Path| {
        // The header is JSON: `BF16` and ` I16` are equally long.
        let path = checkpoint.join("model.safetensors");
        let mut bytes = fs::read(&path).unwrap();
        let at = bytes.windows(6).position(|window| window == b"\"BF16\"").expect("a bf16 tensor");
        bytes[at..at + 6].copy_from_slice(b"\"I16\" ");
        fs::write(path, bytes).unwrap();
    };
    assert_unavailable(retype, "I16");
}

#[test]
fn a_world_size_that_does_not_divide_the_heads_names_those_that_would() {
    let args = vec!["--exit-on-error=false".to_owned(), "--strict-readiness=false".to_owned()];
    let world = TestWorld::start(Options { world_size: 3, args, ..Options::default() });
    let (_, index) = world.post("/v2/repository/index", &json!({}));
    assert!(index.contains("1, 2, 4"), "{index}");
}
