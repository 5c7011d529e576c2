//! Repositories of each published layout, made by `trireme init`, load without changes and return the same text.

mod support;

use std::path::Path;
use std::process::{Command, Output};

use serde_json::{Value, json};
use support::{Options, TestWorld, shipped_repository};

const PROMPT: &str = "Q: What is 7 plus 8?\nA:";
const MAX_TOKENS: u32 = 8;

/// The settings of generation that the engine has, each with its names in the layouts.
const SETTINGS: &[&[&str]] = &[
    &["max_tokens", "request_output_len"],
    &["temperature"],
    &["top_k", "runtime_top_k"],
    &["top_p", "runtime_top_p"],
    &["min_p", "runtime_min_p"],
    &["repetition_penalty"],
    &["presence_penalty"],
    &["frequency_penalty"],
    &["seed", "random_seed"],
    &["min_tokens", "min_length"],
    &["beam_width"],
    &["length_penalty", "len_penalty"],
    &["guided_decoding_guide_type"],
    &["guided_decoding_guide"],
    &["end_id"],
    &["stop_words", "stop_words_list"],
    &["bad_words", "bad_words_list"],
    &["return_log_probs", "is_return_log_probs", "output_log_probs"],
];

fn trireme(args: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_trireme")).args(args).output().expect("trireme runs")
}

fn init(layout: &str, repository: &Path) {
    let checkpoint = shipped_repository().join("tensorrt_llm/1");
    let (checkpoint, output) = (checkpoint.to_str().unwrap(), repository.to_str().unwrap());
    let fill = match layout {
        "turbomind" => "instance_count:4",
        "gpt" => "triton_max_batch_size:8",
        _ => "tp:1",
    };
    let made = trireme(&["init", checkpoint, "--layout", layout, "--output", output, "--fill", fill]);
    assert!(made.status.success(), "{layout}: {}", String::from_utf8_lossy(&made.stderr));
}

/// Lints and serves a repository of these layouts.
fn serve(layouts: &[&str]) -> (tempfile::TempDir, TestWorld) {
    let scratch = tempfile::tempdir().unwrap();
    let repository = scratch.path().join("models");
    layouts.iter().for_each(|layout| init(layout, &repository));
    let linted = trireme(&["lint", repository.to_str().unwrap()]);
    assert!(linted.status.success(), "{}", String::from_utf8_lossy(&linted.stdout));
    let world = TestWorld::start(Options { repository, ..Options::default() });
    (scratch, world)
}

fn ask(world: &TestWorld, model: &str, body: &Value, output: &str) -> Value {
    let (status, text) = world.post(&format!("/v2/models/{model}/generate"), body);
    assert_eq!(status, 200, "{model}: {text}");
    serde_json::from_str::<Value>(&text).unwrap()[output].clone()
}

/// The token ids in the last event of a session's turn.
fn last_ids(world: &TestWorld, body: &Value) -> Vec<Value> {
    let (status, text) = world.post("/v2/models/turbomind/generate_stream", body);
    assert_eq!(status, 200, "{text}");
    let events = text.lines().filter_map(|line| line.strip_prefix("data: "));
    let mut ids =
        events.filter_map(|event| serde_json::from_str::<Value>(event).ok()?["output_ids"].as_array().cloned());
    ids.next_back().unwrap_or_else(|| panic!("no tokens in {text}"))
}

/// The text that the shipped repository generates for the prompt.
fn answer() -> String {
    TestWorld::of(1).generate(PROMPT, MAX_TOKENS)
}

#[test]
fn each_layout_declares_every_setting_of_generation() {
    for (layout, model) in [
        ("lmdeploy", "lmdeploy_model"),
        ("sglang", "sglang_model"),
        ("turbomind", "turbomind"),
        ("llama-python", "llama-python"),
        ("gpt", "ensemble"),
        ("gpt", "tensorrt_llm"),
        ("tensorrt-llm", "ensemble"),
        ("tensorrt-llm", "tensorrt_llm"),
        ("tensorrt-llm", "tensorrt_llm_bls"),
    ] {
        let scratch = tempfile::tempdir().unwrap();
        let repository = scratch.path().join("models");
        init(layout, &repository);
        let config = std::fs::read_to_string(repository.join(model).join("config.pbtxt")).unwrap();
        let (inputs, _) = config.split_once("output [").expect("outputs follow the inputs");
        let is_declared = |name: &&str| inputs.contains(&format!("name: \"{name}\""));
        let missing: Vec<_> = SETTINGS.iter().filter(|names| !names.iter().any(&is_declared)).collect();
        assert!(missing.is_empty(), "{layout}/{model} declares none of {missing:?}");
    }
}

