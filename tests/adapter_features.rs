//! Adapters (LoRA) together with other features: pipeline stages, drafts, constraints, keys and values of 8 bits, sleep, and the host
//! tier of the prefix cache. Outputs are those of transformers with PEFT (`scripts/goldens/make_adapter_goldens.py`).

mod support;

use serde_json::{Value, json};
use support::{
    Options, TestWorld, check_golden, copied_repository, eventually, golden, golden_dir, golden_repository, output_ids,
    set_parameters, widen,
};

const LLAMA: &str = "mha_bias_f32";
const ADAPTERS: [&str; 2] = ["llama_qv", "llama_all"];

/// A world of a checkpoint with adapters.
fn world(base: &str, adapters: &[&str], parameters: &[(&str, &str)], args: &[&str]) -> (TestWorld, tempfile::TempDir) {
    let folder = |name: &&str| format!("{name}={}", golden_dir("adapters").join(name).display());
    let modules = adapters.iter().map(folder).collect::<Vec<_>>().join(",");
    let repository = golden_repository(base, &[parameters, &[("lora_modules", &modules)]].concat());
    let world_size = if parameters.iter().any(|(key, _)| *key == "pp") { 2 } else { 1 };
    let args = args.iter().map(|arg| (*arg).to_owned()).collect();
    (
        TestWorld::start(Options { world_size, repository: repository.path().to_owned(), args, ..Options::default() }),
        repository,
    )
}

const F32_ERROR: f64 = 1e-4;

/// Checks a model and its adapters, all at once.
fn check_all(world: &TestWorld, base: &str, adapters: &[&str], allowed: f64) {
    std::thread::scope(|scope| {
        for name in adapters {
            scope.spawn(move || check_golden(world, name, &golden(&format!("adapters/{name}")), allowed));
        }
        check_golden(world, "tensorrt_llm", &golden(base), allowed);
    });
}

#[test]
fn pipeline_stages_have_the_products_of_their_layers() {
    for (base, adapters) in
        [(LLAMA, &ADAPTERS[..]), ("deepseek_v2", &["deepseek_v2_attention"]), ("qwen3_5", &["qwen3_5_all"])]
    {
        let (world, _repository) = world(base, adapters, &[("pp", "2"), ("tp", "1")], &[]);
        check_all(&world, base, adapters, F32_ERROR);
    }
}

/// A checkpoint, its adapters and the parameters of the model.
type Case<'a> = (&'a str, &'a [&'a str], &'a [(&'a str, &'a str)]);

#[test]
fn drafts_of_heads_and_of_another_model_are_verified_with_the_adapter() {
    let (head, llama) =
        (golden_dir("eagle3").join("specforge").display().to_string(), golden_dir(LLAMA).display().to_string());
    let cases: [Case<'_>; 4] = [
        ("mtp_qwen3_5", &["mtp_qwen3_5_all"], &[("mtp_num_tokens", "3")]),
        ("mtp_deepseek_v3", &["mtp_deepseek_v3_attention"], &[("mtp_num_tokens", "3")]),
        ("eagle3", &["eagle3_all"], &[("eagle3_num_tokens", "3"), ("eagle3_path", &head)]),
        (LLAMA, &ADAPTERS, &[("draft_model_num_tokens", "3"), ("draft_model_path", &llama)]),
    ];
    for (base, adapters, parameters) in cases {
        let (mut world, _repository) = world(base, adapters, parameters, &[]);
        check_all(&world, base, adapters, F32_ERROR);
        // Drafts of tiny models may not pay, but a sequence tries one every 32 steps.
        let long = json!({"input_ids": [5, 6, 7], "input_lengths": 3, "request_output_len": 80, "end_id": -1});
        for name in adapters {
            assert_eq!(output_ids(&world, name, &long).len(), 80);
        }
        assert!(world.metric("trireme_llm_drafted_tokens_total") > 2.0, "{base}");
    }
}

