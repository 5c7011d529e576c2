//! Beam search returns the tokens of transformers' `generate(num_beams=…)` in fp32 (`scripts/goldens/make_beam_goldens.py`).

mod support;

use std::path::Path;

use serde_json::{Value, json};
use support::{Options, TestWorld, copied_repository, eventually, set_parameters, widen};

fn goldens(file: &str) -> Vec<Value> {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/goldens").join(file);
    serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap()
}

/// Runs the beam search of a golden; each beam's tokens and log-probability.
fn search(world: &TestWorld, golden: &Value) -> Vec<(Vec<i64>, f64)> {
    let mut body = json!({"input_ids": golden["prompt"], "input_lengths": golden["prompt"].as_array().unwrap().len(),
        "request_output_len": golden["max_tokens"], "return_log_probs": true, "beam_width": golden["beam_width"],
        "len_penalty": golden["len_penalty"], "early_stopping": golden["early_stopping"]});
    if let Some(penalty) = golden.get("repetition_penalty") {
        body["repetition_penalty"] = penalty.clone();
    }
    let (status, text) = world.post("/v2/models/tensorrt_llm/generate", &body);
    assert_eq!(status, 200, "{text}");
    let answer: Value = serde_json::from_str(&text).unwrap();
    let numbers = |name: &str| -> Vec<f64> {
        let values = &answer[name];
        values.as_array().unwrap_or_else(|| panic!("{name}: {answer}")).iter().map(|x| x.as_f64().unwrap()).collect()
    };
    let (ids, lengths, log_probs) = (numbers("output_ids"), numbers("sequence_length"), numbers("cum_log_probs"));
    let width = ids.len() / lengths.len();
    let beam = |(ids, (length, log_prob)): (&[f64], (&f64, &f64))| {
        (ids[..*length as usize].iter().map(|id| *id as i64).collect(), *log_prob)
    };
    ids.chunks(width).zip(lengths.iter().zip(&log_probs)).map(beam).collect()
}

/// Compares the beams of a search with those of a golden; their log-probabilities may differ by `allowed`.
fn compare(world: &TestWorld, golden: &Value, allowed: f64) {
    let beams = search(world, golden);
    let expected = golden["beams"].as_array().unwrap();
    assert_eq!(beams.len(), expected.len());
    for (index, ((tokens, log_prob), expected)) in beams.iter().zip(expected).enumerate() {
        assert_eq!(json!(tokens), expected["tokens"], "beam {index} of {golden}");
        let expected = expected["log_prob"].as_f64().unwrap();
        assert!((log_prob - expected).abs() < allowed, "beam {index} of {golden}: {log_prob}");
    }
}

#[test]
fn beams_are_those_of_transformers_for_world_sizes_1_and_2() {
    let repository = copied_repository();
    widen(&repository.path().join("tensorrt_llm/1/model.safetensors"));
    for world_size in [1, 2] {
        let mut world =
            TestWorld::start(Options { world_size, repository: repository.path().to_owned(), ..Options::default() });
        for golden in goldens("beam_search.json") {
            compare(&world, &golden, 1e-3);
        }
        eventually("blocks are free", || world.metric("trireme_llm_kv_blocks_used") == 0.0);
    }
}

#[test]
fn beams_with_keys_and_values_in_8_bits_are_those_of_transformers_with_rounded_ones() {
    for form in ["fp8", "int8"] {
        let repository = copied_repository();
        widen(&repository.path().join("tensorrt_llm/1/model.safetensors"));
        set_parameters(&repository, "tensorrt_llm", &[("kv_cache_dtype", form)]);
        let repository_path = repository.path().to_owned();
        let mut world = TestWorld::start(Options { repository: repository_path, ..Options::default() });
        for golden in goldens("beam_search_kv_cache.json").iter().filter(|golden| golden["kv_cache"] == form) {
            // Without rounding they differ by 0.009 to 0.17. An element near the border of two codes may have the other one.
            compare(&world, golden, 5e-3);
        }
        eventually("blocks are free", || world.metric("trireme_llm_kv_blocks_used") == 0.0);
    }
}