#[test]
fn text_models_of_lmdeploy_sglang_and_hugging_face_return_the_text_of_the_ensemble() {
    let (_scratch, world) = serve(&["lmdeploy", "sglang", "llama-python"]);
    let answer = answer();
    for model in ["lmdeploy_model", "sglang_model"] {
        let body = json!({"prompt": PROMPT, "max_tokens": MAX_TOKENS, "ignore_eos": false, "stream": false});
        assert_eq!(ask(&world, model, &body, "response"), answer, "{model}");
    }
    let body = json!({"text_input": PROMPT, "max_tokens": MAX_TOKENS, "top_k": 1});
    assert_eq!(ask(&world, "llama-python", &body, "text_output"), answer);
    // These models sample as soon as a temperature is given.
    let drawn = |seed: u64| {
        let body = json!({"text_input": "Once", "max_tokens": MAX_TOKENS, "temperature": 2.0, "seed": seed});
        ask(&world, "llama-python", &body, "text_output")
    };
    let first = drawn(0);
    assert!((1..8).any(|seed| drawn(seed) != first), "eight seeds gave {first}");
    for (model, prompt) in [("lmdeploy_model", "prompt"), ("sglang_model", "prompt"), ("llama-python", "text_input")] {
        let body = json!({prompt: PROMPT, "max_tokens": MAX_TOKENS, "ignore_eos": false, "stream": false, "temperature": 0.5,
                          "top_k": 4, "top_p": 0.9, "min_p": 0.1, "repetition_penalty": 1.1, "presence_penalty": 0.1,
                          "frequency_penalty": 0.1, "random_seed": 3, "min_length": 2, "end_id": 2, "stop_words": ["xyz"],
                          "bad_words": ["xyz"], "skip_special_tokens": true, "return_log_probs": true});
        assert!(ask(&world, model, &body, "output_log_probs").is_array(), "{model}");
        let body = json!({prompt: PROMPT, "max_tokens": MAX_TOKENS, "ignore_eos": false, "stream": false,
                          "sampling_param_min_p": 0.5, "any_parameter": 1});
        let (status, text) = world.post(&format!("/v2/models/{model}/generate"), &body);
        assert!(status == 400 && text.contains("'sampling_param_min_p' changes the text"), "{status}: {text}");
    }
}

#[test]
fn sessions_of_turbomind_keep_the_tokens_of_earlier_turns() {
    let (_scratch, world) = serve(&["turbomind"]);
    let ids = ask(&world, "preprocessing", &json!({"QUERY": PROMPT}), "INPUT_ID");
    let length = ids.as_array().unwrap().len();
    let turn = |ids: &Value, start: i32, end: i32| {
        let length = ids.as_array().unwrap().len();
        let body = json!({"input_ids": ids, "input_lengths": length, "request_output_len": MAX_TOKENS, "runtime_top_k": 1,
                          "START": start, "END": end, "CORRID": 7});
        last_ids(&world, &body)
    };
    let first = turn(&ids, 1, 0);
    assert!(first.len() > length, "the prompt and the output: {first:?}");
    let second = turn(&json!(ids.as_array().unwrap()[1..]), 0, 1);
    assert_eq!(second[..first.len()], first[..], "the second turn begins with the first");
    assert!(second.len() > first.len() + length - 1);
}

