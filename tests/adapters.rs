//! Adapters (LoRA): requests choose one by name, outputs are those of transformers with PEFT
//! (`scripts/goldens/make_adapter_goldens.py`), and adapters are loaded and dropped while the server runs.

mod support;

use std::path::PathBuf;

use serde_json::{Value, json};
use support::{
    Options, TestWorld, check_golden, copied_repository, eventually, golden, golden_dir, golden_repository, post_to,
    set_parameters, widen,
};

const LLAMA: [&str; 3] = ["llama_qv", "llama_all", "llama_patterns"];

fn adapter_dir(name: &str) -> PathBuf {
    golden_dir("adapters").join(name)
}

/// The error of log-probabilities in f32.
const F32_ERROR: f64 = 1e-4;

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
                scope.spawn(move || {
                    (0..2).for_each(|_| check_golden(world, name, &golden(&format!("adapters/{name}")), F32_ERROR))
                });
            }
            (0..2).for_each(|_| check_golden(&world, "tensorrt_llm", &golden("mha_bias_f32"), F32_ERROR));
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
    let golden = golden("adapters/demo");
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

/// The rows of `lora_config` and `lora_weights` for the adapter `llama_qv`: TensorRT-LLM's form, with the factor 2 in B.
fn tensors() -> (Vec<[u32; 3]>, Vec<f32>) {
    let bytes = std::fs::read(adapter_dir("llama_qv").join("adapter_model.safetensors")).unwrap();
    let header_len = u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
    let header: Value = serde_json::from_slice(&bytes[8..8 + header_len]).unwrap();
    let values = |name: &str| -> Vec<f32> {
        let offset = |index: usize| 8 + header_len + header[name]["data_offsets"][index].as_u64().unwrap() as usize;
        bytes[offset(0)..offset(1)].as_chunks::<4>().0.iter().map(|it| f32::from_le_bytes(*it)).collect()
    };
    let (mut config, mut weights) = (Vec::new(), Vec::new());
    for layer in 0..2 {
        for (module, name) in [(1, "q_proj"), (3, "v_proj")] {
            let tensor = |part: &str| {
                values(&format!("base_model.model.model.layers.{layer}.self_attn.{name}.lora_{part}.weight"))
            };
            config.push([module, layer, 4]);
            weights.extend(tensor("A"));
            weights.extend(tensor("B").iter().map(|b| 2.0 * b));
            weights.extend([9.0; 8]); // Rows are filled up.
        }
    }
    (config, weights)
}

#[test]
fn an_adapter_in_a_request_of_tensorrt_llms_clients_is_kept_for_later_requests_with_its_task_id() {
    let repository = golden_repository("mha_bias_f32", &[("max_loras", "1")]);
    let file = repository.path().join("tensorrt_llm/config.pbtxt");
    let inputs =
        [("lora_task_id", "UINT64", "1"), ("lora_weights", "FP32", "-1, -1"), ("lora_config", "INT32", "-1, 3")];
    // `infer` over HTTP is for models that are not decoupled.
    let mut text = std::fs::read_to_string(&file).unwrap().replace("decoupled: true", "decoupled: false");
    for (name, datatype, dims) in inputs {
        text += &format!("input {{ name: \"{name}\" data_type: TYPE_{datatype} dims: [ {dims} ] optional: true }}\n");
    }
    std::fs::write(&file, text).unwrap();
    let world = TestWorld::start(Options { repository: repository.path().to_owned(), ..Options::default() });
    let (config, weights) = tensors();
    let golden = golden("adapters/llama_qv");
    let sequence = &golden["sequences"][2];
    let (prompt, count) = (&sequence["prompt"], sequence["tokens"].as_array().unwrap().len());
    let tensor = |name: &str, datatype: &str, shape: &[usize], data: Value| json!({"name": name, "datatype": datatype, "shape": shape, "data": data});
    let request = |further: Vec<Value>| {
        let length = prompt.as_array().unwrap().len();
        let mut inputs = vec![
            tensor("input_ids", "INT32", &[1, length], prompt.clone()),
            tensor("input_lengths", "INT32", &[1, 1], json!([length])),
            tensor("request_output_len", "INT32", &[1, 1], json!([count])),
            tensor("end_id", "INT32", &[1, 1], json!([-1])),
        ];
        inputs.extend(further);
        world.post("/v2/models/tensorrt_llm/infer", &json!({"inputs": inputs}))
    };
    let task = |id: u64| tensor("lora_task_id", "UINT64", &[1, 1], json!([id]));
    let with_weights = |config: &[[u32; 3]]| {
        let rows = config.len();
        vec![
            tensor("lora_config", "INT32", &[1, rows, 3], json!(config.concat())),
            tensor("lora_weights", "FP32", &[1, rows, weights.len() / 4], json!(weights[..rows * weights.len() / 4])),
        ]
    };
    let (status, text) = request(vec![task(7)]);
    assert!(status == 400 && text.contains("send `lora_weights` and `lora_config` with it"), "{status} {text}");
    let first = [with_weights(&config), vec![task(7)]].concat();
    for further in [first, vec![task(7)]] {
        let (status, text) = request(further);
        assert_eq!(status, 200, "{text}");
        let answer: Value = serde_json::from_str(&text).unwrap();
        let outputs = answer["outputs"].as_array().unwrap();
        let ids = outputs.iter().find(|output| output["name"] == "output_ids").unwrap()["data"].as_array().unwrap();
        assert!(ids.ends_with(sequence["tokens"].as_array().unwrap()), "{text}");
    }
    for (row, words) in
        [([1, 0, 17], "rank 17"), ([9, 0, 4], "module 9"), ([1, 2, 4], "layer 2"), ([0, 0, 4], "`attn_qkv`")]
    {
        let (status, text) = request([with_weights(&[row]), vec![task(8)]].concat());
        assert!(status == 400 && text.contains(words), "{status} {text}");
    }
    let (status, text) = request(with_weights(&config));
    assert!(status == 400 && text.contains("needs the input `lora_task_id`"), "{status} {text}");
}