#[test]
fn drawn_tokens_of_an_adapter_are_the_same_with_drafts() {
    let (base, adapters) = ("mtp_qwen3_5", ["mtp_qwen3_5_all"]);
    let drawn = |world: &TestWorld| {
        let request = |seed: u64| {
            let prompt: Vec<u64> = (0..20).map(|i| 3 + (i * 31 + seed * 17) % 190).collect();
            let body = json!({"input_ids": prompt, "input_lengths": 20, "request_output_len": 60, "end_id": -1, "temperature": 0.8,
                              "runtime_top_k": 8, "random_seed": seed});
            ["tensorrt_llm", adapters[0]].map(|name| output_ids(world, name, &body))
        };
        (0..4).map(request).collect::<Vec<_>>()
    };
    let plain = drawn(&world(base, &adapters, &[], &[]).0);
    let (mut with_drafts, _repository) = world(base, &adapters, &[("mtp_num_tokens", "3")], &[]);
    assert_eq!(drawn(&with_drafts), plain);
    assert!(with_drafts.metric("trireme_llm_accepted_draft_tokens_total") > 0.0);
    assert!(plain.iter().all(|[model, adapter]| model != adapter));
}

#[test]
fn keys_and_values_of_8_bits_are_those_of_the_adapter() {
    // Logits are up to about ten, and keys and values have 4 significant bits.
    let (world, _repository) = world(LLAMA, &ADAPTERS, &[("kv_cache_dtype", "fp8")], &[]);
    check_all(&world, LLAMA, &ADAPTERS, 0.3);
}

#[test]
fn adapters_are_served_after_a_sleep_of_either_level() {
    let (world, _repository) = world(LLAMA, &ADAPTERS, &[("max_loras", "1")], &["--enable-sleep-mode"]);
    check_all(&world, LLAMA, &ADAPTERS, F32_ERROR);
    for level in [1, 2] {
        for path in [&format!("/sleep?level={level}")[..], "/wake_up"] {
            assert_eq!(world.post(path, &json!({})), (200, String::new()), "{path}\n{}", world.log_text());
        }
        check_all(&world, LLAMA, &ADAPTERS, F32_ERROR);
    }
}

#[test]
fn an_adapter_is_loaded_and_dropped_while_the_model_sleeps() {
    let (world, _repository) = world(LLAMA, &ADAPTERS[..1], &[], &["--enable-sleep-mode"]);
    check_all(&world, LLAMA, &ADAPTERS[..1], F32_ERROR);
    assert_eq!(world.post("/sleep?level=1", &json!({})).0, 200);
    let load = json!({"lora_name": "late", "lora_path": golden_dir("adapters").join(ADAPTERS[1])});
    let (status, text) = world.post("/v1/load_lora_adapter", &load);
    assert_eq!(status, 200, "{text}");
    let (status, text) = world.post("/v1/unload_lora_adapter", &json!({"lora_name": ADAPTERS[0]}));
    assert_eq!(status, 200, "{text}");
    assert_eq!(world.post("/wake_up", &json!({})).0, 200);
    check_golden(&world, "late", &golden(&format!("adapters/{}", ADAPTERS[1])), F32_ERROR);
    assert_eq!(world.post(&format!("/v2/models/{}/generate", ADAPTERS[0]), &json!({"input_ids": [1]})).0, 404);
}