#[test]
fn tensorrt_llms_inflight_and_bls_models_return_the_text_of_the_ensemble() {
    let (_scratch, world) = serve(&["tensorrt-llm"]);
    let answer = answer();
    let body = json!({"text_input": PROMPT, "max_tokens": MAX_TOKENS, "return_log_probs": true});
    for model in ["ensemble", "tensorrt_llm_bls"] {
        assert_eq!(ask(&world, model, &body, "text_output"), answer, "{model}");
        // NVIDIA's configuration of the second model has a `reshape` for this input.
        let log_probs = ask(&world, model, &body, "output_log_probs");
        assert_eq!(log_probs.as_array().map(Vec::len), Some(MAX_TOKENS as usize), "{model}: {log_probs}");
    }
    // Each response counts as a request to the detokenizer, which the language model's stream includes.
    let num_texts = || {
        let (_, text) = world.get("/v2/models/postprocessing/stats");
        serde_json::from_str::<Value>(&text).unwrap()["model_stats"][0]["inference_count"].as_u64().unwrap()
    };
    let (before, streamed) = (num_texts(), json!({"text_input": PROMPT, "max_tokens": MAX_TOKENS, "stream": true}));
    let (status, events) = world.post("/v2/models/tensorrt_llm_bls/generate_stream", &streamed);
    let events: Vec<&str> = events.lines().filter_map(|line| line.strip_prefix("data: ")).collect();
    assert_eq!((status, events.len() as u64), (200, num_texts() - before), "{events:?}");
    let text = |event: &&str| serde_json::from_str::<Value>(event).unwrap()["text_output"].as_str().unwrap().to_owned();
    assert!(answer.ends_with(&events.iter().map(text).collect::<String>()), "{events:?}");
    assert!(events.len() > 4, "{events:?}");
    // Without top-k and top-p TensorRT-LLM is greedy at any temperature; with a top-p of 1 it samples.
    let text = |temperature: f64, top_p: f64, seed: u64| {
        let body = json!({"text_input": PROMPT, "max_tokens": MAX_TOKENS, "temperature": temperature, "top_p": top_p,
                          "seed": seed});
        ask(&world, "ensemble", &body, "text_output")
    };
    assert_eq!(text(5.0, 0.0, 1), answer);
    for model in ["ensemble", "tensorrt_llm_bls"] {
        let drawn = |seed: &str| {
            let body =
                json!({"text_input": "Once", "max_tokens": MAX_TOKENS, "temperature": 2.0, "top_p": 1.0, seed: 5});
            ask(&world, model, &body, "text_output")
        };
        assert_eq!(drawn("seed"), drawn("random_seed"), "{model}: names of two releases");
    }
    assert!(world.log_text().contains("neither `runtime_top_k` nor `runtime_top_p`"), "{}", world.log_text());
    assert!((0..8).any(|seed| text(5.0, 1.0, seed) != answer), "eight seeds gave {answer}");
    // The way benchmarks of vLLM, SGLang and LMDeploy request a fixed length from TensorRT-LLM's ensemble.
    let body = json!({"text_input": PROMPT, "max_tokens": 40, "min_length": 40, "end_id": 1_048_576, "top_p": 1.0,
                      "temperature": 0.000_001, "accumulate_tokens": true, "stream": false, "return_num_output_tokens": true});
    assert_eq!(ask(&world, "ensemble", &body, "num_output_tokens"), 40);
}

#[test]
fn the_python_gpt_repository_returns_the_prompt_with_the_output() {
    let (_scratch, world) = serve(&["gpt"]);
    let body = json!({"text_input": PROMPT, "max_tokens": MAX_TOKENS, "end_id": 2, "pad_id": 2, "top_k": 1});
    let text = ask(&world, "ensemble", &body, "text_output");
    let answer = answer();
    assert!(text.as_str().unwrap().ends_with(answer.trim_end()), "expected `{answer}` at the end of {text}");
    // Its Python runtime is greedy without a top-k, regardless of other settings.
    let warm = json!({"text_input": PROMPT, "max_tokens": MAX_TOKENS, "end_id": 2, "pad_id": 2, "top_p": 0.99,
                      "temperature": 5.0, "random_seed": 1});
    assert_eq!(ask(&world, "ensemble", &warm, "text_output"), text);
    let word = answer.split_whitespace().next_back().expect("the answer has words");
    for words in ["stop_words", "bad_words"] {
        let body = json!({"text_input": PROMPT, "max_tokens": MAX_TOKENS, "end_id": 2, "pad_id": 2, words: [format!(" {word}")]});
        let without = ask(&world, "ensemble", &body, "text_output");
        assert_ne!(without, text, "`{words}` with `{word}` changes the text");
    }
    let beams = json!({"text_input": PROMPT, "max_tokens": 4, "end_id": 2, "pad_id": 2, "beam_width": 2});
    assert_eq!(ask(&world, "ensemble", &beams, "text_output").as_array().map(Vec::len), Some(2));
}

/// Copies the models of `from`, each with an empty version, and fills in only the path of their checkpoint.
fn copy_mostly_unfilled(from: &Path, repository: &Path) {
    for model in std::fs::read_dir(from).unwrap() {
        let (model, name) = (model.as_ref().unwrap().path(), model.as_ref().unwrap().file_name());
        std::fs::create_dir_all(repository.join(&name).join("1")).unwrap();
        std::fs::copy(model.join("config.pbtxt"), repository.join(&name).join("config.pbtxt")).unwrap();
    }
    let checkpoint = shipped_repository().join("tensorrt_llm/1").display().to_string();
    let fill = format!("--fill=tokenizer_dir:{checkpoint},engine_dir:{checkpoint}");
    let filled = trireme(&["init", "--template", repository.to_str().unwrap(), &fill]);
    assert!(filled.status.success(), "{}", String::from_utf8_lossy(&filled.stderr));
}

