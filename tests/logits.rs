//! Raw logits on request equal those of transformers in fp32 (`scripts/goldens/make_logits_goldens.py`), for any world size.

mod support;

use std::fs;
use std::path::Path;

use serde_json::{Value, json};
use support::{Options, TestWorld, copied_repository, eventually, widen};

fn goldens() -> Vec<Value> {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/goldens/logits.json");
    serde_json::from_slice(&fs::read(path).unwrap()).unwrap()
}

fn numbers(value: &Value) -> Vec<f64> {
    let values = value.as_array().unwrap_or_else(|| panic!("no list: {value}"));
    values.iter().map(|number| number.as_f64().unwrap()).collect()
}

/// Compares rows of logits with the digests in the golden.
fn check(what: &str, rows: &[f64], golden: &Value) {
    let golden = golden.as_array().unwrap();
    assert!(rows.len().is_multiple_of(golden.len()) && !rows.is_empty(), "{what}: {} logits", rows.len());
    for (index, (row, golden)) in rows.chunks(rows.len() / golden.len()).zip(golden).enumerate() {
        let some: Vec<f64> = row.iter().step_by(64).copied().collect();
        let expected = numbers(&golden["some"]);
        assert_eq!(some.len(), expected.len(), "{what}, row {index}");
        let is_near = |found: f64, expected: f64, allowed: f64| (found - expected).abs() <= allowed;
        assert!(some.iter().zip(&expected).all(|(a, b)| is_near(*a, *b, 1e-3)), "{what}, row {index}: {some:?}");
        let max = row.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        let (sum, squares) = (row.iter().sum::<f64>(), row.iter().map(|x| x * x).sum::<f64>());
        let (golden_sum, golden_squares) = (golden["sum"].as_f64().unwrap(), golden["squares"].as_f64().unwrap());
        assert!(is_near(max, golden["max"].as_f64().unwrap(), 1e-3), "{what}, row {index}: largest {max}");
        assert!(is_near(sum, golden_sum, 0.5), "{what}, row {index}: sum {sum}, expected {golden_sum}");
        assert!(is_near(squares, golden_squares, 1e-4 * golden_squares), "{what}, row {index}: squares {squares}");
    }
}

fn request(golden: &Value) -> Value {
    json!({"input_ids": golden["prompt"], "input_lengths": golden["prompt"].as_array().unwrap().len(),
           "request_output_len": golden["output"].as_array().unwrap().len(), "end_id": -1,
           "return_context_logits": true, "return_generation_logits": true})
}

#[test]
fn logits_are_those_of_transformers_for_world_sizes_1_and_2() {
    let repository = copied_repository();
    widen(&repository.path().join("tensorrt_llm/1/model.safetensors"));
    // The longer prompt is computed in two steps.
    let config = repository.path().join("tensorrt_llm/config.pbtxt");
    let chunked = "\nparameters { key: \"max_num_tokens\" value: { string_value: \"64\" } }\n";
    fs::write(&config, fs::read_to_string(&config).unwrap() + chunked).unwrap();
    for world_size in [1, 2] {
        let options = Options { world_size, repository: repository.path().to_owned(), ..Options::default() };
        let mut world = TestWorld::start(options);
        for golden in goldens() {
            // Twice: the second time the prompt is in the prefix cache, and its logits must be returned nevertheless.
            for _ in 0..2 {
                let (status, text) = world.post("/v2/models/tensorrt_llm/generate", &request(&golden));
                assert_eq!(status, 200, "{text}");
                let answer: Value = serde_json::from_str(&text).unwrap();
                assert_eq!(answer["output_ids"], golden["output"], "world size {world_size}");
                check("context", &numbers(&answer["context_logits"]), &golden["context"]);
                check("generation", &numbers(&answer["generation_logits"]), &golden["generation"]);
            }
        }
        eventually("blocks are free", || world.metric("trireme_llm_kv_blocks_used") == 0.0);
    }
}

#[test]
fn a_stream_has_the_logits_of_the_prompt_once_and_of_each_token_with_it() {
    let world = TestWorld::of(1);
    let body = json!({"text_input": "Once upon a time", "max_tokens": 6, "stream": true,
                      "return_context_logits": true, "return_generation_logits": true});
    let mut stream = world.stream_request(&body);
    let events: Vec<Value> = std::iter::from_fn(|| stream.next_event()).collect();
    let contexts: Vec<usize> = events.iter().map(|event| numbers(&event["context_logits"]).len()).collect();
    assert!(contexts[0] > 0 && contexts[1..].iter().all(|&len| len == 0), "{contexts:?}");
    let of_tokens: usize = events.iter().map(|event| numbers(&event["generation_logits"]).len()).sum();
    let config = fs::read(support::shipped_repository().join("tensorrt_llm/1/config.json")).unwrap();
    let vocab_size = serde_json::from_slice::<Value>(&config).unwrap()["vocab_size"].as_u64().unwrap() as usize;
    assert_eq!((of_tokens, contexts[0] % vocab_size), (6 * vocab_size, 0));
    // Without a request for logits there are none.
    let (_, silent) = world.post("/v2/models/ensemble/generate", &json!({"text_input": "Once", "max_tokens": 2}));
    assert!(!silent.contains("logits"), "{silent}");
}
