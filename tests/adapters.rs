//! Adapters (LoRA): requests choose one by name, outputs are those of transformers with PEFT
//! (`scripts/goldens/make_adapter_goldens.py`), and adapters are loaded and dropped while the server runs.

mod support;

use std::path::PathBuf;

use serde_json::{Value, json};
use support::{
    Options, TestWorld, copied_repository, eventually, golden_dir, golden_repository, post_to, set_parameters, widen,
};

const LLAMA: [&str; 3] = ["llama_qv", "llama_all", "llama_patterns"];

fn adapter_dir(name: &str) -> PathBuf {
    golden_dir("adapters").join(name)
}

fn golden(name: &str) -> Value {
    serde_json::from_slice(&std::fs::read(adapter_dir(name).join("golden.json")).unwrap()).unwrap()
}

/// The goldens of the model itself.
fn plain() -> Value {
    serde_json::from_slice(&std::fs::read(golden_dir("mha_bias_f32").join("golden.json")).unwrap()).unwrap()
}

/// The greedy tokens of a prompt.
fn tokens(world: &TestWorld, model: &str, prompt: &Value, count: usize) -> Vec<u64> {
    let length = prompt.as_array().unwrap().len();
    let body = json!({"input_ids": prompt, "input_lengths": length, "request_output_len": count, "end_id": -1,
                      "exclude_input_in_output": true});
    let (status, text) = world.post(&format!("/v2/models/{model}/generate"), &body);
    assert_eq!(status, 200, "{model}: {text}");
    let answer: Value = serde_json::from_str(&text).unwrap();
    let ids = answer["output_ids"].as_array().unwrap_or_else(|| panic!("no tokens: {text}"));
    ids.iter().map(|id| id.as_u64().unwrap()).collect()
}

/// Compares all sequences of a golden, as far as its margins are above the rounding of f32.
fn check(world: &TestWorld, model: &str, golden: &Value) {
    for sequence in golden["sequences"].as_array().unwrap() {
        let expected: Vec<u64> = sequence["tokens"].as_array().unwrap().iter().map(|id| id.as_u64().unwrap()).collect();
        let found = tokens(world, model, &sequence["prompt"], expected.len());
        let equal = found.iter().zip(&expected).take_while(|(found, expected)| found == expected).count();
        let margin = sequence["margins"].get(equal).and_then(Value::as_f64).unwrap_or(0.0);
        assert!(margin <= 2e-4, "{model}: token {equal} of {expected:?} differs at a margin of {margin}: {found:?}");
    }
}

#[test]
fn requests_of_several_adapters_and_of_none_have_the_tokens_of_peft_for_world_sizes_1_and_2() {
    let modules = LLAMA.map(|name| format!("{name}={}", adapter_dir(name).display())).join(",");
    // Fewer slots than adapters, and prompts in chunks.
    let parameters = [("lora_modules", modules.as_str()), ("max_loras", "2"), ("max_num_tokens", "64")];
    let repository = golden_repository("mha_bias_f32", &parameters);
    for world_size in [1, 2] {
        let options = Options { world_size, repository: repository.path().to_owned(), ..Options::default() };
        let mut world = TestWorld::start(options);
        std::thread::scope(|scope| {
            for name in LLAMA {
                let world = &world;
                scope.spawn(move || (0..2).for_each(|_| check(world, name, &golden(name))));
            }
            (0..2).for_each(|_| check(&world, "tensorrt_llm", &plain()));
        });
        let (_, metrics) = world.get_metrics("/metrics");
        let info = metrics.lines().find(|line| line.starts_with("vllm:lora_requests_info{")).unwrap_or_default();
        assert!(info.contains("max_lora=\"2\"") && info.contains("running_lora_adapters=\"\""), "{metrics}");
        let (status, text) = world.post("/v2/models/llama_none/generate", &json!({"input_ids": [1]}));
        assert!(status == 400 || status == 404, "{status} {text}");
    }
}

fn models(world: &TestWorld) -> Vec<Value> {
    let (_, text) = world.get("/v1/models");
    serde_json::from_str::<Value>(&text).unwrap()["data"].as_array().unwrap().clone()
}