/// The messages about unfilled variables in the output of `lint` or in a log.
fn unset_messages(text: &str) -> Vec<String> {
    let parts = text.split("template variables taken as unset: ").skip(1);
    // After the names, the log has the model's name and lint the next line.
    let names = |rest: &str| rest.split(" model=").next().unwrap().lines().next().unwrap().trim().to_owned();
    let mut all: Vec<String> = parts.map(names).collect();
    all.sort();
    all.dedup();
    all
}

#[test]
fn templates_of_the_first_and_the_last_release_are_served_with_most_variables_unset() {
    let answer = answer();
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    for from in ["tests/layouts/release_0_5", "src/lint/layouts/tensorrt_llm"] {
        let scratch = tempfile::tempdir().unwrap();
        let repository = scratch.path().join("models");
        copy_mostly_unfilled(&root.join(from), &repository);
        let linted = trireme(&["lint", repository.to_str().unwrap()]);
        let linted_text = String::from_utf8_lossy(&linted.stdout);
        assert!(linted.status.success(), "{from}: {linted_text}");
        let world = TestWorld::start(Options { repository, ..Options::default() });
        let body = json!({"text_input": PROMPT, "max_tokens": MAX_TOKENS, "bad_words": "", "stop_words": ""});
        let text = ask(&world, "ensemble", &body, "text_output");
        // Without `decoupled_mode` there is one response, and the prompt is not excluded.
        assert_eq!(text, format!("{PROMPT}{answer}"), "{from}");
        let messages = unset_messages(&linted_text);
        assert!(
            !messages.is_empty() && messages == unset_messages(&world.log_text()),
            "{from}: {messages:?}\n{}",
            world.log_text()
        );
    }
}

#[test]
fn releases_before_0_14_return_zeros_for_outputs_that_were_not_requested() {
    let scratch = tempfile::tempdir().unwrap();
    let repository = scratch.path().join("models");
    copy_mostly_unfilled(&Path::new(env!("CARGO_MANIFEST_DIR")).join("src/lint/layouts/tensorrt_llm"), &repository);
    for model in std::fs::read_dir(&repository).unwrap() {
        let config = model.unwrap().path().join("config.pbtxt");
        let text = std::fs::read_to_string(&config).unwrap();
        let text = text.replace("${triton_backend}", "tensorrtllm");
        // This input was added in 0.14.
        let kept: String = text.split_inclusive('\n').filter(|line| !line.contains("num_return_sequences")).collect();
        std::fs::write(&config, kept).unwrap();
    }
    let world = TestWorld::start(Options { repository, ..Options::default() });
    let body = json!({"text_input": PROMPT, "max_tokens": MAX_TOKENS, "bad_words": "", "stop_words": ""});
    for output in ["cum_log_probs", "context_logits", "generation_logits"] {
        assert_eq!(ask(&world, "ensemble", &body, output), 0.0, "{output}");
    }
    let log_probs = ask(&world, "ensemble", &body, "output_log_probs");
    assert!(log_probs.as_array().unwrap().iter().all(|value| *value == 0.0), "{log_probs}");
    let body = json!({"text_input": PROMPT, "max_tokens": MAX_TOKENS, "return_log_probs": true});
    assert_ne!(ask(&world, "ensemble", &body, "cum_log_probs"), 0.0);
}

#[test]
fn no_repository_is_made_for_a_checkpoint_that_cannot_be_served() {
    let scratch = tempfile::tempdir().unwrap();
    let config = std::fs::read_to_string(shipped_repository().join("tensorrt_llm/1/config.json")).unwrap();
    let other = config.replace("\"silu\"", "\"sin\"");
    assert_ne!(config, other);
    std::fs::write(scratch.path().join("config.json"), other).unwrap();
    let output = scratch.path().join("models");
    let made = trireme(&["init", scratch.path().to_str().unwrap(), "--output", output.to_str().unwrap()]);
    let message = String::from_utf8_lossy(&made.stderr);
    assert!(!made.status.success() && message.contains("field `hidden_act` must be"), "{message}");
    assert!(!output.exists());
}

#[test]
fn a_template_is_filled_in_place() {
    let scratch = tempfile::tempdir().unwrap();
    let config = scratch.path().join("config.pbtxt");
    std::fs::write(&config, "max_batch_size: ${triton_max_batch_size}\n# ${other}\n").unwrap();
    let path = config.to_str().unwrap();
    let filled = trireme(&["init", "--template", path, "--fill=triton_max_batch_size:8"]);
    assert!(filled.status.success(), "{}", String::from_utf8_lossy(&filled.stderr));
    assert_eq!(std::fs::read_to_string(&config).unwrap(), "max_batch_size: 8\n# ${other}\n");
    let unknown = trireme(&["init", "--template", path, "--fill=nothing:8"]);
    assert!(!unknown.status.success());
}
