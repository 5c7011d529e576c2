//! Mixtures of experts in a world: the ways to divide experts among workers give the tokens of transformers.

mod support;

use std::fs;

use serde_json::{Value, json};
use support::{Options, TestWorld, golden_dir, golden_repository, post_to};

fn generate(world: &TestWorld, prompt: &Value, count: usize) -> Value {
    let len = prompt.as_array().unwrap().len();
    let request = json!({"input_ids": prompt, "input_lengths": len, "request_output_len": count, "end_id": -1});
    let (status, text) = post_to(&world.url("/v2/models/tensorrt_llm/generate"), &request);
    assert_eq!(status, 200, "{text}");
    serde_json::from_str::<Value>(&text).unwrap()["output_ids"].clone()
}

#[test]
fn workers_with_different_experts_give_the_tokens_of_transformers() {
    for (case, world_size, ep) in [("qwen3_moe", 2, "2"), ("gpt_oss", 4, "2")] {
        let golden: Value = serde_json::from_slice(&fs::read(golden_dir(case).join("golden.json")).unwrap()).unwrap();
        let repository = golden_repository(case, &[("ep", ep)]);
        let options = Options { world_size, repository: repository.path().to_owned(), ..Options::default() };
        let world = TestWorld::start(options);
        for sequence in golden["sequences"].as_array().unwrap() {
            // Up to the first token that roundings could change.
            let clear = sequence["margins"].as_array().unwrap().iter();
            let count = clear.take_while(|margin| margin.as_f64().unwrap() > 0.05).count().min(12);
            let expected = &sequence["tokens"].as_array().unwrap()[..count];
            let found = generate(&world, &sequence["prompt"], count.max(1));
            let found = found.as_array().unwrap();
            assert_eq!(found[found.len() - count.max(1)..][..count], *expected, "{case}, `ep` {ep}");
        }
    }
}

#[test]
fn parts_that_do_not_divide_the_experts_are_refused_with_both_numbers() {
    let repository = golden_repository("qwen3_moe", &[("ep", "4")]);
    let args = vec!["--exit-on-error=false".to_owned()];
    let options = Options { world_size: 4, repository: repository.path().to_owned(), args, ..Options::default() };
    let (status, index) = TestWorld::start(options).post("/v2/repository/index", &json!({}));
    let expected = "6 experts cannot be divided among `ep` 4 parts of a group of 4 workers; `ep` must divide both";
    assert!(status == 200 && index.contains(expected), "{status} {index}");
}