#[test]
fn the_host_tier_keeps_what_each_adapter_computed_of_the_same_text() {
    // A conversation fits once.
    let parameters = [("max_tokens_in_paged_kv_cache", "272"), ("kv_cache_host_memory_bytes", "16777216")];
    let names = ["tensorrt_llm", ADAPTERS[0], ADAPTERS[1]];
    let prompt: Vec<u64> = (0..200).map(|i| 3 + (i * 31) % 190).collect();
    let body = json!({"input_ids": prompt, "input_lengths": 200, "request_output_len": 20, "end_id": -1});
    let ask = |world: &TestWorld| names.map(|name| output_ids(world, name, &body));
    let cold = ask(&world(LLAMA, &ADAPTERS, &[("enable_kv_cache_reuse", "false")], &[]).0);
    let (mut world, _repository) = world(LLAMA, &ADAPTERS, &parameters, &[]);
    assert_eq!(ask(&world), cold);
    assert_eq!(world.metric("trireme_llm_prefix_cache_host_tokens_total"), 0.0, "no adapter has the blocks of another");
    assert_eq!(ask(&world), cold);
    // Whole blocks but that of the last token.
    assert_eq!(world.metric("trireme_llm_prefix_cache_host_tokens_total"), 3.0 * 192.0);
    assert!(cold[0] != cold[1] && cold[1] != cold[2]);
    eventually("blocks are free", || world.metric("trireme_llm_kv_blocks_used") == 0.0);
}

#[test]
fn constrained_requests_of_an_adapter_have_its_likeliest_tokens_that_the_constraint_allows() {
    let folder = golden_dir("adapters").join("demo");
    let repository = copied_repository();
    set_parameters(&repository, "tensorrt_llm", &[("lora_modules", &format!("story={}", folder.display()))]);
    widen(&repository.path().join("tensorrt_llm/1/model.safetensors"));
    let world = TestWorld::start(Options { repository: repository.path().to_owned(), ..Options::default() });
    let golden = golden("adapters/demo");
    let answer = |model: &str, further: Value| {
        let mut request = json!({"model": model, "prompt": golden["text"], "max_tokens": 120, "temperature": 0});
        request.as_object_mut().unwrap().extend(further.as_object().unwrap().clone());
        let (status, text) = world.post("/v1/completions", &request);
        assert_eq!(status, 200, "{text}");
        serde_json::from_str::<Value>(&text).unwrap()["choices"][0]["text"].as_str().unwrap().to_owned()
    };
    // What the adapter says anyway is allowed, and so is what the model says.
    let expected = golden["answer"].as_str().unwrap();
    let anything = json!({"structured_outputs": {"regex": "(.|\n)*"}});
    assert!(answer("story", anything.clone()).starts_with(expected.trim_end()));
    assert_ne!(answer("ensemble", anything.clone()), answer("story", anything));
    let schema = json!({"type": "object", "properties": {"size": {"enum": ["small", "large"]}, "is_old": {"type": "boolean"}},
                        "required": ["size", "is_old"], "additionalProperties": false});
    std::thread::scope(|scope| {
        for model in ["story", "ensemble", "story"] {
            let (answer, schema) = (&answer, &schema);
            scope.spawn(move || {
                let text = answer(model, json!({"structured_outputs": {"json": schema}}));
                let found: Value = serde_json::from_str(&text).unwrap_or_else(|error| panic!("{error}: {text}"));
                assert!(found["size"].is_string() && found["is_old"].is_boolean(), "{text}");
            });
        }
    });
}

#[test]
fn an_adapter_of_layers_that_take_none_stops_the_start_before_weights_are_read() {
    let folder = tempfile::tempdir().unwrap();
    let config = json!({"peft_type": "LORA", "r": 1, "lora_alpha": 1, "target_parameters": ["experts.gate_up_proj"]});
    std::fs::write(folder.path().join("adapter_config.json"), config.to_string()).unwrap();
    let modules = format!("experts={}", folder.path().display());
    let repository = golden_repository("qwen3_moe", &[("lora_modules", &modules)]);
    // Nothing could be read of them.
    std::fs::write(repository.path().join("tensorrt_llm/1/model.safetensors"), "").unwrap();
    let mut command = std::process::Command::new(env!("CARGO_BIN_EXE_trireme"));
    command.args(["rank", "--device=cpu", "--http-port=0", "--grpc-port=0", "--metrics-port=0", "--model-repository"]);
    let output = command.arg(repository.path()).output().unwrap();
    let log = String::from_utf8(output.stderr).unwrap();
    assert!(!output.status.success());
    assert!(log.contains("adapter `experts`") && log.contains("field `target_parameters`"), "{log}");
}