#[test]
fn an_adapter_is_loaded_listed_chosen_by_its_name_and_dropped_while_the_server_runs() {
    let repository = copied_repository();
    set_parameters(&repository, "tensorrt_llm", &[("max_loras", "1")]);
    widen(&repository.path().join("tensorrt_llm/1/model.safetensors"));
    let mut world = TestWorld::start(Options { repository: repository.path().to_owned(), ..Options::default() });
    let golden = golden("demo");
    let count = golden["tokens"].as_array().unwrap().len();
    let request = |model: &str| json!({"model": model, "prompt": golden["text"], "max_tokens": count, "temperature": 0, "ignore_eos": true});
    let complete = |world: &TestWorld, model: &str| world.post("/v1/completions", &request(model));
    let answer = |text: &str| serde_json::from_str::<Value>(text).unwrap()["choices"][0]["text"].clone();
    assert_eq!(complete(&world, "story").0, 404);
    let load = json!({"lora_name": "story", "lora_path": adapter_dir("demo")});
    let (status, text) = world.post("/v1/load_lora_adapter", &load);
    assert_eq!((status, text.as_str()), (200, "Success: LoRA adapter 'story' added successfully."));
    let (status, text) = world.post("/v1/load_lora_adapter", &load);
    assert!(status == 400 && text.contains("is loaded already"), "{status} {text}");

    let (_, before) = complete(&world, "ensemble");
    let (status, text) = complete(&world, "story");
    assert_eq!(status, 200, "{text}");
    assert_eq!(answer(&text), golden["answer"]);
    let (_, after) = complete(&world, "ensemble");
    assert_eq!(answer(&before), answer(&after));
    assert_ne!(answer(&before), golden["answer"]);
    let body = json!({"text_input": golden["text"], "max_tokens": count, "exclude_input_in_output": true});
    let (status, text) = world.post("/v2/models/story/generate", &body);
    assert!(status == 200, "{status} {text}");
    let text_output = serde_json::from_str::<Value>(&text).unwrap()["text_output"].as_str().unwrap().to_owned();
    let expected = golden["answer"].as_str().unwrap().trim();
    assert_eq!(text_output.trim().trim_start_matches(golden["text"].as_str().unwrap()).trim(), expected);

    let entry = models(&world).into_iter().find(|model| model["id"] == "story").expect("the adapter is listed");
    assert_eq!(
        (&entry["parent"], entry["root"].as_str().unwrap()),
        (&json!("ensemble"), adapter_dir("demo").to_str().unwrap())
    );
    let wrong = json!({"lora_name": "wrong", "lora_path": adapter_dir("llama_all")});
    let (status, text) = world.post("/v1/load_lora_adapter", &wrong);
    assert!(status == 400 && text.contains("has shape"), "{status} {text}");
    let taken = json!({"lora_name": "ensemble", "lora_path": adapter_dir("demo")});
    assert!(world.post("/v1/load_lora_adapter", &taken).1.contains("is the name of a model"));

    let (status, text) = world.post("/v1/unload_lora_adapter", &json!({"lora_name": "story"}));
    assert_eq!((status, text.as_str()), (200, "Success: LoRA adapter 'story' removed successfully."));
    assert_eq!(world.post("/v1/unload_lora_adapter", &json!({"lora_name": "story"})).0, 404);
    assert_eq!(complete(&world, "story").0, 404);
    assert!(models(&world).iter().all(|model| model["id"] != "story"));
    assert!(world.get_metrics("/metrics").1.contains("trireme_llm_adapters{model=\"tensorrt_llm\",version=\"1\"} 0"));
}

#[test]
fn an_adapter_is_dropped_after_the_requests_that_use_it() {
    let modules = format!("story={}", adapter_dir("demo").display());
    let repository = copied_repository();
    set_parameters(&repository, "tensorrt_llm", &[("lora_modules", &modules)]);
    let mut world = TestWorld::start(Options { repository: repository.path().to_owned(), ..Options::default() });
    let request = json!({"model": "story", "prompt": "Once", "max_tokens": 300, "temperature": 0, "ignore_eos": true});
    std::thread::scope(|scope| {
        let url = world.url("/v1/completions");
        let running = scope.spawn(move || post_to(&url, &request));
        eventually("the adapter runs", || world.get_metrics("/metrics").1.contains("running_lora_adapters=\"story\""));
        let (status, text) = world.post("/v1/unload_lora_adapter", &json!({"lora_name": "story"}));
        assert_eq!(status, 200, "{text}");
        assert_eq!(world.metric("trireme_llm_requests_running"), 0.0, "a request still used the adapter");
        let (status, text) = running.join().unwrap();
        let answer: Value = serde_json::from_str(&text).unwrap();
        assert_eq!((status, answer["usage"]["completion_tokens"].as_u64()), (200, Some(300)), "{text}");
    });
}
