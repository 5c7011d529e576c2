//! `trireme plan`, which `launch --plan` runs, predicts the memory that workers use once they have loaded.

mod support;

use std::path::Path;
use std::process::{Command, Output};

use serde_json::json;
use support::{Options, TestWorld, copied_repository, golden_repository, set_parameters, shipped_repository};

fn plan(repository: &Path, world_size: u32) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_trireme"));
    command.args(["plan", "--device=cpu", &format!("--world-size={world_size}")]);
    command.arg("--model-repository").arg(repository).output().expect("the program runs")
}

/// The `MiB` cells of a worker's line, in bytes.
fn sizes(text: &str, worker: u32) -> Vec<f64> {
    let is_worker = |line: &&str| line.split_ascii_whitespace().take(2).eq([worker.to_string().as_str(), "CPU"]);
    let cells: Vec<_> = text.lines().find(is_worker).unwrap_or_default().split_ascii_whitespace().collect();
    let sized = cells.windows(2).filter(|pair| pair[1] == "MiB");
    sized.map(|pair| pair[0].parse::<f64>().expect("a number") * f64::from(1 << 20)).collect()
}

#[test]
fn a_plan_predicts_the_memory_of_workers_within_two_percent() {
    compare(&shipped_repository());
    let stages = copied_repository();
    set_parameters(&stages, "tensorrt_llm", &[("pp", "2")]);
    compare(stages.path());
    // TensorRT-LLM's name for 8-bit integers.
    let quantized = copied_repository();
    set_parameters(&quantized, "tensorrt_llm", &[("use_weight_only", "true")]);
    compare(quantized.path());
    let coded = copied_repository();
    set_parameters(&coded, "tensorrt_llm", &[("kv_cache_dtype", "fp8")]);
    compare(coded.path());
}

#[test]
fn a_plan_counts_the_experts_of_each_worker_and_refuses_parts_that_do_not_divide_them() {
    let planned = |ep| {
        let repository = golden_repository("qwen3_moe", &[("ep", ep)]);
        let output = plan(repository.path(), if ep == "4" { 4 } else { 2 });
        (repository, String::from_utf8_lossy(&[output.stdout, output.stderr].concat()).into_owned())
    };
    compare(planned("2").0.path());
    let (_, text) = planned("4");
    assert!(text.contains("6 experts cannot be divided among `ep` 4 parts of a group of 4 workers"), "{text}");
}

#[test]
fn parameters_of_quantization_choose_what_is_planned_and_contradictions_are_refused() {
    let weights = |parameters: &[(&str, &str)]| {
        let repository = copied_repository();
        set_parameters(&repository, "tensorrt_llm", parameters);
        let output = plan(repository.path(), 1);
        let text = String::from_utf8_lossy(&[output.stdout, output.stderr].concat()).into_owned();
        (output.status.success(), text)
    };
    let planned = |parameters: &[(&str, &str)]| {
        let (success, text) = weights(parameters);
        assert!(success, "{text}");
        sizes(&text, 0)[0]
    };
    let plain = planned(&[]);
    let int8 = planned(&[("quantization", "int8")]);
    assert!(int8 < 0.9 * plain, "{int8} of {plain}");
    assert_eq!(planned(&[("weight_only_precision", "int8")]), int8);
    assert_eq!(planned(&[("quantization", "none")]), plain);
    assert_eq!(planned(&[("use_weight_only", "false"), ("weight_only_precision", "int8")]), plain);
    for (parameters, expected) in [
        (
            &[("quantization", "fp4")][..],
            "parameter `quantization`: the precision of weights is `fp4`, expected `none`",
        ),
        (
            &[("kv_cache_dtype", "fp8_e5m2")],
            "parameter `kv_cache_dtype`: the type of the KV cache is `fp8_e5m2`, expected",
        ),
        (
            &[("kv_cache_dtype", "fp8"), ("kv_cache_quant_algo", "INT8")],
            "`kv_cache_dtype` and `kv_cache_quant_algo` differ",
        ),
        (&[("quantization", "fp8"), ("weight_only_precision", "int8")], "`quantization` and `weight_only_precision`"),
    ] {
        let (success, text) = weights(parameters);
        assert!(!success && text.contains(expected), "{text}");
    }
}

/// Compares the plan for two workers with the memory that they report.
fn compare(repository: &Path) {
    let output = plan(repository, 2);
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(output.status.success(), "{text}{}", String::from_utf8_lossy(&output.stderr));

    let options = Options { world_size: 2, repository: repository.to_owned(), ..Options::default() };
    let mut world = TestWorld::start(options);
    let request = json!({"input_ids": [5, 6, 7], "input_lengths": 3, "request_output_len": 1});
    let (status, text_of_error) = world.post("/v2/models/tensorrt_llm/generate", &request);
    assert_eq!(status, 200, "{text_of_error}");
    let (_, metrics) = world.get_metrics("/metrics");
    for worker in 0..2 {
        let planned: f64 = sizes(&text, worker).iter().sum();
        let is_worker = |line: &&str| {
            line.starts_with("trireme_llm_worker_memory_bytes") && line.contains(&format!("worker=\"{worker}\""))
        };
        let line =
            metrics.lines().find(is_worker).unwrap_or_else(|| panic!("no memory of worker {worker}:\n{metrics}"));
        let used: f64 = line.rsplit(' ').next().unwrap().parse().unwrap();
        assert!((planned - used).abs() <= 0.02 * used, "worker {worker} uses {used} bytes, planned {planned}:\n{text}");
    }
}

#[test]
fn a_model_that_does_not_fit_is_reported_with_the_missing_bytes() {
    let repository = copied_repository();
    let none = [("max_tokens_in_paged_kv_cache", ""), ("kv_cache_free_gpu_mem_fraction", "0.0000001")];
    set_parameters(&repository, "tensorrt_llm", &none);
    let output = plan(repository.path(), 1);
    let text = String::from_utf8_lossy(&output.stdout);
    assert!(!output.status.success(), "{text}");
    assert!(text.contains("does not fit: a sequence of") && text.contains("lacks"), "{text}");
}

#[test]
fn host_memory_is_planned_and_refused_by_name_where_the_host_has_less() {
    let planned = |bytes: &str| {
        let repository = copied_repository();
        set_parameters(&repository, "tensorrt_llm", &[("kv_cache_host_memory_bytes", bytes)]);
        let output = plan(repository.path(), 2);
        (output.status.success(), String::from_utf8_lossy(&output.stdout).into_owned())
    };
    let (success, text) = planned("16777216");
    assert!(success && text.contains("host memory of each worker: 16.0 MiB for "), "{text}");
    assert!(text.contains(" evicted KV blocks; 32.0 MiB in all, "), "{text}");
    let (success, text) = planned("1000000000000000");
    assert!(!success, "{text}");
    assert!(text.contains("`kv_cache_host_memory_bytes` is 1000000000000000 for each of 2 workers"), "{text}");
    assert!(!planned("0").1.contains("host memory"));
}
